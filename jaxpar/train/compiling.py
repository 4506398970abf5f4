"""``unless_asked``: work that no Python interrupts, as a compile, is left at once when the run is asked to end, by all processes together."""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import NoReturn

import jax

from jaxpar.train.news import Exchange, News
from jaxpar.train.signals import Stop

_PERIOD = 0.5
"""Seconds between two questions to the other processes."""


def unless_asked(work: Callable[[Callable[[], None]], None], exchange: Exchange, stop: Stop) -> int:
    """Do ``work`` in a thread of its own until it is done in all processes, or one was asked to stop.

    Args:
      work: is given a function to call when nothing more of it runs on devices: two programs at once could meet each other's messages, so
        the processes ask each other only from then on.
      exchange: brings the news of all.
      stop: takes the signals.

    Returns:
      The signal, 0 where the work is done. After a signal the thread may still be at it: the process can only be ended (:func:`leave`).
    """
    quiet, pool = threading.Event(), ThreadPoolExecutor(1, "compile")
    future = pool.submit(contextvars.copy_context().run, work, quiet.set)
    pool.shutdown(wait=False)
    while True:
        until = time.monotonic() + _PERIOD
        while not (wait([future], 0.02).done or stop.asked or time.monotonic() >= until):
            pass
        while not (exchange.alone or quiet.is_set() or future.done()):
            time.sleep(0.02)
        done = future.done()
        if done:
            future.result()
        news = exchange.meet(News(stop.asked, busy=not done))
        asked = max(one.signal for one in news)
        if asked or not any(one.busy for one in news):
            return asked


def leave() -> NoReturn:
    """End this process with exit status 0 while a thread of it still compiles; the others do so too."""
    if jax.process_count() > 1:
        with suppress(RuntimeError):  # together, lest the last ones take the first for dead
            jax.distributed.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
