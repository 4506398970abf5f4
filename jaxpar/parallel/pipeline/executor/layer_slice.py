"""``LayerSlice``: sums of a layer's gradients in a buffer of buckets, which are read in parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from jaxpar.parallel.pipeline.executor.stage import held, indices, read

BLOCK_BYTES = 2**26
"""A gradient whose fp32 sums are larger is reduced in blocks: each needs copies of a part of it."""
RING_BLOCK_BYTES = 2**27
"""The same for a gradient that is reduced beside a backward, which hides fewer transfers of more and smaller blocks."""
_TILE = 128
"""Blocks start at multiples of a TPU's tiles."""


class SumBlock(NamedTuple):
    """The entries ``start`` to ``start + size`` along a dim of an array."""

    dim: int
    start: int
    size: int


def blocks_of(shape: Sequence[int], scattered: Sequence[int], most: int) -> list[SumBlock]:
    """Returns the blocks in which a gradient is reduced.

    They split its largest dim that is not scattered. A gradient of at most ``most`` bytes in fp32, or all of
    whose dims are scattered, is one block.

    Args:
      shape: of the gradient.
      scattered: its dims that are scattered.
      most: the most bytes of a block.

    >>> [tuple(block) for block in blocks_of((512, 100_000), scattered=[0], most=2**27)]
    [(1, 0, 50048), (1, 50048, 49952)]
    """
    free = [dim for dim in range(len(shape)) if dim not in scattered]
    dim = max(free, key=lambda dim: shape[dim], default=0)
    count = -(-math.prod(shape) * 4 // most) if free else 1
    if count == 1:
        return [SumBlock(dim, 0, shape[dim] if shape else 1)]
    step = -(-shape[dim] // (_TILE * count)) * _TILE
    return [SumBlock(dim, start, min(step, shape[dim] - start)) for start in range(0, shape[dim], step)]


@dataclass(frozen=True)
class LayerSlice:
    """The content of a slot of layer ``i`` in a buffer [slots, layers, ...], or a block of it.

    It is read in parts: a copy of the whole slice would take as much memory again.
    """

    buffer: jax.Array
    slot: jax.Array
    i: jax.Array
    block: SumBlock | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.buffer.shape[2:]
        if self.block is None:
            return shape
        return (*shape[: self.block.dim], self.block.size, *shape[self.block.dim + 1 :])

    def read(self) -> jax.Array:
        """Returns all of it."""
        if self.block is None:
            found = read([self.buffer], self.slot, self.i)[0]
        else:
            found = self._at({self.block.dim: self.block.start}, {})
        # XLA drops the indices of a buffer of a single slice, and with them what the slot depends on.
        return held(found, self.slot) if self.buffer.shape[:2] == (1, 1) else found

    def part(self, start: jax.Array, size: int, dim: int) -> jax.Array:
        """Returns ``size`` entries along ``dim``, from ``start``; a block splits another dim."""
        starts = {} if self.block is None else {self.block.dim: self.block.start}
        return self._at(starts | {dim: held(start, self.slot)}, {dim: size})  # held as in ``read``

    def _at(self, starts: dict[int, Any], sizes: dict[int, int]) -> jax.Array:
        where = indices(self.slot, self.i, *(starts.get(d, 0) for d in range(len(self.shape))))
        lengths = (1, 1, *(sizes.get(d, n) for d, n in enumerate(self.shape)))
        return jax.lax.dynamic_slice(self.buffer, where, lengths, allow_negative_indices=False)[0, 0]

    def after(self, x: jax.Array) -> LayerSlice:
        """Returns the same slice, which is read once ``x`` is computed."""
        return replace(self, slot=held(self.slot, x))
