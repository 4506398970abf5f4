"""Attention in tiles in plain JAX: it skips tiles that the mask hides, and masks only partially visible tiles.

The algorithm is FlashAttention (Dao et al. 2022, arXiv:2205.14135), for any mask on any device. Queries are in blocks
[n, P, B, K, G, Q, D], keys and values in blocks [m, P, B, K, L, D], with the heads in P parts. A tile is a block of
queries and a block of keys of one part, small enough for a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.parallel.attention.tiled import tile
from jaxpar.parallel.attention.tiled.tile import Gradients, Rows, Sums, TileArrays, TileSpec, Tokens
from jaxpar.utils.arrays import accumulator
from jaxpar.utils.scope_facts import trip_count_scope

type Expected = tuple[int, int] | None
"""How many unmasked and partially masked tiles a device visits on average; ``None`` if that depends on arrays."""


class Operands(NamedTuple):
    """Queries, keys and values in blocks.

    Attributes:
      q: queries [n, P, B, K, G, Q, D].
      k, v: keys and values [m, P, B, K, L, D].
      at: positions and segments of queries and keys.
      extras: array options.
      expected: the average number of tiles, from
        :meth:`jaxpar.parallel.attention.split.partition.SequenceSplit.expected`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    at: tuple[Tokens, Tokens]
    extras: TileArrays
    expected: Expected = None


class Tiles(NamedTuple):
    """The tiles to visit: the first ``count`` of ``numbers``, where tile (i, j) has the number ``i * columns + j``."""

    numbers: Any
    count: Any


def in_blocks(x: Any, block: int, axis: int, fill: Any = 0) -> Any:
    """Cuts ``axis`` of ``x`` into blocks along a new first axis, and pads the last block with ``fill``."""
    xp = np if isinstance(x, np.ndarray) else jnp
    if missing := -x.shape[axis] % block:
        x = xp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)], constant_values=fill)
    cut = x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
    return xp.moveaxis(cut, axis, 0)


def join_blocks(x: jax.Array, length: int, axis: int) -> jax.Array:
    """Inverts :func:`in_blocks` for an axis of the given length."""
    joined = jnp.moveaxis(x, 0, axis)
    joined = joined.reshape(*joined.shape[:axis], -1, *joined.shape[axis + 2 :])
    return jax.lax.slice_in_dim(joined, 0, length, axis=axis)


def tokens_in_blocks(tokens: Tokens, block: int) -> Tokens:
    """Returns tokens in blocks: positions [n, Q] and segments [n, B, Q]."""
    segments = None if tokens.segments is None else in_blocks(tokens.segments, block, 1, tile.PAD_SEGMENT)
    return Tokens(in_blocks(tokens.positions, block, 0, tile.PAD), segments)


def flags(rules: TileSpec, q: Tokens, k: Tokens, extras: TileArrays) -> tuple[Any, Any]:
    """Returns which tiles [n, m] are visible at least in part, and which of these are fully visible.

    Both follow from the minimum and maximum positions and segments of the blocks, except under a ``where`` function,
    which is evaluated on every tile.
    """
    some, every = _of_positions(rules, q.positions, k.positions, extras)
    if q.segments is not None:
        overlap, equal = _of_segments(q.segments, k.segments)
        some, every = some & overlap, every & equal
    if rules.mask.where is not None:
        some, every = _of_values(rules, q, k, extras, some)
    return some, every & some


def chosen(rules: TileSpec, q: Tokens, k: Tokens, extras: TileArrays) -> tuple[Tiles, Tiles]:
    """Returns the fully visible tiles and the partially visible tiles."""
    some, every = flags(rules, q, k, extras)
    partly = some & ~every
    if isinstance(some, np.ndarray):
        known = (np.flatnonzero(x).astype(np.int32) for x in (every, partly))
        unmasked, masked = (Tiles(numbers, len(numbers)) for numbers in known)
        return unmasked, masked
    # A single sort moves the fully visible tiles to the front and the partially visible ones to the back.
    kinds = jnp.where(every, 0, jnp.where(partly, 2, 1)).ravel()
    numbers = jnp.argsort(kinds).astype(jnp.int32)
    counts = (jnp.sum(x, dtype=jnp.int32) for x in (every, partly))
    return Tiles(numbers, next(counts)), Tiles(numbers[::-1], next(counts))


