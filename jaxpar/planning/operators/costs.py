"""``OperatorCosts``: the seconds of operators and of the redistribution between them, under any strategies.

An operator computes its share, and sums over the devices that hold parts of its result. In the backward pass it sums
the gradient of each operand over the axes that do not shard that operand. Between two operators an array is
redistributed where their strategies differ: by slices, which send nothing, all-to-alls and all-gathers. The gradient
takes the way back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpar.planning.operators.graph import DimArray, Edge, Operator, Strategy
from jaxpar.planning.search.plan import Plan
from jaxpar.sharding.hardware.links import Links
from jaxpar.sharding.hardware.topology import Topology

_PASSES = 3.0
"""FLOPs of a step divided by those of its forward pass."""

type Mesh = Mapping[str, int]


def axes_of(array: DimArray, mesh: Mesh, strategy: Strategy) -> dict[str, str]:
    """Returns the axes that shard an array, and the dim of each."""
    return {a: name for a, name in zip(mesh, strategy, strict=True) if name is not None and name in array.names}


@dataclass
class OperatorCosts:
    """The seconds of operators and of redistribution on a topology.

    Attributes:
      topology: the hardware.
      reduce_bytes: bytes of an element of a weight's gradient.
    """

    topology: Topology
    reduce_bytes: int = 4
    _links: dict[tuple[int, ...], Links] = field(default_factory=dict)
    _seconds: dict[tuple[object, ...], float] = field(default_factory=dict)

    def operator(self, operator: Operator, mesh: Mesh, strategy: Strategy) -> float:
        """Returns the seconds of an operator in a step, forward and backward."""
        device = self.topology.accelerator
        used = [a for a, name in zip(mesh, strategy, strict=True) if name is not None]
        share = math.prod(mesh[a] for a in used)
        arrays = (*operator.operands, operator.result)
        local = sum(x.bytes / _ways(x, mesh, strategy) for x in arrays) if operator.operands else 0.0
        work = max(operator.flops / share / device.rate("bf16"), local / device.hbm_bandwidth)
        sent = self._sum(operator.result, mesh, strategy, used) if operator.operands else 0.0
        for x in operator.operands:
            if x.differentiable:
                sent += self._sum(x, mesh, strategy, used) / x.sharers
        return operator.times * (_PASSES * work + sent)

    def edge(self, edge: Edge, mesh: Mesh, source: Strategy, target: Strategy) -> float:
        """Returns the seconds of redistribution between two operators in a step."""
        before, after = (axes_of(edge.array, mesh, s) for s in (source, target))
        if before == after:
            return 0.0
        there = self._redistribute(edge.array, mesh, before, after)
        back = self._redistribute(edge.array, mesh, after, before) if edge.differentiable else 0.0
        return edge.times * (there + back)

    def _sum(self, array: DimArray, mesh: Mesh, strategy: Strategy, used: Iterable[str]) -> float:
        """The seconds of the sum of an array over the axes that shard the operator and not the array."""
        own = axes_of(array, mesh, strategy)
        over = tuple(a for a in used if a not in own and mesh[a] > 1)
        n = math.prod(mesh[a] for a in over)
        local = array.bytes / math.prod(mesh[a] for a in own)
        return self._time("all-reduce", mesh, over, 2.0 * local * (n - 1) / n)

    def _redistribute(self, array: DimArray, mesh: Mesh, before: Mapping[str, str], after: Mapping[str, str]) -> float:
        """Slices first, as they make the array smaller, then all-to-alls, then all-gathers."""
        seconds = 0.0
        local = array.bytes / math.prod(mesh[a] for a in {*before, *after})
        for a in (a for a in before if a in after and before[a] != after[a]):
            seconds += self._time("all-to-all", mesh, (a,), local * (mesh[a] - 1) / mesh[a])
        gone = tuple(a for a in before if a not in after and mesh[a] > 1)
        return seconds + self._time("all-gather", mesh, gone, local * (math.prod(mesh[a] for a in gone) - 1))

    def _time(self, kind: str, mesh: Mesh, axes: tuple[str, ...], sent: float) -> float:
        if not axes or not sent:
            return 0.0
        key = kind, *mesh.items(), axes, sent
        if key not in self._seconds:
            self._seconds[key] = self._links_of(mesh).seconds(kind, axes, sent)
        return self._seconds[key]

    def _links_of(self, mesh: Mesh) -> Links:
        # A mesh of fewer devices is one of several that send at once: the others are along the outermost axis.
        others = self.topology.devices // math.prod(mesh.values())
        sizes: dict[str, Any] = {"pipeline": others, **mesh}
        full = Plan(**sizes)
        if full.mesh_sizes not in self._links:
            self._links[full.mesh_sizes] = Links.of(self.topology, full.mesh)
        return self._links[full.mesh_sizes]


def _ways(array: DimArray, mesh: Mesh, strategy: Strategy) -> int:
    return math.prod(mesh[a] for a in axes_of(array, mesh, strategy))
