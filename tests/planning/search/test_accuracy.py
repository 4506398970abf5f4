"""The planner against an exhaustive search: all layouts of a small Llama on 8 chips, as the TPU compiler sees them."""

from __future__ import annotations

import pytest

from benchmarks.planning import exhaustive
from jaxpar.planning.search.compiled import CompiledPlan


@pytest.fixture(scope="module")
def found() -> exhaustive.Accuracy:
    return exhaustive.accuracy(exhaustive.toy(), exhaustive.Stored.read())


def test_the_choice_is_nearly_the_best_of_all(found: exhaustive.Accuracy) -> None:
    assert found.plans >= 68 and found.programs <= 12
    assert found.chosen <= exhaustive.CHOSEN


def test_estimates_rank_plans_as_compiled_programs_do(found: exhaustive.Accuracy) -> None:
    deeper = exhaustive.accuracy(exhaustive.toy(), exhaustive.Stored.read(), 2)
    assert found.plans > deeper.plans and found.step >= exhaustive.STEP and deeper.memory >= exhaustive.MEMORY


def test_pipelines_of_one_layer_a_stage_copy_no_buffer() -> None:
    """Where XLA copies the buffer of residuals in every tick, the program moves twice as many bytes."""
    stored = exhaustive.Stored.read().compiled_plans
    for name in ("PP 4 × Ulysses 2, 8 microbatches", "PP 4 × ring 2, 8 microbatches"):
        (one,) = (figures for plan, figures in stored.items() if plan.describe() == name)
        assert isinstance(one, CompiledPlan) and one.hbm < 1.5 * one.compute


@pytest.mark.slow
def test_the_stored_plans_are_the_whole_space() -> None:
    assert set(exhaustive.space(exhaustive.toy())) == set(exhaustive.Stored.read().compiled_plans)
