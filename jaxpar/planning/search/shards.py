"""How many devices share the arrays of a plan, and the weights that they use and store."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxpar.planning.search.plan import BATCH, EXPERTS, LAYERS, SEQ, VOCAB, Plan
from jaxpar.planning.search.workload import Factors, Workload, count

type Axes = tuple[str, ...]


class Shards:
    """How many devices share the arrays of a plan.

    Args:
      plan: the plan.
      attention: whether the tables are those inside attention, where ``ulysses`` splits heads.
    """

    def __init__(self, plan: Plan, *, attention: bool = False):
        table: dict[str | None, Axes] = {
            BATCH: ("replica", "data", "expert"),
            SEQ: ("context", "ulysses"),
            LAYERS: ("pipeline",),
            EXPERTS: ("expert",),
        }
        table |= dict.fromkeys(plan.tensor, ("model",))
        if plan.pipeline > 1:
            table[VOCAB] = ("pipeline", *table.get(VOCAB, ()))
        if attention:
            table[SEQ] = ("context",)
            for name in ("heads", "kv_heads"):
                table[name] = ("ulysses", *table.get(name, ()))
        self._table, self._mesh = table, plan.mesh

    def axes(self, *groups: Factors) -> Axes:
        """The axes that shard an array with these factors, each once."""
        found: list[str] = []
        for group in groups:
            for name, size in group:
                for axis in self._table.get(name, ()):
                    if axis not in found and self._mesh[axis] > 1 and size % self._mesh[axis] == 0:
                        found.append(axis)
                        size //= self._mesh[axis]
        return tuple(found)

    def ways(self, *groups: Factors) -> int:
        """The number of shards of an array with these factors."""
        return math.prod(self._mesh[axis] for axis in self.axes(*groups))

    def local(self, *groups: Factors) -> float:
        """The elements on one device of an array with these factors."""
        return count(*groups) / self.ways(*groups)


@dataclass(frozen=True)
class WeightGroup:
    """The weights that a plan gathers and reduces over the same axes.

    Attributes:
      layered: whether they are in the layers.
      experts: whether they are those of experts.
      elements: those that a device uses; gathered, but without those of other stages, experts and parts of tensors.
      axes: the axes of ZeRO that shard them where they are stored.
      others: the number of devices along these axes.
      summed: the other axes of ZeRO, which shard none of their dims: they are whole along these, as their gradients.
    """

    layered: bool
    experts: bool
    elements: float
    axes: Axes
    others: int
    summed: Axes = ()

    @property
    def stored(self) -> float:
        """The elements that a device stores."""
        return self.elements / self.others


def weight_groups(plan: Plan, workload: Workload) -> tuple[WeightGroup, ...]:
    """Returns the weights of a plan: in the layers and outside of them, of experts and others."""
    return tuple(_groups(plan, workload))


def _groups(plan: Plan, workload: Workload) -> Iterator[WeightGroup]:
    shards, sums = Shards(plan), dict[tuple[bool, bool, Axes], float]()
    found = plan.stored_over(plan.names(workload.names), workload.stored)
    # Along `expert` devices have other experts, so those are neither gathered nor summed over it.
    every = {of: tuple(axis for axis in plan.zero_axes if axis != "expert" or not of) for of in (False, True)}
    for p in workload.params:
        names = dict(p.factors)
        experts = EXPERTS in names
        kind = LAYERS in names, experts, found.get(p.path, every[experts])
        sums[kind] = sums.get(kind, 0.0) + shards.local(p.factors)
    for (layered, experts, axes), elements in sums.items():
        others = math.prod(plan.mesh[axis] for axis in axes)
        summed = tuple(axis for axis in every[experts] if axis not in axes)
        yield WeightGroup(layered, experts, elements, axes, others, summed)
