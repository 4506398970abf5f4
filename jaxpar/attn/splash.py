"""Flash attention on TPU: jax's own Pallas splash kernel, for the heads and sequences of one device."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxpar.attn.blocks import LANES, SAVED, pad, stated_flops, up, visited

BLOCK = 512
"""Rows of queries and of keys that the kernel holds at a time; 2,048 overflow a v5e's vector memory."""


def splash(q_BSHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Causal attention of one device's shards.

    Args:
      q_BSHD: queries [batch, seq, heads, head_dim].
      k_BSKD, v_BSKD: keys and values [batch, seq, kv_heads, head_dim]; ``heads`` is a multiple of ``kv_heads``.
      interpret: run the kernel's Python on any device, slowly. For tests.

    Returns:
      [batch, seq, heads, head_dim] in the dtype of ``q``; softmax and sums are fp32.
    """
    # Imported here: it costs a second, and only a TPU's program needs it.
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    batch, seq, heads, head_dim = q_BSHD.shape
    padded = up(seq, min(BLOCK, up(seq, LANES)))
    block, wide = min(BLOCK, padded), up(head_dim, LANES)
    sizes = library.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = library.MultiHeadMask([library.CausalMask((padded, padded))] * heads)
    kernel = library.make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, residual_checkpoint_name=SAVED, interpret=interpret
    )

    scaled = (q_BSHD * (1 / math.sqrt(head_dim))).astype(q_BSHD.dtype)
    q, k, v = (jnp.swapaxes(pad(x, padded, wide), 1, 2) for x in (scaled, k_BSKD, v_BSKD))
    with jax.named_scope(stated_flops(batch, heads, wide, visited(padded, block))):
        o_BHSD = jax.vmap(kernel)(q, k, v)
    return jnp.swapaxes(o_BHSD[:, :, :seq, :head_dim], 1, 2)
