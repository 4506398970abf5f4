"""Goodput: how a run spent its time since its first start, by cause. It uses only clocks, neither jax nor files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

CAUSES = ("steps", "compile", "checkpoint", "evaluation", "data", "restore", "lost", "restart", "other")
"""The causes on which a run spends time; each second counts for exactly one.

``steps``: steps that count. ``lost``: steps that were rolled back, or repeated after a kill. ``data``: time in which
devices waited for batches. ``restart``: from the last record before a stop to the next start. ``checkpoint``,
``evaluation``, ``compile`` and ``restore``: pauses.
"""


class Goodput:
    """Seconds by cause; their sum is the time since the run's first start.

    Args:
      clock: a monotonic clock of this process, in seconds.
      now: the wall clock, in seconds since 1970, which is also valid across restarts.

    >>> ticks = iter([0.0, 1.0, 3.0, 3.0, 4.0])
    >>> time = Goodput(clock=lambda: next(ticks), now=lambda: 1000.0)
    >>> with time.spend("steps"):
    ...     pass
    >>> time.count_step(1, 2.0)
    >>> time.wall(), time.spent["steps"], time.spent["other"]
    (3.0, 2.0, 1.0)
    >>> time.share()
    0.5
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time):
        self._clock, self._cause, self._since = clock, "other", clock()
        self.began = now()
        """When the run first started, in seconds since 1970."""
        self.spent = dict.fromkeys(CAUSES, 0.0)
        self._steps: dict[int, float] = {}

    @contextmanager
    def spend(self, cause: str) -> Iterator[None]:
        """Count the time inside the ``with`` block for ``cause``; blocks can be nested, and the innermost counts."""
        before = self._turn(cause)
        try:
            yield
        finally:
            self._turn(before)

    def count_step(self, number: int, seconds: float, waited: float = 0.0) -> None:
        """Record a step that took ``seconds`` of the time spent on steps, ``waited`` of them waiting for data."""
        self._move("steps", "data", waited)
        self._steps[number] = seconds - waited

    def lose(self, after: int) -> float:
        """Count the steps after ``after`` as lost; returns the seconds that were spent on them."""
        gone = [number for number in self._steps if number > after]
        seconds = sum(self._steps.pop(number) for number in gone)
        self._move("steps", "lost", seconds)
        return seconds

    def wall(self) -> float:
        """Seconds since the run's first start, the sum over all causes."""
        self._turn(self._cause)
        return sum(self.spent.values())

    def share(self) -> float:
        """The goodput: time in steps that count, divided by all time."""
        wall = self.wall()
        return self.spent["steps"] / wall if wall else 0.0

    def record(self) -> dict[str, Any]:
        """The account as JSON values, from which :meth:`resume` continues."""
        wall = self.wall()
        spent = {cause: round(seconds, 6) for cause, seconds in self.spent.items()}
        return {"goodput": round(self.share(), 6), "wall_seconds": wall, "spent": spent, "began": self.began}

    def resume(self, records: Sequence[Mapping[str, Any]], step: int) -> None:
        """Continue the account of a run that resumes after ``step``.

        Args:
          records: everything that the run wrote, in order: those of :meth:`record`; steps with ``step_seconds``,
            ``data_seconds`` and ``elapsed``, the run's age when they ended; and rollbacks, with ``rollback_to``.
          step: the step from which it resumes. Later steps count as lost.
        """
        known, began = dict.fromkeys(CAUSES, 0.0), None
        steps, last, covered = dict[int, float](), 0.0, 0.0
        for one in records:
            if isinstance(one.get("spent"), Mapping):
                known = {cause: float(one["spent"].get(cause, 0.0)) for cause in CAUSES}
                began, covered = float(one["began"]), float(one["wall_seconds"])
                last = max(last, covered)
            elif "rollback_to" in one:
                gone = {number: seconds for number, seconds in steps.items() if number > one["rollback_to"]}
                steps = {number: seconds for number, seconds in steps.items() if number not in gone}
                known = _moved(known, "steps", "lost", sum(gone.values()))
            elif "elapsed" in one:
                waited = float(one.get("data_seconds", 0.0))
                steps[one["step"]] = seconds = float(one["step_seconds"]) - waited
                if one["elapsed"] > covered:  # not yet in the last account
                    known["steps"] += seconds
                    known["data"] += waited
                    last = float(one["elapsed"])
        if began is None:
            return  # the run kept no account
        known["other"] += max(last - sum(known.values()), 0.0)
        known["restart"] += max(self.began - began - last, 0.0)
        self.began, self._steps = began, steps | self._steps
        self.spent = {cause: known[cause] + self.spent[cause] for cause in CAUSES}
        self.lose(step)

    def _turn(self, cause: str) -> str:
        """Count time for ``cause`` from now on; returns the previous cause."""
        now = self._clock()
        self.spent[self._cause] += now - self._since
        before, self._cause, self._since = self._cause, cause, now
        return before

    def _move(self, source: str, target: str, seconds: float) -> None:
        self.spent = _moved(self.spent, source, target, seconds)


def _moved(spent: dict[str, float], source: str, target: str, seconds: float) -> dict[str, float]:
    return {**spent, source: spent[source] - seconds, target: spent[target] + seconds}


def describe(record: Mapping[str, Any]) -> str:
    """Returns a record as one line: the share, and the causes that took most of the remaining time.

    >>> spent = {"steps": 8.0, "compile": 1.5, "lost": 0.0, "other": 0.5}
    >>> describe({"goodput": 0.8, "wall_seconds": 10.0, "spent": spent})
    '80.0% of 10 s in steps; compile 1.5 s, other 0.5 s'
    """
    rest = sorted(
        ((cause, seconds) for cause, seconds in record["spent"].items() if cause != "steps" and seconds >= 0.05),
        key=lambda pair: -pair[1],
    )
    causes = ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in rest)
    return f"{record['goodput']:.1%} of {record['wall_seconds']:.0f} s in steps" + (f"; {causes}" if causes else "")
