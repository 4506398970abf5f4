"""The arguments of a train step as arrays: NNX objects, train states and other pytrees taken apart and put together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core import meta

from jaxpar.errors import ModelError, listing
from jaxpar.linen import unbox
from jaxpar.nnx import names_of
from jaxpar.sharding.names import Names
from jaxpar.training.model import show, to_path

_NUMBERS = (bool, int, float, complex)
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)

Name = int | str
"""The place of an argument: its index, or the keyword that it was passed by."""


def is_nnx(x: Any) -> bool:
    """Whether a value is an object of NNX, which a step changes in place: a module, optimizer, metric or its like."""
    return isinstance(x, nnx.Pytree | nnx.Variable) and not isinstance(x, nnx.State)


@dataclass(frozen=True)
class CallStructure:
    """What a call has apart from its arrays. Two calls of equal structure run the same program.

    Attributes:
      positional: the number of positional arguments.
      keywords: the names of the others.
      objects: the places of arguments that contain objects of NNX.
      graph: their static part.
      graph_tree: the structure of their arrays.
      trees: the place and the structure of each other argument.
      static: the leaves of those that are no arrays, by their index among all leaves.
      paths: the path of each array; it begins with the name of the argument.
      names: the name of each argument, by place.
      dims: the names of dims that the model's annotations give, by path.
    """

    positional: int
    keywords: tuple[str, ...]
    objects: tuple[Name, ...]
    graph: Any
    graph_tree: Any
    trees: tuple[tuple[Name, Any], ...]
    static: tuple[tuple[int, Any], ...]
    paths: tuple[str, ...]
    names: tuple[tuple[Name, str], ...]
    dims: tuple[tuple[str, Names], ...] = ()

    @property
    def in_objects(self) -> int:
        """The number of arrays in objects of NNX, which are the first."""
        return 0 if self.graph is None else int(self.graph_tree.num_leaves)

    def arguments(self, arrays: Sequence[Any]) -> dict[Name, Any]:
        """Returns the arguments by place. Objects of NNX are new ones."""
        found = self.plain_arguments(arrays)
        if self.graph is not None:
            state = jax.tree.unflatten(self.graph_tree, arrays[: self.in_objects])
            found |= zip(self.objects, nnx.merge(self.graph, state), strict=True)
        return found

    def plain_arguments(self, arrays: Sequence[Any]) -> dict[Name, Any]:
        """Returns the arguments that contain no object of NNX, by place."""
        found: dict[Name, Any] = {}
        left, static = list(arrays[self.in_objects :]), dict(self.static)
        count = self.in_objects
        for place, tree in self.trees:
            leaves = []
            for _ in range(tree.num_leaves):
                leaves.append(static[count] if count in static else left.pop(0))
                count += 1
            found[place] = jax.tree.unflatten(tree, leaves)
        return found

    def call(self, step: Callable[..., Any], arguments: Mapping[Name, Any]) -> Any:
        """Returns what a step returns for these arguments."""
        return step(
            *(arguments[i] for i in range(self.positional)), **{name: arguments[name] for name in self.keywords}
        )

    def arrays_of(self, objects: Sequence[Any]) -> list[Any]:
        """Returns the arrays of objects of NNX, after a step has changed them.

        Raises:
          ModelError: the step added or removed variables.
        """
        if self.graph is None:
            return []
        _, state = nnx.split(tuple(objects))
        if jax.tree.structure(state) != self.graph_tree:
            before = set(self.paths[: self.in_objects])
            leaves, names = jax.tree_util.tree_leaves_with_path(state), dict(self.names)
            after = {_nnx_path(path, self.objects, names) for path, _ in leaves}
            raise ModelError(
                f"train_step changed the variables of its NNX objects: added {listing(sorted(after - before))}, "
                f"removed {listing(sorted(before - after))}. Remedy: create every variable before the first step, and "
                "take intermediate values out of the model in the step, as by nnx.pop(model, nnx.Intermediate)."
            )
        return jax.tree.leaves(state)


def places_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Name, Any]:
    """Returns the arguments of a call by place."""
    found: dict[Name, Any] = dict(enumerate(args))
    found.update(kwargs)
    return found


def take_apart(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, numbers: bool
) -> tuple[CallStructure, list[Any]]:
    """Returns the structure and the arrays of a call.

    Args:
      step: the train step.
      args, kwargs: its arguments.
      numbers: whether all Python numbers are arrays, as for ``jax.jit``; else those in arguments without an array, such
        as a configuration, are static.
    """
    places: dict[Name, Any] = places_of(args, kwargs)
    names = _names(step, len(args)) | {name: name for name in kwargs}
    objects = tuple(place for place, x in places.items() if any(map(is_nnx, jax.tree.leaves(x, is_leaf=is_nnx))))
    graph, graph_tree, arrays, paths = None, None, [], []  # type: Any, Any, list[Any], list[str]
    dims: list[tuple[str, Names]] = []
    if objects:
        graph, state = nnx.split(tuple(places[place] for place in objects))
        graph_tree = jax.tree.structure(state)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            arrays.append(leaf)
            paths.append(_nnx_path(path, objects, names))
        dims += _dims_of_variables(state, objects, names)
    trees: list[tuple[Name, Any]] = []
    static: list[tuple[int, Any]] = []
    count = len(arrays)
    for place, x in places.items():
        if place in objects:
            continue
        leaves, tree = jax.tree_util.tree_flatten_with_path(x)
        trees.append((place, tree))
        dims += _dims_of_boxes(x, names[place])
        with_numbers = numbers or any(isinstance(leaf, _ARRAYS) for _, leaf in leaves)
        for path, leaf in leaves:
            if isinstance(leaf, _ARRAYS) or (isinstance(leaf, _NUMBERS) and with_numbers):
                arrays.append(leaf)
                paths.append(show((names[place], *to_path(path))))
            else:
                static.append((count, leaf))
            count += 1
    structure = CallStructure(
        len(args),
        tuple(kwargs),
        objects,
        graph,
        graph_tree,
        tuple(trees),
        tuple(static),
        tuple(paths),
        tuple(names.items()),
        tuple(dims),
    )
    return structure, arrays


def _names(step: Callable[..., Any], count: int) -> dict[Name, str]:
    """The name of each positional argument, or ``arg0`` and so on where the function does not tell."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {i: known[i] if i < len(known) else f"arg{i}" for i in range(count)}


