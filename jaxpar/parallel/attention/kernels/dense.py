"""``dense``: the reference implementation. It builds all scores and is differentiated by JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.attention.tiled.tile import FAR, Segments, TileArrays, TileSpec, Tokens, distances, kept
from jaxpar.utils.arrays import accumulator


def dense(
    rules: TileSpec,
    q_BSHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    positions: tuple[Any, Any],
    segments: Segments,
    extras: TileArrays,
) -> tuple[jax.Array, jax.Array]:
    """Returns attention of all queries to all keys; it builds the scores ``[batch, heads, queries, keys]``.

    Args:
      rules: mask, scale, soft cap and dropout.
      q_BSHD: queries ``[batch, queries, heads, head_dim]``.
      k_BTKD, v_BTKD: keys and values ``[batch, keys, kv_heads, head_dim]``. ``heads`` is a multiple of ``kv_heads``.
      positions: the positions of queries ``[queries]`` and keys ``[keys]``.
      segments: segment ids of queries ``[batch, queries]`` and keys ``[batch, keys]``.
      extras: array options.

    Returns:
      The result in the queries' dtype, and the log-sum-exp ``[batch, queries, heads]``, as
      :func:`jaxpar.parallel.attention.split.vjp.attend` returns them.
    """
    batch, rows, heads, _ = q_BSHD.shape
    kv_heads = k_BTKD.shape[2]
    group, dtype = heads // kv_heads, accumulator(q_BSHD)
    q = q_BSHD.reshape(batch, rows, kv_heads, group, -1)
    s = jnp.einsum("bqkgd,blkd->bkgql", q, k_BTKD, preferred_element_type=dtype) * rules.scale
    if rules.softcap is not None:
        s = rules.softcap * jnp.tanh(s / rules.softcap)
    x, y = positions[0][:, None], positions[1][None, :]
    if extras.slopes is not None:
        distance = distances((Tokens(positions[0]), Tokens(positions[1])))
        s = s - extras.slopes.astype(dtype)[:, :, None, None] * distance.astype(dtype)
    if extras.bias is not None:
        s = s + extras.bias.astype(dtype)
    prefix = None if extras.prefix is None else extras.prefix[:, None, None]
    several = 1 if prefix is None else len(prefix)
    visible = jnp.broadcast_to(rules.mask.visible(x, y, prefix), (several, rows, k_BTKD.shape[1]))
    if segments is not None:
        a, b = segments[0][:, :, None], segments[1][:, None, :]
        visible = visible & (a == b) & (a >= 0)
    visible = visible[:, None, None]
    if extras.bias is not None or extras.slopes is not None:
        visible = visible & ~(s <= FAR)  # the same rule as tile.hidden
    empty = ~jnp.any(visible, -1)
    # A row that sees no key gets scores of 0, and its result is cleared below: -inf would give NaN in both passes.
    s = jnp.where(visible, s, jnp.where(empty[..., None], 0, -jnp.inf))
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jax.nn.softmax(s, axis=-1)  # exp(s - lse) is wrong for scores of -1e9, whose lse loses the log of the sum
    if rules.dropout:
        p = p * kept(rules, (Tokens(positions[0]), Tokens(positions[1])), extras, p.shape).astype(dtype)
    o = jnp.einsum("bkgql,blkd->bqkgd", p.astype(v_BTKD.dtype), v_BTKD, preferred_element_type=dtype)
    hide = jnp.broadcast_to(empty, lse.shape)
    lse = jnp.where(hide, -jnp.inf, lse)
    o = jnp.where(jnp.moveaxis(hide, 3, 1)[..., None], 0, o)
    return o.reshape(batch, rows, heads, -1).astype(q_BSHD.dtype), jnp.moveaxis(lse, 3, 1).reshape(batch, rows, heads)
