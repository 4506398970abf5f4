"""Validate names, files and parsed JSON of a manifest; anything malformed raises a ``ValueError`` or ``OSError``."""

from __future__ import annotations

import errno
import os
from io import FileIO
from pathlib import Path
from typing import Any

from jaxpar.utils.checks import is_count
from jaxpar.utils.durable import link_text, open_regular


def inside(name: str) -> bool:
    """Whether a name from a manifest stays inside the checkpoint's folder (:func:`opened` checks symbolic links).

    >>> inside("arrays/params.w/0.0"), inside("../other"), inside("/etc/passwd")
    (True, False, False)
    """
    parts = name.split("/")
    return (
        "\\" not in name and name.isprintable() and len(name) <= 4096 and all(p not in ("", ".", "..") for p in parts)
    )


def opened(root: Path, name: str) -> FileIO:
    """Open a regular file of a checkpoint for reading, unbuffered, without following a symbolic link below ``root``.

    Args:
      root: the checkpoint's folder; it may be a link itself.
      name: the file, relative to ``root``.

    Raises:
      OSError: it is outside of ``root``, there is a symbolic link on the way, or it is not a regular file but, for
        example, a pipe, a device or a folder; reading a pipe might never end.
    """
    if not inside(name):
        raise OSError(errno.EINVAL, "it is outside the checkpoint's folder")
    *folders, last = name.split("/")
    at = os.open(root, _FOLDER)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        return FileIO(open_regular(last, os.O_RDONLY, dir_fd=at), "rb")
    except OSError as error:
        raise _of_link(root, name) or error from None
    finally:
        os.close(at)


_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
"""Flags that open a folder in order to open what is in it."""


def _of_link(root: Path, name: str) -> OSError | None:
    """The error of a path with a symbolic link below ``root``; ``None`` if there is none."""
    paths = [root / name, *(root / name).parents[: name.count("/")]]
    link = next((path for path in reversed(paths) if path.is_symlink()), None)
    if link is None:
        return None
    return OSError(errno.ELOOP, f"{'it' if link == paths[0] else link} is {link_text(link)}")


def table(data: Any, key: str) -> dict[str, Any]:
    """Returns ``data[key]``, which must be a dict."""
    found = data[key]
    if not isinstance(found, dict):
        raise ValueError(f"{key} must be a JSON object, got {type(found).__name__}")  # noqa: TRY004
    return found


def text(value: Any, key: str) -> str:
    """Returns a value that must be a string."""
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a string, got {value!r:.40}")  # noqa: TRY004
    return value


def count(value: Any, key: str, most: int) -> int:
    """Returns a value that must be an integer from 0 to ``most``."""
    if not is_count(value, 0) or value > most:
        raise ValueError(f"{key} must be an integer from 0 to {most}, got {value!r:.40}")
    return value


def counts(value: Any, key: str, most: int) -> tuple[int, ...]:
    """Returns a value that must be a list of integers from 0 to ``most``, as a tuple."""
    if not isinstance(value, list):
        raise ValueError(f"{key} must be a list of integers, got {value!r:.40}")  # noqa: TRY004
    return tuple(count(item, key, most) for item in value)
