"""Head exchange of DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): each device gets all tokens of some heads.

If the number of devices does not divide the key heads, the key heads are repeated as often as necessary, so that every
device gets the keys of its own query heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.collectives.hierarchical import all_to_all_local, gather_local


def repeats(kv_heads: int, num_shards: int) -> int:
    """Returns how often each key head is repeated before the exchange among ``num_shards`` devices.

    >>> repeats(8, 4), repeats(2, 4), repeats(6, 4)
    (1, 2, 2)
    """
    return math.lcm(kv_heads, num_shards) // kv_heads


def seq_to_heads(x_BSHD: jax.Array, axes: Sequence[str], repeat: int = 1) -> jax.Array:
    """Exchanges local tokens of all heads ``[batch, tokens, heads, …]`` for all tokens of some heads.

    Args:
      x_BSHD: the local tokens.
      axes: the mesh axes to exchange over, major to minor; empty for no exchange.
      repeat: how often each head is repeated before the exchange.
    """
    if not axes:
        return x_BSHD
    repeated = jnp.repeat(x_BSHD, repeat, axis=2) if repeat > 1 else x_BSHD
    return all_to_all_local(repeated, axes, split_dim=2, concat_dim=1)


def heads_to_seq(x_BSHD: jax.Array, axes: Sequence[str], repeat: int = 1) -> jax.Array:
    """Inverts :func:`seq_to_heads` for results or gradients, and sums over repeated heads in at least fp32."""
    if not axes:
        return x_BSHD
    back = all_to_all_local(x_BSHD, axes, split_dim=1, concat_dim=2)
    if repeat == 1:
        return back
    shape = (*back.shape[:2], -1, repeat, *back.shape[3:])
    return jnp.sum(back.reshape(shape), axis=3, dtype=jnp.promote_types(back.dtype, jnp.float32))


def all_tokens(x_BS: Any, axes: Sequence[str]) -> Any:
    """All-gathers a per-token array ``[batch, tokens]`` over ``axes``."""
    return gather_local(x_BS, axes, dim=1) if axes else x_BS
