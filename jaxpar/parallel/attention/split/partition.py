"""How a sequence's queries and keys are split, and where the tokens of each part stand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.parallel.attention.mask import Mask
from jaxpar.parallel.attention.split.token_order import Order, into_zigzag, permutation, positions
from jaxpar.parallel.attention.tiled.blockwise import Expected, chosen, in_blocks, tokens_in_blocks
from jaxpar.parallel.attention.tiled.padding import LANES, up
from jaxpar.parallel.attention.tiled.tile import PAD, PAD_SEGMENT, Segments, TileArrays, TileSpec, Tokens

type KeySource = Literal["here", "gather", "ring", "rows"]
type Backend = Literal["jax", "tpu", "interpret"]


@dataclass(frozen=True)
class AttentionPlan:
    """How attention is computed: all that is no array.

    Attributes:
      rules: what is computed.
      keys: how the keys of other devices come: not at all, gathered, from neighbour to neighbour with an online softmax, or
        so with whole rows of scores.
      ring: the mesh axes that queries and keys are split over for ``keys``, major to minor.
      heads: the mesh axes that exchange sequence for heads before, and back after.
      order: how the tokens lie on the devices of ``ring``, unless the extras have their positions.
      relay: they come contiguous, and are brought into that order first and back after.
      kv_grad_dtype: the dtype in which gradients of keys and values go from device to device; ``None`` for that of the sums.
      keep: gathered keys and values are kept for the backward pass.
      block: tokens of a tile's side, at most.
      tile: scores of a tile, at most, if one head's do not exceed it: heads go in parts.
      offset: the position of the first query; the first key's is 0.
      turns: the hops of a ring that some device needs, where a given order tells.
      whole: every device of the ring has all queries, in order, and keeps to its own keys; results are to be merged.
      engine: what computes tiles: plain jax, or a kernel for TPUs, compiled or in its interpreter.
    """

    rules: TileSpec
    keys: KeySource = "here"
    ring: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    order: Order = "contiguous"
    relay: bool = False
    kv_grad_dtype: str | None = None
    keep: bool = False
    block: int = 512
    tile: int = 2**16
    offset: int = 0
    turns: tuple[int, ...] | None = None
    whole: bool = False
    engine: Backend = "jax"

    @property
    def ways(self) -> int:
        """Devices of the ring; inside of a shard_map."""
        return math.prod(jax.lax.axis_size(axis) for axis in self.ring)


@dataclass(frozen=True)
class SequenceSplit:
    """One device's queries and keys, inside of a shard_map.

    Attributes:
      batch: its sequences.
      q_length, k_length: tokens that this device has.
      segments: of these tokens, and of the keys of all devices.
    """

    way: AttentionPlan
    batch: int
    q_length: int
    k_length: int
    segments: Segments
    extras: TileArrays

    @property
    def index(self) -> Any:
        return jax.lax.axis_index(self.way.ring) if self.way.ring else 0

    @property
    def blocks(self) -> tuple[int, int]:
        """Tokens in a block of queries and in a block of keys."""
        if self.way.keys == "rows":
            return self.q_length, self.k_length
        parts = 2 if self.way.order == "zigzag" and self.way.ways > 1 else 1
        cut = side if self.way.engine == "jax" else in_lanes
        return cut(self.q_length // parts, self.way.block), cut(self.k_length // parts, self.way.block)

    def parts(self, kv_heads: int, group: int) -> int:
        """In how many parts key heads go, the fewest that make tiles small enough."""
        if self.way.keys == "rows" or self.way.engine != "jax":
            return 1
        head = self.batch * group * self.blocks[0] * self.blocks[1]
        fits = (n for n in range(1, kv_heads) if kv_heads % n == 0 and head * kv_heads // n <= self.way.tile)
        return next(fits, kv_heads)

    def queries(self) -> Tokens:
        """Where this device's queries stand, in blocks."""
        way, segments = self.way, None if self.segments is None else self.segments[0]
        at = jnp.arange(self.q_length, dtype=jnp.int32) if way.whole else self._positions(self.q_length, self.index)
        at = at + way.offset
        at = at if self.extras.offset is None else at + self.extras.offset
        return tokens_in_blocks(Tokens(at, segments), self.blocks[0])

    def keys(self, distance: int | None = 0) -> Tokens:
        """Where the keys stand of the device that is so many places back in the ring, in blocks; ``None`` for those of all."""
        way, segments = self.way, None if self.segments is None else self.segments[1]
        length = self.k_length * way.ways
        if distance is None:
            every = permutation(way.order, length, way.ways) if self.extras.order is None else self.extras.order
            at = self._filled(every, 0, PAD)
            segments = None if segments is None else self._filled(segments, 1, PAD_SEGMENT)
        else:
            source = (self.index - distance) % way.ways
            at = self._positions(self.k_length, source)
            if segments is not None:
                segments = jax.lax.dynamic_slice_in_dim(segments, source * self.k_length, self.k_length, 1)
        return tokens_in_blocks(Tokens(at, segments), self.blocks[1])

    def _positions(self, length: int, index: Any) -> Any:
        """Of the tokens of a device of the ring, each of which has so many."""
        if self.extras.order is not None:
            return jax.lax.dynamic_slice_in_dim(self.extras.order, index * length, length, 0)
        return positions(self.way.order, length * self.way.ways, self.way.ways, index)

    def extras_of(self, distance: int | None = 0) -> TileArrays:
        """The extras with the bias's columns of those keys, filled up to whole blocks."""
        bias = self.extras.bias
        if bias is None:
            return self.extras
        bias = self._bias_in_order(bias)
        if distance is not None:
            bias = jax.lax.dynamic_slice_in_dim(bias, self._column(distance), self.k_length, 4)
        bias = self._filled(bias, 4, 0)
        missing = [(0, 0)] * 3 + [(0, -n % b) for n, b in zip(bias.shape[3:], self.blocks, strict=True)]
        return self.extras._replace(bias=jnp.pad(bias, missing))

    def put_bias(self, sums: jax.Array, new: jax.Array, distance: int | None = 0) -> jax.Array:
        """``sums``, of all of the bias, with the gradients of the columns of those keys."""
        new = in_pieces(new[:, :, :, : self.q_length], up(self.k_length, self.blocks[1]), 4)
        new = new[..., : self.k_length].reshape(*new.shape[:4], -1)
        return jax.lax.dynamic_update_slice_in_dim(sums, new, self._column(distance), 4)

    def _filled(self, x: Any, axis: int, fill: int) -> Any:
        """``x``, of keys of one or of all devices, with those of each filled up to whole blocks."""
        missing = up(self.k_length, self.blocks[1]) - self.k_length
        if not missing:
            return x
        xp, cut = np if isinstance(x, np.ndarray) else jnp, in_pieces(x, self.k_length, axis)
        cut = xp.pad(cut, [(0, missing * (i == axis + 1)) for i in range(cut.ndim)], constant_values=fill)
        return cut.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    def _bias_in_order(self, bias: jax.Array, *, back: bool = False) -> jax.Array:
        way = self.way
        if not way.relay:
            return bias
        columns = permutation(way.order, self.k_length * way.ways, way.ways)
        bias = bias[..., np.argsort(columns) if back else columns]
        return into_zigzag(bias, way.ring, 3, back=back)

    def bias_gradient(self, sums: jax.Array) -> jax.Array:
        """``sums`` with rows and columns as those of the bias came."""
        return self._bias_in_order(sums, back=True)

    def _column(self, distance: int | None) -> Any:
        return 0 if distance is None else (self.index - distance) % self.way.ways * self.k_length

    @property
    def _by_formula(self) -> bool:
        """Whether positions and mask alone, and none of the arrays, say where tokens stand and what they see of it."""
        return all(x is None for x in (self.extras.prefix, self.extras.offset, self.extras.order))

    def expected(self, distance: Any = 0) -> Expected:
        """How many tiles a device visits of those keys, in the mean of all devices; of a hop that is not known here, in the mean of all but the first.

        Where arrays decide, ``None``; of a kernel, whose cost the compiler's scheduler is told, as many as positions leave.
        """
        way, ways = self.way, self.way.ways
        if not self._by_formula or self.segments is not None or way.rules.mask.where is not None:
            if way.engine == "jax":
                return None
            if not self._by_formula:
                n, m = (
                    up(n, size) // size for n, size in zip((self.q_length, self.k_length), self.blocks, strict=True)
                )
                return 0, n * m * (ways if distance is None else 1)
        hops = [distance] if distance is None or isinstance(distance, int) else range(1, ways)
        counts = np.zeros(2)
        for index in range(ways):
            of_queries = (
                ("contiguous", self.q_length, 1, 0) if way.whole else (way.order, self.q_length * ways, ways, index)
            )
            q = positions(*of_queries) + way.offset  # type: ignore[arg-type]
            for hop in hops:
                if hop is None:
                    k = self._filled(permutation(way.order, self.k_length * ways, ways), 0, PAD)
                else:
                    k = positions(way.order, self.k_length * ways, ways, (index - hop) % ways)
                blocks = (tokens_in_blocks(Tokens(x), n) for x, n in zip((q, k), self.blocks, strict=True))
                rows, columns = blocks
                counts += [some.count for some in chosen(way.rules, rows, columns, self.extras)]
        whole, partly = np.ceil(counts / ways / len(hops))
        return int(whole), int(partly)

    def hops(self) -> tuple[int, ...]:
        """How far back there are keys that some device's queries see; read from positions alone."""
        way, ways = self.way, self.way.ways
        if way.turns is not None:
            return way.turns
        if not self._by_formula:
            return tuple(range(ways))
        parts = 2 if way.order == "zigzag" and ways > 1 else 1

        def chunks(index: int, length: int, offset: int) -> tuple[Any, Any]:
            at = in_blocks(np.asarray(positions(way.order, length * ways, ways, index)) + offset, length // parts, 0)
            return at.min(1), at.max(1)

        def needed(distance: int) -> bool:
            for index in range(ways):
                rows, columns = (
                    chunks(index, self.q_length, way.offset),
                    chunks((index - distance) % ways, self.k_length, 0),
                )
                some, _ = way.rules.mask.bounds(
                    (rows[0][:, None], rows[1][:, None]), (columns[0][None], columns[1][None])
                )
                if np.any(some):
                    return True
            return False

        return tuple(distance for distance in range(ways) if distance == 0 or needed(distance))


def turns_of(mask: Mask, order: Any, ways: int, block: int, offset: int) -> tuple[int, ...]:
    """How far back there are keys that some device's queries see, of tokens that stand at ``order`` [seq], known here.

    >>> turns_of(Mask(causal=True, window=2), np.arange(8), 4, 2, 0)
    (0, 1)
    """
    at = in_blocks(np.asarray(order, np.int64).reshape(ways, -1), block, 1, PAD)
    low, high = np.where(at == PAD, at.max(), at).min(2).T, at.max(2).T
    each = lambda x: (x[:, None, :, None] + offset, x[None, :, None, :])
    (q_low, k_low), (q_high, k_high) = each(low), each(high)
    some, _ = mask.bounds((q_low, q_high), (k_low, k_high))
    seen = np.broadcast_to(some, (ways, ways, *low.shape[1:] * 2)).any((2, 3))
    index = np.arange(ways)
    return tuple(hop for hop in range(ways) if hop == 0 or seen[index, (index - hop) % ways].any())


def in_pieces(x: Any, length: int, axis: int) -> Any:
    """``x`` with ``axis`` as two: pieces, and what is in a piece."""
    return x.reshape(*x.shape[:axis], -1, length, *x.shape[axis + 1 :])


def side(length: int, most: int) -> int:
    """Tokens of a tile's side: the most that divide ``length`` and are no fewer than half of ``most``; else ``most``."""
    if length <= most:
        return length
    return next((size for size in range(most, most // 2, -1) if length % size == 0), most)


def in_lanes(length: int, most: int) -> int:
    """Tokens of a tile's side in a kernel for TPUs: a multiple of 128 that needs the least filling up, and no fewer than half of ``most``.

    >>> [in_lanes(n, 512) for n in (100, 512, 640, 1280, 4096)]
    [128, 512, 384, 256, 512]
    """
    most = min(max(LANES, most // LANES * LANES), up(length, LANES))
    least = up(most // 2, LANES)
    return min(range(most, least - 1, -LANES), key=lambda size: up(length, size))
