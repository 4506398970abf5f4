"""Rows of a data file that hold no text: an error, or counted and reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jaxpar.errors import DataError

_MOST_SHOWN = 3


@dataclass(frozen=True)
class BadRow:
    """Why a row has no text.

    Attributes:
      reason: the reason.
      remedy: what would read it, if it is not the row that must be corrected.
    """

    reason: str
    remedy: str = ""


@dataclass
class BadRows:
    """Counts bad rows, or raises an error for the first.

    Attributes:
      policy: ``error`` or ``skip``.
      count: number of bad rows so far.
      first: file, row and reason of the first few.

    >>> bad = BadRows("skip")
    >>> bad.add("a.jsonl row 3", BadRow("it is not JSON"))
    >>> bad.describe()
    '1 bad row skipped: a.jsonl row 3: it is not JSON'
    """

    policy: Literal["error", "skip"] = "error"
    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, place: str, bad: BadRow) -> None:
        """Count a row; ``place`` is its file and its number, from 1.

        Raises:
          DataError: the policy is ``error``.
        """
        if self.policy == "error":
            remedy = bad.remedy or "correct the row"
            raise DataError(
                f"{place}: {bad.reason}. Remedy: {remedy}; or bad_rows: skip, which counts and reports such rows."
            )
        self.count += 1
        if len(self.first) < _MOST_SHOWN:
            self.first.append(f"{place}: {bad.reason}")

    def describe(self) -> str:
        """Returns the number of bad rows with the first of them; empty if there are none."""
        if not self.count:
            return ""
        more = f"; and {self.count - len(self.first):,} more" if self.count > len(self.first) else ""
        return f"{self.count:,} bad row{'s' * (self.count > 1)} skipped: {'; '.join(self.first)}{more}"
