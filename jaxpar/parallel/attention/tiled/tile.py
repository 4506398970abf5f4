"""The arithmetic of one tile: some queries against some keys.

Shape suffixes: B batch, K key heads, G query heads of a key head, Q queries and L keys of a tile, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

from jaxpar.parallel.attention.mask import Mask

FAR = -1e30
"""What an unseen key scores: far below any score, and still a number."""
PAD = -(2**31)
"""The position of a token that only fills up a block: the one int32 that no token's position may be. Positions below 0 are legal."""
PAD_SEGMENT = -1
"""The segment of such a token. All segments below 0 are padding."""
Segments = tuple[Any, Any] | None
"""Of queries [B, S] and of keys [B, T]."""


@dataclass(frozen=True)
class TileSpec:
    """What is computed of queries and keys: all that is no array."""

    mask: Mask
    scale: float
    softcap: float | None = None
    dropout: float = 0.0


class Tokens(NamedTuple):
    """Where the tokens of queries or of keys stand: positions [Q], and segments [B, Q] if there are several."""

    positions: Any
    segments: Any = None


class AttentionArrays(NamedTuple):
    """Arrays beside queries, keys and values; ``None`` for what is not asked for."""

    segments: Segments = None
    prefix: Any = None
    slopes: Any = None
    bias: Any = None
    sinks: Any = None
    key: Any = None
    offset: Any = None
    order: Any = None
    sequences: Any = None


class TileArrays(NamedTuple):
    """Arrays beside queries, keys and values; what is not asked for is ``None``.

    Attributes:
      bias: added to the scores, [B or 1, K or 1, G or 1, queries, keys].
      slopes: of ALiBi, [K, G]: ``-slope * |q - k|`` is added to the scores.
      prefix: lengths of prefixes [B or 1].
      key: of the dropout, two 32-bit words [2], or those of each sequence [B, 2].
      numbers: the places of the sequences here among all [B], and the number of the first head here: what dropout draws for.
      offset: of the queries' positions, beside what :class:`jaxpar.parallel.attention.split.partition.AttentionPlan` says.
      order: the position of each token of all devices, as they lie [seq]; in the place of an order with a name.
    """

    bias: Any = None
    slopes: Any = None
    prefix: Any = None
    key: Any = None
    numbers: Any = None
    offset: Any = None
    order: Any = None


def varies_over(x: Any) -> frozenset[str]:
    """The manual axes over which a ``shard_map`` that keeps count of it takes ``x`` to differ."""
    kind = jax.typeof(x)
    # jax 0.12 has it in a place of its own.
    axes: frozenset[str] = kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma
    return axes


def accumulator(x: Any) -> Any:
    """The dtype of sums: fp32, or that of ``x`` where it is wider."""
    return jnp.promote_types(x.dtype, jnp.float32)


def scaled(rules: TileSpec, q: Any) -> tuple[Any, float]:
    """Queries with the scale in them, and by what scores are still to be multiplied: numbers less wide than sums would lose some of it."""
    return (q * rules.scale, 1.0) if q.dtype == accumulator(q) else (q, rules.scale)


def turned(x: jax.Array) -> jax.Array:
    """What is of queries and keys [B, K, G, Q, L] as [B, K, L, G, Q]."""
    return jnp.moveaxis(x, -1, 2)


def scores(
    rules: TileSpec, q: Any, k: Any, at: tuple[Tokens, Tokens], extras: TileArrays, turn: bool = False
) -> tuple[jax.Array, Any]:
    """Scores [B, K, G, Q, L] of queries [B, K, G, Q, D] and keys [B, K, L, D]; and what the soft cap has made of them. Both :func:`turned`, if asked."""
    own, rest = scaled(rules, q)
    pair, operands = ("bkld,bkgqd->bklgq", (k, own)) if turn else ("bkgqd,bkld->bkgql", (own, k))
    s = jnp.einsum(pair, *operands, preferred_element_type=accumulator(q)) * rest
    placed: Callable[[jax.Array], jax.Array] = turned if turn else lambda x: x
    capped = None
    if rules.softcap is not None:
        capped = jnp.tanh(s / rules.softcap)
        s = rules.softcap * capped
    if extras.slopes is not None:
        s = s - placed(extras.slopes.astype(s.dtype)[None, :, :, None, None] * distances(at).astype(s.dtype))
    if extras.bias is not None:
        s = s + placed(extras.bias.astype(s.dtype))
    return s if extras.bias is None and extras.slopes is None else hidden(s), capped


