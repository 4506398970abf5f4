"""Batches of examples of any kind: pytrees of numbers from a random-access source, or batches from an iterator.

A random-access source has a length and gives example ``i``; it is shuffled, split over processes and resumed as a text
is. An iterator yields this process's rows of each batch, and keeps its own position.
"""

from __future__ import annotations

import base64
import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import jax
import numpy as np

from jaxpar.data.lazy_rows import LazyRows, reads_in_parts
from jaxpar.data.loader import Batches, position_of
from jaxpar.data.windows import as_integer, check_share
from jaxpar.errors import DataError, listing
from jaxpar.utils.checks import shown

STATE_VERSION = 1
_KINDS = "biufc"
_BYTES = "base64"


class Columns(Sequence[Any]):
    """Examples of a pytree of arrays ``[examples, ...]``: example ``i`` is row ``i`` of each.

    Args:
      name: the source's name in errors.
      arrays: the pytree.

    Raises:
      DataError: the arrays have different lengths, or there is none.

    >>> columns = Columns("points", {"x": np.arange(6.0).reshape(3, 2), "label": np.arange(3)})
    >>> len(columns), columns[1]["x"].tolist(), int(columns[1]["label"])
    (3, [2.0, 3.0], 1)
    """

    def __init__(self, name: str, arrays: Any):
        self._arrays = jax.tree.map(np.asarray, arrays, is_leaf=_is_numbers)
        lengths = {path: x.shape[0] if x.ndim else 0 for path, x in _leaves(self._arrays)}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise DataError(
                f"{name}: a mapping of arrays must hold a row of each array for each example, got the lengths "
                f"{lengths}. Remedy: arrays of one length, or a sequence of examples."
            )
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return jax.tree.map(lambda x: x[index], self._arrays)


@dataclass(eq=False)
class ExamplePlan:
    """The examples of a random-access source as rows of global batches.

    Attributes:
      name: the source's name in errors.
      examples: has a length, and gives example ``i``: a pytree of arrays and numbers, of the same shapes for each.
      batch: rows of the global batch, over all processes.
      process_index, process_count: this process, and how many share a global batch.

    Raises:
      DataError: there are fewer examples than rows, or the processes do not divide the rows.

    >>> plan = ExamplePlan("squares", [{"x": i, "y": i * i} for i in range(10)], batch=4)
    >>> {name: x.tolist() for name, x in plan.read(np.array([3, 0, 1, 2])).items()}
    {'x': [3, 0, 1, 2], 'y': [9, 0, 1, 4]}
    """

    name: str
    examples: Any
    batch: int
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self) -> None:
        self.batch = as_integer("batch", self.batch, 1)
        check_share(self.batch, self.process_index, self.process_count)
        if self.windows < self.batch:
            raise DataError(
                f"{self.name}: {self.windows} examples are too few for one global batch of {self.batch}. Remedy: a "
                "smaller data.batch, or more examples."
            )

    @property
    def windows(self) -> int:
        """Number of examples."""
        return len(self.examples)

    @property
    def steps(self) -> int:
        """Number of full global batches in one pass over the examples."""
        return self.windows // self.batch

    def read(self, numbers: np.ndarray) -> Any:
        """Returns this process's rows of the global batch of the examples ``numbers`` [batch], stacked.

        Of arrays outside of memory nothing is read yet (:class:`jaxpar.data.lazy_rows.LazyRows`).
        """
        rows = self.batch // self.process_count
        mine = [int(i) for i in numbers[self.process_index * rows : (self.process_index + 1) * rows]]
        first, tree = self._first
        columns: list[list[Any]] = [[] for _ in first]
        for number in mine:
            example, structure = self._example(number)
            _check_same(f"{self.name}: example {number}", "example 0", (example, structure), (first, tree))
            for column, x in zip(columns, example, strict=True):
                column.append(x[1])
        stacked = [LazyRows(column) if reads_in_parts(column[0]) else np.stack(column) for column in columns]
        return jax.tree.unflatten(tree, stacked)

    def shapes(self) -> Any:
        """Returns the shapes of a global batch, without reading one."""
        arrays, tree = self._first
        shapes = [
            jax.ShapeDtypeStruct((self.batch, *x.shape), jax.dtypes.canonicalize_dtype(x.dtype)) for _, x in arrays
        ]
        return jax.tree.unflatten(tree, shapes)

    def heldout(self, max_batches: int) -> list[Any]:
        """Returns at most ``max_batches`` full batches, evenly spread over the examples; the same in every call."""
        steps = min(as_integer("max_batches", max_batches, 1), self.steps)
        numbers = np.arange(steps * self.batch) * self.windows // (steps * self.batch)
        return [self.read(rows) for rows in numbers.reshape(steps, self.batch)]

    def stream(self, seed: int) -> Batches:
        """Returns the endless stream of shuffled batches."""
        return Batches(self, seed=as_integer("seed", seed), shuffle=True, epochs=None)

    def identity(self) -> dict[str, int | str]:
        """Returns what must be equal for a number to mean the same example: their count and their arrays."""
        arrays = ", ".join(f"{path} {x.dtype}{list(x.shape)}" for path, x in self._first[0])
        return {"examples": self.windows, "arrays": arrays, "batch": self.batch}

    @cached_property
    def _first(self) -> tuple[list[tuple[str, Any]], Any]:
        return self._example(0)

    def _example(self, number: int) -> tuple[list[tuple[str, Any]], Any]:
        try:
            example = self.examples[number]
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise DataError(
                f"{self.name}: example {number} of {self.windows} cannot be read: {type(error).__name__}: {error} "
                f"({place.filename}:{place.lineno})."
            ) from error
        return arrays_of(f"{self.name}: example {number}", example)


