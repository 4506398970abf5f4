"""Which dims FSDP shards the weights along: ``embed`` where that reaches them, else those that save most memory.

After ZeRO stage 3 (Rajbhandari et al. 2020, arXiv:1910.02054): a device keeps 1/N of every weight. Rules by dim name
reach a weight only if one of its dims has a name that they shard. ``embed`` is a dim of nearly every weight of a
transformer, but not of a VAE or a U-Net.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxpar.analysis.units import show_bytes
from jaxpar.parallel.zero.stages import Zero
from jaxpar.sharding.rules import Axes, over

SMALL = over("data", Zero().min_bytes).min_bytes
"""Smaller weights need not be sharded; as for ``Zero``."""
NEGLIGIBLE = 1 / 1024
"""Weights that together are less of all bytes need not be sharded, such as the scales of norms."""


@dataclass(frozen=True)
class StoredArray:
    """A weight by its dims, as rules see them.

    Attributes:
      path: its path.
      dims: the name of each dim, or ``None``, and its size.
      itemsize: bytes of an element.
    """

    path: str
    dims: tuple[tuple[str | None, int], ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        """Bytes, without a mesh."""
        return math.prod(size for _, size in self.dims) * self.itemsize


@dataclass(frozen=True)
class StorageAxes:
    """The mesh axes over which a plan stores its weights.

    Attributes:
      sizes: mesh axis → number of devices.
      axes: those of ZeRO, outermost first.
      used: dim name → the axes that shard it wherever it is, in weights and activations.
      never: dim names that FSDP does not shard, as the layers that a scan takes one after the other.
      first: dim names that it shards before all others, such as ``embed``; others only where these do not suffice.
    """

    sizes: Mapping[str, int]
    axes: Axes
    used: Mapping[str | None, Axes]
    never: Collection[str]
    first: tuple[str, ...]

    @cached_property
    def options(self) -> tuple[Axes, ...]:
        """What one dim may be sharded over, most devices first: all axes, or without the innermost ones."""
        plain = tuple(axis for axis in self.axes if axis != "expert")
        found = dict.fromkeys(axes[:end] for axes in (self.axes, plain) for end in range(len(axes), 0, -1))
        return tuple(sorted(found, key=self.ways, reverse=True))

    def ways(self, axes: Iterable[str]) -> int:
        """Returns the number of devices along axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def free(self, array: StoredArray) -> Axes:
        """Returns the axes of ZeRO that shard no dim of a weight yet."""
        taken = {axis for name, _ in array.dims for axis in self.used.get(name, ())}
        return tuple(axis for axis in self.axes if axis not in taken)


@dataclass(frozen=True)
class FsdpDims:
    """The dims along which FSDP shards weights.

    Attributes:
      rules: those of the role ``params``, as plain data. ``None`` if no names suffice, so that every weight is sharded
        along a dim that fits (:func:`jaxpar.over`), with or without a name.
      found: the path of each weight that is not small → the axes that shard it.
      reason: why other dims than those of ``StorageAxes.first`` are sharded.
    """

    rules: Mapping[str, Any] | None
    found: Mapping[str, Axes]
    reason: str


def fsdp_dims(arrays: Sequence[StoredArray], storage: StorageAxes) -> FsdpDims | None:
    """Returns the dims along which FSDP shards weights; ``None`` if those of ``storage.first`` reach all of them.

    Further dims are chosen one by one: each time the dim that saves most bytes of the weights that are still
    replicated. A weight is sharded along one dim: a rule gives way where another dim of the weight has taken the axes.
    Weights of less than 64 KiB, and those that together are less than a thousandth of all, need not be sharded.

    Args:
      arrays: the weights.
      storage: the mesh axes.
    """
    choice = _Choice(arrays, storage)
    left = choice.unsharded(storage.first)
    if not left:
        return None
    chosen, missing = storage.first, left
    while left and (name := choice.most(left, chosen)):
        chosen = (*chosen, name)
        left = choice.unsharded(chosen)
    if any(over_axes(array, storage) for array in left):
        reason = "FSDP shards every weight along a dim that fits, with or without a name"
        return FsdpDims(None, over_all(arrays, storage), f"{reason}: {choice.show(missing)}")
    rules = choice.rules(chosen)
    found = {array.path: choice.sharded(array, chosen)[1] for array in arrays if array.bytes >= SMALL}
    added = ", ".join(name for name in rules if name not in storage.first)
    reason = f"FSDP shards {added or 'some weights over fewer axes'} besides {', '.join(storage.first)}"
    return FsdpDims(rules, found, f"{reason}: {choice.show(missing)}")