def _of_positions(rules: TileSpec, q: Any, k: Any, extras: TileArrays) -> tuple[Any, Any]:
    xp = np if isinstance(q, np.ndarray) and isinstance(k, np.ndarray) else jnp
    ends = [
        (xp.min(xp.where(x == tile.PAD, np.iinfo(np.int32).max, x), -1), xp.max(x, -1), xp.min(x, -1) != tile.PAD)
        for x in (q, k)
    ]
    (q_low, q_high, q_full), (k_low, k_high, k_full) = ends
    prefix = None if extras.prefix is None else (xp.min(extras.prefix), xp.max(extras.prefix))
    rows, columns = (q_low[:, None], q_high[:, None]), (k_low[None], k_high[None])
    some, every = rules.mask.bounds(rows, columns, prefix)
    there = (q_high != tile.PAD)[:, None] & (k_high != tile.PAD)[None]
    return some & there, every & q_full[:, None] & k_full[None]


def _of_segments(q: Any, k: Any) -> tuple[Any, Any]:
    (a, b), (c, d) = ((jnp.min(x, -1), jnp.max(x, -1)) for x in (q, k))
    a, b, c, d = a[:, None], b[:, None], c[None], d[None]
    overlap = (jnp.maximum(a, 0) <= d) & (jnp.maximum(c, 0) <= b)
    return jnp.any(overlap, -1), jnp.all((a == b) & (c == d) & (a == c) & (a >= 0), -1)


