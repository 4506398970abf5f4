"""int8 on the wire: weights gathered and gradients reduced in blocks of 8-bit integers, each block with a scale of its own.

After ZeRO++ (Wang et al. 2023, arXiv:2306.10209). A number x of a block becomes round(x / s) with s = max|block| / 127, so none is off by more
than max|block| / 254. What is not finite stays so: the scale carries it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.parallel.collectives import hierarchical

BLOCK = 256
_SHORT = 32
"""A block shorter than this costs more for its scale than it is worth: then all of a row is one."""


class Packed(NamedTuple):
    """int8 ``values`` [..., n], and fp32 ``scales`` [..., n / block]."""

    values: jax.Array
    scales: jax.Array


def block_of(n: int, most: int = BLOCK) -> int:
    """The length of the blocks of a row of ``n``: its largest divisor up to ``most``, or all of it where that is short.

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
    """``x`` [..., n] in blocks along its last dim.

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
    """What :func:`pack` was given, but for rounding."""
    values, scales = packed
    wide_BN = values.reshape(*scales.shape, -1).astype(jnp.float32) * scales[..., None]
    return wide_BN.reshape(values.shape).astype(dtype)


def gather_packed(x: jax.Array, axes: str | Sequence[str], *, dim: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """:func:`jaxpar.parallel.collectives.hierarchical.gather_local` that sends int8; the result is of ``dtype``."""
    # Behind a barrier, or the compiler gathers first and rounds afterwards.
    packed = jax.lax.optimization_barrier(pack(x))
    gather = functools.partial(hierarchical.gather_local, axes=axes, dim=dim)
    return unpack(Packed(gather(packed.values), gather(packed.scales)), dtype)


def scatter_packed(x: jax.Array, axes: str | Sequence[str], *, dim: int) -> jax.Array:
    """:func:`jaxpar.parallel.collectives.hierarchical.scatter_local` that sends int8: an all-to-all, then a sum in fp32.

    The error of a sum of N parts is at most that of N roundings; it does not build up from hop to hop.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    devices = math.prod(jax.lax.axis_size(name) for name in names)
    shape = (*x.shape[:dim], devices, x.shape[dim] // devices, *x.shape[dim + 1 :])
    packed = jax.lax.optimization_barrier(pack(jnp.moveaxis(x.reshape(shape), dim, 0)))
    send = functools.partial(hierarchical.all_to_all_local, axes=names, split_dim=0, concat_dim=0)
    return jnp.sum(unpack(Packed(send(packed.values), send(packed.scales))), 0)


def sum_packed(x: jax.Array, axes: str | Sequence[str]) -> jax.Array:
    """``jax.lax.psum`` in fp32 that sends int8: scattered, then gathered."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    devices = math.prod(jax.lax.axis_size(name) for name in names)
    dims = [dim for dim, size in enumerate(x.shape) if size % devices == 0]
    if dims:
        dim = max(dims, key=lambda d: (d < x.ndim - 1, x.shape[d]))  # cut along the last one, blocks get short
        return gather_packed(scatter_packed(x, names, dim=dim), names, dim=dim, dtype=jnp.float32)
    flat = jnp.pad(x.ravel(), (0, -x.size % devices)).reshape(devices, -1)
    whole = gather_packed(scatter_packed(flat, names, dim=0), names, dim=0, dtype=jnp.float32)
    return whole.ravel()[: x.size].reshape(x.shape)
