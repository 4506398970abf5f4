"""Flash attention on TPU: jax's own Pallas splash kernel, for the heads and sequences of one device.

It costs a second to import, and only a TPU's program needs it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as library

from jaxpar.parallel.attention.mask import Mask
from jaxpar.parallel.attention.tiled.blockwise import in_blocks
from jaxpar.parallel.attention.tiled.padding import FILL, LANES, SAVED, pad, stated_flops, up
from jaxpar.parallel.attention.tiled.tile import PAD_SEGMENT, TileSpec

BLOCK = 512
"""Rows of queries and of keys that the kernel holds at a time; 2,048 overflow a v5e's vector memory."""


def splash(
    q_BSHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    rules: TileSpec,
    segments: Any = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Attention of one device's shards, under any mask that is none of a function.

    Args:
      q_BSHD: queries [batch, seq, heads, head_dim].
      k_BSKD, v_BSKD: keys and values [batch, seq, kv_heads, head_dim]; ``heads`` is a multiple of ``kv_heads``.
      rules: mask, scale and soft cap.
      segments: of queries and keys [batch, seq], if there are several.
      interpret: run the kernel's Python on any device, slowly. For tests.

    Returns:
      [batch, seq, heads, head_dim] in the dtype of ``q``; softmax and sums are fp32.
    """
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
    mask = Lazy(rules.mask, seq, padded)
    kernel = library.make_splash_mha(
        library.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=SAVED,
        attn_logits_soft_cap=rules.softcap,
        interpret=interpret,
    )
    ids = None
    if segments is not None:
        fill = lambda x: jnp.pad(jnp.maximum(x, PAD_SEGMENT), ((0, 0), (0, padded - seq)), constant_values=FILL)
        ids = library.SegmentIds(*(fill(x) for x in segments))

    scaled = (q_BSHD * rules.scale).astype(q_BSHD.dtype)
    q, k, v = (jnp.swapaxes(pad(x, padded, wide), 1, 2) for x in (scaled, k_BSKD, v_BSKD))
    with jax.named_scope(stated_flops(batch, heads, wide, mask.visited(block))):
        o_BHSD = jax.vmap(kernel)(q, k, v, ids)
    o = jnp.swapaxes(o_BHSD[:, :, :seq, :head_dim], 1, 2)
    return o if segments is None else jnp.where(segments[0][:, :, None, None] < 0, 0, o)


class Lazy(library.Mask):
    """A mask as the library takes it, which asks it for every block of scores several times, and only what ``any`` and ``all`` say of it.

    Of blocks that are seen whole or not at all that is known from their first and last positions; all of a long sequence's
    scores, block by block, would take minutes (131,072 tokens: two).

    Attributes:
      shape: scores.
      q_sequence: positions of the queries.
      mask_function: which scores are seen, called in the kernel with positions of queries and keys.
    """

    def __init__(self, mask: Mask, length: int, padded: int) -> None:
        self.mask, self.length, self.padded = mask, length, padded
        self.q_sequence = np.arange(padded, dtype=np.int32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.padded, self.padded

    def mask_function(self, q: Any, k: Any) -> Any:
        """What fills up a sequence sees everything: a query that sees nothing would divide by zero. Its result is cut off."""
        seen = self.mask.visible(q, k)
        if self.length == self.padded:
            return (k >= 0) & seen
        return ((k < self.length) & seen) | (q >= self.length)

    def bounds(self, q: tuple[Any, Any], k: tuple[Any, Any]) -> tuple[Any, Any]:
        """As :meth:`jaxpar.parallel.attention.mask.Mask.bounds`."""
        some, every = self.mask.bounds(q, k)
        return (some & (k[0] < self.length)) | (q[1] >= self.length), (every & (k[1] < self.length)) | (
            q[0] >= self.length
        )

    def visited(self, block: int) -> int:
        """Scores that the kernel computes: those of all blocks that are not empty."""
        at = in_blocks(self.q_sequence, block, 0)
        some, _ = self.bounds((at[:, :1], at[:, -1:]), (at[None, :, 0], at[None, :, -1]))
        return int(np.count_nonzero(np.broadcast_to(some, (len(at), len(at))))) * block * block

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        (q, k) = ((part.start, part.stop - 1) for part in block)
        return np.array([self.bounds(q, k)], bool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lazy) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.mask, self.length, self.padded
