"""The differential suite itself: cases as data, the reference, the shrinker, workers, and planted defects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from . import attention, attention_calls, pipeline_models, pipelines, reference, report
from .attention_calls import kept_by_one_device
from .attention_inputs import arrays_of, problem_of, standard_slopes
from .cases import FAMILIES, Dice, Differences, Outcome, drawn, family, parsed, printed
from .runner import Result, Worker
from .shrink import shrunk

FULL = attention.Case(
    batch=2,
    queries=5,
    keys=6,
    kv_heads=2,
    heads=2,
    head_dim=3,
    value_dim=2,
    dtype="float64",
    window=4,
    q_offset=1,
    bias="inf",
    bias_heads=True,
    sinks=True,
    softcap=2.0,
    alibi="drawn",
    scale=0.7,
    segments="padding",
    seed=3,
)


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_seeds_give_equal_cases_that_print_as_python(name: str) -> None:
    cases = [drawn(name, 5, index) for index in range(60)]
    assert cases[40:] == [drawn(name, 5, index) for index in range(40, 60)]
    assert cases != [drawn(name, 6, index) for index in range(60)]
    assert cases == [parsed(name, printed(case)) for case in cases]
    assert len({printed(case) for case in cases}) == 60


@pytest.mark.parametrize("name", FAMILIES)
def test_the_defaults_are_the_simplest_case(name: str) -> None:
    assert printed(family(name).Case()) == "Case()"


def test_only_a_case_is_read_from_the_command_line() -> None:
    with pytest.raises(ValueError, match="--case is"):
        parsed("attention", "[1, 2]")
    with pytest.raises(ValueError, match="malformed node"):
        parsed("attention", "Case(keys=__import__('os').getpid())")


def test_a_case_shrinks_to_the_least_that_fails() -> None:
    """The planted defect needs 3 keys, a window with two sides and a mesh; all other fields return to their
    defaults."""
    case = attention.Case(context=4, keys=11, queries=7, window=(4, 2), softcap=2.0, prefix=(1, 2, 3), dtype="bfloat16")
    found = shrunk(case, lambda c: c.keys >= 3 and isinstance(c.window, tuple) and c.context > 1)
    assert found == attention.Case(context=2, keys=3, window=(1, 1))


def test_a_shrinker_that_finds_no_end_stops_at_its_budget() -> None:
    asked: list[Any] = []

    def fails(case: Any) -> bool:
        asked.append(case)
        return case.window is not None

    shrunk(attention.Case(window=2**40), fails, budget=7)
    assert len(asked) == 7


def _moved(problem: reference.Problem, name: str, step: Any) -> reference.Problem:
    return replace(problem, **{name: getattr(problem, name) + step})


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "slopes", "sinks"])
def test_gradients_of_the_reference_are_its_finite_differences(name: str) -> None:
    keep = np.random.default_rng(0).integers(0, 2, (FULL.rows, FULL.query_heads, FULL.queries, FULL.keys)) * 2.0
    problem = problem_of(FULL, arrays_of(FULL), keep)
    gradient = reference.solve(problem).arrays[name]
    value = lambda p: float(np.sum(reference.solve(p).arrays["o"] * problem.grad))
    rng, h = np.random.default_rng(1), 1e-6
    for _ in range(8):
        step = rng.normal(size=gradient.shape)
        slope = (value(_moved(problem, name, h * step)) - value(_moved(problem, name, -h * step))) / (2 * h)
        assert slope == pytest.approx(float(np.sum(gradient * step)), rel=1e-6, abs=1e-8)


def test_the_reference_knows_rows_without_keys_and_numbers_that_nothing_sees() -> None:
    case = replace(FULL, holes=True, dtype="float32", bias="min rows")
    arrays = arrays_of(case)
    assert np.isnan(arrays["q"]).any() and np.isnan(arrays["v"]).any()
    found = reference.solve(problem_of(case, arrays, None)).arrays
    assert all(np.isfinite(x).all() for x in found.values())
    assert not found["o"][arrays["q_segments"] < 0].any() and not found["v"][arrays["k_segments"] < 0].any()


def test_slopes_of_the_reference_are_those_of_the_paper() -> None:
    assert standard_slopes(4).tolist() == [0.25, 0.0625, 0.015625, 0.00390625]
    assert standard_slopes(3).tolist() == [0.0625, 0.00390625, 0.25]


def _run(case: Any) -> Outcome:
    outcome: Outcome = attention.run(case).outcome
    return outcome


def test_a_planted_wrong_attention_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention.Case(batch=2, queries=3, keys=3, head_dim=2, window=2, softcap=0.7)
    assert _run(case).kind == "same"
    right = attention_calls.options_of

    def wrong(case: Any, arrays: Any) -> Any:
        fixed, traced = right(case, arrays)
        return {**fixed, "softcap": 0.701}, traced

    monkeypatch.setattr(attention_calls, "options_of", wrong)
    found = _run(case)
    assert found.kind == "differs" and "bound 1e-05" in found.text


@pytest.mark.slow
def test_a_planted_wrong_pipeline_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect weights microbatches equally, though they hold different numbers of tokens."""
    case = pipelines.Case(stages=1, microbatches=2, layers=(1,), seq=3, width=2, weighted=True, seed=2)
    assert len(set(pipeline_models.batch_of(case)["counted"].sum(1))) == 2
    assert pipelines.run(case).outcome.kind == "same"
    right = pipeline_models.staged

    def wrong(case: Any) -> Any:
        loss = right(case)
        return replace(loss, head=lambda model, x, batch: loss.head(model, x, batch)[0])

    monkeypatch.setattr(pipeline_models, "staged", wrong)
    assert pipelines.run(case).outcome.kind == "differs"


