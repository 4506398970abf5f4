"""``attend``: attention with a custom gradient, shared by all implementations that compute in tiles.

The backward pass recomputes tiles from queries, keys and the log-sum-exp of the scores. Sums of gradients are fp32
(fp64 for fp64) from the first tile to the last device.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpar.parallel.attention.split import ring, ulysses
from jaxpar.parallel.attention.split.partition import AttentionPlan, SequenceSplit
from jaxpar.parallel.attention.split.token_order import into_zigzag
from jaxpar.parallel.attention.tiled.blockwise import finished, in_blocks, join_blocks, rows_of
from jaxpar.parallel.attention.tiled.padding import KEPT, SAVED
from jaxpar.parallel.attention.tiled.tile import Segments, TileArrays

RINGS = {"ring": ring.ring_forward, "rows": ring.rows_forward}
"""The forward passes that take several steps, by where the keys come from."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    plan: AttentionPlan, q_BSHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, segments: Segments, extras: TileArrays
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns attention of one device's queries, keys and values, inside a ``shard_map`` over the axes of ``plan``.

    Args:
      plan: the plan.
      q_BSHD: local queries ``[batch, tokens, heads, head_dim]``; ``heads`` is a multiple of ``kv_heads``.
      k_BTKD, v_BTKD: local keys and values ``[batch, tokens, kv_heads, head_dim]``.
      segments: segment ids of the local queries and keys ``[batch, tokens]``.
      extras: array options of the heads that this device computes after the head exchange; a bias has one column per
        key of all devices.

    Returns:
      The result in the queries' dtype (in the sums' dtype if the caller merges it), the log-sum-exp ``[batch, tokens,
      heads]`` in the sums' dtype, and what its rounding lost, or ``None`` without bias and slopes. A query that sees no
      key gets 0 and -inf. The gradient of the log-sum-exp is that of its unrounded value.
    """
    return _forward(plan, q_BSHD, k_BTKD, v_BTKD, segments, extras)[0]


def _forward(plan: AttentionPlan, q: Any, k: Any, v: Any, segments: Segments, extras: TileArrays) -> Any:
    repeat = ulysses.repeats(k.shape[2], jax.lax.axis_size(plan.heads))
    exchanged = _exchange(plan, q), _exchange(plan, k, repeat), _exchange(plan, v, repeat)
    split = _split(plan, exchanged, segments, extras)
    q_blocks, *keys = _packed(split, *exchanged)
    gathered_kv = None
    if plan.keep:
        keys = gathered_kv = [checkpoint_name(ring.gathered(split, x), KEPT) for x in keys]
    o, lse, lost = finished(RINGS.get(plan.keys, ring.one_step_forward)(split, q_blocks, *keys))
    o = o if plan.full_queries else o.astype(q.dtype)
    # Without a bias, scores are never so large that the rounding matters.
    results = o, lse, None if extras.bias is None and extras.slopes is None else lost
    results = jax.tree.map(lambda x: _exchange_back(plan, _unpacked(x, split.q_length)), results)
    results = jax.tree.map(lambda x: checkpoint_name(x, SAVED), results)
    return results, (exchanged, gathered_kv, segments, extras, results, k.shape[2])


def _backward(plan: AttentionPlan, kept: Any, gradients: tuple[jax.Array, jax.Array, Any]) -> Any:
    exchanged, gathered_kv, segments, extras, (o, lse, lost), kv_heads = kept
    exchanged, gradients = ring.not_before(plan, (exchanged, gradients), lse)
    split, (q, k, v) = _split(plan, exchanged, segments, extras), exchanged
    rows = jax.tree.map(lambda x: _exchange(plan, x), rows_of(o, lse, lost, gradients[0], gradients[1]))
    rows = jax.tree.map(lambda x: _packed_rows(split, x, k.shape[2]), rows)
    q_blocks, *keys = _packed(split, q, k, v)
    k_blocks, v_blocks = gathered_kv or keys
    run = ring.ring_backward if plan.keys in RINGS else ring.one_step_backward
    found = run(split, q_blocks, k_blocks, v_blocks, rows)
    dq = _unpacked(found.q, q.shape[1]).astype(q.dtype)
    dk, dv = (_unpacked(x[:, :, :, :, None], k.shape[1]) for x in (found.k, found.v))
    repeat = ulysses.repeats(kv_heads, jax.lax.axis_size(plan.heads))
    # Gradients of repeated heads are summed after the exchange, so they keep the sums' dtype without kv_grad_dtype.
    narrow = plan.kv_grad_dtype or (found.k.dtype if repeat > 1 else k.dtype)
    dk, dv = (_exchange_back(plan, x.astype(narrow) if plan.heads else x, repeat) for x in (dk, dv))
    extra_grads = TileArrays(
        bias=None if found.bias is None else split.bias_in_order(found.bias, back=True).astype(extras.bias.dtype),
        slopes=None if found.slopes is None else found.slopes.astype(extras.slopes.dtype),
    )
    return _exchange_back(plan, dq), dk.astype(k.dtype), dv.astype(v.dtype), None, extra_grads


attend.defvjp(_forward, _backward)


def _exchange(plan: AttentionPlan, x: jax.Array, repeat: int = 1) -> jax.Array:
    """Exchanges a device's tokens [B, S, H, …] for the heads and tokens that it computes."""
    x = ulysses.seq_to_heads(x, plan.heads, repeat)
    return into_zigzag(x, plan.ring, 1) if plan.relay else x


