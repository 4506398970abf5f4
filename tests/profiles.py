"""How many cases run by default: hypothesis profiles, and the marker ``slow`` for a part of a long list of cases.

The profile is ``fast``, or ``thorough`` with ``pytest --hypothesis-profile thorough``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How fast inputs are drawn depends on what else the machine does.
_ANY_MACHINE: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fast", **_ANY_MACHINE, max_examples=50)
settings.register_profile("thorough", **_ANY_MACHINE, max_examples=1000)
settings.load_profile("fast")  # the command line may select the other one afterwards


def examples(fast: int = 50, **options: Any) -> settings:
    """Settings of a property test: ``fast`` examples by default, ten times as many in the profile ``thorough``."""
    thorough = settings.get_current_profile_name() == "thorough"
    return settings(max_examples=10 * fast if thorough else fast, deadline=None, **options)


def few(values: Iterable[Any], keep: int, names: int = 1) -> list[Any]:
    """The values of a ``parametrize``: ``keep`` of them, evenly spread, run by default, the others are slow.

    Args:
      values: of one parameter, or tuples of several.
      keep: how many run by default.
      names: the number of parameters.
    """
    cases = list(values)
    default = {round(i * (len(cases) - 1) / max(keep - 1, 1)) for i in range(keep)}
    marks = [() if i in default else pytest.mark.slow for i in range(len(cases))]
    return [pytest.param(*(x if names > 1 else (x,)), marks=mark) for x, mark in zip(cases, marks, strict=True)]


def few_pairs(first: Iterable[Any], second: Iterable[Any], keep: int) -> list[Any]:
    """The values of a ``parametrize`` of two parameters: ``keep`` of all pairs run by default, the others are slow.

    Where ``keep`` is at least the number of values of each parameter, every value is in a pair that runs by default.
    """
    a, b = list(first), list(second)
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b))]
    # Each value of the longer list is once on every diagonal.
    default = sorted(pairs, key=lambda pair: ((pair[0] - pair[1]) % min(len(a), len(b)), pair))[:keep]
    return [pytest.param(a[i], b[j], marks=() if (i, j) in default else pytest.mark.slow) for i, j in pairs]
