"""Files and folders that survive a kill: exclusive locks, atomic replacement, synced folders."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from jaxpar.errors import JaxparError

LOCK = "lock"


class Lock:
    """An exclusive lock on an existing folder, held until :meth:`release`, or until the process ends.

    Args:
      folder: the folder; the file ``lock`` in it names the holder.
      error: the error that is raised where another run holds the lock.

    Raises:
      JaxparError: ``error``; it names the process that holds the lock.
      OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, error: type[JaxparError]):
        self._file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 200, 0).decode(errors="replace").strip() or "an unknown process"
            os.close(self._file)
            raise error(
                f"{folder} is in use by another run ({holder}). Remedy: use another folder, or end that run."
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock; releasing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def write_atomically(file: Path, text: str) -> None:
    """Replace a file by ``text``, so that a kill leaves the old or the new content, and sync it to disk.

    The folder is synced before the file is replaced too: the content may name other new files of it.
    """
    new = file.with_name(f"{file.name}.new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    sync_folder(file.parent)
    os.replace(new, file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder's directory entries to disk."""
    f = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(f)
    finally:
        os.close(f)
