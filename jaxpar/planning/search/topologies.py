"""``compare_topologies``: the best of several topologies: the fastest, the smallest that fits, or the cheapest."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxpar.analysis.compile.ahead_of_time import CRASHED
from jaxpar.analysis.roofline import show_time
from jaxpar.analysis.units import show_bytes, table_lines
from jaxpar.errors import PlanError, listing
from jaxpar.planning.search.best_estimate import best_estimate
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.plan import BATCH, SEQ, Plan
from jaxpar.planning.search.report import Planner, PlanReport
from jaxpar.planning.search.search import TOLERANCE, Candidate, CompilerMeasures, Objective, SearchOptions, find
from jaxpar.planning.search.space import Space
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.utils.terminal import fit

Goal = Literal["time", "memory", "chips", "price"]


@dataclass(frozen=True)
class Goals:
    """What a comparison of topologies minimizes.

    Attributes:
      goal: ``time`` the seconds for each sequence, ``memory`` the bytes of a device at the peak, ``chips`` the number
        of chips, ``price`` the dollars for each sequence.
      prices: kind of accelerator → dollars for an hour of one chip.
      programs: the largest number of programs to compile for each topology.
    """

    goal: Goal = "time"
    prices: Mapping[str, float] = field(default_factory=dict)
    programs: int = 12

    @property
    def objective(self) -> Objective:
        """What the search on one topology minimizes: at a given number of chips, the fastest plan is the cheapest."""
        return "memory" if self.goal == "memory" else "time"


@dataclass
class TopologyChoice:
    """One topology and the best plan on it.

    Attributes:
      topology: the hardware.
      estimate: the plan with the lowest estimate; ``None`` if none fits.
      report: the plans that were compiled; ``None`` if none was.
    """

    topology: Topology
    estimate: Candidate | None
    report: PlanReport | None = None

    @property
    def chips(self) -> int:
        """The number of chips."""
        return self.topology.devices // self.topology.accelerator.chip_devices

    @property
    def compiled(self) -> bool:
        """Whether a plan was compiled and fits."""
        return self.report is not None and bool(self.report.search.ranked)

    @property
    def best(self) -> Candidate | None:
        """The best plan with its figures, compiled or estimated; ``None`` if none fits."""
        return self.estimate if self.report is None else next(iter(self.report.search.ranked), None)

    @property
    def plan(self) -> Plan | None:
        """The best plan."""
        return None if self.best is None else self.best.plan

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of the best plan; NaN if none fits."""
        return math.nan if self.best is None else self.best.step_seconds

    @property
    def peak_bytes(self) -> float:
        """Bytes of a device at the peak of the best plan; NaN if none fits."""
        return math.nan if self.best is None else self.best.peak_bytes


