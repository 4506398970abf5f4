"""The search compiles plans in the order of their estimates, and ends when no estimate left promises more."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from jaxpar.errors import CompileError, LayoutError, MissingExtraError, PlanError
from jaxpar.planning.search.compiled import CompiledPlan, PlannedRun
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.report import PlanReport
from jaxpar.planning.search.search import TOLERANCE, Candidate, Search, SearchOptions, family, find, search
from jaxpar.planning.search.space import Space
from jaxpar.planning.search.step_cost import StepCost
from jaxpar.planning.search.workload import Workload
from jaxpar.sharding.hardware.topology import Topology

TOPOLOGY = Topology.parse("v5e:2x4")
PLANS = [
    Plan(data=data, model=8 // data, zero=zero, grad_accum_steps=steps, tensor=("mlp",) if data < 8 else ())
    for data in (8, 4, 2)
    for zero in (0, 1, 3)
    for steps in (1, 2, 4)
]
WORK = Workload((), (), {}, 2.0, {"batch": 8, "embed": 8, "mlp": 8}, ("batch", "embed", "mlp"))


class Estimates(CostModel):
    """Costs that are given."""

    def __init__(self, seconds: dict[Plan, float], peak: float = 2.0**30):
        super().__init__(WORK, TOPOLOGY)
        self._seconds, self._peak = seconds, peak

    def cost(self, plan: Plan) -> StepCost:
        peak = self._peak / (8 if plan.offload else 1)
        return StepCost(0.0, 0.0, (), 0.0, 0.0, self._seconds.get(plan, 1.0), {"parameters": peak})


@dataclass
class Compiler:
    """Programs that are given, and which were compiled."""

    seconds: dict[Plan, float]
    problems: dict[Plan, str] = field(default_factory=dict)
    too_large: frozenset[Plan] = frozenset()
    traced: dict[Plan, int] = field(default_factory=dict)
    tried: list[Plan] = field(default_factory=list)

    def traced_bytes(self, plan: Plan) -> int | None:
        return self.traced.get(plan)

    def compiled(self, plan: Plan) -> CompiledPlan:
        self.tried.append(plan)
        if plan in self.problems:
            raise LayoutError([self.problems[plan]])
        return CompiledPlan(
            plan not in self.too_large, self.seconds[plan], 0.5, 0.25, 0.125, (), 8.0, 4.0, 2.0**29, 0.5, 100.0
        )


@dataclass(frozen=True)
class Planner:
    workload: Workload = WORK

    def run_of(self, plan: Plan) -> PlannedRun:
        raise NotImplementedError

    def config_of(self, plan: Plan) -> dict[str, Any]:
        return {"mesh": plan.mesh_data}


def run(seconds: dict[Plan, float], compiler: Compiler, **options: Any) -> Search:
    return search(Estimates(seconds), seconds, compiler, Counter(), SearchOptions(**options))


@examples(30)
@given(st.lists(st.floats(0.1, 10.0), min_size=len(PLANS), max_size=len(PLANS)), st.data())
def test_what_is_left_promises_less_than_the_tolerance(seconds: list[float], data: st.DataObject) -> None:
    estimates = dict(zip(PLANS, seconds, strict=True))
    compiler = Compiler({plan: s * data.draw(st.floats(0.5, 2.0)) for plan, s in estimates.items()})
    found = run(estimates, compiler, at_most=len(PLANS))
    best, left = found.ranked[0], found.waiting()
    assert found.value(best) == min(compiler.seconds[plan] for plan in compiler.tried)
    assert not left or found.value(best) <= TOLERANCE * found.expected(left[0])
    assert len({family(plan) for plan in compiler.tried}) >= 2 and len(set(compiler.tried)) == len(compiler.tried)


@examples(30)
@given(st.lists(st.floats(0.1, 10.0), min_size=len(PLANS), max_size=len(PLANS)), st.integers(0, 2**32))
def test_families_that_err_alike_are_corrected(seconds: list[float], seed: int) -> None:
    """Where all plans of a family err by one factor, and all families were tried, the best plan is within 5 %."""
    factors: dict[Any, float] = {}
    for i, plan in enumerate(PLANS):
        factors.setdefault(family(plan), 0.5 + ((seed >> i) % 16) / 10)
    estimates = dict(zip(PLANS, seconds, strict=True))
    compiler = Compiler({plan: s * factors[family(plan)] for plan, s in estimates.items()})
    found = run(estimates, compiler, at_least=len(factors), at_most=len(PLANS))
    assert found.value(found.ranked[0]) <= TOLERANCE * min(compiler.seconds.values()) * (1 + 1e-9)


def test_plans_that_cannot_run_are_passed_over() -> None:
    seconds = {plan: 1.0 + i for i, plan in enumerate(PLANS[:6])}
    first, second, third, fourth, *_ = seconds
    compiler = Compiler(seconds, {first: "mlp does not divide"}, frozenset({second}), {third: 2**60})
    lines: list[str] = []
    found = search(Estimates(seconds), seconds, compiler, Counter(), SearchOptions(at_least=1), progress=lines.append)
    assert found.ranked[0].plan == fourth and third not in compiler.tried
    problems = {c.plan: c.problem.splitlines()[0] for c in found.candidates if c.problem}
    assert problems[second] == "does not fit: 512.00 MiB needed, compiled"
    assert problems[third] == "does not fit: 1048576.00 TiB needed, by its trace"
    assert "mlp does not divide" in problems[first]
    assert lines[0].startswith(f"{first.describe()}: ") and f"{fourth.describe()}: 4000.0 ms, 0.50 GiB" in lines


def test_plans_that_keep_the_same_are_corrected_by_one_that_does_not_fit() -> None:
    """A program that needs twice its estimate says that others of its kind do not fit either."""
    same = [Plan(data=8, zero=3, remat="dots", replica=r) for r in (1, 2, 4)]
    seconds = {plan: 1.0 + i for i, plan in enumerate([*same, PLANS[0]])}
    compiler = Compiler(seconds, traced={plan: 2**60 for plan in same})
    found = search(Estimates(seconds), seconds, compiler, Counter(), SearchOptions(at_least=1))
    assert [c.plan for c in found.candidates if c.problem] == same[:1] and found.ranked[0].plan == PLANS[0]
    assert found.waiting() == []


def test_no_compiler_is_an_error() -> None:
    class Missing(Compiler):
        def compiled(self, plan: Plan) -> CompiledPlan:
            raise MissingExtraError("compiling for a TPU requires libtpu")

    with raises(MissingExtraError, "TPU"):
        run(dict.fromkeys(PLANS, 1.0), Missing({}))


def test_the_runs_own_layout_is_compiled_first() -> None:
    """So no plan is shown that is worse than the layout that the run has."""
    seconds = {plan: 1.0 + i / 100 for i, plan in enumerate(PLANS[:6])}
    own = PLANS[5]
    compiler = Compiler({plan: 2.0 for plan in seconds} | {own: 1.9})
    found = run(seconds, compiler, given={"data": own.data, "zero": own.zero, "grad_accum_steps": 4})
    assert compiler.tried[0] == own and found.ranked[0].plan == own and found.ranked[0].given


def test_the_runs_own_layout_is_compiled_though_its_estimate_does_not_fit() -> None:
    compiler = Compiler({PLANS[0]: 1.0})
    options = SearchOptions(given={"data": PLANS[0].data, "zero": PLANS[0].zero, "grad_accum_steps": 1})
    found = search(Estimates({}, peak=2.0**40), PLANS, compiler, Counter(), options)
    assert compiler.tried == PLANS[:1] and found.ranked[0].given and found.too_large == len(PLANS) - 1


def test_a_layout_with_options_of_its_own_corrects_no_estimate() -> None:
    own, other = (Plan(data=n, replica=8 // n, zero=3) for n in (2, 4))
    seconds = {own: 1.0, other: 1.0}
    for own_options, expected in ((False, 2.0), (True, 1.0)):
        given = {"given": {"data": 2}, "own_options": own_options}
        found = run(seconds, Compiler({own: 2.0, other: 1.0}), at_least=1, at_most=1, **given)
        assert found.ranked[0].given and [found.expected(c) for c in found.waiting()] == [expected]


def test_a_layout_that_is_no_plan_is_reported() -> None:
    seconds = dict.fromkeys(PLANS[:2], 1.0)
    text = "the run's own layout is none of these plans, so it was not compiled"
    assert run(seconds, Compiler(seconds), given={"data": 3}).notes == (text,)
    assert run(seconds, Compiler(seconds)).notes == ()


def test_the_number_of_programs_is_limited() -> None:
    estimates = dict.fromkeys(PLANS, 1.0)
    compiler = Compiler({plan: 10.0 + i for i, plan in enumerate(PLANS)})
    run(estimates, compiler, at_least=5, at_most=3)
    assert len(compiler.tried) == 3


def test_least_memory() -> None:
    seconds = dict.fromkeys(PLANS[:3], 1.0)
    found = run(seconds, Compiler(seconds), objective="memory")
    assert found.value(found.ranked[0]) == 2.0**29


def test_the_host_is_used_only_where_nothing_else_fits() -> None:
    space = Space(tensor=("mlp",), offload=True)
    seconds = dict.fromkeys(PLANS, 1.0)

    class Same(Compiler):
        def compiled(self, plan: Plan) -> CompiledPlan:
            self.seconds.setdefault(plan, 1.0)
            return super().compiled(plan)

    fits = find(Estimates(seconds), space, Same({}))
    assert not any(c.plan.offload for c in fits.candidates)
    full = find(Estimates(seconds, peak=2.0**40), space, Same({}))
    assert full.ranked == [] and full.too_large > 0
    tight = find(Estimates(seconds, peak=2.0**35), space, Same({}))
    assert tight.ranked and all(c.plan.offload for c in tight.candidates)


def test_nothing_fits() -> None:
    found = search(Estimates({}, peak=2.0**40), PLANS, Compiler({}), Counter())
    with raises(PlanError, "v5e:2x4", "27"):
        _ = PlanReport(found, Planner()).best


def test_a_crash_of_the_compiler_is_no_plan_that_does_not_fit() -> None:
    class Crashing(Compiler):
        def compiled(self, plan: Plan) -> CompiledPlan:
            raise CompileError("the compiler crashed (SIGABRT): a.cc:12] Check failed: x == y\nmore")

    found = run({PLANS[0]: 1.0}, Crashing({}), at_least=1)
    with raises(PlanError, "v5e:2x4", "SIGABRT"):
        _ = PlanReport(found, Planner()).best


def report() -> PlanReport:
    seconds = {plan: 1.0 + i for i, plan in enumerate(PLANS[:5])}
    found = run(seconds, Compiler({plan: s * 1.5 for plan, s in seconds.items()}), at_least=1)
    return PlanReport(found, Planner())


def test_the_report_shows_what_was_compiled_and_what_was_left() -> None:
    text = str(report())
    assert text.splitlines()[0] == "DP 8 on v5e:2x4: 1.5 s a step, MFU 50.0%, 512.00 MiB at the peak"
    assert re.search(r"^1  DP 8 +1\.5 s +50\.0% +8 B +4 B +512\.00 MiB$", text, re.MULTILINE)
    assert re.search(r"^   DP 8, 2 accumulated +3 s .* estimate$", text, re.MULTILINE)
    assert "5 plans fit by their estimate, 0 do not; 1 compiled" in text
    assert "the best program takes 0.50 × the lowest estimate left" in text


def ranked(first: CompiledPlan, second: CompiledPlan, *plans: Plan, **how: Any) -> PlanReport:
    cost = StepCost(0.0, 0.0, (), 0.0, 0.0, 1.0, {"parameters": 1.0})
    found = [Candidate(plan, cost, compiled=line) for plan, line in zip(plans, (first, second), strict=False)]
    return PlanReport(Search(TOPOLOGY, how.get("objective", "time"), found, 0, Counter()), Planner())


def test_the_reason_is_what_the_next_plan_takes_longer_for() -> None:
    best = CompiledPlan(True, 1.0, 0.75, 0.5, 0.25, (), 0.0, 0.0, 2.0**30)
    plain, large = (PLANS[0], PLANS[9]), (Plan(data=8, batch=4), Plan(data=8, batch=8))
    slower = replace(best, step=1.5, compute=0.5, hbm=0.875, exposed=0.75, peak_bytes=2.0**31)
    name = PLANS[9].describe()
    assert ranked(best, slower, *plain).why() == (
        f"500 ms before {name}: 125 ms less compute, 500 ms less exposed communication"
    )
    assert ranked(replace(best, hbm=0.8125), slower, *plain).why() == (
        f"500 ms before {name}: 62.5 ms less memory traffic, 500 ms less exposed communication"
    )
    more = replace(best, step=1.125, exposed=0.125)
    assert ranked(best, more, *plain).why() == f"125 ms before {name}: 125 ms more exposed communication"
    assert ranked(best, replace(best, step=3.0), *large).why() == (
        f"125 ms a sequence before {large[1].describe()}"  # plans of several batches share no compute
    )
    assert ranked(best, slower, *plain, objective="memory").why() == f"1.00 GiB less at the peak than {name}"
    assert ranked(best, slower, PLANS[0]).why() == "no other plan was compiled"


def test_the_json_has_what_a_script_wants() -> None:
    told = json.loads(report().to_json())
    first, second, *_ = told["plans"]
    assert first["compiled"] and first["config"] == {"mesh": {"data": 8}} and first["step_seconds"] == 1.5
    assert {"wire_bytes", "exposed_bytes", "peak_bytes", "mfu", "tokens_per_second"} <= first.keys()
    assert not second["compiled"] and second["step_seconds"] == 2.0 and told["fitting"] == 5


def test_a_plan_shows_itself_in_a_notebook() -> None:
    page = report()._repr_html_()
    assert page.startswith("<div><b>DP 8 on v5e:2x4") and "<table" in page


def test_candidates_prefer_what_is_known() -> None:
    cost = StepCost(0.0, 0.0, (), 0.0, 0.0, 2.0, {"parameters": 10.0})
    assert Candidate(PLANS[0], cost).peak_bytes == 10.0 and Candidate(PLANS[0], cost, 20).peak_bytes == 20
