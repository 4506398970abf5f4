"""Exchange status between the processes of a run about once a second: stop signals and time spent per step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields

import jax
import numpy as np

from jaxpar.app.train_config import StragglerConfig
from jaxpar.utils.multihost import gather_rows

_PERIOD = 1.0
"""Approximate seconds between two exchanges."""
_MAX_STEPS = 1000
"""Maximum number of steps between two exchanges."""
_MIN_FRACTION = 0.1
"""A slow process's own time must exceed that of the others by this fraction of the step; less delays nobody."""


@dataclass(frozen=True)
class ProcessStatus:
    """The status that a process sends to the others.

    Attributes:
      signal: the signal that this process received, or 0.
      overdue: whether its clock says that it is time to save.
      steps: steps since the last exchange; the following are sums over these, in seconds.
      own: its own work outside of the device: batches and bookkeeping.
      waited: time spent waiting for the device, and so for the other processes.
      seconds: duration of the steps.
      busy: whether it is still at work before the first step.
    """

    signal: int = 0
    overdue: bool = False
    steps: int = 0
    own: float = 0.0
    waited: float = 0.0
    seconds: float = 0.0
    busy: bool = False


class StatusExchange:
    """Exchanges the status of all processes, in the same steps in each of them.

    A few numbers are sent over the devices between two steps. The number of steps to the next exchange follows from the
    exchanged values, so all processes agree on it. A single process gets its own status after every step, without any
    device.
    """

    def __init__(self, process_count: int | None = None):
        self.single_process = (jax.process_count() if process_count is None else process_count) == 1
        """Whether there are no other processes."""
        self._left = 1

    def after_step(self, mine: Callable[[], ProcessStatus]) -> list[ProcessStatus] | None:
        """Returns the status of each process in steps where an exchange is due, else ``None``; call it after every
        step.

        Call it once the step's results are available: the collectives of two programs at once may receive each other's
        messages (Gloo, which CPUs use, then ends the process).
        """
        self._left -= 1
        if self._left:
            return None
        found = self.exchange_now(mine())
        self._left = 1
        if not self.single_process:
            self._left = steps_between(max(one.seconds / one.steps if one.steps else _PERIOD for one in found))
        return found

    def exchange_now(self, mine: ProcessStatus) -> list[ProcessStatus]:
        """Returns the status of each process now; all processes must call it."""
        if self.single_process:
            return [mine]
        return [_read(row) for row in gather_rows(np.array(astuple(mine), np.float32))]


def steps_between(seconds: float) -> int:
    """Returns the number of steps to the next exchange, for steps of ``seconds`` seconds.

    >>> steps_between(0.3), steps_between(20.0), steps_between(0.0)
    (3, 1, 1000)
    """
    return max(1, min(_MAX_STEPS, int(_PERIOD / max(seconds, _PERIOD / _MAX_STEPS))))


def _read(row: np.ndarray) -> ProcessStatus:
    signal, overdue, steps, own, waited, seconds, busy = map(float, row)
    return ProcessStatus(int(signal), bool(overdue), int(steps), own, waited, seconds, bool(busy))


class Stragglers:
    """Finds the slow processes from the status of many steps.

    >>> slow = Stragglers(StragglerConfig(factor=2.0, every=10))
    >>> slow.add([ProcessStatus(steps=10, own=own, seconds=5.0) for own in (0.1, 3.0, 0.2)])
    [1]
    >>> slow.own
    [0.01, 0.3, 0.02]
    """

    def __init__(self, config: StragglerConfig):
        self._config = config
        self._sums: list[ProcessStatus] = []
        self.own: list[float] = []
        """Each process's own seconds per step, as last judged."""
        self.waited: list[float] = []
        """Each process's seconds per step spent waiting for the device, and so for the others, as last judged."""
        self.reported: set[int] = set()
        """The processes that were slow when last judged."""

    def add(self, statuses: Sequence[ProcessStatus]) -> list[int] | None:
        """Returns the slow processes once there are enough steps to judge by; ``None`` before."""
        self._sums = [_sum(a, b) for a, b in zip(self._sums, statuses, strict=True)] if self._sums else list(statuses)
        steps = max(one.steps for one in self._sums)
        if len(statuses) < 2 or steps < self._config.every:
            return None
        sums, self._sums = self._sums, []
        self.own, self.waited = ([getattr(one, name) / steps for one in sums] for name in ("own", "waited"))
        seconds = max(one.seconds for one in sums) / steps
        return slow(self.own, seconds, self._config.factor)


def slow(own: Sequence[float], seconds: float, factor: float) -> list[int]:
    """Returns the processes that slow down the others.

    Args:
      own: each process's own seconds per step.
      seconds: duration of a step.
      factor: a process is slow if its own time exceeds the median of the others by this factor, and also by a tenth of
        the step.

    >>> slow([0.001, 0.003], 1.0, 2.0), slow([0.1, 0.5], 1.0, 2.0)
    ([], [1])
    """
    found = []
    for rank, mine in enumerate(own):
        others = statistics.median([*own[:rank], *own[rank + 1 :]])
        if mine > factor * others and mine - others > _MIN_FRACTION * seconds:
            found.append(rank)
    return found


def _sum(a: ProcessStatus, b: ProcessStatus) -> ProcessStatus:
    return ProcessStatus(**{f.name: getattr(a, f.name) + getattr(b, f.name) for f in fields(ProcessStatus)})
