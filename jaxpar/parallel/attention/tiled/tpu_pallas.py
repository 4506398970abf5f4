"""Pallas TPU kernels for both passes of :mod:`jaxpar.parallel.attention.tiled.blockwise`, on the same arrays.

Each step of a kernel's grid computes one tile from a list in scalar memory; the length of the list may be traced. Sums
over a row of tiles (for keys and values, a column) stay in vector memory, and their arrays are updated in place: rows
without tiles are not touched, and the hops of a ring need no merging. Scores are computed as keys × queries, [L, Q].
Per-query numbers are then along the lanes, as they are stored, and sums over keys do not cross lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxpar.parallel.attention.tiled.blockwise import Operands, flags
from jaxpar.parallel.attention.tiled.padding import LANES
from jaxpar.parallel.attention.tiled.tile import FAR, PAD, Gradients, Rows, Sums, TileSpec, Tokens

Mode = Literal["tpu", "interpret"]
type Seen = Callable[[], jax.Array]
MASKED, FIRST, LAST, EMPTY, BITS = 1, 2, 4, 8, 4
"""Flag bits of a listed tile, and their number.

A tile is partially masked, the first of its row, the last of its row, or a placeholder that is not computed.
"""
NN, NT, TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))
"""The contracted dims of two matrices."""


class Visit(NamedTuple):
    """The tiles to visit: the first ``count`` of ``tiles``, each ``number << BITS | flags``."""

    tiles: Any
    count: Any


def forward(rules: TileSpec, x: Operands, sums: Sums, *, mode: Mode = "tpu") -> Sums:
    """Returns ``sums`` updated with the given keys; see :func:`jaxpar.parallel.attention.tiled.blockwise.forward`."""
    if (visit := visits(*flags(rules, *x.at, x.extras), by_row=True)) is None:
        return sums
    (q, k, v), job = x[:3], _Job(rules, x, mode)
    side, width, maps = q.shape[5], v.shape[-1], _maps_by_row(q, k)
    inputs = [(q, maps.of_rows), (k, maps.of_columns), (v, maps.of_columns)]
    carried = [(x, maps.of_rows) for x in (sums.values, _flat(sums.greatest), _flat(sums.weights))]
    scratch = [(width, side), (1, side), (1, side)]
    found = job.run(_forward_kernel, "attend_forward", visit, maps, inputs, carried, scratch, q.shape[-1] + width)
    values, greatest, weights = found
    return Sums(values, greatest.reshape(sums.greatest.shape), weights.reshape(sums.weights.shape))


def backward(rules: TileSpec, x: Operands, rows: Rows, sums: Gradients, *, mode: Mode = "tpu") -> Gradients:
    """Returns ``sums`` plus the gradients; see :func:`jaxpar.parallel.attention.tiled.blockwise.backward`.

    Every caller passes zeros for the gradients of keys and values. The kernel therefore only writes them, which saves a
    ring the arrays of zeros.
    """
    some, every = flags(rules, *x.at, x.extras)
    by_row, by_column = visits(some, every, by_row=True), visits(some, every, by_row=False, placeholders=True)
    if by_row is None or by_column is None:
        return sums
    (q, k, v), job, n = x[:3], _Job(rules, x, mode), x.q.shape[0]
    side, length, wide, deep = q.shape[5], k.shape[-2], q.shape[-1], v.shape[-1]
    stats = _flat(rows.lse), _flat(rows.delta)

    def inputs(maps: _IndexMaps) -> list[Any]:
        of_queries = [(x, maps.of_rows) for x in (q, rows.gradient, *stats)]
        return [*of_queries, (k, maps.of_columns), (v, maps.of_columns)]

    maps = _maps_by_row(q, k)
    carried, scratch = [(sums.q, maps.of_rows)], [(wide, side)]
    (dq,) = job.run(_queries_kernel, "attend_backward_q", by_row, maps, inputs(maps), carried, scratch, 2 * wide + deep)
    maps = _IndexMaps(lambda b, h, g, t: (b, h, g, t % n, t // n))
    carried, scratch = [(sums.k, maps.of_columns), (sums.v, maps.of_columns)], [(length, wide), (length, deep)]
    given = maps, inputs(maps), carried, scratch, 2 * wide + 2 * deep
    dk, dv = job.run(_keys_kernel, "attend_backward_kv", by_column, *given, new=True)
    return sums._replace(q=dq, k=dk, v=dv)


def visits(some: Any, every: Any, *, by_row: bool, placeholders: bool = False) -> Visit | None:
    """Returns the list of visible tiles, or ``None`` if it is known to be empty.

    Args:
      some: which tiles are visible at least in part [rows, columns].
      every: which tiles are fully visible [rows, columns].
      by_row: list the tiles row by row, otherwise column by column.
      placeholders: add a placeholder, which is not computed, to every row (or column) without tiles.
    """
    some, every = (some, every) if by_row else (some.T, every.T)
    columns, computed = some.shape[1], some
    if isinstance(some, np.ndarray) and not some.any():
        return None
    if placeholders:
        some = some | (~some.any(1, keepdims=True) & (np.arange(columns) == 0))
    if isinstance(some, np.ndarray):
        xp: Any = np
        numbers: Any = np.flatnonzero(some)
        count: Any = len(numbers)
    else:
        xp, numbers = jnp, jnp.nonzero(some.ravel(), size=some.size, fill_value=0)[0]
        # A kernel runs at least one step. With an empty list that is tile 0, flagged as a placeholder.
        count = jnp.maximum(jnp.sum(some, dtype=jnp.int32), 1)
    row, place = numbers // columns, xp.arange(len(numbers))
    first = (place == 0) | (row != xp.roll(row, 1))
    last = (place == count - 1) | (row != xp.roll(row, -1))
    tile_flags = (~(some & every)).ravel()[numbers] * MASKED + first * FIRST + last * LAST
    tile_flags = tile_flags + (~computed).ravel()[numbers] * EMPTY
    return Visit(jnp.asarray((numbers << BITS) + tile_flags, jnp.int32), count)


class _IndexMaps:
    """Index maps of a kernel's arrays: which block a step of the grid reads.

    Args:
      tile: returns (sequence, key head, query head of it, row, column) from the grid's sequence and heads and the
        number of a tile.
    """

    def __init__(self, tile: Callable[..., tuple[Any, ...]]) -> None:
        def index(block: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
            def of(*step: Any) -> tuple[Any, ...]:
                *outer, tiles, _ = step
                b, h, t, g = (*outer, 0)[:4]
                return block(*tile(b, h, g, tiles[t] >> BITS))

            return of

        self.of_rows = index(lambda b, h, g, i, j: (i, 0, b, h, g, 0, 0))  # over queries and heads [n, 1, B, K, G, …]
        self.of_columns = index(lambda b, h, g, i, j: (j, 0, b, h, 0, 0))  # over keys and heads [m, 1, B, K, …]
        self.row = index(lambda b, h, g, i, j: (i, 0, 0))  # positions of queries [n, 1, Q]
        self.column = index(lambda b, h, g, i, j: (j, 0, 0))
        self.row_of_batch = index(lambda b, h, g, i, j: (i, b, 0, 0))  # segments of queries [n, B, 1, Q]
        self.column_of_batch = index(lambda b, h, g, i, j: (j, b, 0, 0))


def _position_inputs(maps: _IndexMaps, at: tuple[Tokens, Tokens]) -> list[Any]:
    rows, columns = at
    found = [(rows.positions[:, None], maps.row), (columns.positions[:, None], maps.column)]
    if rows.segments is not None:
        found += [(rows.segments[:, :, None], maps.row_of_batch), (columns.segments[:, :, None], maps.column_of_batch)]
    return [(jnp.asarray(x, jnp.int32), index) for x, index in found]


def _maps_by_row(q: jax.Array, k: jax.Array) -> _IndexMaps:
    """Returns the index maps of a list of tiles in rows, with one step for each query head."""
    group, columns = q.shape[4], k.shape[0]
    return _IndexMaps(lambda b, h, _, t: (b, h // group, h % group, t // columns, t % columns))


def _flat(x: jax.Array) -> jax.Array:
    """Reshapes per-query numbers [n, 1, B, K, G, Q] to rows [.., 1, Q]."""
    return x[..., None, :]


@dataclass(frozen=True)
class _Job:
    """The arguments that the kernels of a pass share, as :func:`forward` and :func:`backward` receive them."""

    rules: TileSpec
    x: Operands
    mode: Mode

    def run(
        self,
        kernel: Callable[..., None],
        name: str,
        visit: Visit,
        maps: _IndexMaps,
        inputs: Sequence[tuple[jax.Array, Any]],
        carried: Sequence[tuple[jax.Array, Any]],
        scratch: Sequence[tuple[int, int]],
        products: int,
        *,
        new: bool = False,
    ) -> Sequence[jax.Array]:
        """Runs a kernel and returns ``carried`` updated in place; with ``new``, new arrays of the same shapes.

        Args:
          kernel: computes a tile, from the rules, the tile's list entry, a function that computes its mask, the refs of
            ``inputs``, and those of ``carried`` and ``scratch``.
          name: its name.
          visit: the tiles to visit.
          maps: the index maps of positions and segments.
          inputs, carried: arrays and their index maps.
          scratch: shapes of the sums in vector memory.
          products: the contracted and the resulting sizes of all matmuls of a tile, summed.
          new: whether the kernel only writes ``carried``; its last grid dim is then the query heads of a key head.
        """
        _, _, batch, kv_heads, group, _, _ = self.x.q.shape
        prefix = self.x.extras.prefix
        prefixes = jnp.broadcast_to(0 if prefix is None else prefix, (batch,)).astype(jnp.int32)
        grid = (batch, kv_heads, visit.count, group) if new else (batch, kv_heads * group, visit.count)
        positions, read = _position_inputs(maps, self.x.at), () if new else carried
        arrays = (*inputs, *positions, *read)

        def body(tiles: Any, prefixes: Any, *refs: Any) -> None:
            length = None if prefix is None else prefixes[pl.program_id(0)]
            at = refs[len(inputs) : len(inputs) + len(positions)]
            seen = lambda: _seen(self.rules, at, length)
            kernel(self.rules, tiles[pl.program_id(2)], seen, refs[: len(inputs)], refs[len(inputs) + len(at) :])

        def spec(x: jax.Array, index: Any) -> pl.BlockSpec:
            # A block has the full last two dims and one element of each other dim.
            return pl.BlockSpec((*(None,) * (x.ndim - 2), *x.shape[-2:]), index)

        semantics: Any = ("parallel", "parallel", *("arbitrary",) * (len(grid) - 2))
        call = pl.pallas_call(
            body,
            name=name,
            out_shape=[_alike(x) for x, _ in carried],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=grid,
                in_specs=[spec(*x) for x in arrays],
                out_specs=[spec(*x) for x in carried],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            ),
            input_output_aliases={2 + len(arrays) - len(read) + n: n for n in range(len(read))},
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
            cost_estimate=self._cost(products),
            interpret=self.mode == "interpret",
        )
        return call(visit.tiles, prefixes, *(x for x, _ in arrays))

    def _cost(self, products: int) -> pl.CostEstimate | None:
        """Returns the cost of the average number of tiles; audits read it too."""
        if self.x.expected is None:
            return None
        _, _, batch, kv_heads, group, side, _ = self.x.q.shape
        rows = sum(self.x.expected) * batch * kv_heads * group * self.x.k.shape[-2]
        moved = rows * products * self.x.k.dtype.itemsize
        return pl.CostEstimate(flops=2 * rows * side * products, bytes_accessed=moved, transcendentals=rows * side)


def _alike(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of ``x``, varying over the same manual axes."""
    kind = jax.typeof(x)
    varying = {"manual_axis_type": kind.manual_axis_type} if hasattr(kind, "manual_axis_type") else {"vma": kind.vma}
    return jax.ShapeDtypeStruct(x.shape, x.dtype, **varying)