def _of_values(rules: TileSpec, q: Tokens, k: Tokens, extras: TileArrays, some: Any) -> tuple[Any, Any]:
    """Refines ``some`` under a ``where`` function, which must be evaluated to know what it hides."""
    rows, columns = some.shape

    def look(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        visible = tile.seen(rules, _at(q, k, *_divmod(number, columns)), extras)
        return jnp.any(visible), jnp.all(visible)

    found = jax.lax.map(look, jnp.arange(rows * columns))
    any_seen, all_seen = (x.reshape(rows, columns) for x in found)
    return some & any_seen, all_seen


def visit(rules: TileSpec, x: Operands, one: Callable[..., Any], carry: Any) -> Any:
    """Folds ``one(carry, i, j, part, masked)`` over all tiles to visit.

    Args:
      rules: mask, scale, soft cap and dropout.
      x: the operands.
      one: computes one tile of a part of the heads.
      carry: the initial carry.
    """
    parts, columns, expected = x.q.shape[1], x.at[1].positions.shape[0], x.expected
    for n, (some, masked) in enumerate(zip(chosen(rules, *x.at, x.extras), (False, True), strict=True)):
        if some.count == 0 if isinstance(some.count, int) else expected is not None and not expected[n]:
            continue  # no device has such tiles; the compiler could otherwise overlap a transfer with an empty loop
        numbers = jnp.asarray(some.numbers)

        def step(t: jax.Array, carry: Any, numbers: Any = numbers, masked: bool = masked) -> Any:
            at, part = _divmod(t, parts)
            return one(carry, *_divmod(_pick(numbers, at), columns), part, masked)

        first, last = _start(0, some.count * parts)
        with jax.named_scope("tiles" if expected is None else trip_count_scope(expected[n] * parts)):
            carry = jax.lax.fori_loop(first, last, step, carry)
    return carry


def initial_sums(q: jax.Array, v: jax.Array) -> Sums:
    """Returns the initial sums, of queries that have seen no key yet."""
    rows = zeros(q[..., 0], accumulator(q))
    return Sums(jnp.broadcast_to(rows[..., None], (*rows.shape, v.shape[-1])), rows + tile.FAR, rows)


def zeros(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns zeros of the shape of ``x`` in a dtype, varying over the same manual axes as ``x``."""
    none = jnp.zeros(x.shape, dtype)
    axes = tuple(tile.varies_over(x))
    return jax.lax.pcast(none, axes, to="varying") if axes else none


def forward(rules: TileSpec, x: Operands, sums: Sums) -> Sums:
    """Returns ``sums`` updated with the given keys.

    Args:
      rules: mask, scale, soft cap and dropout.
      x: the operands.
      sums: the sums over the keys so far.
    """

    def one(sums: Sums, i: jax.Array, j: jax.Array, part: jax.Array, masked: bool) -> Sums:
        (q, own), (k, v) = _pick((x.q, sums), i, part), _pick((x.k, x.v), j, part)
        here = _extras_of_tile(x, i, j, part)
        new = tile.forward(rules, q, k, v, _at(*x.at, i, j), here, own, masked)
        return jax.tree.map(lambda x, y: _put(x, y, i, part), sums, new)

    return visit(rules, x, one, sums)


def finished(sums: Sums) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the result, the log-sum-exp of each query, and what its rounding lost.

    The first two are 0 and -inf for a query that has seen no key. Where a bias lowers all scores of a query to -1e9,
    the log-sum-exp cannot hold the logarithm of the number of keys: fp32 numbers are 64 apart there.
    """
    empty = sums.weights == 0
    weights = jnp.where(empty, 1, sums.weights)
    log = jnp.log(weights)
    lse = sums.greatest + log
    lost = jnp.where(empty, 0, log - (lse - sums.greatest))
    return sums.values / weights[..., None], jnp.where(empty, -jnp.inf, lse), lost


def rows_of(o: jax.Array, lse: jax.Array, lost: jax.Array | None, gradient: jax.Array, lse_gradient: jax.Array) -> Rows:
    """Returns what the backward pass needs per query, from the forward pass and the gradients of its first two results.

    Every gradient is linear in ``gradient`` and ``delta``, with weights ``exp(score - lse)``. Both therefore take the
    factor that corrects the weights for the rounding of ``lse``.
    """
    delta = jnp.sum(o.astype(lse.dtype) * gradient.astype(lse.dtype), -1) - lse_gradient.astype(lse.dtype)
    if lost is not None:
        factor = jnp.exp(-lost)
        gradient, delta = (gradient * factor[..., None]).astype(gradient.dtype), delta * factor
    return Rows(gradient, jnp.where(jnp.isneginf(lse), 0, lse), delta)


def not_before[T](x: T, results: jax.Array) -> T:
    """Returns ``x`` with a data dependence on ``results``, so that nothing is computed from it earlier.

    XLA's CPU compiler schedules instructions without dependences first: the blocks and zeros of the backward pass would
    occupy memory during the forward pass. The compiler drops optimization barriers before it schedules, but it keeps a
    select.
    """
    never = results[(0,) * results.ndim] < -jnp.inf
    return jax.tree.map(lambda a: jnp.where(never, jnp.ones((), a.dtype), a), x)


def no_gradients(q: jax.Array, k: jax.Array, v: jax.Array, extras: TileArrays) -> Gradients:
    """Returns the initial sums of gradients, all 0, in the dtype of the scores: a bias may have another one."""
    dtype = accumulator(q)
    bias, slopes = (None if x is None else zeros(x, dtype) for x in (extras.bias, extras.slopes))
    return Gradients(zeros(q, dtype), zeros(k, dtype), zeros(v, dtype), bias, slopes)


def backward(rules: TileSpec, x: Operands, rows: Rows, sums: Gradients) -> Gradients:
    """Returns ``sums`` plus the gradients of the given queries and keys.

    Args:
      rules: mask, scale, soft cap and dropout.
      x: the operands.
      rows: the gradient of the result, the log-sum-exp and delta of each query, in blocks.
      sums: the sums of gradients so far.
    """

    def one(sums: Gradients, i: jax.Array, j: jax.Array, part: jax.Array, masked: bool) -> Gradients:
        (q, own), (k, v) = _pick((x.q, rows), i, part), _pick((x.k, x.v), j, part)
        here = _extras_of_tile(x, i, j, part)
        new = tile.backward(rules, q, k, v, _at(*x.at, i, j), here, own, masked)
        add = lambda x, y, n: _put(x, _pick(x, n, part) + y, n, part)
        bias = None if sums.bias is None else _add_bias(sums.bias, new.bias, i, j, part)
        slopes = None if sums.slopes is None else _add_slopes(sums.slopes, new.slopes, part)
        return Gradients(add(sums.q, new.q, i), add(sums.k, new.k, j), add(sums.v, new.v, j), bias, slopes)

    return visit(rules, x, one, sums)


def _at(q: Tokens, k: Tokens, i: Any, j: Any) -> tuple[Tokens, Tokens]:
    return _pick(q, i), _pick(k, j)


def _pick(tree: Any, *numbers: Any) -> Any:
    """Returns element ``[numbers]`` of every array in ``tree``."""

    def pick(x: Any) -> jax.Array:
        size = (1,) * len(numbers) + x.shape[len(numbers) :]
        start = _start(*numbers, *(0,) * (x.ndim - len(numbers)))
        return _slice(jnp.asarray(x), start, size).reshape(x.shape[len(numbers) :])

    return jax.tree.map(pick, tree)


def _put(x: jax.Array, y: jax.Array, *numbers: Any) -> jax.Array:
    start = _start(*numbers, *(0,) * y.ndim)
    return _update(x, y.reshape((1,) * len(numbers) + y.shape), start)


def _start(*numbers: Any) -> tuple[Any, ...]:
    """Casts start indices to int32: dynamic slices require a single dtype, also with 64-bit types enabled."""
    return tuple(np.int32(n) if isinstance(n, int) else jnp.asarray(n, jnp.int32) for n in numbers)


# Indices are never negative here. By default JAX emits code for negative indices in each dim of every slice, which was
# half of a ring's program.
_slice = functools.partial(jax.lax.dynamic_slice, allow_negative_indices=False)
_update = functools.partial(jax.lax.dynamic_update_slice, allow_negative_indices=False)


def _divmod(number: Any, size: int) -> tuple[Any, Any]:
    """Returns quotient and remainder of a non-negative number."""
    if size == 1:
        return number, 0
    dividend = jnp.asarray(number)
    divisor = jnp.asarray(size, dividend.dtype)  # a loop counter is int64 with 64-bit types enabled
    return jax.lax.div(dividend, divisor), jax.lax.rem(dividend, divisor)


def _extras_of_tile(x: Operands, i: Any, j: Any, part: Any) -> TileArrays:
    extras, kv_heads = x.extras, x.q.shape[3]
    if extras.slopes is not None:
        extras = extras._replace(slopes=_part(extras.slopes, part, kv_heads))
    if extras.numbers is not None:
        sequences, head = extras.numbers
        extras = extras._replace(numbers=(sequences, head + part * kv_heads * x.q.shape[4]))
    if extras.bias is not None:
        extras = extras._replace(bias=_bias_tile(extras.bias, (i, j, part), (x.q.shape[-2], x.k.shape[-2], kv_heads)))
    return extras


def _part(slopes: jax.Array, part: Any, heads: int) -> jax.Array:
    return _slice(slopes, _start(part * heads, 0), (heads, slopes.shape[1]))


def _add_slopes(sums: jax.Array, new: jax.Array, part: Any) -> jax.Array:
    return _update(sums, _part(sums, part, len(new)) + new, _start(part * len(new), 0))


def _bias_tile(bias: jax.Array, index: tuple[Any, Any, Any], sizes: tuple[int, int, int]) -> jax.Array:
    return _slice(bias, *_window(bias, index, sizes))


def _add_bias(sums: jax.Array, new: jax.Array, *index: Any) -> jax.Array:
    sizes = new.shape[-2], new.shape[-1], new.shape[1]
    folded = tuple(n for n in range(3) if sums.shape[n] == 1)
    start, _ = _window(sums, index, sizes)
    new = jnp.sum(new, axis=folded, keepdims=True) + _bias_tile(sums, index, sizes)
    return _update(sums, new, start)


def _window(
    bias: jax.Array, index: tuple[Any, ...], sizes: tuple[int, int, int]
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Returns the start and the size of a tile in a bias [B or 1, K or 1, G or 1, queries, keys]."""
    (i, j, part), (rows, columns, heads) = index, sizes
    heads, first = (1, 0) if bias.shape[1] == 1 else (heads, part * heads)
    return _start(0, first, 0, i * rows, j * columns), (bias.shape[0], heads, bias.shape[2], rows, columns)
