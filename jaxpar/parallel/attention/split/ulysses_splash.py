"""Ulysses on TPU: heads exchanged, jax's splash kernel, heads exchanged back, with one gradient around all of it.

Of the result the gradient kernels want only what each row of it is worth in the direction of its gradient: one number for each query and head.
Left to the kernel's own gradient, which makes that number from the whole result as the kernel left it, the result would be exchanged
a second time in every layer that keeps it in the form that the output projection reads. Here it is kept in that form alone, and the numbers
are exchanged.

The gradient kernels have no public name in jax: this file is the one to change when jax moves them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpar.parallel.attention.kernels.tpu_splash import BLOCK, LANES
from jaxpar.parallel.attention.split import ulysses
from jaxpar.parallel.attention.tiled.padding import SAVED, pad, stated_flops, up, visited


def splash_exchanged(
    q_BSHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, axes: Sequence[str], *, interpret: bool = False
) -> jax.Array:
    """Causal attention of one device's tokens to the tokens of all devices along ``axes``; inside of a ``shard_map`` over them.

    Args:
      q_BSHD: queries [batch, tokens, heads, head_dim]; the devices divide ``heads``.
      k_BSKD, v_BSKD: keys and values [batch, tokens, kv_heads, head_dim]; ``heads`` is a multiple of ``kv_heads``.
      interpret: run the kernel's Python on any device, slowly. For tests.

    Returns:
      As the queries; softmax and sums are fp32.
    """
    return _attend((tuple(axes), k_BSKD.shape[2], interpret), q_BSHD, k_BSKD, v_BSKD)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: tuple[tuple[str, ...], int, bool], q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _forward(how, q, k, v)[0]


def _forward(how: tuple[tuple[str, ...], int, bool], q: Any, k: Any, v: Any) -> Any:
    axes, kv_heads, interpret = how
    repeat = ulysses.repeats(kv_heads, ulysses.ways_of(axes))
    far = ulysses.apart(q, axes), ulysses.apart(k, axes, repeat), ulysses.apart(v, axes, repeat)
    kernel, scope, ready, back = _prepared(far[0].shape, interpret)
    with jax.named_scope(scope):
        o, (lse,) = jax.vmap(kernel)(ready(_scaled(far[0])), ready(far[1]), ready(far[2]))
    o, lse = checkpoint_name(ulysses.together(back(o), axes), SAVED), checkpoint_name(lse, SAVED)
    return o, (far, o, lse)


def _backward(how: tuple[tuple[str, ...], int, bool], kept: Any, gradient: jax.Array) -> Any:
    axes, kv_heads, interpret = how
    (q, k, v), o, lse = kept
    # A gradient that is there before the result is (of a recomputed layer, of one attention by itself) would be exchanged first and take room meanwhile.
    lse, gradient = jax.lax.optimization_barrier((lse, gradient))
    wide = jnp.promote_types(o.dtype, jnp.float32)
    delta = jnp.sum(o.astype(wide) * gradient.astype(wide), -1)
    gradient, delta = ulysses.apart(gradient, axes), ulysses.apart(delta, axes)
    kernel, scope, ready, back = _prepared(q.shape, interpret)
    with jax.named_scope(scope):
        grads = jax.vmap(functools.partial(_gradients, kernel))
        found = grads(ready(_scaled(q)), ready(k), ready(v), lse, ready(gradient), ready(delta[..., None])[..., 0])
    dq, dk, dv = (back(x) for x in found)
    repeat = ulysses.repeats(kv_heads, ulysses.ways_of(axes))
    dk, dv = (ulysses.together(x.astype(y.dtype), axes, repeat).astype(y.dtype) for x, y in ((dk, k), (dv, v)))
    return ulysses.together(_scaled(dq.astype(q.dtype)), axes), dk, dv


_attend.defvjp(_forward, _backward)


def _scaled(q: jax.Array) -> jax.Array:
    return (q * (1 / math.sqrt(q.shape[3]))).astype(q.dtype)


def _prepared(shape: tuple[int, ...], interpret: bool) -> tuple[Any, str, Any, Any]:
    """The kernel of [heads, seq, head_dim], the scope that states its FLOPs, and the ways of arrays [batch, seq, heads, head_dim] there and back."""
    # Imported here: it costs a second, and only a TPU's program needs it.
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    batch, seq, count, head_dim = shape
    padded = up(seq, min(BLOCK, up(seq, LANES)))
    block, wide = min(BLOCK, padded), up(head_dim, LANES)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": block for name in names}
    kernel = library.make_splash_mha(
        library.MultiHeadMask([library.CausalMask((padded, padded))] * count),
        block_sizes=library.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        interpret=interpret,
    )
    ready = lambda x: jnp.swapaxes(pad(x, padded, wide if x.shape[3] == head_dim else x.shape[3]), 1, 2)
    back = lambda x: jnp.swapaxes(x[:, :, :seq, :head_dim], 1, 2)
    return kernel, stated_flops(batch, count, wide, visited(padded, block)), ready, back


def _gradients(kernel: Any, q: Any, k: Any, v: Any, lse: Any, gradient: Any, delta: Any) -> tuple[Any, Any, Any]:
    """Of one sequence's queries, keys and values [heads, seq, head_dim], from ``lse`` and ``delta`` [heads, seq]."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library

    said, sizes = kernel.kwargs, kernel.kwargs["block_sizes"]
    arrays = q, k, v, None, None, lse, gradient, delta
    alike = {
        name: said[name] for name in ("is_mqa", "mask_value", "attn_logits_soft_cap", "mask_function", "interpret")
    }
    alike |= {name: getattr(sizes, name) for name in ("q_layout", "k_layout", "v_layout")}
    _, dk, dv = library._splash_attention_bwd_dkv(
        *arrays,
        bq=sizes.block_q_dkv,
        bkv=sizes.block_kv_dkv,
        bkv_compute=sizes.block_kv_dkv_compute,
        mask_info=kernel.dkv_mask_info,
        use_fused_bwd_kernel=False,
        **alike,
    )
    dq = library._splash_attention_bwd_dq(
        *arrays, bq=sizes.block_q_dq, bkv=sizes.block_kv_dq, mask_info=kernel.dq_mask_info, **alike
    )
    return dq, dk, dv
