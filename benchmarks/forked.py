"""Work in processes of their own that need not import everything anew: they are forked from one that has, while no jax backend runs in it."""

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
    """Import what forked processes will need: orbax, these modules and these names of jaxpar. Nothing of it starts a backend or a thread."""
    import orbax.checkpoint  # noqa: F401

    for name in ("CheckpointManager", "MeshSpec", "restore", "save"):
        getattr(jp, name)
    for module in modules:
        importlib.import_module(module)
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")


class Forked:
    """A process that does one thing and ends with status 0, or 1 if that raised; as much of ``subprocess.Popen`` as is wanted."""

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
        except BaseException:  # noqa: BLE001 (what forked it must never go on here)
            traceback.print_exc()
        finally:
            os._exit(status)

    def poll(self) -> int | None:
        """Its status, ``None`` while it runs; negative is the signal that ended it."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Its status, when it has ended."""
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