def over_all(arrays: Iterable[StoredArray], storage: StorageAxes) -> dict[str, Axes]:
    """Returns the path of each weight that is not small → the axes with which ``over`` shards it."""
    return {array.path: over_axes(array, storage) for array in arrays if array.bytes >= SMALL}


def over_axes(array: StoredArray, storage: StorageAxes) -> Axes:
    """Returns the axes with which ``over`` shards a weight that is not small: all that are free, or none."""
    axes = storage.free(array)
    ways = lambda name: storage.ways((*storage.used.get(name, ()), *axes))
    return axes if any(size % ways(name) == 0 for name, size in array.dims) else ()


def replicated(arrays: Sequence[StoredArray]) -> str:
    """Returns which weights ZeRO leaves replicated, as text; empty if there are none."""
    if not arrays:
        return ""
    most = max(arrays, key=lambda array: array.bytes)
    more = f" and {len(arrays) - 1} others" if len(arrays) > 1 else ""
    nbytes = show_bytes(sum(array.bytes for array in arrays))
    return f"{most.path}{more}, {nbytes}, stay replicated: the devices divide none of their dims"


class _Choice:
    """What rules for some dims do to the weights."""

    def __init__(self, arrays: Sequence[StoredArray], storage: StorageAxes):
        self.arrays, self.storage = arrays, storage
        self.total = sum(array.bytes for array in arrays)
        first = storage.first[:1]
        sizes = (size for array in arrays for name, size in array.dims if name in first)
        whole = all(size % storage.ways(storage.axes) == 0 for size in sizes)
        # A rule with alternatives gives way to one without, whatever the order of a weight's dims.
        self.plain = first if whole and "expert" not in storage.axes else ()

    def sharded(self, array: StoredArray, chosen: Collection[str]) -> tuple[str | None, Axes]:
        """Returns the dim of a weight that rules for some dims shard, and its axes; none if no axes divide one."""
        free = {*self.storage.free(array)}
        for name, size in sorted(array.dims, key=lambda dim: dim[0] not in self.plain):
            if name in chosen and not self.storage.used.get(name):
                for axes in self.storage.options:
                    if free.issuperset(axes) and size % self.storage.ways(axes) == 0:
                        return name, axes
        return None, ()

    def unsharded(self, chosen: Collection[str]) -> list[StoredArray]:
        """Returns the weights that are not small and that such rules do not reach; none if they are few bytes."""
        left = [
            array
            for array in self.arrays
            if array.bytes >= SMALL and self.storage.free(array) and not self.sharded(array, chosen)[1]
        ]
        return left if sum(array.bytes for array in left) > NEGLIGIBLE * self.total else []

    def most(self, left: Sequence[StoredArray], chosen: Collection[str]) -> str | None:
        """Returns the further dim that saves most bytes of these weights; the larger of two that save the same."""
        saved: dict[str, tuple[float, int]] = {}
        for array in left:
            for name, size in dict(array.dims).items():
                ways = self.storage.ways(self.sharded(array, (name,) if name else ())[1])
                if name is not None and name not in chosen and name not in self.storage.never and ways > 1:
                    nbytes, largest = saved.get(name, (0.0, 0))
                    saved[name] = nbytes + array.bytes * (1 - 1 / ways), max(largest, size)
        return max(saved, key=lambda name: (saved[name], name), default=None)

    def rules(self, chosen: Sequence[str]) -> dict[str, Any]:
        """Returns the rules for these dims: for each the axes that shard it in some weight."""
        pairs = {self.sharded(array, chosen) for array in self.arrays}
        options = {name: [[*axes] for axes in self.storage.options if (name, axes) in pairs] for name in chosen}
        return {
            name: found[0] if name in self.plain else {"first_of": [*found, None]}
            for name, found in options.items()
            if found
        }

    def show(self, missing: Iterable[StoredArray]) -> str:
        """Returns how many bytes the weights have that the first rules do not reach."""
        nbytes, names = show_bytes(sum(array.bytes for array in missing)), " or ".join(self.storage.first)
        n = self.storage.ways(self.storage.axes)
        return f"{nbytes} of the weights' {show_bytes(self.total)} have no dim {names} that {n} devices divide"