@pytest.mark.parametrize(
    ("found", "want", "size", "text"),
    [
        ([1.0, 2.0], [1.0, 2.1], 0.0, "x[1] is 2, the reference 2.1: error 4.8e-02, bound 1e-05"),
        ([np.nan, 2.0], [1.0, 2.0], 0.0, "x is not finite in 1 of 2 entries, the reference 0"),
        ([1.0], [1.0, 2.0], 0.0, "x has shape [1], the reference [2]"),
        ([1e-7, 0.0], [0.0, 0.0], 0.0, "x[0] is 1e-07, the reference 0: error 1.0e+00, bound 1e-05"),
        ([1e-7, 0.0], [0.0, 0.0], 1.0, ""),
        ([np.inf, 0.0], [np.inf, 0.0], 0.0, ""),
    ],
)
def test_what_differs_is_told_with_its_place(found: Any, want: Any, size: float, text: str) -> None:
    differences = Differences()
    differences.check("x", found, want, 1e-5, size)
    assert differences.outcome.text == text
    assert differences.outcome.kind == ("differs" if text else "same")


def test_what_dropout_keeps_on_one_device_is_a_fair_draw_for_each_sequence_and_head() -> None:
    case = attention.Case(batch=3, heads=4, queries=24, keys=24, dropout=0.3, seed=1)
    kept = kept_by_one_device(case)
    assert set(np.unique(kept)) == {0.0, 1 / 0.7}
    shares = (kept > 0).mean((2, 3))
    # Five standard deviations of a share of 576 draws.
    assert np.abs(shares - 0.7).max() < 5 * (0.3 * 0.7 / 576) ** 0.5
    masks = (kept > 0).reshape(12, -1).astype(float)
    correlations = np.corrcoef(masks) - np.eye(12)
    assert np.abs(correlations).max() < 5 / 576**0.5


def test_a_process_that_ends_is_the_outcome_of_its_case() -> None:
    worker = Worker("cases")  # a module without cases: the process raises and ends
    results = [worker.ask("Case()", index) for index in (3, 4)]
    worker.close()
    assert [r.index for r in results] == [3, 4]
    assert all(r.outcome.kind == "crashed" and "AttributeError" in r.outcome.text for r in results)


def test_the_table_counts_refusals_and_failures_and_tells_the_worst_error_that_passed() -> None:
    outcomes = [
        Outcome("same", "", {"fp32": 2e-7}),
        Outcome("refused", "Remedy"),
        Outcome("differs", "", {"fp32": 3e-6}),
    ]
    results = [Result(i, "Case()", outcome, 1.0) for i, outcome in enumerate(outcomes)]
    assert report.row("attention", 4, results) == "| attention | 4 | 3 | 1 | 1 | fp32 2.0e-07 |"
    assert not report.too_many_refused(results)
    assert report.too_many_refused([results[1]] * 6 + [results[0]] * 14)


def test_dice_draw_plain_numbers_of_both_ends() -> None:
    dice = Dice(0, 0)
    drawn = {dice.whole(1, 3) for _ in range(60)}
    assert drawn == {1, 2, 3} and all(type(x) is int for x in drawn)
