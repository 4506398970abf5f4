"""Which slot of a buffer holds what, for how long: linear scan (Poletto & Sarkar 1999) over the times of a schedule."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from typing import NamedTuple

# A tick has four times: what F reads is there at the first; what came for B arrives at the second, and B reads at the third;
# what F sends arrives, and W reads, at the last.
FORWARD, ARRIVAL, BACKWARD, END = range(4)


def time(tick: int, part: int) -> int:
    """A time of a schedule."""
    return 4 * tick + part


class Live(NamedTuple):
    """Something in a buffer from the time it is written to the time of its last reading, both included."""

    start: int
    end: int
    key: Hashable


def allocate(lives: Iterable[Live]) -> tuple[int, dict[Hashable, int]]:
    """How many slots hold all of these, and which one each has; as few as can be.

    >>> allocate([Live(0, 3, "a"), Live(1, 2, "b"), Live(3, 5, "c")])
    (2, {'a': 0, 'b': 1, 'c': 1})
    """
    slots: dict[Hashable, int] = {}
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    count = 0
    for live in sorted(lives, key=lambda live: (live.start, live.end, str(live.key))):
        while busy and busy[0][0] < live.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot, count = count, count + 1
        slots[live.key] = slot
        heapq.heappush(busy, (live.end, slot))
    return count, slots
