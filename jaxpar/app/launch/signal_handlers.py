"""``listening``: record SIGTERM, SIGHUP and SIGINT, so that a supervisor can pass them on to its processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def listening(signals: list[int]) -> Iterator[None]:
    """Append SIGTERM, SIGHUP and SIGINT to a list, instead of ending this process before its children.

    Does nothing outside of the main thread.

    >>> import os
    >>> found = []
    >>> with listening(found):
    ...     os.kill(os.getpid(), signal.SIGTERM)
    >>> [signal.Signals(number).name for number in found]
    ['SIGTERM']
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    take = lambda number, frame: signals.append(number)
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, take) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
