"""Forked processes for benchmarks: they share the imports of their parent, in which no jax backend runs."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable

import jaxpar as jp


def load(*modules: str) -> None:
    """Import orbax, ``modules`` and the names of jaxpar that forked processes need, without a backend or a thread."""
    import orbax.checkpoint  # noqa: F401

    for name in ("CheckpointManager", "MeshSpec", "restore", "save"):
        getattr(jp, name)
    for module in modules:
        importlib.import_module(module)
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")


class Forked:
    """A forked process that runs one function; the parts of ``subprocess.Popen`` that the benchmarks need.

    Its exit status is 0, or 1 if the function raised.
    """

    def __init__(self, work: Callable[..., object], *given: object):
        sys.stdout.flush()
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            work(*given)
            status = 0
        except BaseException:  # noqa: BLE001 (the parent's code must never continue in this process)
            traceback.print_exc()
        finally:
            os._exit(status)

    def poll(self) -> int | None:
        """Return the exit status, ``None`` while the process runs; negative is the signal that ended it."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the process; return its exit status."""
        status = self._wait(0)
        assert status is not None
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, how: int) -> int | None:
        if self._status is None:
            pid, found = os.waitpid(self.pid, how)
            self._status = os.waitstatus_to_exitcode(found) if pid else None
        return self._status
