"""``balanced_packing``: packed documents laid on devices so that each has as much to compute.

Zigzag evens out one triangle, not many of different sizes: where documents are packed, a device may get the ends of the long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from jaxpar.errors import ConfigError, LayoutError
from jaxpar.parallel.attention.load_balance import Ints, grid
from jaxpar.parallel.attention.mask import Mask
from jaxpar.utils.checks import is_count

CAUSAL = Mask(causal=True)
TRIES = 4000
"""So many swaps are tried at most: some half a second for 64 pieces."""


def balanced_packing(
    segment_ids: Any,
    ways: int,
    *,
    mask: Mask = CAUSAL,
    chunks: int = 8,
    impl: Literal["ring", "gather"] = "ring",
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """An order of packed documents in which the devices of a ring have even work.

    The sequence is cut into ``chunks * ways`` pieces, and each device gets ``chunks`` of them: the heaviest that is left goes to the
    device with the least so far (Graham 1969). Zigzag and striped pieces are tried too, and then pairs of pieces are swapped as long as
    that shortens the critical path, so that it is never longer than zigzag's.

    Args:
      segment_ids: [seq], or [batch, seq] for rows that are to lie alike: their work is summed. ``np.repeat(range(n), lengths)`` of
        the lengths of n documents; padding is below 0.
      ways: devices.
      mask: which keys a query sees within its document.
      chunks: pieces for each device, an even number; more are evener, and make more tiles that are masked in part.
      impl: ``ring`` for the least sum of each hop's slowest device, ``gather`` for the least work of the busiest device.

    Returns:
      The position of each token [seq], as they lie: ``x[:, order]`` brings tokens, segments and targets into this order, and ``order``
      are then the positions of all rows. :func:`jaxpar.attention` and :func:`jaxpar.balance` take it for their ``order``; with a
      ``block`` that divides ``seq / (chunks * ways)`` no tile spans two pieces.

    Raises:
      ConfigError: ``chunks`` or ``impl`` is none.
      LayoutError: the sequence does not divide into so many pieces.

    >>> balanced_packing(np.repeat([0, 1], [4, 4]), 2, chunks=2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    ids = np.atleast_2d(np.asarray(segment_ids))
    seq = ids.shape[-1]
    if impl not in ("ring", "gather"):
        raise ConfigError(f"balanced_packing: impl is {impl!r}, but 'ring' or 'gather' is wanted.")
    if not is_count(chunks, 2) or chunks % 2:
        raise ConfigError(f"balanced_packing: chunks is {chunks!r}, but an even number, 2 or more, is wanted.")
    if seq % (chunks * ways):
        fits = [n for n in range(2, chunks, 2) if seq % (n * ways) == 0]
        other = f" or chunks={fits[-1]}" if fits else ""
        raise LayoutError(
            f"balanced_packing: {seq} tokens cannot be cut into {chunks} pieces for each of {ways} devices. Remedy: a multiple of "
            f"{chunks * ways}{other}."
        )
    each = seq // (chunks * ways)
    work = sum(grid(mask, np.arange(seq)[None], each, row).visible for row in ids)
    cost = lambda owner: _cost(work, owner, ways, impl)
    owner = min(_candidates(np.asarray(work).sum(1), ways, chunks), key=cost)
    owner = _swapped(owner, cost)
    pieces = np.argsort(owner, kind="stable")
    return (pieces[:, None] * each + np.arange(each)).reshape(-1).astype(np.int32)


def _candidates(load: Ints, ways: int, chunks: int) -> Iterator[Ints]:
    """Who has each piece [chunks * ways]."""
    half = np.repeat(np.arange(ways), chunks // 2)
    yield np.concatenate([half, half[::-1]])
    yield np.arange(len(load)) % ways
    owner, total, room = np.zeros(len(load), np.int64), np.zeros(ways), np.full(ways, chunks)
    for piece in np.argsort(-load, kind="stable"):
        device = int(np.argmin(np.where(room > 0, total, np.inf)))
        owner[piece], total[device], room[device] = device, total[device] + load[piece], room[device] - 1
    yield owner


def _cost(work: Any, owner: Ints, ways: int, impl: str) -> tuple[float, float]:
    """The critical path, and the busiest device's work."""
    mine = np.eye(ways)[owner]
    pairs = mine.T @ work @ mine
    index = np.arange(ways)
    hops = pairs[index[:, None], (index[:, None] - index[None]) % ways]
    busiest = float(hops.sum(1).max())
    return (float(hops.max(0).sum()), busiest) if impl == "ring" else (busiest, float((hops.sum(1) ** 2).sum()))


def _swapped(owner: Ints, cost: Callable[[Ints], tuple[float, float]]) -> Ints:
    """``owner`` after swaps of two pieces, each of which makes it cheaper."""
    best, rng = cost(owner), np.random.default_rng(0)
    for a, b in rng.integers(0, len(owner), (min(TRIES, len(owner) ** 2), 2)):
        if owner[a] == owner[b]:
            continue
        swapped = owner.copy()
        swapped[[a, b]] = owner[[b, a]]
        if (new := cost(swapped)) < best:
            owner, best = swapped, new
    return owner