def _dot(a: jax.Array, b: jax.Array, contracted: tuple[tuple[int], tuple[int]]) -> jax.Array:
    return jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.float32)


def _scores(rules: TileSpec, q: jax.Array, k: jax.Array) -> tuple[jax.Array, Any]:
    """Returns the scores [L, Q], and the tanh of the soft cap (``None`` without one)."""
    s = _dot(k, q, NT) * rules.scale
    if rules.softcap is None:
        return s, None
    capped = jnp.tanh(s * (1 / rules.softcap))
    return rules.softcap * capped, capped


def _seen(rules: TileSpec, positions: Sequence[Any], prefix: Any) -> jax.Array:
    """Returns which keys the queries of a tile see, [L, Q], from positions and any segments."""
    x, y = positions[0][...], _as_column(positions[1][...])
    visible = (x != PAD) & (y != PAD) & rules.mask.visible(x, y, prefix)
    if len(positions) > 2:
        a, b = positions[2][...], _as_column(positions[3][...])
        visible = visible & (a == b) & (a >= 0)
    return visible


def _as_column(x: jax.Array) -> jax.Array:
    """Transposes [1, L] to [L, 1]."""
    return jnp.swapaxes(jnp.broadcast_to(x, (LANES, x.shape[1])), 0, 1)[:, :1]


