"""SIGTERM and Ctrl-C end a run after the step it is in; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

_TWICE = 0.5
"""Seconds within which a second Ctrl-C is the first one again: a terminal sends it to a launcher and to its processes both."""


class Stop:
    """Takes the signals that ask a run to end, for as long as it is open; a context.

    ``asked`` is the number of the first one that came to this process, 0 before. Handlers give way then: a second SIGTERM does what SIGTERM does, a
    second Ctrl-C raises ``KeyboardInterrupt``. Outside of the main thread no handler can be set, and nothing is taken.

    >>> import os, signal
    >>> with Stop() as stop:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     told(stop.asked)
    'SIGTERM'
    """

    def __init__(self) -> None:
        self.asked, self._when = 0, 0.0
        self.late = False
        """Whether the run ends as another process was asked to: this one's own signal may come yet, and must not spoil the end."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        late = self.late and not self.asked and bool(self._before)
        for number in list(self._before):
            self._give_back(number)
        if late:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked:  # only Ctrl-C still comes here
            if now - self._when >= _TWICE:
                self._give_back(signal.SIGINT)
                raise KeyboardInterrupt
            return
        self.asked, self._when = number, now
        # At once also while the program waits for a device, where no Python runs.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _give_back(self, number: int) -> None:
        """The handler that was there; jax's coordination service has one of its own for SIGTERM, which no Python can set again."""
        before = self._before.pop(number, None)
        signal.signal(number, signal.SIG_DFL if before is None else before)


def told(number: int) -> str:
    """A signal as people know it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