def _dims_of_variables(state: Any, objects: tuple[Name, ...], names: Mapping[Name, str]) -> Iterator[tuple[str, Names]]:
    """The dims that annotations of NNX name, such as ``nnx.with_partitioning``."""
    is_variable = lambda x: isinstance(x, nnx.Variable)
    for keys, variable in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_variable):
        path = _nnx_path(keys, objects, names)
        if is_variable(variable) and (dims := names_of(variable.get_metadata(), path)) is not None:
            yield path, dims


def _dims_of_boxes(x: Any, name: str) -> Iterator[tuple[str, Names]]:
    """The dims that annotations of Linen name, such as ``nn.with_partitioning``."""
    is_box = lambda x: isinstance(x, meta.Partitioned)
    for keys, box in jax.tree_util.tree_leaves_with_path(x, is_leaf=is_box):
        if is_box(box):
            path = show((name, *to_path(keys)))
            yield f"{path}/value", unbox(box, path)[1]


def _nnx_path(keys: tuple[Any, ...], objects: tuple[Name, ...], names: Mapping[Name, str]) -> str:
    first, *rest = to_path(keys)
    place = objects[int(first)]
    rest = rest[:-1] if rest[-1:] == ["value"] else rest
    return show((names[place], *rest))


@dataclass(frozen=True)
class ReturnStructure:
    """What a step returns, apart from its arrays.

    Attributes:
      tree: the structure.
      objects: the place of the argument that each leaf is, for those that are objects of NNX; by index of the leaf.
      static: the other leaves that are no arrays, by index.
      leaves: the number of all leaves.
    """

    tree: Any
    objects: tuple[tuple[int, Name], ...]
    static: tuple[tuple[int, Any], ...]
    leaves: int

    def result(self, arrays: Sequence[Any], arguments: Mapping[Name, Any]) -> Any:
        """Returns what the step returns, with these arrays and the caller's own objects."""
        left, objects, static = list(arrays), dict(self.objects), dict(self.static)
        leaves = [
            arguments[objects[i]] if i in objects else static[i] if i in static else left.pop(0)
            for i in range(self.leaves)
        ]
        return jax.tree.unflatten(self.tree, leaves)


def take_result_apart(result: Any, arguments: Mapping[Name, Any]) -> tuple[ReturnStructure, list[Any]]:
    """Returns the structure and the arrays of what a step returned.

    Raises:
      ModelError: it contains an NNX object that is no argument of the step.
    """
    leaves, tree = jax.tree.flatten(result, is_leaf=is_nnx)
    objects: list[tuple[int, Name]] = []
    static: list[tuple[int, Any]] = []
    arrays: list[Any] = []
    for i, leaf in enumerate(leaves):
        if is_nnx(leaf):
            place = next((place for place, x in arguments.items() if x is leaf), None)
            if place is None:
                raise ModelError(
                    f"train_step returned a new NNX object, {type(leaf).__name__}. Remedy: change the objects that it "
                    "is passed, and return arrays such as the loss."
                )
            objects.append((i, place))
        elif isinstance(leaf, _ARRAYS + _NUMBERS):
            arrays.append(leaf)
        else:
            static.append((i, leaf))
    return ReturnStructure(tree, tuple(objects), tuple(static), len(leaves)), arrays
