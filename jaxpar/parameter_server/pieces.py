"""Parameters cut into pieces: whole tensors, or ranges of rows of large ones. A piece is what a server owns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax.numpy as jnp

from jaxpar.errors import ConfigError


@dataclass(frozen=True)
class ParamSpec:
    """Shape and dtype of a parameter on the servers; ``sparse`` if workers read and change single rows of it."""

    shape: tuple[int, ...]
    dtype: str
    sparse: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class ParamPiece:
    """Rows ``start`` to ``stop`` of the parameter ``name``, or all of it.

    Attributes:
      name: the parameter's path, such as ``params/embed/embedding``.
      start, stop: the rows.
      spec: shape and dtype of the piece.
    """

    name: str
    start: int
    stop: int
    spec: ParamSpec

    @property
    def key(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"

    def to_list(self) -> list[Any]:
        """Returns the piece as plain data, for :meth:`from_list`."""
        return [self.name, self.start, self.stop, list(self.spec.shape), self.spec.dtype, self.spec.sparse]

    @classmethod
    def from_list(cls, data: list[Any]) -> Self:
        """Returns the piece that :meth:`to_list` wrote."""
        name, start, stop, shape, dtype, sparse = data
        return cls(name, start, stop, ParamSpec(tuple(shape), dtype, sparse))


type Params = Mapping[str, ParamSpec]


def cut(params: Params, piece_bytes: int, *, table_pieces: Mapping[str, int] | None = None) -> list[ParamPiece]:
    """Returns the pieces of all parameters, ordered by name and row.

    Args:
      params: the parameters by path.
      piece_bytes: larger dense parameters are cut by rows into pieces of at most this size, where one row allows it.
      table_pieces: the number of pieces of each sparse table.

    >>> cut({"w": ParamSpec((5, 2), "float32")}, 16)[1].key
    'w[1:3]'
    """
    found = []
    for name, spec in sorted(params.items()):
        rows = spec.shape[0] if spec.shape else 1
        if spec.sparse:
            count = min((table_pieces or {}).get(name, 1), rows)
        else:
            row_bytes = max(spec.nbytes // max(rows, 1), 1)
            count = math.ceil(rows / max(piece_bytes // row_bytes, 1)) if spec.nbytes > piece_bytes else 1
        edges = [rows * i // max(count, 1) for i in range(max(count, 1) + 1)]
        for start, stop in itertools.pairwise(edges):
            shape = (stop - start, *spec.shape[1:]) if spec.shape else ()
            found.append(ParamPiece(name, start, stop, ParamSpec(shape, spec.dtype, spec.sparse)))
    return found


@dataclass(frozen=True)
class SparseTable:
    """A table of which workers pull and push only the rows that a batch touches.

    The worker's model has a small table at the same path, with ``capacity`` rows (such as ``nnx.Embed(capacity,
    features)``). For each batch the worker fills it with the rows that the batch needs, and replaces the ids in the
    batch by their numbers in it. A row's initial value depends on ``seed`` and the row's number only. Servers store a
    row, and its optimizer state, from its first update on.

    Attributes:
      path: the parameter, such as ``params/items/embedding``.
      rows: rows of the table on the servers.
      ids: paths of the integer arrays of a batch that hold row numbers, such as ``("items",)``.
      stddev: standard deviation of the normal initial values.
      pieces: the number of row ranges that servers share.
      seed: of the initial values.
    """

    path: str
    rows: int
    ids: tuple[str, ...]
    stddev: float = 0.02
    pieces: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "pieces"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"table {self.path}: {name} must be an integer of at least 1, got {value!r}.")
        if isinstance(self.ids, str) or not self.ids:
            raise ConfigError(
                f"table {self.path}: ids must be a tuple of paths of arrays in a batch, got {self.ids!r}. Remedy: "
                "ids=('items',)."
            )


def server_params(model: Params, tables: Iterable[SparseTable]) -> dict[str, ParamSpec]:
    """Returns the parameters as servers hold them: those of the worker's model, tables with all of their rows.

    Raises:
      ConfigError: a table is not a matrix of the model.
    """
    found = dict(model)
    for table in tables:
        spec = model.get(table.path)
        if spec is None or len(spec.shape) != 2:
            have = "has no such parameter" if spec is None else f"has {spec} there"
            raise ConfigError(
                f"table {table.path}: the model {have}, but a table is a matrix [rows, features]. Remedy: a path of "
                f"the model: {', '.join(sorted(model))}."
            )
        found[table.path] = ParamSpec((table.rows, spec.shape[1]), spec.dtype, sparse=True)
    return found
