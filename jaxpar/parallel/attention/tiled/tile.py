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
from jaxpar.utils.arrays import accumulator

FAR = -1e30
"""The score of a hidden key: far below any real score, and finite."""
PAD = -(2**31)
"""The position of filler tokens in a block: the only int32 that no real token has. Negative positions are legal."""
PAD_SEGMENT = -1
"""The segment of a filler token. All negative segments are padding."""
Segments = tuple[Any, Any] | None
"""The segment ids of queries [B, S] and of keys [B, T]."""


@dataclass(frozen=True)
class TileSpec:
    """The static options of an attention: mask, scale, soft cap and dropout fraction."""

    mask: Mask
    scale: float
    softcap: float | None = None
    dropout: float = 0.0


class Tokens(NamedTuple):
    """Positions [Q] of queries or keys, and their segments [B, Q] if segments are given."""

    positions: Any
    segments: Any = None


class AttentionArrays(NamedTuple):
    """The array options of a global attention, ``None`` if not given; see :class:`TileArrays` for most of them."""

    segments: Segments = None
    prefix: Any = None
    slopes: Any = None
    bias: Any = None
    sinks: Any = None
    key: Any = None
    offset: Any = None
    order: Any = None
    sequences: Any = None

    def of_tiles(self, heads: int, kv_heads: int, first_head: Any) -> TileArrays:
        """Returns the options of one device's tiles, with the query heads grouped by key head."""
        group = (kv_heads, heads // kv_heads)
        bias = self.bias
        if bias is not None:
            bias = bias.reshape(bias.shape[0], *((1, 1) if bias.shape[1] == 1 else group), *bias.shape[2:])
        slopes = None if self.slopes is None else self.slopes.reshape(group)
        numbers = None if self.sequences is None else (self.sequences, first_head)
        return TileArrays(bias, slopes, self.prefix, self.key, numbers, self.offset, self.order)


class TileArrays(NamedTuple):
    """The array options of one device's tiles, ``None`` if not given.

    Attributes:
      bias: added to the scores, [B or 1, K or 1, G or 1, queries, keys].
      slopes: ALiBi slopes [K, G]: ``-slope * |q - k|`` is added to the scores.
      prefix: prefix lengths [B or 1].
      key: the dropout key as two 32-bit words [2], or [B, 2] for one key per sequence.
      numbers: the global indices of the local sequences [B] and the index of the first local head, for dropout.
      offset: added to the queries' positions, on top of
        :class:`jaxpar.parallel.attention.split.partition.AttentionPlan`'s ``offset``.
      order: the position of each stored token of all devices [seq], instead of a named order.
    """

    bias: Any = None
    slopes: Any = None
    prefix: Any = None
    key: Any = None
    numbers: Any = None
    offset: Any = None
    order: Any = None


def varies_over(x: Any) -> frozenset[str]:
    """Returns the manual axes over which ``x`` varies, as tracked by a ``shard_map`` with ``check_vma``."""
    kind = jax.typeof(x)
    # JAX 0.12 stores the axes in ``manual_axis_type``.
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def scaled(rules: TileSpec, q: Any) -> tuple[Any, float]:
    """Folds the scale into the queries, or returns it as a factor of the scores if their dtype is too narrow."""
    return (q * rules.scale, 1.0) if q.dtype == accumulator(q) else (q, rules.scale)


def keys_first(x: jax.Array) -> jax.Array:
    """Transposes [B, K, G, Q, L] to [B, K, L, G, Q]."""
    return jnp.moveaxis(x, -1, 2)


def scores(
    rules: TileSpec, q: Any, k: Any, at: tuple[Tokens, Tokens], extras: TileArrays, key_major: bool = False
) -> tuple[jax.Array, Any]:
    """Returns the scores of a tile, and the tanh of the soft cap (``None`` without one).

    Args:
      rules: scale and soft cap.
      q: queries [B, K, G, Q, D].
      k: keys [B, K, L, D].
      at: positions and segments of queries and keys.
      extras: slopes and bias, of this tile.
      key_major: return [B, K, L, G, Q] instead of [B, K, G, Q, L].
    """
    own, rest = scaled(rules, q)
    pair, operands = ("bkld,bkgqd->bklgq", (k, own)) if key_major else ("bkgqd,bkld->bkgql", (own, k))
    s = jnp.einsum(pair, *operands, preferred_element_type=accumulator(q)) * rest
    placed: Callable[[jax.Array], jax.Array] = keys_first if key_major else lambda x: x
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
    """Replaces scores that a bias or slope lowers to :data:`FAR` or less by -inf, which hides their keys; keeps NaN."""
    return jnp.where(s <= FAR, -jnp.inf, s)


def distances(at: tuple[Tokens, Tokens]) -> jax.Array:
    """Returns the distances [Q, L] of queries and keys; uint32, because the distance of two int32 may exceed int32."""
    q, k = jnp.asarray(at[0].positions)[:, None], jnp.asarray(at[1].positions)[None, :]
    return (jnp.maximum(q, k) - jnp.minimum(q, k)).astype(jnp.uint32)


def seen(rules: TileSpec, at: tuple[Tokens, Tokens], extras: TileArrays) -> jax.Array:
    """Returns which keys the queries of a tile see, [B or 1, 1, 1, Q, L]."""
    q, k = at
    prefix = None if extras.prefix is None else extras.prefix[:, None, None]
    x, y = q.positions[None, :, None], k.positions[None, None, :]
    visible = (x != PAD) & (y != PAD) & rules.mask.visible(*real(rules.mask, x, y), prefix)
    if q.segments is not None:
        a, b = q.segments[:, :, None], k.segments[:, None, :]
        visible = visible & (a == b) & (a >= 0)
    return visible[:, None, None]


def real(mask: Mask, q: Any, k: Any) -> tuple[Any, Any]:
    """Replaces :data:`PAD` by a real position of the tile, because a caller's ``where`` must not get :data:`PAD`."""
    if mask.where is None:
        return q, k
    # Every block has a real token: only the last one is padded.
    return jnp.where(q == PAD, jnp.max(q), q), jnp.where(k == PAD, jnp.max(k), k)


def kept(rules: TileSpec, at: tuple[Tokens, Tokens], extras: TileArrays, shape: tuple[int, ...]) -> jax.Array:
    """Returns dropout's factors of a tile's weights, [B, K, G, Q, L]: 0 or 1 / (1 - dropout).

    Each factor is drawn from the key, the sequence, the head and the two positions, so it does not depend on the
    sharding.
    """
    batch, kv_heads, group, rows, columns = shape
    sequences, first_head = extras.numbers
    positions = at[0].positions[:, None], at[1].positions[None, :]
    counts = [jnp.broadcast_to(x, (rows, columns)) for x in positions]
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
    """Partial softmax sums per query: the weighted values [.., D], the maximum score and the sum of weights."""

    values: jax.Array
    greatest: jax.Array
    weights: jax.Array


def forward(rules: TileSpec, q: Any, k: Any, v: Any, at: Any, extras: TileArrays, sums: Sums, masked: bool) -> Sums:
    """Returns ``sums`` updated with the keys of a tile by online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867).

    Args:
      rules: the static options.
      q: queries [B, K, G, Q, D].
      k, v: keys and values [B, K, L, D].
      at: positions and segments of queries and keys.
      extras: array options of this tile.
      sums: the sums over the keys so far.
      masked: whether the mask hides part of the tile.
    """
    s, _ = scores(rules, q, k, at, extras)
    visible = seen(rules, at, extras) if masked else None
    s = s if visible is None else jnp.where(visible, s, FAR)
    greatest = jnp.maximum(sums.greatest, jnp.max(s, -1))
    p = jnp.exp(s - greatest[..., None])
    # A row that sees no key has FAR as its maximum, which would give all keys equal weight.
    p = p if visible is None else jnp.where(visible, p, 0)
    shrunk = jnp.exp(sums.greatest - greatest)
    weights = sums.weights * shrunk + jnp.sum(p, -1)
    if rules.dropout:
        p = p * kept(rules, at, extras, p.shape).astype(p.dtype)
    added = jnp.einsum("bkgql,bkld->bkgqd", p.astype(v.dtype), v, preferred_element_type=accumulator(v))
    return Sums(sums.values * shrunk[..., None] + added, greatest, weights)


class Gradients(NamedTuple):
    """Gradients of queries, keys, values, bias ([B, K, G, Q, L] in a tile) and slopes [K, G], in the dtype of sums."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: Any
    slopes: Any


class Rows(NamedTuple):
    """Inputs of the backward pass per query.

    Attributes:
      gradient: the gradient of the result [B, K, G, Q, D].
      lse: the log-sum-exp of the scores [B, K, G, Q].
      delta: ``sum(o * do)`` minus the gradient of ``lse`` [B, K, G, Q], to subtract from the weights' gradient.
    """

    gradient: jax.Array
    lse: jax.Array
    delta: jax.Array


def backward(
    rules: TileSpec, q: Any, k: Any, v: Any, at: Any, extras: TileArrays, rows: Rows, masked: bool
) -> Gradients:
    """Returns the gradients of one tile (Dao et al. 2022, arXiv:2205.14135, algorithm 4).

    Scores and their gradients have keys before queries, [B, K, L, G, Q], so every einsum takes them without a
    transpose. XLA's CPU compiler requires the contracted dim of an operand in a fixed place, and then transposes only
    arrays with head_dim.

    Args:
      rules: the static options.
      q: queries [B, K, G, Q, D].
      k, v: keys and values [B, K, L, D].
      at: positions and segments of queries and keys.
      extras: array options of this tile.
      rows: the gradient of the result, the log-sum-exp and delta of each query.
      masked: whether the mask hides part of the tile.
    """
    dtype = accumulator(q)
    multiply = functools.partial(jnp.einsum, preferred_element_type=dtype)
    own, rest = scaled(rules, q)
    s, capped = scores(rules, q, k, at, extras, key_major=True)
    p = jnp.exp(s - rows.lse[:, :, None])
    p = jnp.where(keys_first(seen(rules, at, extras)), p, 0) if masked else p
    dp = multiply("bkld,bkgqd->bklgq", v, rows.gradient)
    dropped = p
    if rules.dropout:
        keep = keys_first(kept(rules, at, extras, (*q.shape[:-1], k.shape[-2]))).astype(dtype)
        dp, dropped = dp * keep, p * keep
    ds = p * (dp - rows.delta[:, :, None])
    bias = None if extras.bias is None else jnp.moveaxis(ds, 2, -1)
    slopes = None if extras.slopes is None else -jnp.einsum("bklgq,ql->kg", ds, distances(at).astype(dtype))
    if capped is not None:
        ds = ds * (1 - capped * capped)
    ds = (ds * rest).astype(q.dtype)
    # Transposing dq is faster than transposing ds, but for several heads in bf16 the CPU compiler then emits a dot that
    # it does not support.
    narrow = q.dtype != dtype
    dq = multiply("bkld,bklgq->bkgqd", k, ds) if narrow else jnp.moveaxis(multiply("bkld,bklgq->bkdgq", k, ds), 2, -1)
    dq, dk = dq * (rules.scale / rest), multiply("bklgq,bkgqd->bkld", ds, own)
    dv = multiply("bklgq,bkgqd->bkld", dropped.astype(q.dtype), rows.gradient)
    return Gradients(dq, dk, dv, bias, slopes)
