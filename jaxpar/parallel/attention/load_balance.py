"""Which device computes how much of an attention: counted from positions, without devices and without anything of size seq².

A tile is a block of queries against a block of keys, the unit that :mod:`jaxpar.parallel.attention.tiled.blockwise` visits or leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from jaxpar.errors import ConfigError, LayoutError, did_you_mean
from jaxpar.parallel.attention.mask import Mask
from jaxpar.parallel.attention.split.partition import side
from jaxpar.parallel.attention.split.token_order import Order, check, permutation
from jaxpar.parallel.attention.tiled.blockwise import in_blocks
from jaxpar.parallel.attention.tiled.tile import PAD, PAD_SEGMENT

Impl = Literal["ring", "ring_self_attention", "gather", "ulysses", "hybrid"]
IMPLS: tuple[str, ...] = get_args(Impl)
type Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Grid:
    """All tiles of an attention, rows and columns in the order in which the tokens lie.

    Attributes:
      first: the least position in each block [n].
      device: whose each block is [n].
      visible: scores in each tile that the mask leaves [n, n].
      visited: whether each tile is computed [n, n].
      block: tokens of a tile's side.
    """

    first: Ints
    device: Ints
    visible: Ints
    visited: np.ndarray[Any, np.dtype[np.bool_]]
    block: int

    @property
    def size(self) -> int:
        """Scores of a tile."""
        return self.block**2


@dataclass(frozen=True, eq=False)
class Balance:
    """How many scores each device computes, of one head of one sequence.

    Attributes:
      mask, seq, ways, impl: what was asked.
      order: the order's name; ``given`` for a permutation.
      block: tokens of a tile's side.
      visible: [ways, hops] scores that the mask leaves: of a tile on the diagonal those on and below it. All of a device's work
        stands in one column where it needs not wait for its neighbours.
      visited: [ways, hops] scores of the tiles that are computed, which are computed whole, those on the diagonal too.
    """

    mask: Mask
    seq: int
    ways: int
    impl: str
    order: str
    block: int
    visible: Any
    visited: Any

    @property
    def per_device(self) -> list[float]:
        """Visible scores of each device."""
        return [float(n) for n in self.visible.sum(1)]

    @property
    def per_hop(self) -> list[float]:
        """Visible scores of the slowest device in each hop: a ring goes on when all are done."""
        return [float(n) for n in self.visible.max(0)]

    @property
    def ratio(self) -> float:
        """The critical path, the slowest device of each hop, over the mean of all devices' work; in visible scores. 1 is even."""
        return _ratio(self.visible)

    @property
    def tile_ratio(self) -> float:
        """As :attr:`ratio`, in scores of tiles that are computed."""
        return _ratio(self.visited)

    def report(self) -> str:
        """A table, one row a device."""
        mean = self.visible.sum() / self.ways
        share = lambda n: f"{100 * n / mean:.1f} %" if mean else "-"
        rows = [("device", "visible scores", "of the mean", "in computed tiles")]
        for i, (n, m) in enumerate(zip(self.visible.sum(1), self.visited.sum(1), strict=True)):
            rows.append((str(i), f"{n:,.0f}", share(n), f"{m:,.0f}"))
        wide = [max(len(row[i]) for row in rows) for i in range(4)]
        table = ["  ".join(cell.rjust(n) for cell, n in zip(row, wide, strict=True)) for row in rows]
        how = f"{self.impl}, {self.order}" if self.impl != "ulysses" else self.impl
        hops = f", {self.visible.shape[1]} hops" if self.visible.shape[1] > 1 else ""
        return "\n".join(
            [
                f"{told(self.mask)}: {self.seq:,} tokens over {self.ways} devices, {how}, tiles of {self.block}",
                *table,
                f"critical path{hops}: {self.ratio:.3f} × the mean in visible scores, {self.tile_ratio:.3f} × in computed tiles",
            ]
        )


