"""Lock a folder so that only one run at a time writes into it."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from jaxpar.errors import CheckpointError

LOCK = "lock"


class Lock:
    """An exclusive lock on a folder, created if missing; held until :meth:`release`, or until the process ends.

    Raises:
      CheckpointError: another run holds it.
      OSError: the folder cannot be created or written to.
    """

    def __init__(self, folder: Path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 200, 0).decode(errors="replace").strip() or "an unknown process"
            os.close(self._file)
            raise CheckpointError(
                f"{folder} is in use by another run ({holder}). Remedy: another folder, or end that run."
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock; releasing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
