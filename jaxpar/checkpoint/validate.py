"""Validate names, files and parsed JSON of a manifest; anything malformed raises a ``ValueError`` or ``OSError``."""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Any

from jaxpar.utils.checks import is_count


def inside(name: str) -> bool:
    """Whether a name from a manifest stays inside the checkpoint's folder (symbolic links are checked elsewhere).

    >>> inside("arrays/params.w/0.0"), inside("../other"), inside("/etc/passwd")
    (True, False, False)
    """
    parts = name.split("/")
    return (
        "\\" not in name and name.isprintable() and len(name) <= 4096 and all(p not in ("", ".", "..") for p in parts)
    )


def opened(file: Path) -> FileIO:
    """Open a regular file for reading, unbuffered.

    Raises:
      OSError: it is not a regular file but, for example, a pipe, a device or a folder; reading a pipe might never end.
    """
    found = FileIO(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(found.fileno()).st_mode):
        found.close()
        raise OSError(errno.EINVAL, "it is not a regular file")
    return found


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