def hidden(s: jax.Array) -> jax.Array:
    """Scores, of which those that a bias or a slope brings to :data:`FAR` or below are -inf: their keys are not seen. NaN stays."""
    return jnp.where(s <= FAR, -jnp.inf, s)


def distances(at: tuple[Tokens, Tokens]) -> jax.Array:
    """How far apart query and key stand, [Q, L]; unsigned, because the distance of two int32 may be no int32."""
    q, k = jnp.asarray(at[0].positions)[:, None], jnp.asarray(at[1].positions)[None, :]
    return (jnp.maximum(q, k) - jnp.minimum(q, k)).astype(jnp.uint32)


def seen(rules: TileSpec, at: tuple[Tokens, Tokens], extras: TileArrays) -> jax.Array:
    """Which keys the queries of a tile see: [B or 1, 1, 1, Q, L]."""
    q, k = at
    prefix = None if extras.prefix is None else extras.prefix[:, None, None]
    x, y = q.positions[None, :, None], k.positions[None, None, :]
    visible = (x != PAD) & (y != PAD) & rules.mask.visible(*real(rules.mask, x, y), prefix)
    if q.segments is not None:
        a, b = q.segments[:, :, None], k.segments[:, None, :]
        visible = visible & (a == b) & (a >= 0)
    return visible[:, None, None]


def real(mask: Mask, q: Any, k: Any) -> tuple[Any, Any]:
    """Positions of a tile as a mask is called with them: a caller's function never meets :data:`PAD`, but a position of the same tile."""
    if mask.where is None:
        return q, k
    # Every block has a token: only the last one is filled up.
    return jnp.where(q == PAD, jnp.max(q), q), jnp.where(k == PAD, jnp.max(k), k)


def kept(rules: TileSpec, at: tuple[Tokens, Tokens], extras: TileArrays, shape: tuple[int, ...]) -> jax.Array:
    """What dropout leaves of a tile's weights, [B, K, G, Q, L]: 0, or the inverse of the share that it leaves.

    A number is drawn from the key, the sequence, the head and the two positions, and so is the same however the arrays are split.
    """
    batch, kv_heads, group, rows, columns = shape
    sequences, first_head = extras.numbers
    counts = (
        jnp.broadcast_to(at[0].positions[:, None], (rows, columns)),
        jnp.broadcast_to(at[1].positions[None, :], (rows, columns)),
    )
    count = jnp.concatenate([x.astype(jnp.uint32).ravel() for x in counts])

    def draw(key: jax.Array, sequence: jax.Array, head: jax.Array) -> jax.Array:
        own = threefry_2x32(key, jnp.stack([sequence, head]).astype(jnp.uint32))
        return threefry_2x32(own, count)[: rows * columns]

    each = jax.vmap(jax.vmap(draw, (None, None, 0)), (0, 0, None))
    keys = jnp.broadcast_to(extras.key, (batch, 2))
    heads = jnp.asarray(first_head, jnp.int32) + jnp.arange(kv_heads * group, dtype=jnp.int32)
    bits = each(keys, jnp.asarray(sequences, jnp.int32), heads).reshape(shape)
    least = jnp.uint32(min(round(rules.dropout * 2**32), 2**32 - 1))
    return jnp.where(bits >= least, 1.0 / (1.0 - rules.dropout), 0.0)


