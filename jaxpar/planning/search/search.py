"""``search``: compiles plans in the order of their estimates, and corrects the estimates after each program."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from jaxpar.analysis.compile.ahead_of_time import CRASHED
from jaxpar.analysis.units import show_bytes
from jaxpar.errors import JaxparError, MissingExtraError
from jaxpar.planning.search.compiled import CompiledPlan, PlannedRun, compile_plan, traced_bytes
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.space import Space, plans
from jaxpar.planning.search.step_cost import StepCost
from jaxpar.sharding.hardware.topology import Topology

Objective = Literal["time", "memory"]
TOLERANCE = 1.05
"""The search ends when the best program is within this factor of the lowest estimate that is left."""
FULL = 0.98
"""The fraction of a device's memory that a program may use."""


@dataclass(frozen=True)
class SearchOptions:
    """What a search minimizes, and how long it looks.

    Attributes:
      objective: ``time`` minimizes the seconds for each sequence, ``memory`` the bytes at the peak.
      at_least: the number of programs, of plans of as many families, that are compiled in any case.
      at_most: the largest number of programs.
      traced: the number of the best other plans whose memory is estimated from a trace.
      given: fields of the run's own layout, which is compiled first; empty if it has none.
      own_options: whether that layout has options that no plan has, so that its figures say nothing of plans.
    """

    objective: Objective = "time"
    at_least: int = 2
    at_most: int = 12
    traced: int = 6
    given: Mapping[str, Any] = field(default_factory=dict)
    own_options: bool = False


FASTEST = SearchOptions()


class Measures(Protocol):
    """What a search learns of one plan."""

    def traced_bytes(self, plan: Plan) -> int | None:
        """Returns the bytes at the peak, estimated from a trace; ``None`` if it has no estimate."""

    def compiled(self, plan: Plan) -> CompiledPlan:
        """Returns the figures of the compiled step."""


@dataclass(frozen=True)
class CompilerMeasures:
    """What a topology's compiler says of plans.

    Attributes:
      run_of: what a plan runs.
      topology: the hardware.
    """

    run_of: Callable[[Plan], PlannedRun]
    topology: Topology

    def traced_bytes(self, plan: Plan) -> int | None:
        """Returns the bytes at the peak, estimated from a trace; ``None`` if it has no estimate."""
        return traced_bytes(self.run_of(plan), self.topology)

    def compiled(self, plan: Plan) -> CompiledPlan:
        """Returns the figures of the compiled step."""
        return compile_plan(self.run_of(plan), self.topology)


@dataclass
class Candidate:
    """A plan and what is known of it.

    Attributes:
      plan: the plan.
      cost: its estimate.
      traced_bytes: its peak memory, estimated from the trace of its step.
      compiled: the figures of its compiled step; ``None`` if it was not compiled, or does not fit.
      given: whether it is the run's own layout.
      needed_bytes: what the compiler needs, if it rejected the program because it is too large.
      problem: why it cannot run, if it cannot.
    """

    plan: Plan
    cost: StepCost
    traced_bytes: int | None = None
    compiled: CompiledPlan | None = None
    given: bool = False
    needed_bytes: float | None = None
    problem: str = ""

    @property
    def waiting(self) -> bool:
        """Whether it was not compiled, and nothing is known against it."""
        return self.compiled is None and not self.problem

    @property
    def step_seconds(self) -> float:
        """Seconds of a step by the roofline of its program, or as estimated."""
        return self.figures.step

    @property
    def peak_bytes(self) -> float:
        """Bytes on one device at the peak, of its program, of its trace, or as estimated."""
        if self.compiled is not None:
            return self.compiled.peak_bytes
        known = (self.needed_bytes, self.traced_bytes, self.cost.peak_bytes)
        return next(size for size in known if size is not None)

    @property
    def figures(self) -> CompiledPlan | StepCost:
        """The figures of its program, or its estimate: the bytes that a device sends, and which of them are exposed."""
        return self.compiled or self.cost


