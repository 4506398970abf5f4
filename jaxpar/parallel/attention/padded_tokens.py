"""Padding never influences anything: numbers of padded tokens, NaN too, are replaced by 0 before attention and after it.

A mask does not do that: a weight of 0 times a value that is NaN is NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.attention.tiled.tile import Segments

type Arrays = tuple[jax.Array, jax.Array, jax.Array]


def without_padding(arrays: Arrays, segments: Segments) -> Arrays:
    """Queries, keys and values [batch, tokens, heads, head_dim] with 0 for padded tokens, and 0 for their gradients.

    Args:
      segments: of queries and of keys [batch, tokens], below 0 for padding; ``None`` returns the arrays as they are.
    """
    if segments is None:
        return arrays
    q, k, v = arrays
    return _zeroed(q, segments[0]), _zeroed(k, segments[1]), _zeroed(v, segments[1])


def result_without_padding(o_BSHD: jax.Array, segments: Segments) -> jax.Array:
    """As :func:`without_padding`, of the result: so the gradient that comes back for padded tokens is 0 too."""
    return o_BSHD if segments is None else _zeroed(o_BSHD, segments[0])


def _zeroed(x_BSHD: jax.Array, segments_BS: Any) -> jax.Array:
    return jnp.where((segments_BS < 0)[:, :, None, None], jnp.zeros((), x_BSHD.dtype), x_BSHD)
