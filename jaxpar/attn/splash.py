"""Flash attention on TPU: jax's own Pallas splash kernel, for the heads and sequences of one device.

The kernel wants sequences in whole blocks and a head dim in whole lanes. What is short of that is padded with zeros: a causal
mask hides padded keys from every real query, zero lanes add nothing to a product.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

LANES = 128
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

    seq, heads, head_dim = q_BSHD.shape[1:]
    padded = _up(seq, min(BLOCK, _up(seq, LANES)))
    block = min(BLOCK, padded)
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
    kernel = library.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)

    def rows(x_BSHD: jax.Array) -> jax.Array:
        """Heads first, in whole blocks and lanes."""
        x_BHSD = jnp.swapaxes(x_BSHD, 1, 2)
        missing = (padded - seq, _up(head_dim, LANES) - head_dim)
        return jnp.pad(x_BHSD, ((0, 0), (0, 0), (0, missing[0]), (0, missing[1]))) if any(missing) else x_BHSD

    scaled = (q_BSHD * (1 / math.sqrt(head_dim))).astype(q_BSHD.dtype)
    with jax.named_scope(stated_flops(q_BSHD.shape, block, padded)):
        o_BHSD = jax.vmap(kernel)(rows(scaled), rows(k_BSKD), rows(v_BSKD))
    return jnp.swapaxes(o_BHSD[:, :, :seq, :head_dim], 1, 2)


def stated_flops(shape: tuple[int, ...], block: int, padded: int) -> str:
    """A scope name that tells an audit what the kernel does not: the FLOPs of one of the two forward matmuls.

    The blocks above the diagonal are never visited; those on it are computed whole.
    """
    batch, _, heads, head_dim = shape
    blocks = padded // block
    visited = blocks * (blocks + 1) // 2
    return f"attention_matmul_flops_{2 * batch * heads * visited * block * block * _up(head_dim, LANES)}"


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
