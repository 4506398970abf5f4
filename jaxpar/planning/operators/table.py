"""``TableSearch``: the dims that ``model`` shards on each mesh, found from the strategies of operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxpar.errors import PlanError, listing
from jaxpar.planning.names.program import NamedProgram
from jaxpar.planning.operators.costs import OperatorCosts
from jaxpar.planning.operators.given import AXES, GivenShardings, Shardings, classes_of
from jaxpar.planning.operators.graph import OperatorGraph, Strategy
from jaxpar.planning.operators.searches import OperatorSearch, Sharded
from jaxpar.planning.operators.trace import operator_graph
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.plan import BATCH, Plan
from jaxpar.planning.search.space import Space, plans
from jaxpar.sharding.mesh import AXES as MESH_AXES


@dataclass(frozen=True)
class TensorTable:
    """The dims that ``model`` shards on a mesh.

    Attributes:
      mesh: axis → size.
      tensor: the dims.
      seconds: of all operators and redistribution, if one table is for all of them.
      free: the strategies that the search found for each operator, from which the table was made.
    """

    mesh: Mapping[str, int]
    tensor: tuple[str, ...]
    seconds: float
    free: Sharded

    def __str__(self) -> str:
        mesh = " × ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        return f"{mesh}, model shards {listing(self.tensor)}" if self.tensor else mesh


class TableSearch:
    """A search for the dims that ``model`` shards, by the strategies of operators.

    Args:
      program: the loss.
      model: has the workload and the topology.
      space: what may be chosen.
      shardings: what is given.

    Attributes:
      graph: the operators.
      looked: the number of strategies that were looked at.
      fixed: the number of operators that an exact search had to fix.
    """

    def __init__(self, program: NamedProgram, model: CostModel, space: Space, shardings: Shardings | None = None):
        wrong = {a: n for a, n in space.fixed.items() if a in MESH_AXES and a not in AXES and n != 1}
        if wrong:
            raise PlanError(
                f"fixed must have no axes of the mesh but data and model with this search, got {wrong}. "
                "Remedy: search='enumerate'."
            )
        self.given = GivenShardings.of(shardings or {}, program)
        self.graph: OperatorGraph = operator_graph(program, self.given.paths)
        self._model, self._space, self._classes = model, space, classes_of(program)
        names = {self._classes.get(name, name) for name in space.tensor} | self.given.model
        self._tensor = tuple(sorted((names & {*self.graph.names, *self.given.model}) - self.given.whole))
        weights = [{self._classes.get(name or "") for name, _ in p.factors} for p in model.workload.params]
        self._weights = [{name for name in names if name is not None} for names in weights]
        costs = OperatorCosts(model.topology, model.workload.reduce_bytes)
        self._search = OperatorSearch(self.graph, costs, {"data": (BATCH,), "model": self._tensor})
        self.looked = self.fixed = 0

    def tables(self, name: str) -> Iterator[TensorTable]:
        """Yields tables, those of the least time of operators first; each on another mesh.

        Args:
          name: of the search.

        Raises:
          PlanError: what is given divides on no mesh.
        """
        if name == "recursive":
            yield from self._recursive()
            return
        meshes = [m for m in self._search.every_mesh(self._model.topology.devices) if self._fits(m)]
        if not meshes:
            raise PlanError(
                f"no mesh on {self._model.topology.devices} devices has the axes that are given, and divides their "
                "dims. Remedy: other shardings, or another fixed mesh."
            )
        found = []
        for mesh in meshes:
            propagates = name == "sharding_propagation"
            free = (
                self._search.propagation(mesh, self._given(mesh))
                if propagates
                else self._search.dynamic_programming(mesh)
            )
            found.append(self._table(free, propagates=propagates))
        yield from sorted(found, key=lambda table: table.seconds)

    def space(self, table: TensorTable) -> Space:
        """Returns the space of a table: all options of the step."""
        fixed: dict[str, Any] = {**self._space.fixed, **table.mesh}
        fixed |= {"zero": 3} if self.given.zero and table.mesh["data"] > 1 else {}
        return replace(self._space, axes=AXES, tensor=self._aliases(table.tensor), fixed=fixed)

    def options(self, table: TensorTable) -> list[Plan]:
        """Returns the plans of a table."""
        return list(plans(self._model.workload, self._model.topology.devices, self.space(table), Counter()))

    def _recursive(self) -> Iterator[TensorTable]:
        """The table of the recursive search, then those with more and more devices along ``model``."""
        devices = self._model.topology.devices
        fixed = {axis: size for axis in AXES if (size := self._space.fixed.get(axis)) is not None}
        most = {"model": self._most_model, **fixed}
        least = 1
        while least <= most["model"]:
            free = self._search.recursive(devices, {"model": least, **fixed}, most)
            yield self._table(free)
            if fixed:
                return
            least = next((n for n in range(free.mesh["model"] + 1, devices + 1) if devices % n == 0), devices + 1)

    @property
    def _most_model(self) -> int:
        """The devices that `model` may have: its collectives do not overlap, so that it stays in a slice."""
        return self._space.fixed.get("model", self._model.topology.devices // self._model.topology.slices)

    def _fits(self, mesh: Mapping[str, int]) -> bool:
        """Whether a mesh is as it is fixed, and its axes divide the given dims."""
        if any(self._space.fixed.get(axis, size) != size for axis, size in mesh.items()):
            return False
        if mesh["model"] > self._most_model:
            return False
        if any(mesh[axis] == 1 < self._model.topology.devices for axis in self.given.axes):
            return False
        by_path = {o.path: o for o in self.graph.operators if o.path}
        if not all(by_path[p].divides(mesh, s) for p, s in self.given.paths.items() if p in by_path):
            return False
        return all(
            any(name in o.sizes and o.sizes[name] % mesh["model"] == 0 for o in self.graph.operators)
            for name in self.given.named
        )

    def _given(self, mesh: Mapping[str, int]) -> dict[int, Sequence[Strategy]]:
        """The strategies that operators may have by what is given."""
        found: dict[int, Sequence[Strategy]] = {}
        for i, o in enumerate(self.graph.operators):
            if o.path in self.given.paths:
                found[i] = (self.given.paths[o.path],)
            elif self.given.named & o.sizes.keys():
                every = o.strategies(mesh, self._search.allowed)
                found[i] = [s for s in every if s[1] in self.given.named] or every
        return found

    def _table(self, free: Sharded, *, propagates: bool = False) -> TensorTable:
        """The table that is closest to the strategies of operators: their votes, then one dim more or less."""
        self.looked += free.looked
        self.fixed = max(self.fixed, len(free.fixed))
        votes = dict.fromkeys(self._tensor, 0.0)
        for i, (o, s) in enumerate(zip(self.graph.operators, free.chosen, strict=True)):
            weight = self._search.seconds(i, free.mesh, (None,) * len(AXES))
            for name in o.sizes.keys() & {*self._tensor}:
                votes[name] += weight if s[1] == name else -weight if s[1] is None else 0.0
        chosen = set(self.given.model)
        for name in sorted(votes, key=lambda name: -votes[name]):
            if votes[name] > 0 and free.mesh["model"] > 1 and self._shardable({*chosen, name}):
                chosen.add(name)
        best, seconds = self._cost(chosen, free.mesh, propagates=propagates)
        while free.mesh["model"] > 1:
            others = [name for name in self._tensor if name not in self.given.model]
            changed = [chosen ^ {name} for name in others]
            changed += [chosen ^ {a, b} for a in chosen & {*others} for b in others if b not in chosen]
            trials = [(self._cost(c, free.mesh, propagates=propagates), c) for c in changed if c and self._shardable(c)]
            if not trials:
                break
            (value, total), other = min(trials, key=lambda trial: trial[0])
            if value >= best and chosen:
                break
            best, seconds, chosen = value, total, other
        return TensorTable(free.mesh, tuple(sorted(chosen)) if free.mesh["model"] > 1 else (), seconds, free)

    def _shardable(self, tensor: set[str]) -> bool:
        """Whether no weight has two of the dims, as `model` can shard only one of them."""
        return all(len(tensor & names) < 2 for names in self._weights)

    def _cost(self, tensor: Collection[str], mesh: Mapping[str, int], *, propagates: bool) -> tuple[float, float]:
        """What a search minimizes under one table for all operators, and the seconds in total."""
        chosen = []
        for o in self.graph.operators:
            options = [(d, m) for m in (*(n for n in o.sizes if n in tensor), None) for d in (BATCH, None)]
            own = self.given.paths.get(o.path)
            chosen.append(own or next(s for s in options if o.divides(mesh, s)))
        total, moved = self._search.total(mesh, chosen), self._search.redistribution(mesh, chosen)
        return (moved + 1e-6 * (total - moved) if propagates else total), total

    def _aliases(self, tensor: Collection[str]) -> tuple[str, ...]:
        """The dims, and the model's other names for them."""
        return tuple(sorted({*tensor, *(name for name, own in self._classes.items() if own in tensor)}))
