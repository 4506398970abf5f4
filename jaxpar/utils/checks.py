"""Checks of single values that configurations and calls share, and how errors show values."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import ConfigError

INT32, INT64 = 2**31 - 1, 2**63 - 1
"""The largest signed integers of 32 and of 64 bits."""


def is_count(value: Any, least: int = 1) -> bool:
    """Whether ``value`` is an integer, not a bool, of at least ``least``.

    >>> is_count(3), is_count(0), is_count(True), is_count(0, 0), is_count(2.0)
    (True, False, False, True, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class Range:
    """The numbers from ``least`` to ``most``; with ``above``, without ``least``, and with ``below``, without ``most``.

    NaN is in no range.

    ``Annotated[int, Range(1, 8)]`` limits a field of a configuration (:func:`jaxpar.utils.yaml_config.build`).

    >>> 3 in Range(1, 8), 9 in Range(1, 8), float("nan") in Range(0, 1.0)
    (True, False, False)
    >>> print(Range(1, 2**20), Range(0, 1.0, above=True), Range(0, 1.0, below=True), sep="; ")
    from 1 to 1,048,576; above 0, at most 1; from 0, below 1
    """

    least: float
    most: float
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        excluded = (self.above and value == self.least) or (self.below and value == self.most)
        return self.least <= value <= self.most and not excluded

    def __str__(self) -> str:
        least, most = (f"{n:,}" if isinstance(n, int) else f"{n:g}" for n in (self.least, self.most))
        if not (self.above or self.below):
            return f"from {least} to {most}"
        return f"{'above' if self.above else 'from'} {least}, {'below' if self.below else 'at most'} {most}"


def check_number(where: str, value: float, numbers: Range) -> None:
    """Raise an error unless a number is in a range.

    Raises:
      ConfigError: its text begins with ``where``.

    >>> check_number("bound", 1e-5, Range(0, 1.0, above=True))
    """
    if value not in numbers:
        raise ConfigError(f"{where} must be {numbers}, got {shown(value)}. Remedy: use a number in this range.")


_SHORT = reprlib.Repr(maxstring=80, maxother=80)


def shown(value: Any) -> str:
    """The beginning of the text of a value of any type, size and depth, for an error.

    >>> shown([1, "a"]), shown(list(range(1000)))
    ("[1, 'a']", '[0, 1, 2, 3, 4, 5, ...]')
    """
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"a value of type {type(value).__name__}"
