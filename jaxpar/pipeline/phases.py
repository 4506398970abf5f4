"""Ticks in runs of the same work, and runs in rounds: what of a schedule's program has to be compiled, which does not grow with microbatches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from jaxpar.schedules.schedule import Schedule


class Work(NamedTuple):
    """What any stage does in a tick."""

    forward: bool
    head: bool
    backward: bool
    weights: bool
    feed: bool
    drain: bool


class Run(NamedTuple):
    """So many ticks of the same work."""

    work: Work
    ticks: int


class Round(NamedTuple):
    """Runs that come so many times, one after the other."""

    runs: tuple[Run, ...]
    times: int

    @property
    def ticks(self) -> int:
        """Of one time."""
        return sum(run.ticks for run in self.runs)


def rounds_of(schedule: Schedule) -> list[Round]:
    """The ticks of a schedule as rounds of runs."""
    return in_rounds(_runs(works_of(schedule)))


def works_of(schedule: Schedule) -> list[Work]:
    """What any stage does, tick by tick."""
    pieces, rows = schedule.pieces, schedule.ticks.rows
    # With one chunk nearly every forward is fed for, and fewer programs are worth the few that are not.
    exact = pieces.chunks > 1
    works = []
    for tick, row in enumerate(rows):
        has = {kind: any(op.kind == kind for ops in row for op in ops) for kind in "FBW"}
        head = _does(schedule, tick, "F", pieces.count - 1)
        feed = _does(schedule, tick + 1, "F", 0) if exact else has["F"]
        drain = _does(schedule, tick - 1, "B", 0) if exact else has["B"]
        works.append(Work(has["F"], head, has["B"], has["W"], feed, drain))
    return works


def _does(schedule: Schedule, tick: int, kind: str, piece: int) -> bool:
    if tick not in range(len(schedule.ticks.rows)):
        return False
    stage, chunk = schedule.pieces.place(piece)
    return any(op.kind == kind and op.chunk == chunk for op in schedule.ticks.rows[tick][stage])


def _runs(works: Sequence[Work]) -> list[Run]:
    runs: list[Run] = []
    for work in works:
        if runs and runs[-1].work == work:
            runs[-1] = Run(work, runs[-1].ticks + 1)
        else:
            runs.append(Run(work, 1))
    return runs


def in_rounds[T: Hashable](runs: Sequence[Run]) -> list[Round]:
    """Runs that repeat, as rounds: from the left, whatever makes the fewest programs.

    >>> a, b = (Run(Work(True, head, False, False, False, False), 2) for head in (True, False))
    >>> [(len(found.runs), found.times) for found in in_rounds([a, b, a, b, a])]
    [(2, 2), (1, 1)]
    """
    rounds: list[Round] = []
    at = 0
    while at < len(runs):
        best = Round((runs[at],), 1)
        for length in range(1, (len(runs) - at) // 2 + 1):
            times, block = 1, tuple(runs[at : at + length])
            while tuple(runs[at + times * length : at + (times + 1) * length]) == block:
                times += 1
            if times > 1 and times * length - length > best.times * len(best.runs) - len(best.runs):
                best = Round(block, times)
        rounds.append(best)
        at += best.times * len(best.runs)
    return rounds
