"""What a process tells its supervisor: each step it ends, what else it is at, and, once a second, where it is.

It goes as lines of JSON through a pipe, whose number the supervisor puts into the environment. Without one, nothing of this does anything. A
pipe says more than a file: the supervisor sees its end as soon as the process is gone, and the process that its supervisor is gone.
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
"""Variable with the number of the pipe."""
TICK = 1.0
"""Seconds between two signs of life."""
_MOST = 300
"""Characters of an error's first line: with it a message stays below what a pipe takes as one (512 bytes in POSIX, 4,096 here)."""
_LINE = 3000
"""Characters of a line for the user."""

_pipe: int | None = None
_worker: int | None = None


def listened() -> bool:
    """Whether a supervisor listens."""
    return _pipe is not None


def connect(environ: MutableMapping[str, str] | None = None) -> bool:
    """Begin to tell, if a supervisor listens; returns whether one does. Called once, by the process's main thread.

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
    """A step has ended; from here on the next one has its allowance."""
    _say(step=step)


def doing(what: str) -> None:
    """Something other than a step begins that may take long, as ``compile``: it has the larger allowance, until the next :func:`beat`."""
    _say(doing=what)


def say(text: str) -> None:
    """A line for the user at the supervisor, as this process's own standard error goes to its log. Nothing without a supervisor."""
    _say(say=text[:_LINE])


def raised(error: BaseException, *, again: bool) -> None:
    """This process is about to end with an error; ``again`` says whether another try may go better."""
    first = (str(error).strip().splitlines() or [""])[0]
    _say(raised=f"{type(error).__name__}: {first}"[:_MOST].rstrip(": "), again=again)


def _say(**message: Any) -> None:
    if _pipe is None:
        return
    try:
        os.write(_pipe, (json.dumps(message) + "\n").encode())
    except BlockingIOError:
        pass  # the supervisor is behind; a later message says as much
    except BrokenPipeError:
        _orphaned()


def _orphaned() -> None:
    """The supervisor is gone, and with it whoever would end this process: it ends as if asked to."""
    global _pipe
    _pipe = None
    os.kill(os.getpid(), signal.SIGTERM)


def at_work() -> None:
    """Where this process is, is from now on where the calling thread is, as long as that lives: the main thread waits for it."""
    global _worker
    _worker = threading.get_ident()


def _tick() -> None:
    while _pipe is not None:
        where, waits = place(_at())
        _say(where=where, waits=waits)
        time.sleep(TICK)


def _at() -> FrameType | None:
    """Where the thread at work is, or else the main one."""
    frames = sys._current_frames()
    threads = [thread for thread in (_worker, threading.main_thread().ident) if thread is not None]
    return next((frames[thread] for thread in threads if thread in frames), None)


def place(frame: FrameType | None) -> tuple[str, bool]:
    """Where a thread is, as ``file:line``, outside of jax; and whether it is inside of jax, as one is that waits for its peers.

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
