"""What the processes of a run tell each other, about once a second: who was asked to stop, and whose time a step takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields

import jax
import numpy as np

from jaxpar.app.config import StragglerConfig
from jaxpar.utils.multihost import gather_rows

_PERIOD = 1.0
"""Seconds between two exchanges, about."""
_REST = 1000
"""And steps, at most."""
_ABSOLUTE = 0.1
"""What a slow process's own time is above that of the others at least, as a part of the step: else nobody waits for it."""


@dataclass(frozen=True)
class ProcessStatus:
    """What one process tells.

    Attributes:
      signal: that asked it to stop, or 0.
      overdue: whether its clock says that it is time to save.
      steps: since the last exchange; the others are sums over these, in seconds.
      own: its own work outside of the device's: batches and bookkeeping.
      waited: for the device, which waits for the other processes.
      seconds: of the steps.
      busy: whether it has not ended what all do before the first step.
    """

    signal: int = 0
    overdue: bool = False
    steps: int = 0
    own: float = 0.0
    waited: float = 0.0
    seconds: float = 0.0
    busy: bool = False


class Exchange:
    """Brings the news of all processes together, in the same steps in each of them.

    A few numbers go over the devices between two steps. How many steps it is to the next exchange follows from what was exchanged, so that all
    processes count the same. One process alone has its own news after every step, and no device is asked.
    """

    def __init__(self, process_count: int | None = None):
        self.alone = (jax.process_count() if process_count is None else process_count) == 1
        """Whether there are no other processes."""
        self._left = 1

    def after_step(self, mine: Callable[[], ProcessStatus]) -> list[ProcessStatus] | None:
        """The news of each process, in steps where there are any: to be called after each, when its results are there.

        Not while a step is at work: the collectives of two programs at once may meet each other's messages (Gloo, which CPUs use, ends the process).
        """
        self._left -= 1
        if self._left:
            return None
        found = self.meet(mine())
        self._left = 1
        if not self.alone:
            self._left = steps_between(max(one.seconds / one.steps if one.steps else _PERIOD for one in found))
        return found

    def meet(self, mine: ProcessStatus) -> list[ProcessStatus]:
        """The news of each process, now: all of them are to call it."""
        return [mine] if self.alone else [_read(row) for row in gather_rows(np.array(astuple(mine), np.float32))]


def steps_between(seconds: float) -> int:
    """How many steps it is to the next exchange, where one takes so many seconds.

    >>> steps_between(0.3), steps_between(20.0), steps_between(0.0)
    (3, 1, 1000)
    """
    return max(1, min(_REST, int(_PERIOD / max(seconds, _PERIOD / _REST))))


def _read(row: np.ndarray) -> ProcessStatus:
    signal, overdue, steps, own, waited, seconds, busy = map(float, row)
    return ProcessStatus(int(signal), bool(overdue), int(steps), own, waited, seconds, bool(busy))


class Stragglers:
    """Who keeps the others waiting, from the news of many steps.

    >>> slow = Stragglers(StragglerConfig(factor=2.0, every=10))
    >>> slow.add([News(steps=10, own=0.1, seconds=5.0), News(steps=10, own=3.0, seconds=5.0), ProcessStatus(steps=10, own=0.2, seconds=5.0)])
    [1]
    >>> slow.own
    [0.01, 0.3, 0.02]
    """

    def __init__(self, asked: StragglerConfig):
        self._asked = asked
        self._sums: list[ProcessStatus] = []
        self.own: list[float] = []
        """Each process's own seconds in a step, as last judged."""
        self.waited: list[float] = []
        """Each process's seconds in a step that it waited for the device, and so for the others."""
        self.told: set[int] = set()
        """Who was slow when last judged."""

    def add(self, news: Sequence[ProcessStatus]) -> list[int] | None:
        """Who is slow, where there are enough steps to judge by; ``None`` where not."""
        self._sums = [_sum(a, b) for a, b in zip(self._sums, news, strict=True)] if self._sums else list(news)
        steps = max(one.steps for one in self._sums)
        if len(news) < 2 or steps < self._asked.every:
            return None
        sums, self._sums = self._sums, []
        self.own, self.waited = ([getattr(one, name) / steps for one in sums] for name in ("own", "waited"))
        seconds = max(one.seconds for one in sums) / steps
        return slow(self.own, seconds, self._asked.factor)


def slow(own: Sequence[float], seconds: float, factor: float) -> list[int]:
    """The processes whose own time is ``factor`` times that of the others (their median), and counts in a step of so many seconds.

    >>> slow([0.001, 0.003], 1.0, 2.0), slow([0.1, 0.5], 1.0, 2.0)
    ([], [1])
    """
    found = []
    for rank, mine in enumerate(own):
        others = statistics.median([*own[:rank], *own[rank + 1 :]])
        if mine > factor * others and mine - others > _ABSOLUTE * seconds:
            found.append(rank)
    return found


def _sum(a: ProcessStatus, b: ProcessStatus) -> ProcessStatus:
    return ProcessStatus(**{f.name: getattr(a, f.name) + getattr(b, f.name) for f in fields(ProcessStatus)})
