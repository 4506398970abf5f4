"""Gathers of weights and reductions of gradients in int8: they send blocks of integers, each with its scale.

After ZeRO++ (Wang et al. 2023, arXiv:2306.10209). A number x of a block becomes round(x / s) with s = max|block| / 127,
so no error exceeds max|block| / 254. A value that is not finite makes its scale not finite.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.parallel.collectives import hierarchical

BLOCK = 256
_SHORT = 32
"""The shortest block whose scale is worth its bytes; if only shorter ones fit, blocks are longer than ``BLOCK``."""


class Packed(NamedTuple):
    """Quantized blocks: int8 ``values`` ``[..., n]`` and fp32 ``scales`` ``[..., n / block]``."""

    values: jax.Array
    scales: jax.Array


def block_of(n: int, most: int = BLOCK) -> int:
    """Returns the block length for rows of ``n``.

    It is the largest divisor of ``n`` up to ``most``; if that is shorter than 32, the smallest divisor above ``most``.

    >>> block_of(2048), block_of(96), block_of(1000), block_of(514)
    (256, 96, 250, 257)
    >>> block_of(509)  # a prime
    509
    """
    least = min(_SHORT, n)
    fits = [size for size in range(min(n, most), least - 1, -1) if n % size == 0]
    longer = (size for size in range(most + 1, n + 1) if n % size == 0)
    return fits[0] if fits else next(longer, n)


def pack(x: jax.Array, block: int = BLOCK) -> Packed:
    """Returns ``x`` ``[..., n]`` quantized in blocks along its last dim.

    >>> import jax.numpy as jnp
    >>> packed = pack(jnp.asarray([1.0, -2.0, 0.5, 2.0]))
    >>> packed.values, packed.scales
    (Array([  64, -127,   32,  127], dtype=int8), Array([0.01574803], dtype=float32))
    """
    wide_BN = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, block_of(x.shape[-1], block))
    scales_B1 = jnp.max(jnp.abs(wide_BN), axis=-1, keepdims=True) / 127
    values = jnp.round(wide_BN / jnp.where(scales_B1 == 0, 1, scales_B1))
    return Packed(values.astype(jnp.int8).reshape(x.shape), scales_B1[..., 0])


def unpack(packed: Packed, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """Returns the array from which :func:`pack` made the blocks, up to rounding."""
    values, scales = packed
    wide_BN = values.reshape(*scales.shape, -1).astype(jnp.float32) * scales[..., None]
    return wide_BN.reshape(values.shape).astype(dtype)


def gather_packed(x: jax.Array, axes: str | tuple[str, ...], *, dim: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The gather of :func:`jaxpar.parallel.collectives.hierarchical.gather_local` in int8; returns ``dtype``."""
    # Without the barrier the compiler gathers first and quantizes afterwards.
    packed = jax.lax.optimization_barrier(pack(x))
    gather = functools.partial(hierarchical.gather_local, axes=axes, dim=dim)
    return unpack(Packed(gather(packed.values), gather(packed.scales)), dtype)


def scatter_packed(x: jax.Array, axes: str | tuple[str, ...], *, dim: int) -> jax.Array:
    """The reduction of :func:`jaxpar.parallel.collectives.hierarchical.scatter_local` in int8; returns fp32.

    It is an all-to-all and then a sum in fp32. The error of a sum of N parts is therefore at most that of N roundings;
    it does not grow from hop to hop.
    """
    devices = jax.lax.axis_size(axes)
    shape = (*x.shape[:dim], devices, x.shape[dim] // devices, *x.shape[dim + 1 :])
    packed = jax.lax.optimization_barrier(pack(jnp.moveaxis(x.reshape(shape), dim, 0)))
    send = functools.partial(hierarchical.all_to_all_local, axes=axes, split_dim=0, concat_dim=0)
    return jnp.sum(unpack(Packed(send(packed.values), send(packed.scales))), 0)


def sum_packed(x: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """Returns ``jax.lax.psum`` in fp32, sent in int8 by a reduce-scatter and a gather."""
    devices = jax.lax.axis_size(axes)
    if dims := [dim for dim, size in enumerate(x.shape) if size % devices == 0]:
        dim = max(dims, key=lambda d: (d < x.ndim - 1, x.shape[d]))  # splitting the last dim would shorten the blocks
        return gather_packed(scatter_packed(x, axes, dim=dim), axes, dim=dim, dtype=jnp.float32)
    flat = jnp.pad(x.ravel(), (0, -x.size % devices)).reshape(devices, -1)
    total = gather_packed(scatter_packed(flat, axes, dim=0), axes, dim=0, dtype=jnp.float32)
    return total.ravel()[: x.size].reshape(x.shape)