@dataclass
class Search:
    """The state of a search.

    Attributes:
      topology: the hardware.
      objective: what is minimized: seconds for each sequence, or bytes at the peak.
      candidates: all plans whose estimate fits, and those that were found not to.
      too_large: the number of plans whose estimate does not fit.
      refused: why meshes are no plans → how many.
      limit: bytes of a device that a program may use.
      notes: which search chose the plans, what it looked at, and what it did not consider.
      own_options: as for :class:`SearchOptions`.
    """

    topology: Topology
    objective: Objective
    candidates: list[Candidate]
    too_large: int
    refused: Counter[str]
    limit: float = math.inf
    notes: tuple[str, ...] = ()
    own_options: bool = False

    @property
    def ranked(self) -> list[Candidate]:
        """The compiled plans that fit, best first."""
        return sorted((c for c in self.candidates if c.compiled is not None), key=self.value)

    @property
    def crashed(self) -> bool:
        """Whether the compiler crashed on a plan, which may have fitted."""
        return any(CRASHED in c.problem for c in self.candidates)

    def value(self, candidate: Candidate) -> float:
        """What is minimized, as far as it is known."""
        if self.objective == "memory":
            return candidate.peak_bytes
        return candidate.step_seconds / (candidate.plan.batch or 1)

    def expected(self, candidate: Candidate) -> float:
        """The value of a plan that was not compiled, corrected by the programs of similar plans."""
        return self.value(candidate) * self._corrections()(candidate)

    def expected_step(self, candidate: Candidate) -> float:
        """Seconds of a step; those of a plan that was not compiled are corrected if time is what is minimized."""
        if candidate.compiled is not None or self.objective == "memory":
            return candidate.step_seconds
        return candidate.cost.step * self._corrections()(candidate)

    def waiting(self) -> list[Candidate]:
        """The plans that were not compiled and may fit, lowest expected value first."""
        correction, memory = self._corrections(), self._memory_corrections()
        left = [c for c in self.candidates if c.waiting and c.peak_bytes * memory(c) <= self.limit]
        return sorted(left, key=lambda c: (self.value(c) * correction(c), c.cost.peak_bytes))

    def _corrections(self) -> Callable[[Candidate], float]:
        """Compiled by estimated, in plans of the same family if there are any, else in all."""
        compiled = [done for done in self.candidates if done.compiled is not None]
        known = [done for done in compiled if not (done.given and self.own_options)]
        ratios = [(family(done.plan), self._ratio(done)) for done in known]
        everything, medians = statistics.median([ratio for _, ratio in ratios] or [1.0]), _medians(ratios)
        return lambda candidate: medians.get(family(candidate.plan), everything)

    def _memory_corrections(self) -> Callable[[Candidate], float]:
        """Bytes that are known by bytes as estimated, in plans that keep the same; 1 if nothing is known of them."""
        known = (done for done in self.candidates if done.compiled is not None or done.problem)
        medians = _medians((_keeps(done.plan), done.peak_bytes / max(done.cost.peak_bytes, 1.0)) for done in known)
        return lambda candidate: 1.0 if candidate.traced_bytes else medians.get(_keeps(candidate.plan), 1.0)

    def _ratio(self, candidate: Candidate) -> float:
        estimated = candidate.cost.peak_bytes if self.objective == "memory" else candidate.cost.step
        known = candidate.peak_bytes if self.objective == "memory" else candidate.step_seconds
        return known / estimated if estimated else 1.0


def _medians(pairs: Iterable[tuple[object, float]]) -> dict[object, float]:
    """The median of the numbers of each kind."""
    found: dict[object, list[float]] = {}
    for kind, number in pairs:
        found.setdefault(kind, []).append(number)
    return {kind: statistics.median(numbers) for kind, numbers in found.items()}


def family(plan: Plan) -> tuple[object, ...]:
    """What makes estimates err alike: the axes that are used, the stage of ZeRO, accumulation and copies."""
    used = tuple(axis for axis, size in plan.mesh.items() if size > 1)
    return used, plan.zero, plan.grad_accum_steps > 1, plan.copies, plan.offload


def _keeps(plan: Plan) -> tuple[object, ...]:
    """What makes estimates of memory err alike."""
    return plan.remat, plan.zero, plan.pipeline > 1, plan.model > 1, plan.grad_accum_steps > 1, plan.copies


