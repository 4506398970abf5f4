"""Work that no Python interrupts, as a compile, is left at once when the run is asked to end: ``unless_asked``, by all processes together; ``until_asked``."""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, NoReturn

import jax

from jaxpar.app.launch import heartbeat
from jaxpar.app.train.process_sync import Exchange, ProcessStatus
from jaxpar.app.train.signals import Stop
from jaxpar.errors import LaunchError

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
        news = exchange.meet(ProcessStatus(stop.asked, busy=not done))
        asked = max(one.signal for one in news)
        if asked or not any(one.busy for one in news):
            return asked


def until_asked[T](steps: Generator[T], stop: Stop) -> Generator[T]:
    """What comes of ``steps``, each made in a thread of its own, until a signal; its thread may then still be at one, which only the process's end ends.

    Raises:
      LaunchError: another process is gone.
    """
    pool, end = ThreadPoolExecutor(1, "steps", heartbeat.at_work), object()
    future: Future[Any] | None = None
    try:
        while not stop.asked:
            future = pool.submit(next, steps, end)
            while not (wait([future], 0.05).done or stop.asked):
                pass
            if stop.asked:
                # A step is soon over, a compile is not; and of several processes some have left.
                wait([future], 0.0 if jax.process_count() > 1 else 0.5)
                return
            found = _result(future, stop)
            if found is end or stop.asked:
                return
            yield found
    finally:
        pool.shutdown(wait=False)
        if future is None or future.done():
            steps.close()


def _result(future: Future[Any], stop: Stop) -> Any:
    """Of a step; where it failed as other processes have heard a signal first, this one's own is waited for."""
    try:
        return future.result()
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        until = time.monotonic() + 1.0
        while not stop.asked and time.monotonic() < until:
            time.sleep(0.02)
        if stop.asked:
            return None
        who = f"process {jax.process_index()} of {jax.process_count()}"
        raise LaunchError(f"{who} has lost another: {str(error).strip().partition(chr(10))[0]}") from error


def leave() -> NoReturn:
    """End this process with exit status 0 while a thread of it still compiles; the others do so too."""
    if jax.process_count() > 1:
        with suppress(RuntimeError):  # together, lest the last ones take the first for dead
            jax.distributed.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
