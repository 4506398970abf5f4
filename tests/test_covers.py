"""Covers of grids of parameters."""

from __future__ import annotations

import itertools

import pytest
from covers import cover, covering


@pytest.mark.parametrize("sizes", [(3,), (26, 2), (8, 7, 3), (4, 3, 3, 2), (2, 2, 2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("strength", [1, 2])
def test_every_combination_is_in_a_row(sizes: tuple[int, ...], strength: int) -> None:
    strength = min(strength, len(sizes))
    rows = cover(*map(range, sizes), strength=strength)
    for places in itertools.combinations(range(len(sizes)), strength):
        wanted = set(itertools.product(*(range(sizes[place]) for place in places)))
        assert {tuple(row[place] for place in places) for row in rows} == wanted
    assert len(rows) == len(set(rows)) and rows == cover(*map(range, sizes), strength=strength)


def test_a_cover_is_small_and_its_first_rows_have_every_value() -> None:
    rows = cover(range(8), range(7), range(3))
    assert len(rows) == 8 * 7
    assert [len({row[place] for row in rows[:8]}) for place in range(3)] == [8, 7, 3]
    assert len(cover(range(26), "ab", strength=1)) == 26
    assert len(cover(*["ab"] * 6)) <= 8 < 2**6


def test_a_factor_of_one_value_or_none_needs_no_special_care() -> None:
    assert cover([{}], "ab") == [({}, "a"), ({}, "b")]
    assert cover([], "ab") == []


def test_all_rows_but_the_first_are_slow() -> None:
    cases = covering("abc", [1, 2], keep=2, strength=1)
    assert [case.values for case in cases] == [("a", 1), ("b", 2), ("c", 1)]
    assert [[mark.name for mark in case.marks] for case in cases] == [[], [], ["slow"]]