def find(
    model: CostModel,
    space: Space,
    measures: Measures,
    options: SearchOptions = FASTEST,
    *,
    progress: Callable[[str], None] = lambda line: None,
) -> Search:
    """Returns the search of a space. Optimizer state is stored in host memory only where nothing fits without it.

    Args:
      model: estimates plans.
      space: what may be chosen.
      measures, options, progress: as for :func:`search`.

    Raises:
      MissingExtraError: there is no compiler for the topology's devices.
    """

    def search_with(offload: bool) -> Search:
        refused: Counter[str] = Counter()
        found = plans(model.workload, model.topology.devices, space, refused, offload=offload)
        return search(model, found, measures, refused, options, progress=progress)

    first = search_with(False)
    return search_with(True) if space.offload and not first.ranked else first


def search(
    model: CostModel,
    candidates: Iterable[Plan],
    measures: Measures,
    refused: Counter[str],
    options: SearchOptions = FASTEST,
    *,
    progress: Callable[[str], None] = lambda line: None,
) -> Search:
    """Returns the search, in which the best plans are compiled.

    Args:
      model: estimates plans.
      candidates: all plans.
      measures: traces and compiles them.
      refused: why meshes are no plans → how many; filled while ``candidates`` is read.
      options: what is minimized, and how many programs are compiled.
      progress: is given a line for each plan that is compiled.

    Raises:
      MissingExtraError: there is no compiler for the topology's devices.
    """
    limit = model.topology.accelerator.hbm_bytes * FULL
    fitting, too_large = [], 0
    for plan in candidates:
        cost = model.cost(plan)
        if cost.peak_bytes > limit and not has_values(plan, options.given):
            too_large += 1
        else:
            fitting.append(Candidate(plan, cost))
    found = Search(model.topology, options.objective, fitting, too_large, refused, limit)
    found.own_options = options.own_options
    own = next((c for c in fitting if has_values(c.plan, options.given)), None)
    if options.given and own is None:
        found.notes = ("the run's own layout is none of these plans, so it was not compiled",)
    tried: list[Candidate] = []
    while len(tried) < options.at_most:
        waiting = found.waiting() if own is None or own.given else [own]
        if not waiting:
            break
        done, chosen = found.ranked, waiting[0]
        if chosen is own and not own.given:
            own.given = True
        elif len(done) < options.at_least and len(tried) <= options.at_least:
            families = {family(c.plan) for c in tried}
            chosen = next((c for c in waiting if family(c.plan) not in families), chosen)
        elif done and found.value(done[0]) <= TOLERANCE * found.expected(chosen):
            break
        _trace(chosen, measures, limit)
        if chosen.waiting:
            tried.append(chosen)
            _compile(chosen, measures)
        progress(_line(chosen))
    for shown in found.waiting()[: options.traced]:
        _trace(shown, measures, limit)
    return found


def has_values(plan: Plan, values: Mapping[str, Any]) -> bool:
    """Returns whether a plan has these values; no plan has an empty list of them."""
    return bool(values) and all(getattr(plan, name) == value for name, value in values.items())


def _trace(candidate: Candidate, measures: Measures, limit: float) -> None:
    """Estimate a plan's memory from the trace of its step."""
    try:
        candidate.traced_bytes = measures.traced_bytes(candidate.plan)
    except JaxparError as error:
        candidate.problem = str(error)
    if (candidate.traced_bytes or 0) > limit / 0.9:  # the trace is within a tenth
        candidate.problem = f"does not fit: {show_bytes(candidate.traced_bytes or 0)} needed, by its trace"


def _compile(candidate: Candidate, measures: Measures) -> None:
    try:
        found = measures.compiled(candidate.plan)
    except MissingExtraError:
        raise
    except JaxparError as error:
        candidate.problem = str(error)
        return
    if found.fits:
        candidate.compiled = found
    else:
        candidate.needed_bytes = found.peak_bytes
        candidate.problem = f"does not fit: {show_bytes(round(found.peak_bytes))} needed, compiled"


def _line(candidate: Candidate) -> str:
    if candidate.problem:
        return f"{candidate.plan.describe()}: {candidate.problem.splitlines()[0]}"
    return f"{candidate.plan.describe()}: {candidate.step_seconds * 1e3:.1f} ms, {candidate.peak_bytes / 2**30:.2f} GiB"
