"""Runs attention that was found in a program as :func:`jaxpar.attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.attention.attention import attention, qkv_sharding
from jaxpar.parallel.attention.context import HEADS_AXIS
from jaxpar.parallel.attention.cost_model import AttentionRequest, cost
from jaxpar.planning.attention.attention import FoundAttention
from jaxpar.planning.attention.axes import Dims, Group, axes_of, size
from jaxpar.planning.attention.values import Linear, View
from jaxpar.sharding.hardware.links import links_of
from jaxpar.sharding.layout import current_layout
from jaxpar.sharding.names import Names
from jaxpar.sharding.resolve import num_shards_over
from jaxpar.utils.arrays import accumulator, at_least_fp32

LOWEST = -2.5e28
"""The least number that is added to a score: it hides a key, and the sum of several is above -1e30.

At -1e30 :func:`jaxpar.attention` gives a query without keys 0, and a program the mean of the values.
"""
ABSORBED = -1e9
"""A number that leaves nothing of a score that it is added to in fp32, if that is below 32; in fp64 it is larger."""
Shape = tuple[int, int, int, int]


def shapes(found: FoundAttention) -> tuple[Shape, Shape]:
    """Returns the shapes of the queries and of the keys ``[batch, seq, heads, head_dim]``."""
    batch, head = size(found.batch), size(found.head)
    return (batch, found.seq.size, size(found.heads), head), (batch, found.keys.size, size(found.kv_heads), head)


def shards_sequence(found: FoundAttention, q_dims: Names, kv_dims: Names) -> bool:
    """Whether the ambient layout shards the sequences of queries and keys alike.

    Args:
      found: the attention.
      q_dims: the names of the queries' dims ``[batch, seq, heads, head_dim]``.
      kv_dims: those of keys and values.
    """
    q, k = (jax.ShapeDtypeStruct(shape, found.q.var.aval.dtype) for shape in shapes(found))
    sharding = qkv_sharding(q, k, q_dims, kv_dims)
    return sharding.q[1] == sharding.kv[1] and num_shards_over(sharding.q[1], current_layout().sizes) > 1


def attend(found: FoundAttention, q_dims: Names, kv_dims: Names) -> Callable[..., jax.Array]:
    """Returns a function of ``found.variables()`` that computes the result of attention, in its own shape and dtype.

    Args:
      found, q_dims, kv_dims: as for :func:`shards_sequence`.
    """

    def run(*arrays: jax.Array) -> jax.Array:
        sequences = {found.q: (found.seq,), found.k: (found.keys,), found.v: (found.keys,)}
        heads = {found.q: found.heads, found.k: found.kv_heads, found.v: found.kv_heads}
        last = {found.q: found.head, found.k: found.head, found.v: found.value_head}
        q, k, v = (
            spread(x, one.dims, (found.batch, sequences[one], heads[one], last[one]))
            for one, x in zip(sequences, arrays, strict=False)
        )
        views = dict(zip((*found.masks.arrays(), *found.biases), arrays[3:], strict=True))
        dtype = jnp.result_type(q, k, v)
        how: dict[str, Any] = {"q_dims": q_dims, "kv_dims": kv_dims, "mask": found.masks.rule, "q_offset": 0}
        how |= {"order": _order(found, q_dims, kv_dims), "scale": found.scale, "softcap": found.softcap}
        how |= _segments(found, views)
        bias = _bias(found, views)
        if bias is None or not found.may_hide_all:
            how |= {} if bias is None else {"bias": bias}
            o = attention(q.astype(dtype), k.astype(dtype), v.astype(dtype), **how)
        else:
            o = _absorbing(q.astype(dtype), k.astype(dtype), v.astype(dtype), bias, how)
        if found.masks.fill is not None:
            seen = jnp.moveaxis(_visible(found, views).any(-1), 1, 2)[..., None]
            o = jnp.where(seen, o, _without_keys(found, v).astype(o.dtype))
        return _gathered_back(found, o).astype(found.out.var.aval.dtype)

    return run


def spread(x: jax.Array, dims: Dims, groups: Sequence[Group]) -> jax.Array:
    """Returns an array with a dim for each group of axes, of size 1 where it has none of them.

    Args:
      x: the array.
      dims: its dims.
      groups: the axes of each dim of the result. Along those that the array has not it is repeated, if it has others of
        the group.
    """
    own, order = axes_of(dims), axes_of(groups)
    x = x.reshape([axis.size for axis in own]).transpose([own.index(axis) for axis in order if axis in own])
    wanted = [group if any(axis in own for axis in group) else () for group in groups]
    x = x.reshape([axis.size if axis in own else 1 for axis in axes_of(wanted)])
    x = jnp.broadcast_to(x, [axis.size for axis in axes_of(wanted)])
    return x.reshape([size(group) for group in wanted])


def _order(found: FoundAttention, q_dims: Names, kv_dims: Names) -> str | None:
    """``contiguous`` if it costs a ring less to be out of balance than to reorder tokens in each layer; else ``None``.

    As with the implementation, the time decides if the device's figures are known, and the bytes otherwise.
    """
    layout = current_layout()
    links = links_of(layout.mesh, layout.rings)
    q, k = (jax.ShapeDtypeStruct(shape, found.q.var.aval.dtype) for shape in shapes(found))
    sharding = qkv_sharding(q, k, q_dims, kv_dims)

    def least(order: str | None) -> float:
        request = AttentionRequest(found.masks.rule, order=order)
        costs = [cost(impl, q, k, sharding, layout.sizes, HEADS_AXIS, request, links) for impl in ("ring", "hybrid")]
        return min((one.sent if links is None else one.seconds for one in costs if one is not None), default=0.0)

    return "contiguous" if least("contiguous") < least(None) else None


def _absorbing(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, how: dict[str, Any]) -> jax.Array:
    """Attention where a bias may hide all keys of a query: it then weighs those alike that have the largest bias.

    Scores that vanish beside the bias are 0 in the result, but have gradients. With such a query the branch that runs
    computes q k^T as (q - q) k^T + q (k - k)^T, of which the first half is differentiated in q, and the second in k.
    """
    fixed = jax.lax.stop_gradient
    most = fixed(bias).max(-1, keepdims=True)
    hidden = most <= ABSORBED * float(jnp.finfo(jnp.float32).eps / jnp.finfo(accumulator(q)).eps)
    bias = bias - jnp.where(hidden, most, 0)
    rows = jnp.moveaxis(hidden, 1, 2)

    def rare(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        first, second = jnp.where(rows, q - fixed(q), q), jnp.where(rows, fixed(q), 0)
        halves = jnp.concatenate([first, second], -1), jnp.concatenate([k, k - fixed(k)], -1)
        return attention(*halves, v, bias=bias, **how)

    usual = lambda q, k, v, bias: attention(q, k, v, bias=bias, **how)
    return jax.lax.cond(hidden.any(), rare, usual, q, k, v, bias)


def _padding(found: FoundAttention, views: dict[View, jax.Array]) -> jax.Array | None:
    """Where the conditions hold, if there are any."""
    conditions = [_condition(found, view, views) for view in found.masks.conditions]
    return reduce(jnp.logical_and, conditions) if conditions else None


def _segments(found: FoundAttention, views: dict[View, jax.Array]) -> dict[str, Any]:
    """Conditions on keys alone, as padding has them, as segments."""
    seen = _padding(found, views)
    if seen is None or seen.shape[1:3] != (1, 1):
        return {}
    (batch, seq, _, _), (_, keys, _, _) = shapes(found)
    ids = jnp.where(jnp.broadcast_to(seen[:, 0, 0], (batch, keys)), 0, -1)
    return {"segment_ids": (jnp.zeros((batch, seq), ids.dtype), ids)}


def _bias(found: FoundAttention, views: dict[View, jax.Array]) -> jax.Array | None:
    """What is added to the scores ``[batch or 1, heads or 1, queries, keys]``, other conditions included."""
    parts = [jnp.maximum(at_least_fp32(_scores_like(found, view, views[view])), LOWEST) for view in found.biases]
    for condition, fill in found.masks.added:
        holds = reduce(jnp.logical_and, [_condition(found, part, views) for part in condition])
        parts.append(jnp.where(holds, 0.0, max(fill, LOWEST)))
    seen = _padding(found, views)
    if seen is not None and seen.shape[1:3] != (1, 1):
        parts.append(jnp.where(seen, 0.0, -jnp.inf))
    if not parts:
        return None
    total = reduce(jnp.add, parts)
    return jnp.broadcast_to(total, (*total.shape[:2], found.seq.size, found.keys.size))


def _visible(found: FoundAttention, views: dict[View, jax.Array]) -> jax.Array:
    """Which keys a query sees, ``[batch or 1, heads or 1, queries, keys]``; queries are 1 if they see the same."""
    padding = _padding(found, views)
    parts: list[jax.Array] = [] if padding is None else [padding]
    if found.masks.band != (None, None):
        rows, columns = (jnp.arange(axis.size) for axis in (found.seq, found.keys))
        parts.append(jnp.asarray(found.masks.rule.visible(rows[:, None], columns))[None, None])
    return reduce(jnp.logical_and, parts)


def _condition(found: FoundAttention, part: Linear | View, views: dict[View, jax.Array]) -> jax.Array:
    if isinstance(part, View):
        return _scores_like(found, part, views[part]).astype(bool) != part.negated
    rows, columns = (jnp.arange(axis.size) * part.factors.get(axis, 0) for axis in (found.seq, found.keys))
    return (rows[:, None] + columns + part.constant >= 0)[None, None]


def _scores_like(found: FoundAttention, view: View, x: jax.Array) -> jax.Array:
    """``[batch or 1, heads or 1, queries or 1, keys or 1]``."""
    return spread(x, view.source_dims, (found.batch, found.heads, (found.seq,), (found.keys,)))


def _without_keys(found: FoundAttention, v: jax.Array) -> jax.Array:
    """What a query gets all of whose keys are hidden: the mean of all values, or NaN for scores of -inf."""
    if found.masks.fill == -jnp.inf:
        return jnp.full((), jnp.nan, v.dtype)
    return jnp.repeat(v.mean(1, keepdims=True), size(found.groups), axis=2)


def _gathered_back(found: FoundAttention, o: jax.Array) -> jax.Array:
    """The result in the dims of the program's."""
    order = (*found.batch, found.seq, *found.heads, *found.value_head)
    wanted = axes_of(found.out.dims)
    o = o.reshape([axis.size for axis in order]).transpose([order.index(axis) for axis in wanted])
    return o.reshape(found.out.var.aval.shape)
