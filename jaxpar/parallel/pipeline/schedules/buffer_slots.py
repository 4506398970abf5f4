"""Assigns buffer slots by linear scan (Poletto & Sarkar 1999) over the times of a schedule."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from typing import NamedTuple

# A tick has four times. FORWARD: F reads its input. ARRIVAL: the cotangents for B are written. BACKWARD: B reads. END:
# the outputs of F are written, and W reads.
FORWARD, ARRIVAL, BACKWARD, END = range(4)


def time(tick: int, part: int) -> int:
    """Returns a time of a schedule: a tick and one of its four parts."""
    return 4 * tick + part


class Live(NamedTuple):
    """The interval in which a tensor occupies a buffer, from its write to its last read, both included."""

    start: int
    end: int
    key: Hashable


def allocate(lives: Iterable[Live]) -> tuple[int, dict[Hashable, int]]:
    """Returns the smallest number of slots that hold all tensors, and the slot of each.

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
