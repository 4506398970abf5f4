"""Files and folders that survive a kill: exclusive locks, atomic replacement, synced folders.

Only :func:`open_input` follows a symbolic link in the last part of a path that it opens, locks or deletes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterable
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from jaxpar.errors import JaxparError

LOCK = "lock"
SHARED, PRIVATE = 0o666, 0o600
"""Modes of new files: what the umask leaves, as every other program's, or the owner's alone."""
_PERMANENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
_PERMANENT |= {errno.ENOTSUP}
"""Not ``EACCES``: permissions come back, and a run goes on until then."""


def is_permanent(error: OSError) -> bool:
    """Whether an error comes from a path that can never be used, rather than from a disk that is full or fails.

    >>> is_permanent(OSError(errno.ENAMETOOLONG, "File name too long")), is_permanent(OSError(errno.ENOSPC, "full"))
    (True, False)
    """
    return error.errno in _PERMANENT


def refuse_address(path: Path | str) -> None:
    """Raise an error for the address of a bucket, which would else become a folder called ``gs:``.

    Raises:
      OSError: the path is an address.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise OSError(errno.EINVAL, "it is an address, not a path of this machine; mount the bucket as a folder")


class Lock:
    """An exclusive lock on an existing folder, held until :meth:`release`, or until the process ends.

    Args:
      folder: the folder; a file in it names the holder.
      held: the error that is raised where another run holds the lock; it names the process that does.
      irregular: the error that is raised where the file is not a regular one; a symbolic link would lead elsewhere.
      name: of the file.

    Raises:
      JaxparError: ``held`` or ``irregular``.
      OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, held: type[JaxparError], irregular: type[JaxparError], name: str = LOCK):
        file = folder / name
        try:
            self._file = open_regular(file, os.O_RDWR | os.O_CREAT, mode=PRIVATE)
        except OSError as cause:
            if cause.errno not in (errno.ELOOP, errno.EINVAL):
                raise
            raise irregular(f"{file} cannot be locked: {cause.strerror}. Remedy: delete it.") from cause
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 200, 0).decode(errors="replace").strip() or "an unknown process"
            os.close(self._file)
            raise held(
                f"{folder} is in use by another run ({holder}). Remedy: use another folder, or end that run."
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock; releasing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def open_regular(file: Path | str, flags: int, *, mode: int = SHARED, dir_fd: int | None = None) -> int:
    """Open a regular file without following a symbolic link, and without waiting for the other end of a pipe.

    Args:
      file, flags, mode, dir_fd: as for :func:`os.open`.

    Returns:
      The descriptor.

    Raises:
      OSError: as of :func:`os.open`. ``ELOOP``: the file is a symbolic link; the text says where it leads. ``EINVAL``:
        it is a folder, a pipe, a device or a socket.
    """
    try:
        found = os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"it is {link_text(file, dir_fd=dir_fd)}") from None
        if error.errno not in (errno.EISDIR, errno.ENXIO):
            raise
    else:
        if stat.S_ISREG(os.fstat(found).st_mode):
            return found
        os.close(found)
    raise OSError(errno.EINVAL, "it is not a regular file")


_OPEN_ALREADY = re.compile(r"/dev/(stdin|fd/\d+)")


def open_input(file: str | os.PathLike[str]) -> BufferedReader:
    """Open a file that a user names for reading, also behind a link, without waiting for the other end of a pipe.

    A pipe that the shell has opened for this process (``<(...)``, ``/dev/stdin``) is read to its end.

    Raises:
      OSError: as of :func:`os.open`. ``EINVAL``: it is a folder, another pipe, a device or a socket, or its path has a
        null byte.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:
        raise OSError(errno.EINVAL, "its path has a null byte") from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or (stat.S_ISFIFO(mode) and _OPEN_ALREADY.fullmatch(os.fspath(file))):
        os.set_blocking(descriptor, True)
        return open(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "Is a directory" if stat.S_ISDIR(mode) else "it is not a regular file")


def read_input(file: Path | str, most: int) -> bytes:
    """Returns the content of a file that a user names, of at most ``most`` bytes.

    Raises:
      OSError: as of :func:`open_input`. ``EFBIG``: it is larger.
    """
    with open_input(file) as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return content


def link_text(link: Path | str, *, dir_fd: int | None = None) -> str:
    """Describes a symbolic link, with the path that it holds, for an error."""
    try:
        return f"a symbolic link to {os.readlink(link, dir_fd=dir_fd)!r:.300}"
    except OSError:  # another process has replaced it
        return "a symbolic link"


def write_atomically(file: Path, data: str | bytes, *, mode: int | None = SHARED, new: str = "") -> None:
    """Replace a file, so that a kill or an error leaves the old or the new content, and sync it to disk.

    The folder is synced before the file is replaced too: the content may name other new files of it.

    Args:
      file: the file.
      data: its content; a text is UTF-8.
      mode: of the new file, of which the umask leaves a part; ``None`` for that of a file that is replaced.
      new: the name of the file until it is complete; by default that of the file with the suffix ``.new``, which is
        for one process at a time.
    """
    path = file.with_name(new or f"{file.name}.new")
    try:
        path.unlink(missing_ok=True)  # left by a kill, or a link
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(path, flags, SHARED if mode is None else mode), "wb") as f:
            if mode is None and file.exists():
                os.fchmod(f.fileno(), stat.S_IMODE(file.stat().st_mode))
            f.write(data.encode() if isinstance(data, str) else data)
            f.flush()
            os.fsync(f.fileno())
        sync_folder(file.parent)
        os.replace(path, file)
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder's directory entries to disk, unless the process may write to the folder and not list it."""
    with suppress(PermissionError):
        _sync(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def sync_files(files: Iterable[Path]) -> None:
    """Sync files and the folders that they are in to disk."""
    paths = list(files)
    for file in paths:
        _sync(open_regular(file, os.O_RDONLY))
    for folder in {file.parent for file in paths}:
        sync_folder(folder)


def _sync(f: int) -> None:
    try:
        os.fsync(f)
    finally:
        os.close(f)


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
