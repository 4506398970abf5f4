"""``AttentionPlan`` and ``SequenceSplit``: how queries and keys are sharded, and the positions of their tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.parallel.attention.mask import Mask
from jaxpar.parallel.attention.split import token_order
from jaxpar.parallel.attention.split.token_order import Order, permutation
from jaxpar.parallel.attention.tiled.blockwise import Expected, chosen, tokens_in_blocks
from jaxpar.parallel.attention.tiled.padding import LANES, up
from jaxpar.parallel.attention.tiled.tile import PAD, PAD_SEGMENT, Segments, TileArrays, TileSpec, Tokens

type KeySource = Literal["here", "gather", "ring", "rows"]
type Backend = Literal["jax", "tpu", "interpret"]


@dataclass(frozen=True)
class AttentionPlan:
    """The static part of an attention: everything that is not an array.

    Attributes:
      rules: mask, scale, soft cap and dropout.
      keys: how a device gets the keys of other devices: ``here`` (not at all), ``gather``, ``ring`` (from neighbour to
        neighbour with an online softmax) or ``rows`` (a ring with complete rows of scores).
      ring: the mesh axes that shard queries and keys for ``keys``, major to minor.
      heads: the mesh axes that exchange sequence for heads before the attention, and back after it.
      order: the order of the tokens on the devices of ``ring``, unless the extras contain explicit positions.
      relay: the tokens arrive contiguous; the attention reorders them into ``order`` first and back afterwards.
      kv_grad_dtype: the dtype in which devices send gradients of keys and values; ``None`` for that of the sums.
      keep: whether gathered keys and values are kept for the backward pass.
      block: the maximum number of tokens on a tile's side.
      tile: the maximum number of scores in a tile. Heads are processed in parts of this size, but at least one at a
        time.
      offset: the position of the first query, relative to the first key.
      turns: the hops of a ring that some device needs, if an explicit order determines them.
      full_queries: every device of the ring has all queries in order and attends only to its own keys; the caller
        merges the results.
      engine: the backend that computes tiles: plain JAX, or the TPU kernel, compiled or interpreted.
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
    full_queries: bool = False
    engine: Backend = "jax"

    @property
    def ring_size(self) -> int:
        """The number of devices in the ring; only valid inside a ``shard_map``."""
        return int(jax.lax.axis_size(self.ring))


