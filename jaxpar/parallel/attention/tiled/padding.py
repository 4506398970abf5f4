"""Helpers of kernels that work in blocks: padding to complete blocks, and stating the FLOPs of the blocks.

A kernel requires sequences of complete blocks and certain sizes of head_dim, so shorter arrays are padded with zeros. A
causal mask hides padded keys from every real query, and zeros in head_dim add nothing to a product.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpar.parallel.attention.tiled.tile import PAD_SEGMENT
from jaxpar.utils.scope_facts import matmul_flops_scope

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