class BatchIterator(Iterator[Any]):
    """Batches of an iterator with ``get_state`` and ``set_state``, checked, with a position that can be saved.

    Args:
      name: the source's name in errors.
      batches: the iterator; it yields this process's rows of each batch.
      batch: rows of the global batch.
      process_index, process_count: this process, and how many share a global batch.

    Raises:
      DataError: the iterator has no state, or the processes do not divide the rows.
    """

    def __init__(self, name: str, batches: Any, batch: int, process_index: int = 0, process_count: int = 1):
        check_share(batch, process_index, process_count)
        missing = [part for part in ("get_state", "set_state") if not callable(getattr(batches, part, None))]
        if missing:
            raise DataError(
                f"{name} must give examples by number (__len__ and __getitem__) or an iterator with get_state and "
                f"set_state, but {type(batches).__name__} has no {listing(missing)}, so a run could not resume. "
                "Remedy: return a sequence of examples, a mapping of arrays, or a grain dataset."
            )
        self._name, self._batches, self._rows = name, batches, batch // process_count
        self._fingerprint = {"version": STATE_VERSION, "batch": batch, "processes": process_count}
        self._taken = 0
        self._first: tuple[Any, Any] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            raise DataError(
                f"{self._name}: the batches ended after {self._taken} batches. Remedy: repeat them without end, or "
                "fewer train.steps."
            ) from None
        where = f"{self._name}: batch {self._taken}"
        found = arrays_of(where, batch)
        for path, x in found[0]:
            if x.ndim == 0 or x.shape[0] != self._rows:
                raise DataError(
                    f"{where}: {path} has shape {list(x.shape)}, but its first dim must be the {self._rows} rows of "
                    f"this process. Remedy: yield batches of the argument `batch` divided by `process_count`."
                )
        if self._first is None:
            self._first = found
        _check_same(where, "the first batch", found, self._first)
        self._taken += 1
        return jax.tree.unflatten(found[1], [x for _, x in found[0]])

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last batch taken, as JSON-able data."""
        state = self._batches.get_state()
        if isinstance(state, bytes):
            state = {_BYTES: base64.b64encode(state).decode()}
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{self._name}: get_state must return JSON values or bytes, got {shown(state)}. Remedy: integers, "
                "strings, lists and dicts."
            ) from error
        return {"fingerprint": dict(self._fingerprint), "position": state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a saved position.

        Raises:
          DataError: the position is of another batch or another number of processes, or the iterator refuses it.
        """
        position = position_of(state, self._fingerprint)
        try:
            if isinstance(position, Mapping) and position.keys() == {_BYTES}:
                position = base64.b64decode(position[_BYTES])
            self._batches.set_state(position)
        except Exception as error:
            raise DataError(
                f"{self._name}: set_state({shown(position)}) fails: {type(error).__name__}: {error}. Remedy: the data "
                "and arguments of the run that saved it, or start from the beginning."
            ) from error

    def close(self) -> None:
        """Stops reading, if the iterator can."""
        close = getattr(self._batches, "close", None)
        if callable(close):
            close()


def arrays_of(where: str, example: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Returns the arrays of a pytree of numbers, by path, in JAX's dtypes (without x64 32 bits), and its structure.

    Arrays outside of memory, such as a ``numpy.memmap``, stay as they are.

    Args:
      where: the pytree's name in errors.
      example: the pytree.

    Raises:
      DataError: it holds no array, or a leaf that is no array of numbers.
    """
    found = []
    for path, leaf in _leaves(example):
        x: Any = leaf if reads_in_parts(leaf) else np.asarray(leaf)
        if x.dtype.kind not in _KINDS and x.dtype.name not in ("bfloat16", "float16"):
            raise DataError(
                f"{where}: {path} must be an array of numbers, got {type(leaf).__name__} of dtype {x.dtype}. Remedy: "
                "encode it as numbers, or leave it out."
            )
        lazy = reads_in_parts(x)
        found.append((path, x if lazy else x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)))
    if not found:
        raise DataError(
            f"{where} must be a pytree of arrays, got {shown(example)}. Remedy: such as {{'image': image, 'label': 3}}."
        )
    return found, jax.tree.structure(example, is_leaf=_is_numbers)


def _check_same(where: str, reference: str, found: tuple[Any, Any], first: tuple[Any, Any]) -> None:
    """Raise a DataError unless both have the same arrays, of the same shapes and dtypes."""
    if found[1] != first[1]:
        raise DataError(
            f"{where} has the arrays {listing(path for path, _ in found[0])}, but {reference} has "
            f"{listing(path for path, _ in first[0])}. Remedy: the same keys everywhere."
        )
    for (path, x), (_, y) in zip(found[0], first[0], strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            raise DataError(
                f"{where}: {path} is {x.dtype} {list(x.shape)}, but in {reference} it is {y.dtype} {list(y.shape)}. "
                "Remedy: pad, crop or cast, so that all are equal."
            )


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a pytree with their paths, such as ``image`` or ``0/x``; a list of numbers is an array."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_numbers)
    return [(jax.tree_util.keystr(path, simple=True, separator="/") or "the example", leaf) for path, leaf in flat]


def _is_numbers(x: Any) -> bool:
    """Whether a list, such as ``[[1, 2], [3, 4]]``, holds nothing but numbers."""
    number = lambda y: isinstance(y, int | float | np.number) or _is_numbers(y)
    return isinstance(x, list) and bool(x) and all(map(number, x))
