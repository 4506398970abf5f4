"""Checks of single values that configurations and calls share."""

from __future__ import annotations

from typing import Any


def is_count(value: Any, least: int = 1) -> bool:
    """Whether ``value`` is an integer, not a bool, of at least ``least``.

    >>> is_count(3), is_count(0), is_count(True), is_count(0, 0), is_count(2.0)
    (True, False, False, True, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
