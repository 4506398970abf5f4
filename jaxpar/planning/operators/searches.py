"""The three searches for the strategies of operators: exact, by repeated division of the devices, by propagation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxpar.planning.operators.costs import OperatorCosts
from jaxpar.planning.operators.eliminate import least_cost
from jaxpar.planning.operators.graph import Operator, OperatorGraph, Strategy
from jaxpar.planning.search.space import factorizations

_SWEEPS = 2
"""How often each operator chooses again at the end of a recursive search."""
_TIE = 1e-6
"""The weight of seconds of operators, against those of redistribution, in a propagation."""


@dataclass(frozen=True)
class Sharded:
    """A graph with a strategy for every operator.

    Attributes:
      mesh: axis → size.
      chosen: the strategy of each operator.
      seconds: of the operators and of redistribution.
      redistribution: seconds of redistribution alone.
      looked: the number of strategies of operators that were looked at.
      fixed: operators whose strategies the search could not vary; if there are none, an exact search is exact.
    """

    mesh: Mapping[str, int]
    chosen: tuple[Strategy, ...]
    seconds: float
    redistribution: float
    looked: int
    fixed: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Division:
    """A larger mesh axis.

    Attributes:
      mesh: with the larger axis.
      axis: the axis.
      dim: what it shards in all operators that have it; ``None`` if each of them chooses.
      again: whether the axis had more than one device before.
    """

    mesh: Mapping[str, int]
    axis: str
    dim: str | None
    again: bool

    def options(self, operator: Operator, before: Strategy, allowed: Collection[str]) -> list[Strategy]:
        """The strategies of an operator that keep what other axes shard, and what this one does, if it can."""
        k = list(self.mesh).index(self.axis)

        def with_dim(name: str | None) -> Strategy:
            return (*before[:k], name, *before[k + 1 :])

        if self.dim is not None:
            one = with_dim(self.dim)
            return [one if operator.divides(self.mesh, one) else with_dim(None)]
        if self.again and before[k] is not None and operator.divides(self.mesh, before):
            return [before]
        every = (with_dim(name) for name in (*(name for name in operator.sizes if name in allowed), None))
        return [s for s in every if operator.divides(self.mesh, s)]


@dataclass(frozen=True)
class OperatorSearch:
    """What the searches share.

    Attributes:
      graph: the operators.
      costs: their seconds.
      allowed: axis → the dims that it may shard.
    """

    graph: OperatorGraph
    costs: OperatorCosts
    allowed: Mapping[str, Collection[str]]
    _known: dict[tuple[object, ...], float] = field(default_factory=dict)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes."""
        return tuple(self.allowed)

    def dynamic_programming(self, mesh: Mapping[str, int]) -> Sharded:
        """Returns the strategies of the least total time on a mesh.

        They are the best of all, unless ``fixed`` lists operators. The time is linear in the number of operators of a
        series-parallel graph, and quadratic or cubic in the number of strategies of one.
        """
        return self._least(mesh, [o.strategies(mesh, self.allowed) for o in self.graph.operators], 1.0)

    def propagation(self, mesh: Mapping[str, int], given: Mapping[int, Sequence[Strategy]]) -> Sharded:
        """Returns the strategies of the least redistribution on a mesh; of several, those of the least total time.

        Args:
          mesh: axis → size.
          given: place of an operator → the strategies that it may have. All others may have any.
        """
        strategies = [given.get(i) or o.strategies(mesh, self.allowed) for i, o in enumerate(self.graph.operators)]
        return self._least(mesh, strategies, _TIE)

    def recursive(
        self, devices: int, first: Mapping[str, int] | None = None, most: Mapping[str, int] | None = None
    ) -> Sharded:
        """Returns strategies that are found by dividing the devices again and again, by 2 where that divides them.

        Each division multiplies a mesh axis. It tries every axis, and for each of them to shard one dim in all
        operators that have it, and to let the operators choose a dim in their order, at the least time of their own and
        of redistribution from the operators before. What takes the least time in total is kept. There are
        log(devices) × axes × dims × operators strategies to look at.

        Args:
          devices: the number of devices.
          first: axis → a size that it has before the first choice; it divides ``devices``.
          most: axis → its largest size, as long as another axis can have what is left.
        """
        forced = [(axis, factor) for axis, size in (first or {}).items() for factor in prime_factors(size)]
        done, looked = 1, 0
        mesh = dict.fromkeys(self.axes, 1)
        chosen: Sequence[Strategy] = [(None,) * len(mesh)] * len(self.graph.operators)
        while done < devices:
            factor = prime_factors(devices // done)[0]
            axes = [a for a in self.axes if mesh[a] * factor <= (most or {}).get(a, devices)] or list(self.axes)
            if forced:
                (axis, factor), *forced = forced
                axes = [axis]
            trials: list[tuple[float, int, dict[str, int], list[Strategy]]] = []
            for axis in axes:
                larger = {**mesh, axis: mesh[axis] * factor}
                for dim in (None, *(name for name in self.graph.names if name in self.allowed[axis])):
                    found, count = self._divide(_Division(larger, axis, dim, mesh[axis] > 1), chosen)
                    looked += count
                    trials.append((self.total(larger, found), len(trials), larger, found))
            _, _, mesh, chosen = min(trials)
            done *= factor
        return self._settled(mesh, chosen, looked)

    def _settled(self, mesh: Mapping[str, int], chosen: Sequence[Strategy], looked: int) -> Sharded:
        """The strategies after each operator has chosen again, knowing what all its neighbours chose."""
        chosen = list(chosen)
        for _ in range(_SWEEPS):
            for i, operator in enumerate(self.graph.operators):
                options = (chosen[i], *operator.strategies(mesh, self.allowed))
                looked += len(options) - 1
                chosen[i] = min(options, key=lambda s: self._seconds(i, mesh, s, chosen))
        return self._sharded(mesh, chosen, looked)

    def _divide(self, division: _Division, before: Sequence[Strategy]) -> tuple[list[Strategy], int]:
        """The strategies after an axis has become larger, and how many were looked at."""
        chosen, looked = list[Strategy](), 0
        for i, operator in enumerate(self.graph.operators):
            options = division.options(operator, before[i], self.allowed[division.axis])
            looked += len(options)
            mesh = division.mesh
            best = options[0]
            if len(options) > 1:
                best = min(options, key=lambda s: self._seconds(i, mesh, s, chosen))
            chosen.append(best)
        return chosen, looked

    def total(self, mesh: Mapping[str, int], chosen: Sequence[Strategy]) -> float:
        """Returns the seconds of all operators and all redistribution."""
        return sum(self.seconds(i, mesh, s) for i, s in enumerate(chosen)) + self.redistribution(mesh, chosen)

    def redistribution(self, mesh: Mapping[str, int], chosen: Sequence[Strategy]) -> float:
        """Returns the seconds of all redistribution."""
        return sum(self._between(k, mesh, chosen[e.source], chosen[e.target]) for k, e in enumerate(self.graph.edges))

    def seconds(self, i: int, mesh: Mapping[str, int], strategy: Strategy) -> float:
        """Returns the seconds of operator ``i``."""
        key = i, *mesh.values(), strategy
        if key not in self._known:
            self._known[key] = self.costs.operator(self.graph.operators[i], mesh, strategy)
        return self._known[key]

    def _between(self, k: int, mesh: Mapping[str, int], source: Strategy, target: Strategy) -> float:
        if source == target:
            return 0.0
        key = k, *mesh.values(), source, target
        if key not in self._known:
            self._known[key] = self.costs.edge(self.graph.edges[k], mesh, source, target)
        return self._known[key]

    def _seconds(self, i: int, mesh: Mapping[str, int], strategy: Strategy, chosen: Sequence[Strategy]) -> float:
        """The seconds of an operator, and of redistribution between it and the operators that have chosen."""
        known, seconds = len(chosen), self.seconds(i, mesh, strategy)
        for k in self.graph.around[i]:
            edge = self.graph.edges[k]
            other = edge.source if edge.target == i else edge.target
            if other < known and other != i:
                pair = (chosen[other], strategy) if edge.target == i else (strategy, chosen[other])
                seconds += self._between(k, mesh, *pair)
        return seconds

    def _least(self, mesh: Mapping[str, int], strategies: Sequence[Sequence[Strategy]], weight: float) -> Sharded:
        own = [np.array([weight * self.seconds(i, mesh, s) for s in mine]) for i, mine in enumerate(strategies)]
        pairs = []
        for k, e in enumerate(self.graph.edges):
            rows = [[self._between(k, mesh, a, b) for b in strategies[e.target]] for a in strategies[e.source]]
            pairs.append((e.source, e.target, np.array(rows)))
        found = least_cost(own, pairs)
        chosen = [mine[k] for mine, k in zip(strategies, found.chosen, strict=True)]
        return self._sharded(mesh, chosen, sum(map(len, strategies)), found.fixed)

    def _sharded(
        self, mesh: Mapping[str, int], chosen: Sequence[Strategy], looked: int, fixed: tuple[int, ...] = ()
    ) -> Sharded:
        moved = self.redistribution(mesh, chosen)
        return Sharded(mesh, tuple(chosen), self.total(mesh, chosen), moved, looked, fixed)

    def every_mesh(self, devices: int) -> Iterator[dict[str, int]]:
        """Yields the meshes of the axes on a number of devices."""
        return factorizations(devices, self.axes)


def prime_factors(n: int) -> list[int]:
    """Returns the prime factors of a number, the smallest first.

    >>> prime_factors(12)
    [2, 2, 3]
    """
    found, factor = [], 2
    while n > 1:
        while n % factor == 0:
            found.append(factor)
            n //= factor
        factor += 1
    return found
