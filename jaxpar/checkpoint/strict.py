"""Parsed JSON, taken only as what it should be: anything else is a ``ValueError`` that says where and what."""

from __future__ import annotations

from typing import Any


def inside(name: str) -> bool:
    """Whether a name, as a manifest gives it, cannot lead out of the folder (links apart).

    >>> inside("arrays/params.w/0.0"), inside("../other"), inside("/etc/passwd")
    (True, False, False)
    """
    parts = name.split("/")
    return (
        "\\" not in name and name.isprintable() and len(name) <= 4096 and all(p not in ("", ".", "..") for p in parts)
    )


def table(data: Any, key: str) -> dict[str, Any]:
    """The table of a key."""
    found = data[key]
    if not isinstance(found, dict):
        raise ValueError(f"{key} is a {type(found).__name__}, but a table is wanted")  # noqa: TRY004 (a wrong file, not a wrong call)
    return found


def text(value: Any, key: str) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError(f"{key} is {value!r:.40}, but a text is wanted")  # noqa: TRY004
    return value


def count(value: Any, key: str, most: int) -> int:
    """A whole number from 0 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{key} is {value!r:.40}, but a count up to {most} is wanted")
    return value


def counts(value: Any, key: str, most: int) -> tuple[int, ...]:
    """A list of such numbers."""
    if not isinstance(value, list):
        raise ValueError(f"{key} is {value!r:.40}, but a list of counts is wanted")  # noqa: TRY004
    return tuple(count(item, key, most) for item in value)
