"""Validate names, files and parsed JSON of a manifest; anything malformed raises a ``ValueError`` or ``OSError``."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from jaxpar.utils.checks import is_count, shown
from jaxpar.utils.durable import link_text, open_regular


def inside(name: str) -> bool:
    """Whether a name from a manifest stays inside the checkpoint's folder (:func:`opened` checks symbolic links).

    >>> inside("arrays/params.w/0.0"), inside("../other"), inside("/etc/passwd")
    (True, False, False)
    """
    parts = f"/{name}/"
    outside = "//" in parts or "/./" in parts or "/../" in parts or "\\" in parts
    return not outside and name.isprintable() and len(name) <= 4096


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


def path_problem(path: str) -> str | None:
    """Returns why a tensor cannot have this path, or ``None``; the limits bound the work of matching paths.

    >>> path_problem("params/blocks/0/w"), path_problem("a\\tb")
    (None, 'its path must be printable')
    """
    if not path.isprintable():
        return "its path must be printable"
    if len(path) > _MOST_PATH or path.count("/") >= _MOST_PARTS:
        return f"its path must have at most {_MOST_PATH:,} characters and {_MOST_PARTS} parts"
    return None


_MOST_PATH, _MOST_PARTS = 1000, 64


def text(value: Any, key: str) -> str:
    """Returns a value that must be a printable string."""
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{key} must be a printable string, got {shown(value)}")
    return value


def count(value: Any, key: str, most: int) -> int:
    """Returns a value that must be an integer from 0 to ``most``."""
    if not is_count(value, 0) or value > most:
        raise ValueError(f"{key} must be an integer from 0 to {most}, got {shown(value)}")
    return value


def counts(value: Any, key: Callable[[], str], most: int) -> tuple[int, ...]:
    """Returns a value that must be a list of integers from 0 to ``most``, as a tuple."""
    if not isinstance(value, list):
        raise ValueError(f"{key()} must be a list of integers, got {shown(value)}")  # noqa: TRY004
    if all(type(item) is int and 0 <= item <= most for item in value):  # a manifest has millions
        return tuple(value)
    return tuple(count(item, key(), most) for item in value)


def check_metadata(data: Any, key: str) -> None:
    """Check values of any form: not nested too deeply for a reader that recurses, and every text is Unicode.

    Raises:
      ValueError: they are.
    """
    level = [data]
    for _ in range(_MOST_DEPTH):
        texts = [x for x in level if isinstance(x, str)] + [k for x in level if isinstance(x, dict) for k in x]
        for one in texts:
            try:
                one.encode()
            except UnicodeEncodeError:  # JSON can hold halves of surrogate pairs
                raise ValueError(f"{key} has a text that is not Unicode: {shown(one)}") from None
        level = [y for x in level if isinstance(x, list | dict) for y in (x.values() if isinstance(x, dict) else x)]
        if not level:
            return
    raise ValueError(f"{key} is nested more than {_MOST_DEPTH} levels deep")


_MOST_DEPTH = 64
