"""An average over devices that sends one bit per number and one fp32 scale per block of numbers.

After 1-bit Adam (Tang et al. 2021, arXiv:2102.02888). A block x becomes sign(x) · mean|x|, the scale of least squared
error. The rest is kept as an error and added the next time: by each device for what it sends, and again for the part
that it averages. A value that is not finite makes its scale not finite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.parallel.collectives import hierarchical
from jaxpar.sharding.rules import Axes

BLOCK = 256
_BITS = 8


class Signs(NamedTuple):
    """Blocks of signs: uint8 ``bits`` ``[..., c / 8]`` and fp32 ``scales`` ``[..., blocks]``.

    The last block may be short.
    """

    bits: jax.Array
    scales: jax.Array


class SignPart(NamedTuple):
    """One flat array on its device, with its errors.

    Attributes:
      values: ``[n]``, the numbers to average.
      live: bool ``[n]``. The other numbers count as 0, and their results are meaningless.
      worker: ``[n]``, the error of the signs that this device has sent so far.
      server: ``[c]``, the error of the averages that this device has sent so far; see :func:`chunk_of`.
    """

    values: jax.Array
    live: jax.Array
    worker: jax.Array
    server: jax.Array


def chunk_of(n: int, num_devices: int) -> int:
    """Returns how many of ``n`` numbers each of ``num_devices`` devices averages: equal parts, in full bytes of signs.

    >>> chunk_of(1024, 8), chunk_of(1025, 8), chunk_of(3, 8)
    (128, 136, 8)
    """
    return -(-n // (_BITS * num_devices)) * _BITS


def pack(x: jax.Array, live: jax.Array, block: int = BLOCK) -> Signs:
    """Returns ``x`` ``[..., c]`` as signs, where c is a multiple of 8; the scales are means over the ``live`` numbers.

    >>> import jax.numpy as jnp
    >>> signs = pack(jnp.asarray([1.0, -2.0, 3.0, 4.0, -5.0, 6.0, 7.0, 99.0]), jnp.arange(8) < 7)
    >>> signs.bits, signs.scales
    (Array([237], dtype=uint8), Array([4.], dtype=float32))
    >>> unpack(signs, 8)
    Array([ 4., -4.,  4.,  4., -4.,  4.,  4.,  4.], dtype=float32)
    """
    # Bit i of all bytes comes from adjacent numbers, which suits a vector unit.
    shape = (*x.shape[:-1], _BITS, x.shape[-1] // _BITS)
    weights_81 = (1 << jnp.arange(_BITS, dtype=jnp.int32))[:, None]
    bits = jnp.sum(jnp.where((x >= 0).reshape(shape), weights_81, 0), axis=-2).astype(jnp.uint8)
    counted = jnp.sum(_blocks(live.astype(x.dtype), block), -1)
    scales = jnp.sum(_blocks(jnp.where(live, jnp.abs(x), 0), block), -1) / jnp.maximum(counted, 1)
    return Signs(bits, scales)


def unpack(signs: Signs, block: int = BLOCK) -> jax.Array:
    """Returns each sign times the scale of its block, fp32 ``[..., c]``."""
    bits, scales = signs
    ones = (bits[..., None, :].astype(jnp.int32) >> jnp.arange(_BITS, dtype=jnp.int32)[:, None]) & 1
    ones = ones.reshape(*bits.shape[:-1], -1)
    sizes = jnp.broadcast_to(scales[..., None], (*scales.shape, block)).reshape(*scales.shape[:-1], -1)
    sizes = sizes[..., : ones.shape[-1]]
    return jnp.where(ones == 1, sizes, -sizes)


def average(parts: Sequence[SignPart], axes: Axes, index: jax.Array, block: int = BLOCK) -> list[SignPart]:
    """Returns the averages of ``values`` ``[n]`` over devices, with the remaining errors, inside a ``shard_map``.

    All arrays are sent together: one all-to-all of bits and scales to the devices that average, and one all-gather
    back.

    Args:
      parts: this device's arrays.
      axes: the mesh axes to average over.
      index: the index of this device along the axes.
      block: the numbers per scale.

    Returns:
      For each array a :class:`SignPart` with the averages as ``values`` and the new errors.
    """
    num_devices = jax.lax.axis_size(axes)
    own_live, outgoing, errors = [], [], []
    for part in parts:
        live = _chunks(part.live, num_devices)
        x = jnp.where(live, _chunks(part.values + part.worker, num_devices), 0)
        signs = pack(x, live, block)
        errors.append(_flat(x - unpack(signs, block), part.values.size))
        own_live.append(jax.lax.dynamic_index_in_dim(live, index, 0, keepdims=False))
        outgoing.append(signs)
    back, server_errors = [], []
    # Row i goes to device i, and row j comes from device j.
    exchange = functools.partial(hierarchical.all_to_all_local, axes=axes, split_dim=0, concat_dim=0)
    for part, live, signs in zip(parts, own_live, _send(outgoing, exchange, axes), strict=True):
        x = jnp.where(live, jnp.mean(unpack(signs, block), 0) + part.server, 0)
        own = pack(x, live, block)
        server_errors.append(jnp.where(live, x - unpack(own, block), 0))
        back.append(Signs(own.bits[None], own.scales[None]))
    gather = functools.partial(hierarchical.gather_local, axes=axes, dim=0)
    found = []
    for part, signs, worker, server in zip(parts, _send(back, gather, axes), errors, server_errors, strict=True):
        found.append(SignPart(_flat(unpack(signs, block), part.values.size), part.live, worker, server))
    return found


def _chunks(x: jax.Array, num_devices: int) -> jax.Array:
    """Returns ``[n]`` as ``[num_devices, c]``, padded with zeros."""
    size = num_devices * chunk_of(x.size, num_devices)
    return jnp.pad(x, (0, size - x.size)).reshape(num_devices, -1)


def _flat(x: jax.Array, n: int) -> jax.Array:
    return x.reshape(-1)[:n]


def _blocks(x: jax.Array, block: int) -> jax.Array:
    """Returns ``[..., c]`` as ``[..., blocks, block]``, padded with zeros."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)]
    return jnp.pad(x, padding).reshape(*x.shape[:-1], -1, block)


def _send(signs: Sequence[Signs], collective: Callable[[jax.Array], jax.Array], axes: Axes) -> list[Signs]:
    """Returns the signs ``[num_devices, ...]`` of all arrays after a collective, which sends them together."""
    joined = tuple(jnp.concatenate(xs, axis=1) for xs in zip(*signs, strict=True))
    # Without the barrier the compiler might send the numbers and take their signs afterwards.
    all_bits, all_scales = (collective(x) if axes else x for x in jax.lax.optimization_barrier(joined))
    found, at, scale_at = [], 0, 0
    for bits, scales in signs:
        end, scale_end = at + bits.shape[1], scale_at + scales.shape[1]
        found.append(Signs(all_bits[:, at:end], all_scales[:, scale_at:scale_end]))
        at, scale_at = end, scale_end
    return found