def _exchange_back(plan: AttentionPlan, x: jax.Array, repeat: int = 1) -> jax.Array:
    x = into_zigzag(x, plan.ring, 1, back=True) if plan.relay else x
    return ulysses.heads_to_seq(x, plan.heads, repeat)


def _split(
    plan: AttentionPlan, exchanged: tuple[jax.Array, ...], segments: Segments, extras: TileArrays
) -> SequenceSplit:
    q, k, _ = exchanged
    if segments is not None:
        q_segments, kv_segments = (ulysses.all_tokens(x, plan.heads) for x in segments)
        if plan.relay:
            q_segments, kv_segments = (into_zigzag(x, plan.ring, 1) for x in (q_segments, kv_segments))
        segments = q_segments, ulysses.all_tokens(kv_segments, plan.ring)
    if extras.numbers is not None and plan.heads:
        sequences, head = extras.numbers
        extras = extras._replace(numbers=(sequences, head + jax.lax.axis_index(plan.heads) * q.shape[2]))
    return SequenceSplit(plan, q.shape[0], q.shape[1], k.shape[1], segments, extras)


def _packed_rows(split: SequenceSplit, x: jax.Array, kv_heads: int) -> jax.Array:
    """Returns numbers of queries [B, S, H, …] in blocks [n, P, B, K, G, Q, …]."""
    group = x.shape[2] // kv_heads
    grouped = jnp.moveaxis(x.reshape(*x.shape[:2], kv_heads, group, *x.shape[3:]), 1, 3)
    return _in_parts(in_blocks(grouped, split.blocks[0], 3), split.parts(kv_heads, group))


def _packed(split: SequenceSplit, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """Returns queries, keys and values in blocks."""
    parts = split.parts(k.shape[2], q.shape[2] // k.shape[2])
    keys = (_in_parts(in_blocks(jnp.moveaxis(x, 1, 2), split.blocks[1], 2), parts) for x in (k, v))
    return _packed_rows(split, q, k.shape[2]), *keys


def _in_parts(x: jax.Array, parts: int) -> jax.Array:
    """Splits blocks [n, B, K, …] into parts of heads [n, P, B, K / P, …]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], parts, -1, *x.shape[3:]), 2, 1)


def _unpacked(x: jax.Array, tokens: int) -> jax.Array:
    """Joins blocks [n, P, B, K, G, Q, …] to [B, S, H, …]."""
    x = jnp.moveaxis(x, 1, 2)
    x = x.reshape(*x.shape[:2], -1, *x.shape[4:])
    joined = jnp.moveaxis(join_blocks(x, tokens, 3), 3, 1)
    return joined.reshape(*joined.shape[:2], -1, *joined.shape[4:])
