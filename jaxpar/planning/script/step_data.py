"""What a traced step is passed and returns, as trees whose leaves are the indices of arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Literal

from jaxpar.planning.script.arguments import CallStructure, ReturnStructure
from jaxpar.training.model import show, to_path


@dataclass(frozen=True)
class StepData:
    """What a traced step says about its state.

    Attributes:
      call, returned: the structure of its arguments and results.
      program: the step, as a function of arrays.
      loaded: indices of the arguments that are no arrays of a device, such as a loader's.
    """

    call: CallStructure
    returned: ReturnStructure
    program: Any
    loaded: frozenset[int]

    def kind(self, i: int) -> tuple[Any, Any]:
        """Returns the shape and dtype of an argument."""
        return self.program.in_avals[i].shape, self.program.in_avals[i].dtype

    def result_kind(self, j: int) -> tuple[Any, Any]:
        """Returns the shape and dtype of a result."""
        return self.program.out_avals[j].shape, self.program.out_avals[j].dtype

    def result_var(self, j: int) -> Any:
        """Returns the variable of a result; ``None`` for a constant."""
        atom = self.program.jaxpr.outvars[j]
        return None if isinstance(atom, Literal) else atom

    def is_same(self, i: int, j: int) -> bool:
        """Whether a result is an argument as it was passed."""
        return self.program.jaxpr.outvars[j] is self.program.jaxpr.invars[i]

    def arguments(self) -> list[Node]:
        """Returns the arguments that contain no object of NNX."""
        names, slots = dict(self.call.names), [_Slot(i) for i in range(len(self.program.in_avals))]
        return [Node.of(x, (names[place],)) for place, x in self.call.plain_arguments(slots).items()]

    def results(self) -> Node:
        """Returns what the step returns."""
        first = self.call.in_objects
        slots = [_Slot(j) for j in range(first, len(self.program.out_avals))]
        places = {place: object() for place, _ in self.call.names}
        return Node.of(self.returned.result(slots, places), ())

    def result_paths(self) -> tuple[str, ...]:
        """Returns the path of each result; of results that are one value that of the first."""
        first = self.call.in_objects
        paths = [*self.call.paths[:first], *(show(node.path) for node in self.results().walk() if node.is_array)]
        order = [*range(first), *(node.arrays.start for node in self.results().walk() if node.is_array)]
        by_index = dict(zip(order, paths, strict=True))
        return tuple(by_index[self.first_of(j) if j >= first else j] for j in range(len(by_index)))

    def first_of(self, j: int) -> int:
        """Returns the first result that is the same value."""
        outvars = self.program.jaxpr.outvars
        if isinstance(outvars[j], Literal):
            return j
        return next(k for k in range(self.call.in_objects, j + 1) if outvars[k] is outvars[j])


@dataclass(frozen=True)
class _Slot:
    """Stands for an array."""

    index: int


@dataclass(frozen=True)
class Node:
    """A part of the arguments or of the results.

    Attributes:
      path: its path.
      tree: its structure.
      arrays: the indices of its arrays, without gaps.
      children: its parts.
      among: whether only tuples and lists are above it.
    """

    path: tuple[str, ...]
    tree: Any
    arrays: range
    children: tuple[Node, ...]
    among: bool

    @classmethod
    def of(cls, x: Any, path: tuple[str, ...], among: bool = True) -> Node:
        """Returns the node of a pytree whose arrays are slots."""
        leaves = jax.tree.leaves(x)
        indices = [leaf.index for leaf in leaves if isinstance(leaf, _Slot)]
        arrays = range(indices[0], indices[-1] + 1) if indices else range(0)
        is_leaf = len(leaves) == 1 and leaves[0] is x
        parts = [] if is_leaf else jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)[0]
        below = among and type(x) in (tuple, list)
        children = tuple(cls.of(part, (*path, *to_path(key)), below) for key, part in parts)
        return cls(path, jax.tree.structure(x), arrays, children, among)

    @property
    def is_array(self) -> bool:
        """Whether it is one bare array."""
        return len(self.arrays) == 1 and not self.children

    def walk(self) -> Iterator[Node]:
        """Yields the node and all its parts, from the top."""
        todo = [self]
        while todo:
            node = todo.pop(0)
            yield node
            todo.extend(node.children)


def frozen(step: StepData, state: Collection[str]) -> frozenset[int]:
    """Returns the arrays of arguments of the structure of a state that are none: a teacher, or a target network."""
    nodes = {show(node.path): node for top in step.arguments() for node in top.walk()}
    kind = lambda node: (node.tree, tuple(map(step.kind, node.arrays)))
    known = [kind(nodes[path]) for path in state if nodes[path].children]
    return frozenset(
        i for node in step.arguments() if show(node.path) not in state and kind(node) in known for i in node.arrays
    )


def empty_state(step: StepData) -> frozenset[str]:
    """Returns the names of the arguments without leaves that the step returns, as the state of plain SGD."""
    result = step.results()
    returned = Counter(node.tree for node in (result, *result.children) if not node.tree.num_leaves)
    names = []
    for node in step.arguments():
        if not node.tree.num_leaves and returned[node.tree]:
            returned[node.tree] -= 1
            names.append(node.path[0])
    return frozenset(names)
