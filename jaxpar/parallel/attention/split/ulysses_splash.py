"""Ulysses on TPU: a head exchange, JAX's splash kernel and the exchange back, under a single custom gradient.

The gradient kernels need only ``delta = sum(o * do)`` of the result, one number per query and head. The kernel's own
VJP computes delta from the result before the exchange back. A layer that saves the result after the exchange, as the
output projection reads it, would have to exchange it a second time. This module saves the result only after the
exchange, computes delta from it and exchanges delta.

JAX has no public name for the gradient kernels: if JAX moves them, change this file.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import CausalMask
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library

from jaxpar.parallel.attention.kernels.tpu_splash import BLOCK, LANES, make_kernel
from jaxpar.parallel.attention.split import ulysses
from jaxpar.parallel.attention.tiled.padding import SAVED, pad, stated_flops, up, visited


def splash_exchanged(
    q_BSHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, axes: Sequence[str], *, interpret: bool = False
) -> jax.Array:
    """Returns causal attention of one device's tokens to all tokens along ``axes``; call it inside a ``shard_map``.

    Args:
      q_BSHD: local queries ``[batch, tokens, heads, head_dim]``. The number of devices divides ``heads``.
      k_BSKD, v_BSKD: local keys and values ``[batch, tokens, kv_heads, head_dim]``. ``heads`` is a multiple of
        ``kv_heads``.
      axes: the mesh axes that shard the sequence, major to minor.
      interpret: interpret the kernel on any device; slow, for tests.

    Returns:
      The result, with the shape and dtype of the queries. The softmax and its sums are fp32.
    """
    return _attend((tuple(axes), k_BSKD.shape[2], interpret), q_BSHD, k_BSKD, v_BSKD)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: tuple[tuple[str, ...], int, bool], q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _forward(static, q, k, v)[0]


def _forward(static: tuple[tuple[str, ...], int, bool], q: Any, k: Any, v: Any) -> Any:
    axes, kv_heads, interpret = static
    repeat = ulysses.repeats(kv_heads, jax.lax.axis_size(axes))
    exchanged = q, k, v = tuple(ulysses.seq_to_heads(x, axes, n) for x, n in ((q, 1), (k, repeat), (v, repeat)))
    kernel, scope, to_kernel, from_kernel = _prepared(q.shape, interpret)
    with jax.named_scope(scope):
        o, (lse,) = jax.vmap(kernel)(to_kernel(_scaled(q)), to_kernel(k), to_kernel(v))
    o, lse = checkpoint_name(ulysses.heads_to_seq(from_kernel(o), axes), SAVED), checkpoint_name(lse, SAVED)
    return o, (exchanged, o, lse)


def _backward(static: tuple[tuple[str, ...], int, bool], kept: Any, gradient: jax.Array) -> Any:
    axes, kv_heads, interpret = static
    (q, k, v), o, lse = kept
    # Without the barrier, a gradient that exists before the result (under remat, or of a single attention) is exchanged
    # first and occupies memory until the result exists.
    lse, gradient = jax.lax.optimization_barrier((lse, gradient))
    wide = jnp.promote_types(o.dtype, jnp.float32)
    delta = jnp.sum(o.astype(wide) * gradient.astype(wide), -1)
    gradient, delta = ulysses.seq_to_heads(gradient, axes), ulysses.seq_to_heads(delta, axes)
    kernel, scope, to_kernel, from_kernel = _prepared(q.shape, interpret)
    with jax.named_scope(scope):
        q_scaled, k_padded, v_padded, gradient = (to_kernel(x) for x in (_scaled(q), k, v, gradient))
        grads = jax.vmap(functools.partial(_gradients, kernel))
        found = grads(q_scaled, k_padded, v_padded, lse, gradient, to_kernel(delta[..., None])[..., 0])
    dq, dk, dv = (from_kernel(x) for x in found)
    repeat = ulysses.repeats(kv_heads, jax.lax.axis_size(axes))
    dk, dv = (ulysses.heads_to_seq(x.astype(y.dtype), axes, repeat).astype(y.dtype) for x, y in ((dk, k), (dv, v)))
    return ulysses.heads_to_seq(_scaled(dq.astype(q.dtype)), axes), dk, dv


_attend.defvjp(_forward, _backward)


def _scaled(q: jax.Array) -> jax.Array:
    return (q * (1 / math.sqrt(q.shape[3]))).astype(q.dtype)


def _prepared(shape: tuple[int, ...], interpret: bool) -> tuple[Any, str, Any, Any]:
    """Returns the kernel, a name scope that states its FLOPs, and the conversions of arrays to its layout and back."""
    batch, seq, count, head_dim = shape
    padded = up(seq, min(BLOCK, up(seq, LANES)))
    block, wide = min(BLOCK, padded), up(head_dim, LANES)
    kernel = make_kernel(CausalMask((padded, padded)), count, block, save_residuals=True, interpret=interpret)
    to_kernel = lambda x: jnp.swapaxes(pad(x, padded, wide if x.shape[3] == head_dim else x.shape[3]), 1, 2)
    from_kernel = lambda x: jnp.swapaxes(x[:, :, :seq, :head_dim], 1, 2)
    return kernel, stated_flops(batch, count, wide, visited(padded, block)), to_kernel, from_kernel


def _gradients(kernel: Any, q: Any, k: Any, v: Any, lse: Any, gradient: Any, delta: Any) -> tuple[Any, Any, Any]:
    """Returns the gradients of one sequence's queries, keys and values [heads, seq, head_dim]."""
    options, sizes = kernel.kwargs, kernel.kwargs["block_sizes"]
    arrays = q, k, v, None, None, lse, gradient, delta
    names = ("is_mqa", "mask_value", "attn_logits_soft_cap", "mask_function", "interpret")
    shared = {name: options[name] for name in names}
    shared |= {name: getattr(sizes, name) for name in ("q_layout", "k_layout", "v_layout")}
    own = {"bq": sizes.block_q_dkv, "bkv": sizes.block_kv_dkv, "bkv_compute": sizes.block_kv_dkv_compute, **shared}
    own |= {"mask_info": kernel.dkv_mask_info, "use_fused_bwd_kernel": False}
    _, dk, dv = library._splash_attention_bwd_dkv(*arrays, **own)
    dq = library._splash_attention_bwd_dq(
        *arrays, bq=sizes.block_q_dq, bkv=sizes.block_kv_dq, mask_info=kernel.dq_mask_info, **shared
    )
    return dq, dk, dv
