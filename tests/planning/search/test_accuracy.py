"""The planner against an exhaustive search: all layouts of a small Llama on 8 chips, as the TPU compiler sees them."""

from __future__ import annotations

import pytest

from benchmarks.planning import exhaustive


@pytest.fixture(scope="module")
def found() -> exhaustive.Accuracy:
    return exhaustive.accuracy(exhaustive.toy(), exhaustive.Stored.read())


def test_the_choice_is_nearly_the_best_of_all(found: exhaustive.Accuracy) -> None:
    assert found.plans >= 60 and found.programs <= 12
    assert found.chosen <= exhaustive.CHOSEN


def test_estimates_rank_plans_as_compiled_programs_do(found: exhaustive.Accuracy) -> None:
    assert found.step >= exhaustive.STEP and found.memory >= exhaustive.MEMORY


def test_the_stored_plans_are_the_whole_space() -> None:
    assert set(exhaustive.space(exhaustive.toy())) == set(exhaustive.Stored.read().compiled_plans)
