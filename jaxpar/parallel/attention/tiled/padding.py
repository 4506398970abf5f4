"""Padding: of sequences to complete blocks, with the FLOPs that a kernel then does, and by the caller.

A kernel requires sequences of complete blocks and certain sizes of head_dim, so shorter arrays are padded with zeros. A
causal mask hides padded keys from every real query, and zeros in head_dim add nothing to a product.

Tokens that the caller marked as padding are replaced by 0 before and after attention. A mask alone is not enough: a
weight of 0 times a value of NaN is NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.attention.tiled.tile import PAD_SEGMENT, Segments
from jaxpar.utils.scope_facts import matmul_flops_scope

type Arrays = tuple[jax.Array, jax.Array, jax.Array]

SAVED = "attention"
"""The checkpoint name of attention outputs; if a remat policy saves it, the kernel is not recomputed."""

KEPT = "attention_keys"
"""The checkpoint name of gathered keys and values under ``keep``; if saved, they are not gathered again."""

LANES = 128
"""Lanes of a TPU register; other sizes are padded to a multiple."""

FILL = -2
"""The segment of filler tokens in a block.

The caller's padded tokens have another segment, -1: they see each other, and the kernel's wrapper clears their results.
"""


def up(size: int, multiple: int) -> int:
    """Rounds ``size`` up to a multiple of ``multiple``.

    >>> up(130, 128)
    256
    """
    return -(-size // multiple) * multiple


def pad(x_BSHD: jax.Array, seq: int, head_dim: int) -> jax.Array:
    """Pads ``x_BSHD`` with zeros to ``seq`` tokens and ``head_dim``."""
    missing = (seq - x_BSHD.shape[1], head_dim - x_BSHD.shape[3])
    return jnp.pad(x_BSHD, ((0, 0), (0, missing[0]), (0, 0), (0, missing[1]))) if any(missing) else x_BSHD


def pad_segments(ids_BS: jax.Array, seq: int) -> jax.Array:
    """Returns segment ids for ``seq`` tokens, with -1 for all padding and :data:`FILL` for filler tokens."""
    ids = jnp.maximum(ids_BS, PAD_SEGMENT).astype(jnp.int32)
    return jnp.pad(ids, ((0, 0), (0, seq - ids.shape[1])), constant_values=FILL)


def visited(seq: int, block: int) -> int:
    """Returns the scores that a causal kernel computes: it skips blocks above the diagonal, and computes all others.

    >>> visited(1024, 512) // 512**2
    3
    """
    blocks = seq // block
    return blocks * (blocks + 1) // 2 * block * block


def stated_flops(batch: int, heads: int, head_dim: int, *scores: int) -> str:
    """Returns a name scope that states the FLOPs of one matmul to audits, because the kernels themselves do not.

    Args:
      batch, heads, head_dim: the sizes of the queries.
      scores: the scores that a kernel computes per head: one number, or one for the forward and one for the backward
        kernels.
    """
    return matmul_flops_scope(*(2 * batch * heads * n * head_dim for n in scores))


def in_one_dtype(*arrays: jax.Array) -> Arrays:
    """Returns queries, keys and values in the dtype of their product, because kernels take no others."""
    dtype = jnp.result_type(*arrays)
    q, k, v = (x.astype(dtype) for x in arrays)
    return q, k, v


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


def result_without_padding(o_BSHD: jax.Array, segments: Segments, dtype: Any) -> jax.Array:
    """Returns the result in a dtype, with padded tokens set to 0, so that their incoming gradient is 0 too."""
    o_BSHD = o_BSHD.astype(dtype)
    return o_BSHD if segments is None else _zeroed(o_BSHD, segments[0])


def _zeroed(x_BSHD: jax.Array, segments_BS: Any) -> jax.Array:
    return jnp.where((segments_BS < 0)[:, :, None, None], jnp.zeros((), x_BSHD.dtype), x_BSHD)
