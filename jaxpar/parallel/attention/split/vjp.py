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
from jaxpar.parallel.attention.split.backend import not_before
from jaxpar.parallel.attention.split.partition import AttentionPlan, SequenceSplit
from jaxpar.parallel.attention.split.token_order import into_zigzag
from jaxpar.parallel.attention.tiled.blockwise import finished, in_blocks, rows_of, whole
from jaxpar.parallel.attention.tiled.padding import KEPT, SAVED
from jaxpar.parallel.attention.tiled.tile import Segments, TileArrays

FORWARD = {
    "here": ring.here_forward,
    "gather": ring.gather_forward,
    "ring": ring.ring_forward,
    "rows": ring.rows_forward,
}
BACKWARD = {
    "here": ring.here_backward,
    "gather": ring.gather_backward,
    "ring": ring.ring_backward,
    "rows": ring.ring_backward,
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    way: AttentionPlan, q_BSHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, segments: Segments, extras: TileArrays
) -> tuple[jax.Array, jax.Array]:
    """Returns attention of one device's queries, keys and values, inside a ``shard_map`` over the axes of ``way``.

    Args:
      way: the plan.
      q_BSHD: local queries ``[batch, tokens, heads, head_dim]``; ``heads`` is a multiple of ``kv_heads``.
      k_BTKD, v_BTKD: local keys and values ``[batch, tokens, kv_heads, head_dim]``.
      segments: segment ids of the local queries and keys ``[batch, tokens]``.
      extras: array options of the heads that this device computes after the head exchange; a bias has one column per
        key of all devices.

    Returns:
      The result in the queries' dtype (in the sums' dtype if the caller merges it), and the log-sum-exp ``[batch,
      tokens, heads]`` in the sums' dtype. A query that sees no key gets 0 and -inf.
    """
    return _forward(way, q_BSHD, k_BTKD, v_BTKD, segments, extras)[0]


def _forward(way: AttentionPlan, q: Any, k: Any, v: Any, segments: Segments, extras: TileArrays) -> Any:
    repeat = ulysses.repeats(k.shape[2], ulysses.ways_of(way.heads))
    far = _arrived(way, q), _arrived(way, k, repeat), _arrived(way, v, repeat)
    split = _split(way, far, segments, extras)
    q_blocks, *keys = _packed(split, *far)
    everybodys = None
    if way.keep:
        keys = everybodys = [checkpoint_name(ring.gathered(split, x), KEPT) for x in keys]
    o, lse = finished(FORWARD[way.keys](split, q_blocks, *keys))
    o, lse = _unpacked(o if way.whole else o.astype(q.dtype), far[0].shape[1]), _unpacked(lse, far[0].shape[1])
    o, lse = (checkpoint_name(_returned(way, x), SAVED) for x in (o, lse))
    return (o, lse), (far, everybodys, segments, extras, o, lse, k.shape[2])


def _backward(way: AttentionPlan, kept: Any, gradients: tuple[jax.Array, jax.Array]) -> Any:
    far, everybodys, segments, extras, o, lse, kv_heads = kept
    far, gradients = not_before(way, (far, gradients), lse)
    split, (q, k, v) = _split(way, far, segments, extras), far
    rows = jax.tree.map(lambda x: _arrived(way, x), rows_of(o, lse, *gradients))
    shape = (k.shape[2], q.shape[2] // k.shape[2])
    rows = jax.tree.map(
        lambda x: _in_parts(in_blocks(_grouped(x, *shape), split.blocks[0], 3), split.parts(*shape)), rows
    )
    q_blocks, *keys = _packed(split, q, k, v)
    k_blocks, v_blocks = everybodys or keys
    found = BACKWARD[way.keys](split, q_blocks, k_blocks, v_blocks, rows)
    dq = _unpacked(found.q, q.shape[1]).astype(q.dtype)
    dk, dv = (_unpacked(x[:, :, :, :, None], k.shape[1]) for x in (found.k, found.v))
    repeat = ulysses.repeats(kv_heads, ulysses.ways_of(way.heads))
    # Gradients of repeated heads are summed after the exchange, so they keep the sums' dtype without kv_grad_dtype.
    narrow = way.kv_grad_dtype or (found.k.dtype if repeat > 1 else k.dtype)
    dk, dv = (_returned(way, x.astype(narrow) if way.heads else x, repeat) for x in (dk, dv))
    beside = TileArrays(
        bias=None if found.bias is None else split.bias_gradient(found.bias).astype(extras.bias.dtype),
        slopes=None if found.slopes is None else found.slopes.astype(extras.slopes.dtype),
    )
    return _returned(way, dq), dk.astype(k.dtype), dv.astype(v.dtype), None, beside


attend.defvjp(_forward, _backward)


def _arrived(way: AttentionPlan, x: jax.Array, repeat: int = 1) -> jax.Array:
    """Exchanges a device's tokens [B, S, H, …] for the heads and tokens that it computes."""
    x = ulysses.apart(x, way.heads, repeat)
    return into_zigzag(x, way.ring, 1) if way.relay else x


def _returned(way: AttentionPlan, x: jax.Array, repeat: int = 1) -> jax.Array:
    x = into_zigzag(x, way.ring, 1, back=True) if way.relay else x
    return ulysses.together(x, way.heads, repeat)


def _split(way: AttentionPlan, far: tuple[jax.Array, ...], segments: Segments, extras: TileArrays) -> SequenceSplit:
    q, k, _ = far
    if segments is not None:
        mine, theirs = (ulysses.all_tokens(x, way.heads) for x in segments)
        if way.relay:
            mine, theirs = (into_zigzag(x, way.ring, 1) for x in (mine, theirs))
        segments = mine, ulysses.all_tokens(theirs, way.ring)
    if extras.numbers is not None and way.heads:
        sequences, head = extras.numbers
        extras = extras._replace(numbers=(sequences, head + jax.lax.axis_index(way.heads) * q.shape[2]))
    return SequenceSplit(way, q.shape[0], q.shape[1], k.shape[1], segments, extras)


def _grouped(x: jax.Array, kv_heads: int, group: int) -> jax.Array:
    """Transposes [B, S, H, …] to [B, K, G, S, …]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], kv_heads, group, *x.shape[3:]), 1, 3)


def _packed(split: SequenceSplit, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """Returns queries, keys and values in blocks."""
    kv_heads, group, (rows, columns) = k.shape[2], q.shape[2] // k.shape[2], split.blocks
    parts = split.parts(kv_heads, group)
    q = _in_parts(in_blocks(_grouped(q, kv_heads, group), rows, 3), parts)
    return q, *(_in_parts(in_blocks(jnp.moveaxis(x, 1, 2), columns, 2), parts) for x in (k, v))


def _in_parts(x: jax.Array, parts: int) -> jax.Array:
    """Splits blocks [n, B, K, …] into parts of heads [n, P, B, K / P, …]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], parts, -1, *x.shape[3:]), 2, 1)


def _unpacked(x: jax.Array, tokens: int) -> jax.Array:
    """Joins blocks [n, P, B, K, G, Q, …] to [B, S, H, …]."""
    x = jnp.moveaxis(x, 1, 2)
    x = x.reshape(*x.shape[:2], -1, *x.shape[4:])
    joined = jnp.moveaxis(whole(x, tokens, 3), 3, 1)
    return joined.reshape(*joined.shape[:2], -1, *joined.shape[4:])
