"""Versions of packages, as far as a range in package metadata asks for."""

from __future__ import annotations

import operator
import re


def satisfies(version: str, wanted: str) -> bool:
    """Whether a version is within a range as package metadata write it.

    A clause in a form that is not known here is taken to hold.

    >>> satisfies("0.12.0.1", ">=0.11,<0.13"), satisfies("0.12.0", "==0.11.*")
    (True, False)
    """
    compare = {
        "==": operator.eq,
        "!=": operator.ne,
        "<=": operator.le,
        ">=": operator.ge,
        "<": operator.lt,
        ">": operator.gt,
    }
    have = numbers_of(version)
    for clause in wanted.replace(" ", "").split(","):
        found = re.fullmatch(r"(==|!=|<=|>=|<|>)(\d+(?:\.\d+)*)(\.\*)?", clause)
        if found is None:
            continue
        limit = numbers_of(found[2])
        part = have[: len(limit)] if found[3] else have
        length = max(len(part), len(limit))  # 0.12 and 0.12.0 are the same
        left, right = (numbers + (0,) * (length - len(numbers)) for numbers in (part, limit))
        if not compare[found[1]](left, right):
            return False
    return True


def numbers_of(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``0.12.0.dev1`` gives ``(0, 12, 0)``."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in leading[0].split(".")) if leading else ()
