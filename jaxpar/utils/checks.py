"""Checks of single values that configurations and calls share."""

from __future__ import annotations

import reprlib
from typing import Any


def is_count(value: Any, least: int = 1) -> bool:
    """Whether ``value`` is an integer, not a bool, of at least ``least``.

    >>> is_count(3), is_count(0), is_count(True), is_count(0, 0), is_count(2.0)
    (True, False, False, True, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def shown(value: Any) -> str:
    """The beginning of the text of a value of any type, size and depth, for an error.

    >>> shown([1, "a"]), shown(list(range(1000)))
    ("[1, 'a']", '[0, 1, 2, 3, 4, 5, ...]')
    """
    try:
        return reprlib.repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"a value of type {type(value).__name__}"