def balance(
    mask: Mask,
    seq: int,
    ways: int,
    order: Order | np.ndarray[Any, Any] = "zigzag",
    *,
    block: int = 512,
    segment_ids: Any = None,
    impl: Impl = "ring",
    ulysses: int = 1,
) -> Balance:
    """How evenly an attention's work is spread over the devices that its sequence is split over.

    Args:
      mask: which keys a query sees. A function ``where`` is called for every tile that the rest of the mask leaves: seq² numbers
        in all, a tile at a time.
      seq: tokens, of queries and of keys.
      ways: devices that the sequence is split over.
      order: how the tokens lie on them; or the position of each token as they lie [seq], as of :func:`jaxpar.balanced_packing`.
      block: tokens of a tile's side, at most, as for :func:`jaxpar.attention`.
      segment_ids: [seq], in the order of positions; a token sees those of its own segment, padding is below 0.
      impl: ``ring`` waits in each hop for the slowest device, ``ring_self_attention`` too, and computes all scores of a hop; ``gather``
        waits for nobody in between; ``ulysses`` gives every device all tokens of some heads; in ``hybrid`` a ring goes over groups of
        devices, each of which has all tokens of its group and some heads.
      ulysses: devices of such a group.

    Raises:
      ConfigError: no such order or implementation.
      LayoutError: the sequence or the devices do not divide, or ``order`` or ``segment_ids`` do not fit it.

    >>> round(balance(Mask(causal=True), 4096, 8).ratio, 3), balance(Mask(causal=True), 4096, 8, "contiguous").ratio > 1.8
    (1.0, True)
    """
    if impl not in IMPLS:
        raise ConfigError(
            f"balance: unknown impl {impl!r}.{did_you_mean(str(impl), IMPLS)} The implementations are: {', '.join(IMPLS)}."
        )
    if (impl == "hybrid") != (ulysses > 1) or ways % ulysses:
        raise LayoutError(
            f"balance: impl {impl!r} on {ways} devices, of which {ulysses} exchange heads. Remedy: with impl='hybrid' a number of them, 2 or more, "
            f"that divides {ways}; without it ulysses=1."
        )
    apart = ways if impl == "ulysses" else ulysses
    parts = ways // apart
    if apart > 1:
        check("contiguous", seq, ways)
    found = grid_of(mask, seq, parts, order, block=block, segment_ids=segment_ids)
    visible = _by_hop(found.visible, found.device, parts)
    visited = _by_hop(found.visited * found.size, found.device, parts)
    if impl == "ring_self_attention":
        # Rows of scores are whole; a hop that shows nothing to anybody is left out.
        visited = np.where(visited.any(0), (seq // ways) ** 2, 0) * np.ones_like(visited)
    if impl in ("gather", "ulysses"):
        visible, visited = visible.sum(1, keepdims=True), visited.sum(1, keepdims=True)
    # Every device of a group has all of its tokens and a share of the heads.
    visible, visited = (np.repeat(x / apart, apart, 0) for x in (visible, visited))
    name = order if isinstance(order, str) else "given"
    return Balance(mask, seq, ways, impl, name, found.block, visible, visited)


def places(order: Order | np.ndarray[Any, Any], seq: int, ways: int) -> Ints:
    """Positions of the tokens of each device [ways, seq / ways].

    Raises:
      ConfigError: no such order.
      LayoutError: the sequence does not divide, or a permutation is none.
    """
    if isinstance(order, str):
        return permutation(order, seq, ways).astype(np.int64).reshape(ways, -1)
    given = np.asarray(order)
    if given.shape != (seq,) or not np.array_equal(np.sort(given), np.arange(seq)):
        raise LayoutError(
            f"balance: order is {given.dtype}{list(given.shape)}, but a permutation of {seq} positions is wanted. Remedy: "
            f"jp.balanced_packing(...), or a name: 'zigzag', 'striped', 'contiguous'."
        )
    if seq % ways:
        raise LayoutError(f"balance: {seq} tokens cannot be split over {ways} devices. Remedy: a multiple of {ways}.")
    return given.astype(np.int64).reshape(ways, -1)


def grid_of(mask: Mask, seq: int, ways: int, order: Any, *, block: int, segment_ids: Any = None) -> Grid:
    """The tiles of an attention; for arguments and errors see :func:`balance`."""
    at = places(order, seq, ways)
    halves = 2 if isinstance(order, str) and order == "zigzag" and ways > 1 else 1
    return grid(mask, at, side(at.shape[1] // halves, block), _segments(segment_ids, seq))


def grid(mask: Mask, at: Ints, block: int, segment_ids: Ints | None = None) -> Grid:
    """The tiles of queries and keys that stand at ``at`` [ways, length], in blocks of so many tokens; ``segment_ids`` by position."""
    cut = lambda x, fill: np.moveaxis(in_blocks(x, block, 1, fill), 0, 1).reshape(-1, block)
    positions = cut(at, PAD)
    own = np.zeros(at.size, np.int64) if segment_ids is None else numbered(segment_ids)
    segments = cut(own[at], PAD_SEGMENT)
    there = positions != PAD
    low, high = np.where(there, positions, at.size).min(1), positions.max(1)
    bounds = mask.bounds((low[:, None], high[:, None]), (low[None], high[None]))
    some, every = (np.broadcast_to(x, (len(low), len(low))) for x in bounds)
    a, b = segments.min(1), segments.max(1)
    overlap = (np.maximum(a, 0)[:, None] <= b[None]) & (np.maximum(a, 0)[None] <= b[:, None])
    alone = (a == b) & (a >= 0)
    visited = some & overlap
    full = every & visited & alone[:, None] & alone[None] & (a[:, None] == a[None])
    visible = full * np.int64(block * block)
    if mask.where is not None:
        _look(mask, positions, segments, visited, visible)
        visited = visible > 0
    else:
        _count(mask, positions, segments, visited & ~full, visible)
    device = np.repeat(np.arange(len(at)), len(low) // len(at))
    return Grid(low, device, visible, visited, block)


def told(mask: Mask) -> str:
    """A mask in words.

    >>> told(Mask(window=128)), told(Mask(causal=False))
    ('causal, window 128', 'everything')
    """
    words = ["causal"] if mask.causal else []
    words += [f"{name} {value}" for name in ("window", "prefix", "chunk") if (value := getattr(mask, name)) is not None]
    words += ["where"] if mask.where is not None else []
    return ", ".join(words) or "everything"


def _look(mask: Mask, positions: Ints, segments: Ints, some: Any, visible: Ints) -> None:
    """Fills in ``visible`` of the tiles ``some``: a function of positions says only by its values what it hides."""
    for i, j in np.argwhere(some):
        # A function meets positions of tokens only: what fills up a block has the last one's, and no segment.
        q, k = (np.where(x == PAD, x.max(), x) for x in (positions[i], positions[j]))
        seen = np.asarray(mask.visible(q[:, None], k[None]))
        same = (segments[i][:, None] == segments[j][None]) & (segments[i] >= 0)[:, None]
        visible[i, j] = np.count_nonzero(seen & same)


def _count(mask: Mask, positions: Ints, segments: Ints, some: Any, visible: Ints) -> None:
    """Fills in ``visible`` of the tiles ``some``, query by query: what a query sees are whole ranges of positions."""
    length = int(positions.max()) + 1
    # A size beyond all positions limits nothing, whatever number it is.
    within_reach = lambda size: None if size is None else min(size, length)
    before, behind = map(within_reach, mask.sides)
    prefix, chunk = within_reach(mask.prefix), within_reach(mask.chunk)
    for j in np.flatnonzero(some.any(0)):
        rows = np.flatnonzero(some[:, j])
        q, own = positions[rows], segments[rows]
        # Keys by segment and then by position: what a query sees of its own segment stands together.
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


def _by_hop(tiles: Any, device: Ints, ways: int) -> Any:
    """Of tiles [n, n], sums [ways, hops]: in hop h a device has the keys of the one h places before it."""
    each = len(device) // ways
    pairs = tiles.reshape(ways, each, ways, each).sum((1, 3))
    index = np.arange(ways)
    return pairs[index[:, None], (index[:, None] - index[None]) % ways]


def _ratio(work: Any) -> float:
    total = work.sum()
    return float(work.max(0).sum() * len(work) / total) if total else 1.0


def _segments(segment_ids: Any, seq: int) -> Ints | None:
    if segment_ids is None:
        return None
    ids = np.asarray(segment_ids)
    if ids.shape != (seq,) or not np.issubdtype(ids.dtype, np.integer):
        raise LayoutError(
            f"balance: segment_ids are {ids.dtype}{list(ids.shape)}, but integers [{seq}], one for each token of one sequence, are wanted."
        )
    return ids


def numbered(segment_ids: Any) -> Ints:
    """Segment ids of any integer dtype, numbered from 0 by size; padding is -1. The same segments, in numbers that products do not overflow.

    >>> numbered(np.array([7, -3, 2**62, 7])).tolist()
    [0, -1, 1, 0]
    """
    ids = np.asarray(segment_ids)
    there = ids >= 0
    found = np.full(ids.shape, PAD_SEGMENT, np.int64)
    found[there] = np.unique(ids[there], return_inverse=True)[1]
    return found
