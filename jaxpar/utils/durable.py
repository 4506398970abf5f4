"""Files and folders that survive a kill: exclusive locks, atomic replacement, synced folders.

No function here follows a symbolic link in the last part of a path that it writes, locks or deletes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import stat
from collections.abc import Iterable
from pathlib import Path

from jaxpar.errors import JaxparError

LOCK = "lock"


class Lock:
    """An exclusive lock on an existing folder, held until :meth:`release`, or until the process ends.

    Args:
      folder: the folder; the file ``lock`` in it names the holder.
      error: the error that is raised where another run holds the lock.

    Raises:
      JaxparError: ``error``; it names the process that holds the lock. Or ``lock`` is not a regular file: a symbolic
        link would lead out of the folder.
      OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, error: type[JaxparError]):
        file = folder / LOCK
        try:
            self._file = _open_regular(file)
        except OSError as cause:
            if cause.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EINVAL):
                raise
            what = "a symbolic link" if file.is_symlink() else "no regular file"
            raise error(f"{file} is {what}, so it cannot be locked. Remedy: delete it.") from cause
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


def _open_regular(file: Path) -> int:
    """Returns the descriptor of a regular file, which is created if it is missing and whose content is kept."""
    found = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return found


def write_atomically(file: Path, text: str) -> None:
    """Replace a file by ``text``, so that a kill leaves the old or the new content, and sync it to disk.

    The folder is synced before the file is replaced too: the content may name other new files of it.
    """
    new = file.with_name(f"{file.name}.new")
    new.unlink(missing_ok=True)  # left by a kill, or a link
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w", encoding="utf-8") as f:
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


def sync_files(files: Iterable[Path]) -> None:
    """Sync files and the folders that they are in to disk."""
    paths = list(files)
    for file in paths:
        f = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(f)
        finally:
            os.close(f)
    for folder in {file.parent for file in paths}:
        sync_folder(folder)


def remove(path: Path) -> None:
    """Delete a folder with its content, a file or a link, but never what a link leads to; errors are ignored."""
    try:
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
        if not is_folder:
            path.unlink()
    except OSError:
        return
    if is_folder:
        shutil.rmtree(path, ignore_errors=True)
