"""``least_cost``: the least sum of costs of operators and of pairs of them, by elimination of one after the other.

An operator with one or two neighbours is minimized away: what is left is a cost of its neighbours, which is added to
the one that they have. Series-parallel graphs, such as chains, residual connections and attention, end that way (the
elimination of nodes and edges of OptCNN, FlexFlow and MindSpore). In other graphs an operator with more neighbours
leaves a cost of all of them, which is exact too, as long as the table is not too large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

LARGEST = 2**22
"""Entries of the largest table. An operator that needs a larger one is fixed at what is best for it alone."""


@dataclass(frozen=True)
class Elimination:
    """A choice for every operator.

    Attributes:
      chosen: the place of each operator's strategy.
      fixed: operators that were fixed because a table would have been too large; if there are none, the choice is the
        best of all.
    """

    chosen: tuple[int, ...]
    fixed: tuple[int, ...] = ()


@dataclass(eq=False, frozen=True)
class _Table:
    """The cost of the choices of some operators, one dim for each."""

    of: tuple[int, ...]
    costs: np.ndarray


def least_cost(
    own: Sequence[np.ndarray], between: Iterable[tuple[int, int, np.ndarray]], largest: int = LARGEST
) -> Elimination:
    """Returns the choices of the least total cost.

    Args:
      own: the cost of each choice of each operator.
      between: two operators and the cost of their choices, ``[choices of the first, choices of the second]``.
      largest: entries of the largest table.

    >>> import numpy as np
    >>> apart = np.array([[0.0, 5.0], [5.0, 0.0]])
    >>> least_cost([np.array([1.0, 2.0]), np.array([3.0, 0.0])], [(0, 1, apart)]).chosen
    (1, 1)
    """
    graph = _Eliminated(own, between)
    best_of: list[tuple[int, _Table]] = []
    fixed: list[int] = []
    while graph.near:
        i, entries = graph.smallest()
        if entries > largest:
            i = max(graph.near, key=lambda i: (len(graph.near[i]), -i))
            best_of.append((i, graph.fix(i)))
            fixed.append(i)
        else:
            best_of.append((i, graph.minimize(i)))
    chosen: dict[int, int] = {}
    for i, best in reversed(best_of):
        chosen[i] = int(best.costs[tuple(chosen[j] for j in best.of)])
    return Elimination(tuple(chosen[i] for i in range(len(own))), tuple(fixed))


class _Eliminated:
    """What is left of the graph: the neighbours of each operator, and the tables of costs that it is in."""

    def __init__(self, own: Sequence[np.ndarray], between: Iterable[tuple[int, int, np.ndarray]]):
        self._sizes = [len(costs) for costs in own]
        self.near: dict[int, set[int]] = {i: set() for i in range(len(own))}
        self._tables: dict[int, list[_Table]] = {i: [_Table((i,), costs)] for i, costs in enumerate(own)}
        for a, b, costs in between:
            self._add(_Table((a, b), costs) if a != b else _Table((a,), np.diagonal(costs)))

    def smallest(self) -> tuple[int, int]:
        """The operator whose elimination needs the smallest table, and the entries of that table."""
        entries = {i: self._sizes[i] * math.prod(self._sizes[j] for j in near) for i, near in self.near.items()}
        best = min(entries, key=lambda i: (entries[i], i))
        return best, entries[best]

    def minimize(self, i: int) -> _Table:
        """Eliminate an operator. Returns its best choice for each choice of its neighbours."""
        near = tuple(sorted(self.near[i]))
        costs = self._joined(self._tables[i], (*near, i))
        self._remove(i)
        self._add(_Table(near, costs.min(axis=-1)))
        return _Table(near, costs.argmin(axis=-1))

    def fix(self, i: int) -> _Table:
        """Eliminate an operator by its best choice, whatever its neighbours choose."""
        choice = int(self._joined([t for t in self._tables[i] if t.of == (i,)], (i,)).argmin())
        for t in self._remove(i):
            k = t.of.index(i)
            self._add(_Table((*t.of[:k], *t.of[k + 1 :]), t.costs.take(choice, axis=k)))
        return _Table((), np.array(choice))

    def _add(self, table: _Table) -> None:
        for i in table.of:
            self.near[i] |= set(table.of) - {i}
            self._tables[i].append(table)

    def _remove(self, i: int) -> list[_Table]:
        """Take an operator and its tables out of the graph."""
        gone = self._tables.pop(i)
        for j in self.near.pop(i):
            self._tables[j] = [t for t in self._tables[j] if i not in t.of]
            self.near[j] = {k for t in self._tables[j] for k in t.of} - {j}
        return gone

    def _joined(self, tables: Iterable[_Table], of: tuple[int, ...]) -> np.ndarray:
        """The sum of tables as one of these operators."""
        total = np.zeros([self._sizes[i] for i in of])
        place = {i: k for k, i in enumerate(of)}
        for t in tables:
            order = sorted(range(len(t.of)), key=lambda k: place[t.of[k]])
            shape = [1] * len(of)
            for k in order:
                shape[place[t.of[k]]] = self._sizes[t.of[k]]
            total = total + t.costs.transpose(order).reshape(shape)
        return total