def _run_tile(tile_flags: Any, tile: Callable[[bool], None]) -> None:
    """Runs ``tile(masked)`` according to the flags of a tile, or nothing for a placeholder."""
    pl.when(tile_flags & (MASKED | EMPTY) == MASKED)(lambda: tile(True))
    pl.when(tile_flags & MASKED == 0)(lambda: tile(False))


def _forward_kernel(rules: TileSpec, tile_flags: Any, seen: Seen, of_tile: Any, rest: Any) -> None:
    q, k, v = of_tile
    values_in, greatest_in, weights_in, values_out, greatest_out, weights_out, values, greatest, weights = rest

    @pl.when(tile_flags & FIRST != 0)
    def _() -> None:
        values[...] = jnp.swapaxes(values_in[...], 0, 1)
        greatest[...], weights[...] = greatest_in[...], weights_in[...]

    def tile(masked: bool) -> None:
        s, _ = _scores(rules, q[...], k[...])
        visible = seen() if masked else None
        s = s if visible is None else jnp.where(visible, s, FAR)
        before = greatest[...]
        most = jnp.maximum(before, jnp.max(s, 0, keepdims=True))
        p = jnp.exp(s - most)
        # A query that sees no key has FAR as its maximum, which would give all keys equal weight.
        p = p if visible is None else jnp.where(visible, p, 0)
        shrunk = jnp.exp(before - most)
        greatest[...], weights[...] = most, weights[...] * shrunk + jnp.sum(p, 0, keepdims=True)
        values[...] = values[...] * shrunk + _dot(v[...], p.astype(v.dtype), TN)

    _run_tile(tile_flags, tile)

    @pl.when(tile_flags & LAST != 0)
    def _() -> None:
        values_out[...] = jnp.swapaxes(values[...], 0, 1)
        greatest_out[...], weights_out[...] = greatest[...], weights[...]


