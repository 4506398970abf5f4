"""Covers of a grid of parameters: few of its rows, in which every pair of values still occurs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest


def cover(*factors: Iterable[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """Rows of the grid of ``factors``, chosen greedily and always alike.

    Each row is the one with most combinations that no row before it has, and among these the one whose values are in
    the fewest rows. So the first rows differ in every factor.

    Args:
      factors: the values of each parameter.
      strength: every combination of values of so many parameters is in a row: 2 for pairs, 1 for each value.

    Returns:
      Rows ``(value of the first parameter, value of the second, ...)``.
    """
    values = [list(factor) for factor in factors]
    grid = list(itertools.product(*(range(len(some)) for some in values)))
    combinations = {row: set(itertools.combinations(enumerate(row), strength)) for row in grid}
    missing = set[Any]().union(*combinations.values())
    uses: Counter[tuple[int, int]] = Counter()
    rows = []
    while missing:
        row = max(grid, key=lambda row: (len(combinations[row] & missing), -sum(uses[at] for at in enumerate(row))))
        missing -= combinations[row]
        uses.update(enumerate(row))
        rows.append(tuple(some[i] for some, i in zip(values, row, strict=True)))
    return rows


def covering(*factors: Iterable[Any], keep: int, strength: int = 2) -> list[Any]:
    """The values of a ``parametrize``: a cover of the grid. The first ``keep`` rows run by default, others are slow."""
    rows = cover(*factors, strength=strength)
    return [pytest.param(*row, marks=() if i < keep else pytest.mark.slow) for i, row in enumerate(rows)]
