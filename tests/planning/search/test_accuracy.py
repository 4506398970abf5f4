"""The planner against compiled programs: an exhaustive search, and cases that its constants were fitted to or not.

The compiled figures are stored, so no compiler is needed: ``benchmarks/planning/accuracy.py`` has the cases, and the
bounds of each column.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planning import accuracy, exhaustive
from jaxpar.app.plan import RunPlanner
from jaxpar.planning.search.compiled import CompiledPlan
from jaxpar.planning.search.search import has_values

CASES = accuracy.cases()
SHAPES = [*dict.fromkeys(case.shape for case in CASES)]
TOY = SHAPES[0]
CHEAP = (TOY, "benchmarks/planning/shapes/deep.yaml")
"""The losses of these alone are traced in each run of the tests."""


@pytest.fixture(scope="module")
def planner() -> RunPlanner:
    toy = accuracy.planner(TOY)
    assert isinstance(toy, RunPlanner)
    return toy


@pytest.fixture(scope="module")
def searched(planner: RunPlanner) -> exhaustive.Accuracy:
    return exhaustive.accuracy(planner, exhaustive.Stored.read())


def test_the_choice_is_nearly_the_best_of_all(searched: exhaustive.Accuracy) -> None:
    assert searched.plans >= 68 and searched.programs <= 12
    assert searched.chosen <= exhaustive.CHOSEN


def test_estimates_rank_plans_as_compiled_programs_do(searched: exhaustive.Accuracy) -> None:
    assert searched.step >= exhaustive.STEP and searched.memory >= exhaustive.MEMORY


def test_pipelines_of_one_layer_a_stage_copy_no_buffer() -> None:
    """Where XLA copies the buffer of residuals in every tick, the program moves twice as many bytes."""
    stored = exhaustive.Stored.read().compiled_plans
    names = [f"PP 4 × {split} 2{zero}, 8 microbatches" for split in ("Ulysses", "ring") for zero in ("", ", ZeRO 3")]
    for name in names:
        (one,) = (figures for plan, figures in stored.items() if plan.describe() == name)
        assert isinstance(one, CompiledPlan) and one.hbm < 1.5 * one.compute


def test_the_stored_plans_are_the_whole_space(planner: RunPlanner) -> None:
    assert set(exhaustive.space(planner)) == set(exhaustive.Stored.read().compiled_plans)


def test_the_flops_of_an_mfu_are_those_of_the_model(planner: RunPlanner) -> None:
    job, work = planner.job, planner.workload
    assert work.model_flops == pytest.approx((job.tokens or 0) * job.model.flops_per_token(job.config.data.seq))


def test_no_constant_saw_the_unseen_shapes_and_two_of_their_topologies() -> None:
    shapes, topologies = (
        {name: {getattr(case, what) for case in CASES if case.column == name} for name in accuracy.BOUNDS}
        for what in ("shape", "topology")
    )
    assert not shapes["fitted"] & shapes["unseen"] and len(shapes["unseen"]) >= 3
    assert len(topologies["unseen"] - topologies["fitted"]) >= 2


@pytest.mark.parametrize("shape", [pytest.param(s, marks=() if s in CHEAP else pytest.mark.slow) for s in SHAPES])
def test_estimates_are_within_the_bounds_of_their_column(shape: str) -> None:
    """FLOPs, steps and peaks, with kernels, masks, experts and pipelines; one bound for all cases of a column."""
    estimates = [accuracy.estimate(case) for case in CASES if case.shape == shape]
    outside = [(one.case.plan.describe(), one.flops, one.step, one.peak) for one in estimates if not one.within]
    assert estimates and outside == []


def test_an_estimate_out_of_bounds_is_noticed() -> None:
    one = next(accuracy.estimate(case) for case in CASES if case.shape == TOY)
    assert one.within and one.case.step and one.case.peak_bytes and one.case.compute
    wrong = ({"step": one.case.step / 2}, {"peak_bytes": one.case.peak_bytes * 2}, {"compute": one.case.compute * 1.1})
    assert not any(replace(one, case=replace(one.case, **change)).within for change in wrong)


@pytest.fixture(scope="module")
def estimates() -> list[accuracy.Estimate]:
    return [accuracy.estimate(case) for case in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("column", accuracy.BOUNDS)
def test_bounds_say_how_wrong_estimates_are(estimates: list[accuracy.Estimate], column: str) -> None:
    """A bound that every case is far from says nothing; after the model is mended, it is tightened."""
    bounds, chosen = accuracy.BOUNDS[column], [one for one in estimates if one.case.column == column]
    for ratios, (low, high) in zip(accuracy.ratios_of(chosen), (bounds.step, bounds.peak), strict=True):
        assert ratios.least < 1.1 * low and ratios.greatest > high / 1.1


@pytest.mark.slow
def test_the_page_has_the_tables(estimates: list[accuracy.Estimate]) -> None:
    text = accuracy.PAGE.read_text(encoding="utf-8")
    assert accuracy.page(text, estimates) == text


@pytest.mark.slow
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != TOY])
def test_traced_memory_is_near_compiled(shape: str) -> None:
    """Plans that are shown and were not compiled have the memory of their trace; of each shape, the last case's."""
    *_, case = (case for case in CASES if case.shape == shape and case.peak_bytes)
    traced, (low, high) = accuracy.traced(case), accuracy.BOUNDS[case.column].traced
    assert traced is not None and low <= traced <= high


@pytest.mark.parametrize("name", ["1b_cp4_ring", "8b_1m_hybrid", "1b_pp4_fsdp4", "mix_ep4", "ds_ep4"])
def test_the_layout_of_a_configuration_is_among_its_plans(name: str) -> None:
    shape = f"configs/bench/{name}.yaml"
    planner = RunPlanner(accuracy.ROOT / shape)
    cases = [case for case in CASES if case.shape == shape]
    assert any(has_values(case.plan, planner.given(case.plan.devices)) for case in cases)
