"""Report this process's progress to its supervisor: each step, other phases, and once a second its position.

Messages are lines of JSON in a pipe, whose file descriptor the supervisor sets in the environment. Without one these
functions do nothing. Unlike a file, a pipe also shows the supervisor immediately that the process has ended, and the
process that its supervisor has.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import MutableMapping
from types import FrameType
from typing import Any

BEATS = "JAXPAR_BEATS"
"""Environment variable with the file descriptor of the pipe."""
TICK = 1.0
"""Seconds between two signs of life."""
_MOST = 300
"""Maximum characters of an error, so that a message fits an atomic pipe write (512 bytes in POSIX, 4,096 here)."""
_LINE = 3000
"""Maximum characters of a line for the user."""

_pipe: int | None = None
_worker: int | None = None


def listened() -> bool:
    """Whether a supervisor listens."""
    return _pipe is not None


def connect(environ: MutableMapping[str, str] | None = None) -> bool:
    """Start to report if a supervisor listens, and return whether it does; the main thread calls this once.

    >>> connect({})
    False
    """
    global _pipe
    number = (os.environ if environ is None else environ).pop(BEATS, None)  # not for this process's own children
    if number is None:
        return False
    _pipe = int(number)
    os.set_inheritable(_pipe, False)
    os.set_blocking(_pipe, False)
    threading.Thread(target=_tick, name="heartbeat", daemon=True).start()
    return True


def beat(step: int) -> None:
    """Report that a step has ended; the next step then has its own allowance."""
    _say(step=step)


def begin(phase: str) -> None:
    """Report the start of a phase other than a step, such as ``compile``; it has the larger allowance."""
    _say(phase=phase)


def say(text: str) -> None:
    """Send a line for the user to the supervisor, which prints it; this process's own stderr goes to its log."""
    _say(say=text[:_LINE])


def raised(error: BaseException, *, again: bool) -> None:
    """Report that this process is about to end with an error; ``again`` says whether a restart may succeed."""
    first = (str(error).strip().splitlines() or [""])[0]
    _say(raised=f"{type(error).__name__}: {first}"[:_MOST].rstrip(": "), again=again)


def _say(**message: Any) -> None:
    global _pipe
    if _pipe is None:
        return
    try:
        os.write(_pipe, (json.dumps(message) + "\n").encode())
    except BlockingIOError:
        pass  # the pipe is full because the supervisor is slow; a later message carries the same information
    except BrokenPipeError:
        # The supervisor is gone and cannot end this process, which therefore ends as if by SIGTERM.
        _pipe = None
        os.kill(os.getpid(), signal.SIGTERM)


def at_work() -> None:
    """Report the position of the calling thread from now on, as long as it lives; the main thread only waits for it."""
    global _worker
    _worker = threading.get_ident()


def _tick() -> None:
    while _pipe is not None:
        where, waits = place(_at())
        _say(where=where, waits=waits)
        time.sleep(TICK)


def _at() -> FrameType | None:
    """The frame of the reported thread: the one set by :func:`at_work`, else the main thread."""
    frames = sys._current_frames()
    threads = [thread for thread in (_worker, threading.main_thread().ident) if thread is not None]
    return next((frames[thread] for thread in threads if thread in frames), None)


def place(frame: FrameType | None) -> tuple[str, bool]:
    """Returns the ``file:line`` of a thread outside of jax, and whether it is inside jax, where it may wait for peers.

    >>> place(None)
    ('', False)
    """
    waits = False
    while frame is not None and _of_jax(frame):
        frame, waits = frame.f_back, True
    if frame is None:
        return "", waits
    parts = frame.f_code.co_filename.split(os.sep)
    start = len(parts) - 1 - parts[::-1].index("jaxpar") if "jaxpar" in parts else len(parts) - 1
    return f"{'/'.join(parts[start:])[-120:]}:{frame.f_lineno}", waits


def _of_jax(frame: FrameType) -> bool:
    name = frame.f_code.co_filename.replace(os.sep, "/")
    return "/site-packages/jax/" in name or "/site-packages/jaxlib/" in name
