"""The entry point of the ``jaxpar`` script: Ctrl-C ends it at once, with one line, while it starts."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def run() -> int:
    """Runs the command line, and returns its exit status.

    An import may take seconds, and Python drops a ``KeyboardInterrupt`` that is raised in a callback. So until the
    command line is imported, and until a run listens to signals itself, Ctrl-C ends the process. Nothing is written
    before.
    """
    with _exit_on_ctrl_c():
        from jaxpar.app.cli import main

        if sys.argv[1:2] == ["train"]:
            return main()
    return main()


@contextmanager
def _exit_on_ctrl_c() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # a shell starts a job in the background with SIGINT ignored
        yield
        return
    signal.signal(signal.SIGINT, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _exit(number: int, frame: FrameType | None) -> None:
    os.write(2, b"stopped by Ctrl-C\n")
    os._exit(130)
