"""Sequence for heads (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509): each device gets all tokens of some heads.

Where there are fewer key heads than devices, or their number does not divide, key heads are repeated as far as needed: every device gets
the keys that its own queries look at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.collectives.hierarchical import all_to_all_local, gather_local


def ways_of(axes: Sequence[str]) -> int:
    """Devices along these axes; inside of a shard_map."""
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def repeats(kv_heads: int, ways: int) -> int:
    """How often each key head is there before the exchange.

    >>> repeats(8, 4), repeats(2, 4), repeats(6, 4)
    (1, 2, 2)
    """
    return math.lcm(kv_heads, ways) // kv_heads


def apart(x_BSHD: jax.Array, axes: Sequence[str], repeat: int = 1) -> jax.Array:
    """[batch, tokens, heads, …] of a device's tokens to all tokens of some of the heads, each of which is repeated before."""
    if not axes:
        return x_BSHD
    repeated = jnp.repeat(x_BSHD, repeat, axis=2) if repeat > 1 else x_BSHD
    return all_to_all_local(repeated, axes, split_dim=2, concat_dim=1)


def together(x_BSHD: jax.Array, axes: Sequence[str], repeat: int = 1) -> jax.Array:
    """The way back, of results or of gradients; those of heads that were repeated are summed."""
    if not axes:
        return x_BSHD
    back = all_to_all_local(x_BSHD, axes, split_dim=1, concat_dim=2)
    if repeat == 1:
        return back
    shape = (*back.shape[:2], -1, repeat, *back.shape[3:])
    return jnp.sum(back.reshape(shape), axis=3, dtype=jnp.promote_types(back.dtype, jnp.float32))


def all_tokens(x_BS: Any, axes: Sequence[str]) -> Any:
    """What there is one of for each token, of all tokens."""
    return gather_local(x_BS, axes, dim=1) if axes else x_BS