class Sums(NamedTuple):
    """Attention on the way, per query: values [.., D] weighted and summed, the greatest score, the sum of weights, in the dtype of sums."""

    values: jax.Array
    greatest: jax.Array
    weights: jax.Array


def forward(rules: TileSpec, q: Any, k: Any, v: Any, at: Any, extras: TileArrays, sums: Sums, masked: bool) -> Sums:
    """``sums`` with the keys of a tile in it (the online softmax of Milakov & Gimelshein 2018, arXiv:1805.02867)."""
    s, _ = scores(rules, q, k, at, extras)
    visible = seen(rules, at, extras) if masked else None
    s = s if visible is None else jnp.where(visible, s, FAR)
    greatest = jnp.maximum(sums.greatest, jnp.max(s, -1))
    p = jnp.exp(s - greatest[..., None])
    # A row that sees nothing has FAR for its greatest, and would weigh all alike.
    p = p if visible is None else jnp.where(visible, p, 0)
    shrunk = jnp.exp(sums.greatest - greatest)
    weights = sums.weights * shrunk + jnp.sum(p, -1)
    if rules.dropout:
        p = p * kept(rules, at, extras, p.shape).astype(p.dtype)
    added = jnp.einsum("bkgql,bkld->bkgqd", p.astype(v.dtype), v, preferred_element_type=accumulator(v))
    return Sums(sums.values * shrunk[..., None] + added, greatest, weights)


class Gradients(NamedTuple):
    """Of a tile's queries, keys, values, bias (of the scores, [B, K, G, Q, L]) and slopes [K, G], in the dtype of sums."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: Any
    slopes: Any


class Rows(NamedTuple):
    """Of the queries of a tile: the gradient of the result [B, K, G, Q, D], the logarithm of the sum of weights, and what the softmax
    takes off each gradient of its weights."""

    gradient: jax.Array
    lse: jax.Array
    delta: jax.Array


def backward(
    rules: TileSpec, q: Any, k: Any, v: Any, at: Any, extras: TileArrays, rows: Rows, masked: bool
) -> Gradients:
    """The gradients that a tile gives (Dao et al. 2022, arXiv:2205.14135, algorithm 4).

    Keys come before queries in all that belongs to both, [B, K, L, G, Q]: so it goes into each product as it is, and XLA's CPU compiler,
    which wants an operand's summed dim in its place, turns only rows of head dims.
    """
    dtype = accumulator(q)
    multiply = functools.partial(jnp.einsum, preferred_element_type=dtype)
    own, rest = scaled(rules, q)
    s, capped = scores(rules, q, k, at, extras, turn=True)
    p = jnp.exp(s - rows.lse[:, :, None])
    p = jnp.where(turned(seen(rules, at, extras)), p, 0) if masked else p
    dp = multiply("bkld,bkgqd->bklgq", v, rows.gradient)
    dropped = p
    if rules.dropout:
        keep = turned(kept(rules, at, extras, (*q.shape[:-1], k.shape[-2]))).astype(dtype)
        dp, dropped = dp * keep, p * keep
    ds = p * (dp - rows.delta[:, :, None])
    bias = None if extras.bias is None else jnp.moveaxis(ds, 2, -1)
    slopes = None if extras.slopes is None else -jnp.einsum("bklgq,ql->kg", ds, distances(at).astype(dtype))
    if capped is not None:
        ds = ds * (1 - capped * capped)
    ds = (ds * rest).astype(q.dtype)
    # Rows are turned faster than scores; but of several heads in bf16 that compiler makes a product that it then lacks.
    narrow = q.dtype != dtype
    dq = multiply("bkld,bklgq->bkgqd", k, ds) if narrow else jnp.moveaxis(multiply("bkld,bklgq->bkdgq", k, ds), 2, -1)
    return Gradients(
        dq * (rules.scale / rest),
        multiply("bklgq,bkgqd->bkld", ds, own),
        multiply("bklgq,bkgqd->bkld", dropped.astype(q.dtype), rows.gradient),
        bias,
        slopes,
    )
