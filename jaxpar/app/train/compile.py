"""Run work that Python cannot interrupt, such as a compile, in a thread, so that a signal ends the run immediately."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, NoReturn

import jax

from jaxpar.app.launch import heartbeat
from jaxpar.app.launch.exit_codes import end_process
from jaxpar.app.train.process_sync import ProcessStatus, StatusExchange
from jaxpar.app.train.signals import Stop
from jaxpar.errors import LaunchError

_PERIOD = 0.5
"""Seconds between two exchanges with the other processes."""


def run_until_signal(work: Callable[[Callable[[], None]], None], exchange: StatusExchange, stop: Stop) -> int:
    """Run ``work`` in a thread until it is done in all processes, or until one process gets a signal.

    Args:
      work: called with a function that it must call once it runs nothing more on devices. The processes exchange their
        status only after that, because two programs at once could receive each other's messages.
      exchange: exchanges the status of all processes.
      stop: receives the signals.

    Returns:
      The signal, or 0 if the work is done. After a signal the thread may still run; then only :func:`leave` ends the
      process.
    """
    quiet, pool = threading.Event(), ThreadPoolExecutor(1, "compile")
    future = pool.submit(contextvars.copy_context().run, work, quiet.set)
    pool.shutdown(wait=False)
    while True:
        until = time.monotonic() + _PERIOD
        while not (wait([future], 0.02).done or stop.number or time.monotonic() >= until):
            pass
        while not (exchange.single_process or quiet.is_set() or future.done()):
            time.sleep(0.02)
        done = future.done()
        if done:
            future.result()
        statuses = exchange.exchange_now(ProcessStatus(stop.number, busy=not done))
        signal_number = max(one.signal for one in statuses)
        if signal_number or not any(one.busy for one in statuses):
            return signal_number


def iterate_until_signal[T](steps: Generator[T], stop: Stop) -> Generator[T]:
    """Yield the items of ``steps``, computing each in a thread, until a signal.

    After a signal the thread may still be computing an item; then only the end of the process ends it.

    Raises:
      LaunchError: another process is gone.
    """
    pool, end = ThreadPoolExecutor(1, "steps", heartbeat.at_work), object()
    future: Future[Any] | None = None
    try:
        while not stop.number:
            future = pool.submit(next, steps, end)
            while not (wait([future], 0.05).done or stop.number):
                pass
            if stop.number:
                # Give a step time to finish. A compile takes longer, and with several processes others may have left.
                wait([future], 0.0 if jax.process_count() > 1 else 0.5)
                return
            found = _result(future, stop)
            if found is end or stop.number:
                return
            yield found
    finally:
        pool.shutdown(wait=False)
        if future is None or future.done():
            steps.close()


def _result(future: Future[Any], stop: Stop) -> Any:
    """The result of a step; if it failed because other processes got a signal first, wait for this process's."""
    try:
        return future.result()
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        until = time.monotonic() + 1.0
        while not stop.number and time.monotonic() < until:
            time.sleep(0.02)
        if stop.number:
            return None
        rank = f"process {jax.process_index()} of {jax.process_count()}"
        raise LaunchError(f"{rank} lost another process: {str(error).strip().partition(chr(10))[0]}") from error


def leave(status: int) -> NoReturn:
    """End this process while a thread still compiles; every process of the run calls this."""
    if jax.process_count() > 1:
        with suppress(RuntimeError):  # shut down together; otherwise the others report this process as dead
            jax.distributed.shutdown()
    end_process(status)
