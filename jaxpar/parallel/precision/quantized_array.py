"""``QuantizedArray``: an array in int8 or int4, whose numbers share scales by channel or in groups of neighbors.

A number x becomes round(x / s) with s = max|x| / 127 (int8) or max|x| / 7 (int4) over the numbers that share the scale
(symmetric quantization, after Jacob et al. 2018, arXiv:1712.05877). A maximum does not depend on the order of its
arguments, so integers and scales are bitwise equal in every layout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.parallel.precision.int8 import Int8, StoredIntegers
from jaxpar.sharding.names import Names
from jaxpar.sharding.rules import Axes

DTYPES = {8: jnp.int8, 4: jnp.int4}
"""The dtype of the integers of so many bits. XLA packs two int4 in a byte; a checkpoint stores each in a byte."""
type Tile = tuple[int, ...]
"""For each dim of an array, how many neighbors share a scale."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["tile"])
@dataclass(frozen=True, eq=False)
class QuantizedArray(StoredIntegers):
    """An array of integers that stands for ``values * scales``.

    It is a pytree, so parameters and the operands of a scan may contain it. :func:`jaxpar.sharded_dot` gathers the
    integers. Other functions of jax, ``x @ w`` and ``w.astype(...)`` convert it to the array that it stands for.

    Attributes:
      values: int8 or int4, with the array's shape.
      scales: fp32 or bf16, with as many dims as the array: along each dim one for ``tile`` neighbors.
      tile: how many neighbors share a scale along each of the last dims, so that it is the same for one layer as for a
        stack of layers.

    >>> import jax.numpy as jnp
    >>> w = quantize_array(jnp.asarray([[0.5, 8.0], [-2.0, 2.0]]), (2, 1), bits=4)
    >>> w.values.tolist(), w.scales.shape
    ([[2, 7], [-7, 2]], (1, 2))
    """

    values: Any
    scales: Any
    tile: Tile

    @property
    def T(self) -> QuantizedArray:
        """The transpose of a matrix, as a :class:`QuantizedArray`."""
        return QuantizedArray(self.values.T, self.scales.T, tuple(reversed(self.tile)))

    def names_of_scales(self, names: Names) -> Names:
        """Returns the logical dims of the scales: none for a dim along which all numbers share a scale."""
        sizes = zip(names, self.shape, self.scales.shape, strict=True)
        return tuple(None if own == 1 < size else name for name, size, own in sizes)

    def by_channel(self, summed: Sequence[int]) -> Int8 | None:
        """Returns the same array as an :class:`Int8` if all numbers along ``summed``, and no others, share a scale.

        Args:
          summed: dims, counted from the end.
        """
        dims = tuple(sorted(dim % self.ndim for dim in summed))
        whole = tuple(size if dim in dims else 1 for dim, size in enumerate(self.shape))
        if self.tile[len(self.tile) - self.ndim :] != whole:
            return None
        return Int8(self.values, jnp.squeeze(self.scales, dims), tuple(dim - self.ndim for dim in dims))

    def spread_scales(self) -> jax.Array:
        """Returns the scales in a shape that broadcasts to that of ``values``."""
        scales = self.scales.astype(jnp.float32)
        for dim, (size, own) in enumerate(zip(self.shape, self.scales.shape, strict=True)):
            scales = _repeat(scales, size // own, dim) if 1 < own < size else scales
        return scales


def is_quantized(x: Any) -> bool:
    """Returns whether a leaf of a model's parameters is a :class:`QuantizedArray` or an :class:`Int8`."""
    return isinstance(x, StoredIntegers)


def quantize_array(x: jax.Array, tile: Tile, *, bits: int, scales: Any = jnp.float32) -> QuantizedArray:
    """Returns an array in int8 or int4.

    Args:
      x: an array of floats.
      tile: how many neighbors share a scale along each dim; it divides the dim.
      bits: 8 or 4.
      scales: the dtype of the scales.
    """
    return _quantize(x, tile, bits, scales, [()] * x.ndim)


def quantize_sharded(
    x: jax.Array, tile: Tile, axes: Sequence[Axes], mesh: Any, *, bits: int, scales: Any = jnp.float32
) -> QuantizedArray:
    """Returns :func:`quantize_array` of a sharded array: each device reads its own shard, and no shard is gathered.

    Where shards do not hold whole groups, devices reduce the largest magnitudes of all groups along that dim.

    Args:
      x, tile, bits, scales: as for :func:`quantize_array`.
      axes: the mesh axes that shard each dim of ``x``. They divide it.
      mesh: the mesh; ``None`` for the ambient one.
    """
    sizes = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).shape
    kept = tuple(
        own if (size // max(1, math.prod(sizes[a] for a in own))) % step == 0 else ()
        for size, step, own in zip(x.shape, tile, axes, strict=True)
    )
    spec, quantize = PartitionSpec(*axes), lambda x: _quantize(x, tile, bits, scales, axes)
    out_specs = QuantizedArray(spec, PartitionSpec(*kept), tile)
    # check_vma is off: maxima over an axis are equal on its devices.
    return jax.shard_map(quantize, mesh=mesh, in_specs=spec, out_specs=out_specs, check_vma=False)(x)


def round_sharded(x: jax.Array, tile: Tile, axes: Sequence[Axes], *, bits: int, scales: Any = jnp.float32) -> jax.Array:
    """Returns what :func:`quantize_sharded` stands for, in the dtype of ``x``, on the ambient mesh."""
    spec, rounded = PartitionSpec(*axes), lambda x: _rounded(x, tile, bits, scales, axes)
    # check_vma is off: maxima over an axis are equal on its devices.
    return jax.shard_map(rounded, in_specs=spec, out_specs=spec, check_vma=False)(x)


def round_straight_through(w: jax.Array, tile: Tile, *, bits: int, scales: Any = jnp.float32) -> jax.Array:
    """Returns what :func:`quantize_array` stands for, in the dtype of ``w``; its gradient is that of ``w``.

    The straight-through estimator (Bengio et al. 2013, arXiv:1308.3432). No number exceeds the range, so no gradient is
    cut off.
    """
    return _straight_through(w, _rounded(w, tile, bits, scales, [()] * w.ndim))


@jax.custom_jvp
def _straight_through(w: jax.Array, rounded: jax.Array) -> jax.Array:
    return rounded


@_straight_through.defjvp
def _derivative(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return primals[1], tangents[0]


def _quantize(x: jax.Array, tile: Tile, bits: int, dtype: Any, axes: Sequence[Axes]) -> QuantizedArray:
    values, scales, _ = _integers(x, tile, bits, dtype, axes)
    return QuantizedArray(values.astype(DTYPES[bits]), scales, tile)


def _rounded(x: jax.Array, tile: Tile, bits: int, dtype: Any, axes: Sequence[Axes]) -> jax.Array:
    values, scales, spread = _integers(x, tile, bits, dtype, axes)
    return (values * spread(scales.astype(jnp.float32))).astype(x.dtype)


def _integers(
    x: jax.Array, tile: Tile, bits: int, dtype: Any, axes: Sequence[Axes]
) -> tuple[jax.Array, jax.Array, Callable[[jax.Array], jax.Array]]:
    """Returns the integers of a shard in fp32, their scales, and a function that repeats scales for each number.

    ``axes`` are the manual axes that shard each dim.
    """
    wide, most = x.astype(jnp.float32), 2 ** (bits - 1) - 1
    largest, groups = jnp.abs(wide), list[jax.Array | None]()
    for dim, (step, own) in enumerate(zip(tile, axes, strict=True)):
        size = x.shape[dim]
        if size % step == 0:
            largest, at = _largest_of_neighbors(largest, step, dim), None
        else:
            at = (jax.lax.axis_index(own) * size + jnp.arange(size)) // step
            count = size * jax.lax.axis_size(own) // step
            largest = jax.lax.pmax(_largest_of_groups(largest, at, count, dim), own)
        groups.append(at)
    scales = (largest / most).astype(dtype)
    # A product with the reciprocal: the compiler turns a division into one in some layouts only, with other last bits.
    inverse = jax.lax.optimization_barrier(1 / jnp.where(scales == 0, 1, scales).astype(jnp.float32))

    def spread(scales: jax.Array) -> jax.Array:
        for dim, (step, at) in enumerate(zip(tile, groups, strict=True)):
            scales = _repeat(scales, step, dim) if at is None else jnp.take(scales, at, dim)
        return scales

    return jnp.clip(jnp.round(wide * spread(inverse)), -most, most), scales, spread


def _largest_of_neighbors(x: jax.Array, step: int, dim: int) -> jax.Array:
    return x if step == 1 else x.reshape(*x.shape[:dim], -1, step, *x.shape[dim + 1 :]).max(dim + 1)


def _largest_of_groups(x: jax.Array, groups: jax.Array, count: int, dim: int) -> jax.Array:
    """Returns the maxima of groups along a dim, 0 for those without numbers here."""
    if count == 1:
        return x.max(dim, keepdims=True)
    shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
    return jnp.zeros(shape, x.dtype).at[(*(slice(None),) * dim, groups)].max(x)


def _repeat(x: jax.Array, count: int, dim: int) -> jax.Array:
    if count == 1:
        return x
    shape = (*x.shape[: dim + 1], count, *x.shape[dim + 1 :])
    return jnp.broadcast_to(jnp.expand_dims(x, dim + 1), shape).reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