@dataclass(frozen=True)
class TopologyReport:
    """Several topologies, compared.

    Attributes:
      choices: one for each topology.
      goals: what is minimized.
      planner: the model that was planned.
    """

    choices: tuple[TopologyChoice, ...]
    goals: Goals
    planner: Planner

    def value(self, choice: TopologyChoice) -> tuple[float, float]:
        """What is minimized: the goal, then the seconds for each sequence."""
        plan = choice.plan
        if plan is None:
            return math.inf, math.inf
        seconds = choice.step_seconds / self._batch(plan)
        first = {"time": seconds, "memory": choice.peak_bytes, "chips": float(choice.chips)}
        if self.goals.goal == "price":
            return self._dollars(choice) / self._batch(plan), seconds
        return first[self.goals.goal], seconds

    @property
    def ranked(self) -> list[TopologyChoice]:
        """The topologies on which a compiled plan fits, best first."""
        return sorted((c for c in self.choices if c.compiled), key=self.value)

    @property
    def waiting(self) -> list[TopologyChoice]:
        """The topologies that are only estimated, best first."""
        return sorted((c for c in self.choices if c.report is None and c.estimate is not None), key=self.value)

    @property
    def best(self) -> PlanReport:
        """The plans of the best topology.

        Raises:
          PlanError: no plan fits any topology.
        """
        for choice in self.ranked:
            if choice.report is not None:
                return choice.report
        for choice in self.choices:
            if choice.report is not None and choice.report.search.crashed:
                return choice.report  # whose best plan is an error that says so
        names = listing(str(choice.topology) for choice in self.choices)
        raise PlanError(f"no plan fits {names}. Remedy: more devices, or a smaller batch.")

    def expected(self, choice: TopologyChoice) -> float:
        """The goal's value of a topology that was not compiled, corrected by those that were."""
        value = self.value(choice)[0]
        if self.goals.goal == "chips":
            return value
        ratios = []
        for done in self.ranked:
            if done.estimate is not None:
                estimated = self.value(TopologyChoice(done.topology, done.estimate))[0]
                ratios.append(self.value(done)[0] / estimated)
        return value * statistics.median(ratios or [1.0])

    def settled(self, best: TopologyChoice, other: TopologyChoice) -> bool:
        """Returns whether a topology that was not compiled promises too little to be."""
        if self.goals.goal == "chips" and best.chips == other.chips:
            return self.value(best)[1] <= TOLERANCE * self.value(other)[1]
        tolerance = 1.0 if self.goals.goal == "chips" else TOLERANCE
        return self.value(best)[0] <= tolerance * self.expected(other)

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the cells of the table: compiled, then estimated, then those that no plan fits."""
        ranked, waiting = self.ranked, self.waiting
        others = [c for c in self.choices if c not in ranked and c not in waiting]
        found = [self._cells(str(i), c, "compiled") for i, c in enumerate(ranked, 1)]
        found += [self._cells("", c, "estimate") for c in waiting]
        crashed = lambda c: c.report is not None and c.report.search.crashed
        return [*found, *(self._cells("", c, CRASHED if crashed(c) else "no plan fits") for c in others)]

    @property
    def columns(self) -> tuple[str, ...]:
        """The head of the table."""
        dollars = ("$ a step", f"$ for 1e9 {self._unit}") if self.goals.prices else ()
        return ("", "topology", "chips", "plan", "step", "peak", *dollars, "")

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """Returns the report, in lines of at most ``width`` columns."""
        table = table_lines([self.columns, *self.rows()], width, below=(3, -1))
        return fit("\n".join([*table, "", self.best.to_text(width)]), width)

    def to_json(self) -> str:
        """Returns the topologies, and the plans of the best one, as JSON."""
        best = json.loads(self.best.to_json())
        return json.dumps({"goal": self.goals.goal, "topologies": [self._facts(c) for c in self.choices], **best})

    def _facts(self, choice: TopologyChoice) -> dict[str, Any]:
        plan = choice.plan
        facts: dict[str, Any] = {"topology": str(choice.topology), "chips": choice.chips, "compiled": choice.compiled}
        if plan is None:
            return {**facts, "plan": None}
        facts |= {"plan": plan.describe(), "step_seconds": choice.step_seconds, "peak_bytes": choice.peak_bytes}
        if choice.topology.kind in self.goals.prices:
            facts["dollars_per_step"] = self._dollars(choice)
        return facts

    def _cells(self, rank: str, choice: TopologyChoice, note: str) -> tuple[str, ...]:
        plan, dollars = choice.plan, []
        cells = [rank, str(choice.topology), f"{choice.chips:,}"]
        if plan is None:
            return (*cells, *[""] * (len(self.columns) - 4), note)
        if self.goals.prices:
            priced = choice.topology.kind in self.goals.prices
            step = self._dollars(choice) if priced else 0.0
            billion = step / (self._batch(plan) * self._tokens) * 1e9
            dollars = [f"{step:.3g}", f"{billion:,.2f}"] if priced else ["", ""]
        figures = [show_time(choice.step_seconds), show_bytes(round(choice.peak_bytes))]
        return (*cells, plan.describe(), *figures, *dollars, note)

    def _dollars(self, choice: TopologyChoice) -> float:
        """Dollars of a step."""
        return self.goals.prices[choice.topology.kind] * choice.chips * choice.step_seconds / 3600

    def _batch(self, plan: Plan) -> int:
        return plan.batch or self.planner.workload.sizes.get(BATCH, 1)

    @property
    def _unit(self) -> str:
        return "tokens" if SEQ in self.planner.workload.sizes else "rows"

    @property
    def _tokens(self) -> int:
        """Tokens of a row of the batch."""
        return self.planner.workload.sizes.get(SEQ, 1)


def parse_prices(settings: Sequence[str]) -> dict[str, float]:
    """Returns kind of accelerator → dollars for an hour of one chip.

    Raises:
      PlanError: a setting is no price.

    >>> parse_prices(["v5e=1.2", "h100=3"])
    {'v5e': 1.2, 'h100': 3.0}
    """
    found = {}
    for setting in settings:
        kind, _, price = setting.partition("=")
        try:
            found[kind] = float(price)
        except ValueError:
            found[kind] = math.nan
        if not 0 < found[kind] < math.inf:
            raise PlanError(
                f"--price must be KIND=DOLLARS for an hour of one chip, got {setting!r}. Remedy: write it as v5e=1.2."
            )
    return found


def compare_topologies(
    planner: Planner,
    space_of: Callable[[Topology], Space],
    topologies: Sequence[Topology],
    goals: Goals,
    *,
    progress: Callable[[str], None] = lambda line: None,
) -> TopologyReport:
    """Returns the best plan on each topology, and which topology is best.

    All topologies are estimated. The best are compiled, until no estimate that is left promises more than 5 % less.

    Args:
      planner: the model.
      space_of: what may be chosen on a topology.
      topologies: the hardware.
      goals: what is minimized.
      progress: is given a line for each topology and plan that is compiled.

    Raises:
      MissingExtraError: there is no compiler for a topology's devices.
      PlanError: no plan fits any topology, a kind has no price, or a price is of a kind that no topology has.
    """
    if unused := sorted(set(goals.prices) - {t.kind for t in topologies}):
        raise PlanError(
            f"--price {unused[0]} has no effect: no topology is of this kind. Remedy: leave it out, or add a topology."
        )
    unpriced = {t.kind for t in topologies} - set(goals.prices)
    if goals.goal == "price" and unpriced:
        kind = min(unpriced)
        raise PlanError(
            f"--objective price must know what {kind} costs. Remedy: --price {kind}=DOLLARS for a chip-hour."
        )
    choices = []
    for topology in topologies:
        model = CostModel(planner.workload, topology)
        choices.append(TopologyChoice(topology, best_estimate(model, space_of(topology), goals.objective)))
    report = TopologyReport(tuple(choices), goals, planner)
    options = SearchOptions(goals.objective, at_most=goals.programs)
    while report.waiting:
        chosen, ranked = min(report.waiting, key=report.expected), report.ranked
        if ranked and report.settled(ranked[0], chosen):
            break
        progress(f"{chosen.topology}:")
        model = CostModel(planner.workload, chosen.topology)
        measures = CompilerMeasures(planner.run_of, chosen.topology)
        found = find(model, space_of(chosen.topology), measures, options, progress=progress)
        chosen.report = PlanReport(found, planner)
    return report
