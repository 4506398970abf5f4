"""Flash attention on NVIDIA GPUs: JAX's Pallas kernel for the heads and sequences of one device.

cuDNN is not used, because JAX needs the library at lowering: a machine without a GPU could not check the program.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.attention.tiled.padding import pad, pad_segments, stated_flops, up, visited
from jaxpar.parallel.attention.tiled.tile import TileSpec

LEAST = 16
"""The minimum size of a dim in a tensor-core matmul."""
BLOCK, BACKWARD = 128, 32
"""Block sizes of the forward and backward kernels, in tokens: the library's defaults, for a 2-byte head_dim of 128."""


def mha(
    q_BSHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    rules: TileSpec,
    segments: Any = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Returns attention of one device's shards, causal or to all tokens.

    Args:
      q_BSHD: queries ``[batch, seq, heads, head_dim]``, in a dtype of at most four bytes.
      k_BSKD, v_BSKD: keys and values ``[batch, seq, kv_heads, head_dim]``. ``heads`` is a multiple of ``kv_heads``; key
        heads are repeated, because the kernel requires one per query head.
      rules: the mask (causal, or none) and the scale.
      segments: segment ids ``[batch, seq]`` of both queries and keys, or ``None``.
      interpret: interpret the kernel on any device; slow, for tests.

    Returns:
      The result ``[batch, seq, heads, head_dim]`` in the dtype of the queries. The softmax and its sums are fp32.
    """
    with warnings.catch_warnings():
        # JAX deprecates this kernel in favour of a library that depends on a profiler and a web server. Keep the kernel
        # until that library is lighter or JAX removes the kernel.
        warnings.filterwarnings("ignore", ".*pallas.ops.gpu.attention is deprecated", DeprecationWarning)
        # Imported lazily: the import takes a second, and only GPU programs need it.
        from jax.experimental.pallas.ops.gpu import attention as library

    batch, seq, heads, head_dim = q_BSHD.shape
    wide = max(LEAST, 1 << (head_dim - 1).bit_length())
    # Wider rows require smaller blocks: blocks of queries, keys and values share one core's shared memory.
    block = max(BACKWARD, BLOCK * 256 // max(256, wide * q_BSHD.dtype.itemsize))
    padded = up(seq, block) if seq > block else max(LEAST, 1 << (seq - 1).bit_length())
    block, backward = min(block, padded), min(BACKWARD, padded)
    names = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes = library.BlockSizes(block_q=block, block_k=block, **dict.fromkeys(names, backward))
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k_BSKD, v_BSKD))
    q, k, v = (pad(x, padded, wide) for x in (q_BSHD, k, v))
    causal = rules.mask.causal
    ids = segments
    if ids is None and not causal and padded > seq:  # no causal mask hides the filler tokens
        ids = jnp.zeros((batch, seq), jnp.int32)
    if ids is not None:
        ids = pad_segments(ids, padded)
    scores = [visited(padded, b) if causal else padded * padded for b in (block, backward)]
    with jax.named_scope(stated_flops(batch, heads, wide, *scores)):
        o = library.mha(
            q, k, v, ids, sm_scale=float(rules.scale), causal=causal, block_sizes=sizes, interpret=interpret
        )
    o = o[:, :seq, :, :head_dim]
    return o if segments is None else jnp.where(segments[:, :, None, None] < 0, 0, o)
