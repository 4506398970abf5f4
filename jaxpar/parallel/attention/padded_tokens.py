"""Replaces padded tokens by 0 before and after attention, so that padding never affects other tokens.

A mask alone is not enough: a weight of 0 times a value of NaN is NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.attention.tiled.tile import Segments

type Arrays = tuple[jax.Array, jax.Array, jax.Array]


def without_padding(arrays: Arrays, segments: Segments) -> Arrays:
    """Returns queries, keys and values with padded tokens, and thereby their gradients, set to 0.

    Args:
      arrays: queries, keys and values ``[batch, tokens, heads, head_dim]``.
      segments: segment ids of queries and of keys ``[batch, tokens]``, negative for padding. ``None`` returns the
        arrays unchanged.
    """
    if segments is None:
        return arrays
    q, k, v = arrays
    return _zeroed(q, segments[0]), _zeroed(k, segments[1]), _zeroed(v, segments[1])


def result_without_padding(o_BSHD: jax.Array, segments: Segments) -> jax.Array:
    """Returns the result with padded tokens set to 0, so that their incoming gradient is 0 too."""
    return o_BSHD if segments is None else _zeroed(o_BSHD, segments[0])


def _zeroed(x_BSHD: jax.Array, segments_BS: Any) -> jax.Array:
    return jnp.where((segments_BS < 0)[:, :, None, None], jnp.zeros((), x_BSHD.dtype), x_BSHD)
