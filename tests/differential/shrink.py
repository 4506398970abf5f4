"""Find the smallest case that still fails: fields return to their defaults, and sizes move towards them, one at a
time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any


def shrunk(case: Any, fails: Callable[[Any], bool], budget: int = 200) -> Any:
    """A case from which no single step leads to a simpler one that fails.

    Args:
      case: a frozen dataclass that fails; the defaults of its fields are the simplest values.
      fails: whether a case still fails in the same way.
      budget: the largest number of cases to try.

    >>> from dataclasses import make_dataclass
    >>> case = make_dataclass("Case", [("heads", int, 1), ("keys", int, 1), ("mask", str, "causal")], frozen=True)
    >>> small = shrunk(case(heads=6, keys=9, mask="full"), lambda c: c.keys >= 4)
    >>> (small.heads, small.keys, small.mask)
    (1, 4, 'causal')
    """
    seen = {case}
    progress = True
    while progress and budget > 0:
        progress = False
        for candidate in steps(case):
            if candidate in seen:
                continue
            seen.add(candidate)
            budget -= 1
            if fails(candidate):
                case, progress = candidate, True
                break
            if budget <= 0:
                break
    return case


def steps(case: Any) -> Iterator[Any]:
    """Cases that are simpler in one field: first those at the default, then those closer to it."""
    different = [f for f in fields(case) if getattr(case, f.name) != f.default]
    for f in different:
        yield replace(case, **{f.name: f.default})
    for f in different:
        for value in nearer(getattr(case, f.name), f.default):
            yield replace(case, **{f.name: value})


def nearer(value: Any, default: Any) -> Iterator[Any]:
    """Values between ``value`` and ``default``, the closest to the default first.

    >>> list(nearer(9, 1)), list(nearer((4, 0), None)), list(nearer(-3, None))
    ([5, 7, 8], [(2, 0), (3, 0)], [-2])
    """
    if value is None or isinstance(value, (bool, str, float)):
        return
    if isinstance(value, int):
        goal = default if isinstance(default, int) else 0
        gap, sign = abs(value - goal), 1 if value > goal else -1
        for step in (gap >> n for n in range(1, gap.bit_length())):
            if value - sign * step != default:
                yield value - sign * step
        return
    if isinstance(value, tuple):
        yield from _shorter(value, default)
        for i, item in enumerate(value):
            for less in nearer(item, None):
                yield (*value[:i], less, *value[i + 1 :])


def _shorter(value: tuple[Any, ...], default: Any) -> Iterator[tuple[Any, ...]]:
    """Tuples without one of their items, if the default is a tuple too: then any length is valid."""
    if isinstance(default, tuple) and len(value) > 1:
        for i in range(len(value)):
            yield (*value[:i], *value[i + 1 :])
