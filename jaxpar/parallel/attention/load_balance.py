"""``balance``: how much of an attention each device computes, counted from positions alone.

Counting needs no devices and no array of size seq². A tile is a block of queries against a block of keys, the unit that
:mod:`jaxpar.parallel.attention.tiled.blockwise` visits or skips.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from jaxpar.errors import ConfigError, LayoutError, unknown
from jaxpar.parallel.attention.mask import Mask
from jaxpar.parallel.attention.split.partition import side
from jaxpar.parallel.attention.split.token_order import Order, by_hop, check, permutation
from jaxpar.parallel.attention.tiled.blockwise import in_blocks
from jaxpar.parallel.attention.tiled.tile import PAD, PAD_SEGMENT

Impl = Literal["ring", "ring_self_attention", "gather", "ulysses", "hybrid"]
IMPLS: tuple[str, ...] = get_args(Impl)
type Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Grid:
    """All tiles of an attention, with rows and columns in the order in which the tokens are stored.

    Attributes:
      first: the minimum position in each block ``[n]``.
      device: the device that stores each block ``[n]``.
      visible: number of visible scores in each tile ``[n, n]``.
      visited: whether each tile is computed ``[n, n]``.
      block: tokens on a tile's side.
    """

    first: Ints
    device: Ints
    visible: Ints
    visited: np.ndarray[Any, np.dtype[np.bool_]]
    block: int

    @property
    def size(self) -> int:
        """The number of scores in a tile."""
        return self.block**2


@dataclass(frozen=True, eq=False)
class Balance:
    """How many scores of one head of one sequence each device computes.

    Attributes:
      mask, seq, num_shards, impl: the arguments of :func:`balance`.
      order: the order's name; ``given`` for a permutation.
      block: tokens on a tile's side.
      visible: number of visible scores ``[num_shards, hops]``. A tile on the causal diagonal counts those on and below
        it.
        There is only one column if no device waits for another (``gather``, ``ulysses``).
      visited: number of scores in computed tiles ``[num_shards, hops]``. A computed tile counts in full, also on the
        diagonal.
    """

    mask: Mask
    seq: int
    num_shards: int
    impl: str
    order: str
    block: int
    visible: Any
    visited: Any

    @property
    def per_device(self) -> list[float]:
        """The visible scores of each device."""
        return [float(n) for n in self.visible.sum(1)]

    @property
    def per_hop(self) -> list[float]:
        """The visible scores of the slowest device in each hop, for which the other devices of a ring wait."""
        return [float(n) for n in self.visible.max(0)]

    @property
    def ratio(self) -> float:
        """The critical path (each hop's slowest device) over the mean work per device, in visible scores; at best 1."""
        return _ratio(self.visible)

    @property
    def tile_ratio(self) -> float:
        """The same as :attr:`ratio`, in scores of computed tiles."""
        return _ratio(self.visited)

    def report(self) -> str:
        """Returns a table with one row per device."""
        mean = self.visible.sum() / self.num_shards
        share = lambda n: f"{100 * n / mean:.1f} %" if mean else "-"
        rows = [("device", "visible scores", "of the mean", "in computed tiles")]
        for i, (n, m) in enumerate(zip(self.visible.sum(1), self.visited.sum(1), strict=True)):
            rows.append((str(i), f"{n:,.0f}", share(n), f"{m:,.0f}"))
        wide = [max(len(row[i]) for row in rows) for i in range(4)]
        table = ["  ".join(cell.rjust(n) for cell, n in zip(row, wide, strict=True)) for row in rows]
        how = f"{self.impl}, {self.order}" if self.impl != "ulysses" else self.impl
        hops = f", {self.visible.shape[1]} hops" if self.visible.shape[1] > 1 else ""
        title = (
            f"{describe(self.mask)}: {self.seq:,} tokens over {self.num_shards} devices, {how}, tiles of {self.block}"
        )
        path = f"{self.ratio:.3f} × the mean in visible scores, {self.tile_ratio:.3f} × in computed tiles"
        return "\n".join([title, *table, f"critical path{hops}: {path}"])


def balance(
    mask: Mask,
    seq: int,
    num_shards: int,
    order: Order | np.ndarray[Any, Any] = "zigzag",
    *,
    block: int = 512,
    segment_ids: Any = None,
    impl: Impl = "ring",
    ulysses: int = 1,
) -> Balance:
    """Returns how much of an attention's work each device of a sharded sequence computes.

    Args:
      mask: which keys a query sees. A ``where`` function is called tile by tile for all tiles that the rest of the mask
        does not hide, up to seq² positions in total.
      seq: number of queries, and of keys.
      num_shards: number of devices that shard the sequence.
      order: the order of the tokens on the devices, or the position of each stored token ``[seq]``, such as
        :func:`jaxpar.context.balanced_packing` returns.
      block: the maximum number of tokens on a tile's side, as for :func:`jaxpar.attention`.
      segment_ids: integers ``[seq]`` in the order of positions. A token sees only its own segment; negative ids are
        padding.
      impl: with ``ring`` and ``ring_self_attention`` each hop takes as long as its slowest device, and
        ``ring_self_attention`` computes all scores of a hop. With ``gather`` no device waits between tiles. With
        ``ulysses`` each device has all tokens of some heads. With ``hybrid`` the ring consists of groups of devices;
        each device has all tokens of its group and some heads.
      ulysses: number of devices in such a group.

    Returns:
      The scores per device and hop.

    Raises:
      ConfigError: the order or the implementation is unknown.
      LayoutError: the sequence or the devices do not divide, or ``order`` or ``segment_ids`` do not fit the sequence.

    >>> (
    ...     round(balance(Mask(causal=True), 4096, 8).ratio, 3),
    ...     balance(Mask(causal=True), 4096, 8, "contiguous").ratio > 1.8,
    ... )
    (1.0, True)
    """
    if impl not in IMPLS:
        raise ConfigError(f"balance: {unknown('impl', impl, IMPLS, 'implementations')}")
    if (impl == "hybrid") != (ulysses > 1) or num_shards % ulysses:
        raise LayoutError(
            f"balance: impl {impl!r} on {num_shards} devices does not support ulysses={ulysses}. Remedy: with "
            f"impl='hybrid' use a divisor of {num_shards}, 2 or more; with another impl use ulysses=1."
        )
    exchange_size = num_shards if impl == "ulysses" else ulysses
    parts = num_shards // exchange_size
    if exchange_size > 1:
        check("contiguous", seq, num_shards)
    found = grid_of(mask, seq, parts, order, block=block, segment_ids=segment_ids)
    visible = _by_hop(found.visible, found.device, parts)
    visited = _by_hop(found.visited * found.size, found.device, parts)
    if impl == "ring_self_attention":
        # Rows of scores are computed in full; a hop that no device needs is skipped.
        visited = np.where(visited.any(0), (seq // num_shards) ** 2, 0) * np.ones_like(visited)
    if impl in ("gather", "ulysses"):
        visible, visited = visible.sum(1, keepdims=True), visited.sum(1, keepdims=True)
    # Every device of a group has all tokens of the group and a share of the heads.
    visible, visited = (np.repeat(x / exchange_size, exchange_size, 0) for x in (visible, visited))
    name = order if isinstance(order, str) else "given"
    return Balance(mask, seq, num_shards, impl, name, found.block, visible, visited)


def places(order: Order | np.ndarray[Any, Any], seq: int, num_shards: int) -> Ints:
    """Returns the positions of each device's tokens ``[num_shards, seq / num_shards]``.

    Raises:
      ConfigError: the order is unknown.
      LayoutError: the sequence does not divide, or ``order`` is not a permutation.
    """
    if isinstance(order, str):
        return permutation(order, seq, num_shards).astype(np.int64).reshape(num_shards, -1)
    given = np.asarray(order)
    if given.shape != (seq,) or not np.array_equal(np.sort(given), np.arange(seq)):
        raise LayoutError(
            f"balance: order must be a permutation of {seq} positions, got {given.dtype}{list(given.shape)}. Remedy: "
            f"use jp.context.balanced_packing(...), or a name: 'zigzag', 'striped', 'contiguous'."
        )
    if seq % num_shards:
        raise LayoutError(
            f"balance: {seq} tokens cannot be split evenly over {num_shards} devices. Remedy: use a multiple of "
            f"{num_shards} tokens."
        )
    return given.astype(np.int64).reshape(num_shards, -1)


def grid_of(mask: Mask, seq: int, num_shards: int, order: Any, *, block: int, segment_ids: Any = None) -> Grid:
    """Returns the tiles of an attention; for arguments and errors see :func:`balance`."""
    at = places(order, seq, num_shards)
    halves = 2 if isinstance(order, str) and order == "zigzag" and num_shards > 1 else 1
    return grid(mask, at, side(at.shape[1] // halves, block), _segments(segment_ids, seq))


def grid(mask: Mask, at: Ints, block: int, segment_ids: Ints | None = None) -> Grid:
    """Returns the tiles of queries and keys in blocks of ``block`` tokens.

    Args:
      mask: which keys a query sees.
      at: the positions of each device's tokens ``[num_shards, length]``.
      block: tokens on a tile's side.
      segment_ids: integers ``[seq]`` in the order of positions.
    """
    cut = lambda x, fill: np.moveaxis(in_blocks(x, block, 1, fill), 0, 1).reshape(-1, block)
    positions = cut(at, PAD)
    own = np.zeros(at.size, np.int64) if segment_ids is None else numbered(segment_ids)
    segments = cut(own[at], PAD_SEGMENT)
    is_token = positions != PAD
    low, high = np.where(is_token, positions, at.size).min(1), positions.max(1)
    bounds = mask.bounds((low[:, None], high[:, None]), (low[None], high[None]))
    some, every = (np.broadcast_to(x, (len(low), len(low))) for x in bounds)
    a, b = segments.min(1), segments.max(1)
    overlap = (np.maximum(a, 0)[:, None] <= b[None]) & (np.maximum(a, 0)[None] <= b[:, None])
    one_segment = (a == b) & (a >= 0)
    visited = some & overlap
    full = every & visited & one_segment[:, None] & one_segment[None] & (a[:, None] == a[None])
    visible = full * np.int64(block * block)
    if mask.where is not None:
        _count_by_value(mask, positions, segments, visited, visible)
        visited = visible > 0
    else:
        _count_by_range(mask, positions, segments, visited & ~full, visible)
    device = np.repeat(np.arange(len(at)), len(low) // len(at))
    return Grid(low, device, visible, visited, block)


def describe(mask: Mask) -> str:
    """Returns a description of a mask.

    >>> describe(Mask(window=128)), describe(Mask(causal=False))
    ('causal, window 128', 'everything')
    """
    words = ["causal"] if mask.causal else []
    words += [f"{name} {value}" for name in ("window", "prefix", "chunk") if (value := getattr(mask, name)) is not None]
    words += ["where"] if mask.where is not None else []
    return ", ".join(words) or "everything"


def _count_by_value(mask: Mask, positions: Ints, segments: Ints, some: Any, visible: Ints) -> None:
    """Fills in ``visible`` for the tiles in ``some`` by evaluating the mask at every position."""
    for i, j in np.argwhere(some):
        # ``where`` must only get positions of real tokens: filler tokens get the block's last position, and no segment.
        q, k = (np.where(x == PAD, x.max(), x) for x in (positions[i], positions[j]))
        seen = np.asarray(mask.visible(q[:, None], k[None]))
        same = (segments[i][:, None] == segments[j][None]) & (segments[i] >= 0)[:, None]
        visible[i, j] = np.count_nonzero(seen & same)


def _count_by_range(mask: Mask, positions: Ints, segments: Ints, some: Any, visible: Ints) -> None:
    """Fills in ``visible`` for the tiles in ``some``: the keys that a query sees are contiguous ranges of positions."""
    length = int(positions.max()) + 1
    # Clamp sizes of any magnitude to the number of positions, so that the sums below do not overflow.
    within_reach = lambda size: None if size is None else min(size, length)
    before, behind = map(within_reach, mask.sides)
    prefix, chunk = within_reach(mask.prefix), within_reach(mask.chunk)
    for j in np.flatnonzero(some.any(0)):
        rows = np.flatnonzero(some[:, j])
        q, own = positions[rows], segments[rows]
        # Sorted by segment and then by position, the keys that a query sees are contiguous.
        keys = np.sort((segments[j] * length + positions[j])[segments[j] >= 0])
        least, most = np.zeros_like(q), np.full_like(q, length - 1)
        if chunk is not None:
            least, most = q // chunk * chunk, (q // chunk + 1) * chunk - 1

        def within(low: Any, high: Any, keys: Any = keys, own: Any = own, ends: Any = (least, most)) -> Any:
            low, high = np.maximum(low, ends[0]), np.minimum(np.minimum(high, ends[1]), length - 1)
            found = np.searchsorted(keys, own * length + high, "right") - np.searchsorted(keys, own * length + low)
            return np.where((low <= high) & (own >= 0), found, 0)

        low = np.zeros_like(q) if before is None else q - before
        high = np.full_like(q, length - 1) if behind is None else q + behind
        seen = within(low, high)
        if prefix is not None:
            seen = seen + within(0, prefix - 1) - within(low, np.minimum(high, prefix - 1))
        visible[rows, j] = seen.sum(1)


def _by_hop(tiles: Any, device: Ints, num_shards: int) -> Any:
    """Sums tiles [n, n] to [num_shards, hops]: in hop h a device has the keys of the device h places before it."""
    each = len(device) // num_shards
    return by_hop(tiles.reshape(num_shards, each, num_shards, each).sum((1, 3)))


def _ratio(work: Any) -> float:
    total = work.sum()
    return float(work.max(0).sum() * len(work) / total) if total else 1.0


def _segments(segment_ids: Any, seq: int) -> Ints | None:
    if segment_ids is None:
        return None
    ids = np.asarray(segment_ids)
    if ids.shape != (seq,) or not np.issubdtype(ids.dtype, np.integer):
        raise LayoutError(
            f"balance: segment_ids must be integers [{seq}], one per token of one sequence, got "
            f"{ids.dtype}{list(ids.shape)}."
        )
    return ids


def numbered(segment_ids: Any) -> Ints:
    """Renumbers segment ids of any integer dtype from 0 in ascending order, so that products do not overflow.

    Padding becomes -1.

    >>> numbered(np.array([7, -3, 2**62, 7])).tolist()
    [0, -1, 1, 0]
    """
    ids = np.asarray(segment_ids)
    is_token = ids >= 0
    found = np.full(ids.shape, PAD_SEGMENT, np.int64)
    found[is_token] = np.unique(ids[is_token], return_inverse=True)[1]
    return found
