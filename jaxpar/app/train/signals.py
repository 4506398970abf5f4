"""SIGTERM, SIGHUP and Ctrl-C end a run after the current step; a second signal ends it immediately."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any, Self

_TWICE = 0.5
"""A second Ctrl-C within these seconds counts as the first: a terminal signals a launcher and its processes."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Receives the signals that end a run, while the context is open.

    ``number`` is the number of the first signal that this process received, or 0. After it the handlers are replaced: a
    second SIGTERM or SIGHUP has its default action, and a second Ctrl-C raises ``KeyboardInterrupt``. Outside of the
    main thread no handler can be set, and no signal is received.

    >>> import os, signal
    >>> with Stop() as stop:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     signal_name(stop.number)
    'SIGTERM'
    """

    def __init__(self) -> None:
        self.number, self._when = 0, 0.0
        self.late = False
        """Whether another process's signal ends the run; this process's own may still follow, and is ignored."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # A program started with nohup ignores SIGHUP, and goes on to.
            numbers = [n for n in _ENDING if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._take) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        late = self.late and not self.number and bool(self._before)
        for number in list(self._before):
            self._give_back(number)
        if late:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number:  # only Ctrl-C still comes here
            if now - self._when >= _TWICE:
                self._give_back(signal.SIGINT)
                raise KeyboardInterrupt
            return
        self.number, self._when = number, now
        # The default action also works while the process waits for a device and runs no Python.
        for other in self._before.keys() - {signal.SIGINT}:
            signal.signal(other, signal.SIG_DFL)

    def _give_back(self, number: int) -> None:
        """Restore the previous handler, or the default if jax's coordination service set it outside of Python."""
        before = self._before.pop(number, None)
        signal.signal(number, signal.SIG_DFL if before is None else before)


def signal_name(number: int) -> str:
    """Returns a signal's name as users know it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
