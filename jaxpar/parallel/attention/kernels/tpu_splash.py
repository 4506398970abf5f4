"""Flash attention on TPU: JAX's Pallas splash kernel for the heads and sequences of one device.

Import this module lazily: the import takes a second, and only TPU programs need it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as library

from jaxpar.parallel.attention.mask import Mask
from jaxpar.parallel.attention.tiled.blockwise import in_blocks
from jaxpar.parallel.attention.tiled.padding import LANES, SAVED, pad, pad_segments, stated_flops, up
from jaxpar.parallel.attention.tiled.tile import TileSpec

BLOCK = 512
"""The block size of queries and of keys, in tokens; 2,048 overflow a v5e's vector memory."""


def splash(
    q_BSHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    rules: TileSpec,
    segments: Any = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Returns attention of one device's shards, under any mask without a ``where`` function.

    Args:
      q_BSHD: queries ``[batch, seq, heads, head_dim]``.
      k_BSKD, v_BSKD: keys and values ``[batch, seq, kv_heads, head_dim]``. ``heads`` is a multiple of ``kv_heads``.
      rules: mask, scale and soft cap.
      segments: segment ids of queries and of keys ``[batch, seq]``, or ``None``.
      interpret: interpret the kernel on any device; slow, for tests.

    Returns:
      The result ``[batch, seq, heads, head_dim]`` in the dtype of the queries. The softmax and its sums are fp32.
    """
    batch, seq, heads, head_dim = q_BSHD.shape
    padded = up(seq, min(BLOCK, up(seq, LANES)))
    block, wide = min(BLOCK, padded), up(head_dim, LANES)
    mask = Lazy(rules.mask, seq, padded)
    kernel = make_kernel(
        mask, heads, block, residual_checkpoint_name=SAVED, attn_logits_soft_cap=rules.softcap, interpret=interpret
    )
    ids = None
    if segments is not None:
        ids = library.SegmentIds(*(pad_segments(x, padded) for x in segments))
    scaled = (q_BSHD * rules.scale).astype(q_BSHD.dtype)
    q, k, v = (jnp.swapaxes(pad(x, padded, wide), 1, 2) for x in (scaled, k_BSKD, v_BSKD))
    with jax.named_scope(stated_flops(batch, heads, wide, mask.visited(block))):
        o_BHSD = jax.vmap(kernel)(q, k, v, ids)
    o = jnp.swapaxes(o_BHSD[:, :, :seq, :head_dim], 1, 2)
    return o if segments is None else jnp.where(segments[0][:, :, None, None] < 0, 0, o)


def make_kernel(mask: library.Mask, heads: int, block: int, **options: Any) -> Any:
    """Returns the library's kernel for the same mask in all heads, in blocks of ``block`` queries and keys."""
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": block for name in names}
    masks, blocks = library.MultiHeadMask([mask] * heads), library.BlockSizes(**sizes)
    return library.make_splash_mha(masks, block_sizes=blocks, head_shards=1, q_seq_shards=1, **options)


@dataclass(frozen=True)
class Lazy(library.Mask):
    """A splash mask that answers from the minimum and maximum positions of a block.

    The library reads every block of the mask several times, and uses only its ``any()`` and ``all()``. Evaluating all
    scores block by block would take minutes for a long sequence (two for 131,072 tokens).

    Attributes:
      mask: which keys a query sees.
      length: number of queries and of keys.
      padded: the same with filler tokens.
    """

    mask: Mask
    length: int
    padded: int

    @functools.cached_property
    def q_sequence(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The positions of the queries."""
        return np.arange(self.padded, dtype=np.int32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.padded, self.padded

    def mask_function(self, q: Any, k: Any) -> Any:
        """Whether ``q`` sees ``k``; filler queries see all keys to avoid a division by 0, and are sliced off later."""
        seen = self.mask.visible(q, k)
        if self.length == self.padded:
            return (k >= 0) & seen
        return ((k < self.length) & seen) | (q >= self.length)

    def bounds(self, q: tuple[Any, Any], k: tuple[Any, Any]) -> tuple[Any, Any]:
        """Whether some or every query of a block sees a key, as :meth:`jaxpar.parallel.attention.mask.Mask.bounds`."""
        (some, every), length = self.mask.bounds(q, k), self.length
        return (some & (k[0] < length)) | (q[1] >= length), (every & (k[1] < length)) | (q[0] >= length)

    def visited(self, block: int) -> int:
        """Returns the number of scores that the kernel computes: those of all blocks with a visible score."""
        at = in_blocks(self.q_sequence, block, 0)
        some, _ = self.bounds((at[:, :1], at[:, -1:]), (at[None, :, 0], at[None, :, -1]))
        return int(np.count_nonzero(np.broadcast_to(some, (len(at), len(at))))) * block * block

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        (q, k) = ((part.start, part.stop - 1) for part in block)
        return np.array([self.bounds(q, k)], bool)
