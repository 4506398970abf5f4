"""Flash attention on NVIDIA GPUs: jax's own Pallas kernel, for the heads and sequences of one device.

Not cuDNN: jax looks for the library when it lowers, so a machine without a GPU could not check the program that will run.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.attention.tiled.padding import FILL, pad, stated_flops, up, visited
from jaxpar.parallel.attention.tiled.tile import PAD_SEGMENT, TileSpec

LEAST = 16
"""The least size of a dim that the tensor cores multiply."""
BLOCK, BACKWARD = 128, 32
"""Rows of queries and of keys that the kernels hold at a time; the library's defaults, for heads of 128 in two bytes."""


def mha(
    q_BSHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    rules: TileSpec,
    segments: Any = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Attention of one device's shards, causal or of all tokens.

    Args:
      q_BSHD: queries [batch, seq, heads, head_dim], of four bytes a number at most.
      k_BSKD, v_BSKD: keys and values [batch, seq, kv_heads, head_dim]; ``heads`` is a multiple of ``kv_heads``. The kernel
        wants a key head for each query head: they are repeated.
      rules: the mask, causal or none, and the scale.
      segments: of the tokens [batch, seq], if there are several; the same of queries and keys.
      interpret: run the kernel's Python on any device, slowly. For tests.

    Returns:
      [batch, seq, heads, head_dim] in the dtype of ``q``; softmax and sums are fp32.
    """
    with warnings.catch_warnings():
        # In favour of a library that brings a profiler and a web server; until that is lighter, or this is gone.
        warnings.filterwarnings("ignore", ".*pallas.ops.gpu.attention is deprecated", DeprecationWarning)
        # Imported here: it costs a second, and only a GPU's program needs it.
        from jax.experimental.pallas.ops.gpu import attention as library

    batch, seq, heads, head_dim = q_BSHD.shape
    wide = max(LEAST, 1 << (head_dim - 1).bit_length())
    # Wider rows, fewer of them: the blocks of queries, keys and values lie in a core's shared memory at once.
    block = max(BACKWARD, BLOCK * 256 // max(256, wide * q_BSHD.dtype.itemsize))
    whole = up(seq, block) if seq > block else max(LEAST, 1 << (seq - 1).bit_length())
    block, backward = min(block, whole), min(BACKWARD, whole)
    sizes = library.BlockSizes(
        block_q=block,
        block_k=block,
        block_q_dkv=backward,
        block_kv_dkv=backward,
        block_q_dq=backward,
        block_kv_dq=backward,
    )
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k_BSKD, v_BSKD))
    q, k, v = (pad(x, whole, wide) for x in (q_BSHD, k, v))
    causal = rules.mask.causal
    ids = segments
    if ids is None and not causal and whole > seq:  # what fills up a sequence must not be seen
        ids = jnp.zeros((batch, seq), jnp.int32)
    if ids is not None:
        ids = jnp.pad(jnp.maximum(ids, PAD_SEGMENT).astype(jnp.int32), ((0, 0), (0, whole - seq)), constant_values=FILL)
    scores = [visited(whole, b) if causal else whole * whole for b in (block, backward)]
    with jax.named_scope(stated_flops(batch, heads, wide, *scores)):
        o = library.mha(
            q, k, v, ids, sm_scale=float(rules.scale), causal=causal, block_sizes=sizes, interpret=interpret
        )
    o = o[:, :seq, :, :head_dim]
    return o if segments is None else jnp.where(segments[:, :, None, None] < 0, 0, o)