@dataclass(frozen=True)
class SequenceSplit:
    """One device's share of the queries and keys, inside a ``shard_map``.

    Attributes:
      plan: the plan.
      batch: number of local sequences.
      q_length, k_length: number of local queries and keys.
      segments: segment ids of the local queries, and of the keys of all devices.
      extras: array options.
    """

    plan: AttentionPlan
    batch: int
    q_length: int
    k_length: int
    segments: Segments
    extras: TileArrays

    @property
    def index(self) -> Any:
        return jax.lax.axis_index(self.plan.ring) if self.plan.ring else 0

    @property
    def blocks(self) -> tuple[int, int]:
        """The number of tokens in a block of queries and in a block of keys."""
        if self.plan.keys == "rows":
            return self.q_length, self.k_length
        parts = 2 if self.plan.order == "zigzag" and self.plan.ring_size > 1 else 1
        cut = side if self.plan.engine == "jax" else in_lanes
        return cut(self.q_length // parts, self.plan.block), cut(self.k_length // parts, self.plan.block)

    def parts(self, kv_heads: int, group: int) -> int:
        """Returns the smallest number of parts of the key heads that keeps tiles within ``plan.tile`` scores."""
        if self.plan.keys == "rows" or self.plan.engine != "jax":
            return 1
        head = self.batch * group * self.blocks[0] * self.blocks[1]
        fits = (n for n in range(1, kv_heads) if kv_heads % n == 0 and head * kv_heads // n <= self.plan.tile)
        return next(fits, kv_heads)

    def queries(self) -> Tokens:
        """Returns positions and segments of this device's queries, in blocks."""
        plan, segments = self.plan, None if self.segments is None else self.segments[0]
        if plan.full_queries:
            at: Any = jnp.arange(self.q_length, dtype=jnp.int32)
        else:
            at = self._positions(self.q_length, self.index)
        at = at + plan.offset
        at = at if self.extras.offset is None else at + self.extras.offset
        return tokens_in_blocks(Tokens(at, segments), self.blocks[0])

    def keys(self, distance: int | None = 0) -> Tokens:
        """Returns positions and segments of the keys of the device ``distance`` places back in the ring, in blocks.

        With ``None``, those of all devices' keys.
        """
        plan, segments = self.plan, None if self.segments is None else self.segments[1]
        length = self.k_length * plan.ring_size
        if distance is None:
            every = permutation(plan.order, length, plan.ring_size) if self.extras.order is None else self.extras.order
            at = self._pad_to_blocks(every, 0, PAD)
            segments = None if segments is None else self._pad_to_blocks(segments, 1, PAD_SEGMENT)
        else:
            source = (self.index - distance) % plan.ring_size
            at = self._positions(self.k_length, source)
            if segments is not None:
                segments = jax.lax.dynamic_slice_in_dim(segments, source * self.k_length, self.k_length, 1)
        return tokens_in_blocks(Tokens(at, segments), self.blocks[1])

    def _positions(self, length: int, index: Any) -> Any:
        """Returns the positions of the ``length`` tokens of ring device ``index``."""
        if self.extras.order is not None:
            return jax.lax.dynamic_slice_in_dim(self.extras.order, index * length, length, 0)
        return token_order.positions(self.plan.order, length * self.plan.ring_size, self.plan.ring_size, index)

    def extras_of(self, distance: int | None = 0) -> TileArrays:
        """Returns the extras with the bias columns of the keys ``distance`` places back, padded to complete blocks."""
        bias = self.extras.bias
        if bias is None:
            return self.extras
        bias = self.bias_in_order(bias)
        if distance is not None:
            bias = jax.lax.dynamic_slice_in_dim(bias, self._column(distance), self.k_length, 4)
        bias = self._pad_to_blocks(bias, 4, 0)
        missing = [(0, 0)] * 3 + [(0, -n % b) for n, b in zip(bias.shape[3:], self.blocks, strict=True)]
        return self.extras._replace(bias=jnp.pad(bias, missing))

    def put_bias(self, sums: jax.Array, new: jax.Array, distance: int | None = 0) -> jax.Array:
        """Writes the bias gradients ``new`` of the keys ``distance`` places back into those of the full bias."""
        new = in_pieces(new[:, :, :, : self.q_length], up(self.k_length, self.blocks[1]), 4)
        new = new[..., : self.k_length].reshape(*new.shape[:4], -1)
        return jax.lax.dynamic_update_slice_in_dim(sums, new, self._column(distance), 4)

    def _pad_to_blocks(self, x: Any, axis: int, fill: int) -> Any:
        """Pads each device's part of ``x``, an array over the keys of one or all devices, to complete blocks."""
        if not (missing := up(self.k_length, self.blocks[1]) - self.k_length):
            return x
        xp, cut = np if isinstance(x, np.ndarray) else jnp, in_pieces(x, self.k_length, axis)
        cut = xp.pad(cut, [(0, missing * (i == axis + 1)) for i in range(cut.ndim)], constant_values=fill)
        return cut.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    def bias_in_order(self, bias: jax.Array, *, back: bool = False) -> jax.Array:
        """Returns a bias, or with ``back`` its gradient, with rows and columns in the order of the ring's tokens."""
        plan = self.plan
        if not plan.relay:
            return bias
        columns = permutation(plan.order, self.k_length * plan.ring_size, plan.ring_size)
        bias = bias[..., np.argsort(columns) if back else columns]
        return token_order.into_zigzag(bias, plan.ring, 3, back=back)

    def _column(self, distance: int | None) -> Any:
        return 0 if distance is None else (self.index - distance) % self.plan.ring_size * self.k_length

    @property
    def _by_formula(self) -> bool:
        """Whether the plan alone determines positions and prefixes, without arrays."""
        return all(x is None for x in (self.extras.prefix, self.extras.offset, self.extras.order))

    def expected(self, distance: Any = 0) -> Expected:
        """Returns how many unmasked and partially masked tiles a device visits, on average over devices.

        For a traced ``distance``, the average also runs over all hops but the first. If arrays determine the tiles, the
        result is ``None`` in plain JAX. The TPU kernel needs a number for the compiler's scheduler: it gets the count
        from positions alone, or all tiles if arrays determine positions or prefixes.

        Args:
          distance: counts the keys of the device ``distance`` places back in the ring; ``None`` for all keys.
        """
        plan, ring_size = self.plan, self.plan.ring_size
        if not self._by_formula or self.segments is not None or plan.rules.mask.where is not None:
            if plan.engine == "jax":
                return None
            if not self._by_formula:
                lengths = zip((self.q_length, self.k_length), self.blocks, strict=True)
                tiles = math.prod(-(-length // block) for length, block in lengths)
                return 0, tiles * (ring_size if distance is None else 1)
        hops = [distance] if distance is None or isinstance(distance, int) else range(1, ring_size)
        counts = np.zeros(2)
        for index in range(ring_size):
            q = np.arange(self.q_length) if plan.full_queries else self._positions(self.q_length, index)
            for hop in hops:
                if hop is None:
                    k = self._pad_to_blocks(permutation(plan.order, self.k_length * ring_size, ring_size), 0, PAD)
                else:
                    k = self._positions(self.k_length, (index - hop) % ring_size)
                at = zip((q + plan.offset, k), self.blocks, strict=True)
                rows, columns = (tokens_in_blocks(Tokens(x), block) for x, block in at)
                counts += [some.count for some in chosen(plan.rules, rows, columns, self.extras)]
        unmasked, masked = np.ceil(counts / ring_size / len(hops))
        return int(unmasked), int(masked)

    def hops(self) -> tuple[int, ...]:
        """Returns the distances in the ring at which some device's queries see keys, judged by positions alone."""
        plan, ring_size = self.plan, self.plan.ring_size
        if plan.turns is not None:
            return plan.turns
        if not self._by_formula:
            return tuple(range(ring_size))
        parts = 2 if plan.order == "zigzag" and ring_size > 1 else 1
        lengths = self.q_length, self.k_length
        q, k = (token_order.positions_of_all(plan.order, length * ring_size, ring_size) for length in lengths)
        chunks = self.q_length // parts, self.k_length // parts
        return needed_hops(visible_blocks(plan.rules.mask, (q + plan.offset, k), chunks))


def visible_blocks(mask: Mask, at: tuple[Any, Any], blocks: tuple[int, int]) -> Any:
    """Returns which blocks of queries may see which blocks of keys, ``[ring, blocks, ring, blocks]``.

    Args:
      mask: which keys a query sees.
      at: the known positions of each device's queries and keys ``[ring, tokens]``.
      blocks: tokens in a block of queries and in one of keys; only the minimum and maximum positions of a block count.
    """
    ends = []
    for x, block in zip(at, blocks, strict=True):
        starts = np.arange(0, x.shape[1], block)  # the last block of a device may be shorter
        ends.append((np.minimum.reduceat(x, starts, 1), np.maximum.reduceat(x, starts, 1)))
    (q_low, q_high), (k_low, k_high) = ends
    some, _ = mask.bounds((q_low[:, :, None, None], q_high[:, :, None, None]), (k_low, k_high))
    return np.broadcast_to(some, (*q_low.shape, *k_low.shape))


def needed_hops(visible: Any) -> tuple[int, ...]:
    """Returns the distances in the ring at which some device's queries see keys, from :func:`visible_blocks`."""
    needed = token_order.by_hop(visible.any((1, 3))).any(0)
    return tuple(hop for hop in range(len(needed)) if hop == 0 or needed[hop])


def turns_of(mask: Mask, order: Any, ring_size: int, block: int, offset: int) -> tuple[int, ...]:
    """Returns the distances in the ring at which some device's queries see keys, for tokens in an explicit order.

    Args:
      mask: which keys a query sees.
      order: the known position of each token ``[seq]``.
      ring_size: number of devices in the ring.
      block: tokens per block; the function compares the minimum and maximum positions of blocks.
      offset: the position of the first query.

    >>> turns_of(Mask(causal=True, window=2), np.arange(8), 4, 2, 0)
    (0, 1)
    """
    at = np.asarray(order, np.int64).reshape(ring_size, -1)
    return needed_hops(visible_blocks(mask, (at + offset, at), (block, block)))


def in_pieces(x: Any, length: int, axis: int) -> Any:
    """Splits ``axis`` of ``x`` into two: pieces, and the elements of a piece."""
    return x.reshape(*x.shape[:axis], -1, length, *x.shape[axis + 1 :])


def side(length: int, most: int) -> int:
    """Returns a tile's side: ``length`` up to ``most``, else its largest divisor in (most / 2, most], else ``most``."""
    if length <= most:
        return length
    return next((size for size in range(most, most // 2, -1) if length % size == 0), most)


def in_lanes(length: int, most: int) -> int:
    """Returns a tile's side in a TPU kernel: the multiple of 128 from most / 2 to most that pads ``length`` least.

    >>> [in_lanes(n, 512) for n in (100, 512, 640, 1280, 4096)]
    [128, 512, 384, 256, 512]
    """
    most = min(max(LANES, most // LANES * LANES), up(length, LANES))
    least = up(most // 2, LANES)
    return min(range(most, least - 1, -LANES), key=lambda size: up(length, size))
