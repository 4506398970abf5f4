"""Flash attention on NVIDIA GPUs: cuDNN's, for the heads and sequences of one device.

On attached GPUs it runs through ``jax.nn.dot_product_attention(implementation="cudnn")``. For GPUs that are not
attached, jax cannot lower that function; :mod:`jaxpar.parallel.attention.kernels.cudnn_calls` then writes the same
calls, so that the program can be compiled ahead of time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.attention.kernels import cudnn_calls
from jaxpar.parallel.attention.mask import Mask
from jaxpar.parallel.attention.tiled.padding import pad, pad_segments, stated_flops, up, visited
from jaxpar.parallel.attention.tiled.tile import Segments, TileSpec

DTYPES = ("float16", "bfloat16")
WIDEST = 256
"""The largest head_dim, on Hopper and later."""
WIDTHS = 8
"""cuDNN requires a head_dim that is a multiple of this."""
EVEN = 2
"""jax requires a sequence that is a multiple of this for gradients."""
MASKED = 2**26
"""The largest number of scores of a sequence for which a mask is written out: 128 MiB in two bytes."""
BLOCK = 128
"""The block size in tokens that audits assume for the FLOPs of causal attention; cuDNN does not publish its own."""


def cudnn(
    q_BSHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    rules: TileSpec,
    segments: Segments = None,
    *,
    attached: bool = True,
) -> jax.Array:
    """Returns attention of one device's shards, causal (with or without a window) or to all tokens.

    Args:
      q_BSHD: queries ``[batch, seq, heads, head_dim]`` in float16 or bfloat16.
      k_BSKD, v_BSKD: keys and values ``[batch, seq, kv_heads, head_dim]`` in the same dtype. ``heads`` is a multiple of
        ``kv_heads``. The values may have another head_dim.
      rules: the mask (causal, a window of earlier tokens, or none) and the scale.
      segments: segment ids of queries and of keys ``[batch, seq]``, or ``None``. They become a mask
        ``[batch, 1, seq, seq]``.
      attached: whether the program is lowered for GPUs of this machine.

    Returns:
      The result ``[batch, seq, heads, head_dim]`` with the values' head_dim, in the dtype of the queries. The softmax
      and its sums are fp32.
    """
    seq, heads, dims = q_BSHD.shape[1], q_BSHD.shape[2], v_BSKD.shape[3]
    wide, padded = up(max(q_BSHD.shape[3], dims), WIDTHS), up(seq, EVEN)
    causal, window = sides(rules.mask, seq)
    mask = _mask(rules.mask, segments, seq, padded) if is_masked(rules.mask, segments, seq) else None
    q, k, v = (pad(x, padded, wide) for x in (q_BSHD, k_BSKD, v_BSKD))
    options: dict[str, Any] = {"scale": float(rules.scale), "is_causal": causal}
    if window is not None and mask is None:
        options["local_window_size"] = (window, 0)
    by_jax = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    attend: Callable[..., jax.Array] = by_jax if attached else cudnn_calls.dot_product_attention
    scores = visited(up(padded, BLOCK), BLOCK) if causal else padded * padded
    with jax.named_scope(stated_flops(q.shape[0], heads, wide, scores)):
        o = attend(q, k, v, mask=mask, **options)
    o = o[:, :seq, :, :dims]
    if segments is None or mask is None:
        return o
    return jnp.where(_sees_some(mask, causal=causal)[:, :seq, None, None], o, 0)


def sides(mask: Mask, seq: int) -> tuple[bool, int | None]:
    """Returns whether a mask is causal, and its window of earlier tokens if it hides a key of ``seq`` tokens."""
    before, after = mask.sides
    return after == 0, before if before is not None and before < seq - 1 else None


def is_masked(mask: Mask, segments: Segments, seq: int) -> bool:
    """Whether a mask of all scores is needed: for segments, and for filler tokens that no causal mask hides."""
    return segments is not None or (seq % EVEN > 0 and not sides(mask, seq)[0])


def refusal(q: Any, kv_heads: int, seq: int, wide: int, rules: TileSpec, segments: Segments) -> str:
    """Returns why jax cannot lower cuDNN's attention and its gradients on this machine; empty if it can.

    Args:
      q: the queries, of which the dtype and the number of heads are read.
      kv_heads: number of key heads.
      seq: number of tokens.
      wide: the larger head_dim of queries and values.
      rules: mask and scale.
      segments: segment ids, or ``None``.
    """
    causal, window = sides(rules.mask, seq)
    masked = is_masked(rules.mask, segments, seq)
    sizes = (up(seq, EVEN), q.shape[2], kv_heads, up(wide, WIDTHS))
    return _refusal(jax.nn.dot_product_attention, str(q.dtype), sizes, causal, None if masked else window, masked)


@functools.lru_cache
def _refusal(
    attend: Callable[..., Any], dtype: str, sizes: tuple[int, ...], causal: bool, window: int | None, masked: bool
) -> str:
    seq, heads, kv_heads, wide = sizes
    q, k, v = (jax.ShapeDtypeStruct((1, seq, n, wide), dtype) for n in (heads, kv_heads, kv_heads))
    mask = jax.ShapeDtypeStruct((1, 1, seq, seq), bool) if masked else None
    options: dict[str, Any] = {"is_causal": causal, "implementation": "cudnn"}
    options |= {} if window is None else {"local_window_size": (window, 0)}

    def loss(q: Any, k: Any, v: Any, mask: Any) -> jax.Array:
        return jnp.sum(attend(q, k, v, mask=mask, **options).astype(jnp.float32))

    try:
        jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), q, k, v, mask)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return ""


def _mask(mask: Mask, segments: Segments, seq: int, padded: int) -> jax.Array:
    """Returns ``[batch or 1, 1, padded, padded]``: whether a query sees a key. A causal limit may be missing."""
    at = jnp.arange(padded)
    if segments is None:
        return jnp.broadcast_to(at < seq, (1, 1, padded, padded))
    a, b = (pad_segments(x, padded) for x in segments)
    seen = (a[:, None, :, None] == b[:, None, None, :]) & (a >= 0)[:, None, :, None]
    _, window = sides(mask, seq)
    return seen if window is None else seen & (at[None, :] >= at[:, None] - window)


def _sees_some(mask: jax.Array, *, causal: bool) -> jax.Array:
    """Returns ``[batch, padded]``: whether a query sees any key. To one that sees none cuDNN gives a mean of values."""
    at = jnp.arange(mask.shape[-1])
    return (mask[:, 0] & (at <= at[:, None]) if causal else mask[:, 0]).any(-1)