def _weights(rules: TileSpec, refs: Sequence[Any], visible: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the softmax weights of a tile and the gradient of its unscaled scores, both [L, Q]."""
    q, gradient, lse, delta, k, v = refs
    s, capped = _scores(rules, q[...], k[...])
    p = jnp.exp(s - lse[...])
    p = p if visible is None else jnp.where(visible, p, 0)
    ds = p * (_dot(v[...], gradient[...], NT) - delta[...])
    ds = ds if capped is None else ds * (1 - capped * capped)
    return p, (ds * rules.scale).astype(q.dtype)


def _queries_kernel(rules: TileSpec, tile_flags: Any, seen: Seen, of_tile: Any, rest: Any) -> None:
    before, after, sums = rest

    @pl.when(tile_flags & FIRST != 0)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    def tile(masked: bool) -> None:
        _, ds = _weights(rules, of_tile, seen() if masked else None)
        sums[...] += _dot(of_tile[4][...], ds, TN)

    _run_tile(tile_flags, tile)

    @pl.when(tile_flags & LAST != 0)
    def _() -> None:
        after[...] = before[...] + jnp.swapaxes(sums[...], 0, 1)


def _keys_kernel(rules: TileSpec, tile_flags: Any, seen: Seen, of_tile: Any, rest: Any) -> None:
    k_after, v_after, k_sums, v_sums = rest
    head, heads = pl.program_id(3), pl.num_programs(3)

    @pl.when((tile_flags & FIRST != 0) & (head == 0))
    def _() -> None:
        k_sums[...], v_sums[...] = jnp.zeros_like(k_sums), jnp.zeros_like(v_sums)

    def tile(masked: bool) -> None:
        p, ds = _weights(rules, of_tile, seen() if masked else None)
        gradient = of_tile[1][...]
        k_sums[...] += _dot(ds, of_tile[0][...], NN)
        v_sums[...] += _dot(p.astype(gradient.dtype), gradient, NN)

    _run_tile(tile_flags, tile)

    @pl.when((tile_flags & LAST != 0) & (head == heads - 1))
    def _() -> None:
        k_after[...], v_after[...] = k_sums[...], v_sums[...]
