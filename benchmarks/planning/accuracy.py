"""The planner's estimates beside compiled programs: those that its constants were fitted to, and those they never saw.

    uv run --extra tpu python benchmarks/planning/accuracy.py --compile   # minutes a program: fills accuracy.json
    uv run python benchmarks/planning/accuracy.py                         # minutes: compares
    uv run python benchmarks/planning/accuracy.py --page                  # also writes docs/measured/plan.md

A case is a line of ``accuracy.json``: a shape (the configuration of a run, or a GPT of ``own_remat.py``), a topology, a
plan and its column. It is ``fitted`` if a constant was fitted to the program, or the cost model was changed because of
it; so are all plans of the exhaustive search. The other column is ``unseen``: the constants stood before any program of
its shapes was compiled.

To add a case, add a line without ``figures`` and run ``--compile``, which compiles what has none, one program after
the other. If the cost model is changed because of a case, the case becomes ``fitted``, and another one replaces it.

Goals: every estimate divided by the compiled figure is within the bounds of its column. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.planning import exhaustive, own_remat
from benchmarks.planning.compiled_rows import Row, compiled_row, plan_of, read_rows, write_rows
from jaxpar.app.plan import RunPlanner
from jaxpar.planning.plan import ModelPlanner
from jaxpar.planning.search.compiled import traced_bytes
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.step_cost import StepCost
from jaxpar.sharding.hardware.topology import Topology

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "measured" / "plan.md"
MARKS = ("<!-- accuracy -->", "<!-- end of accuracy -->")
FEWEST = 4
"""Ranks are compared among at least so many plans of a shape on a topology."""


@dataclass(frozen=True)
class Bounds:
    """The least and the greatest estimate, divided by the compiled figure, of a column.

    Attributes:
      step, peak: of the seconds of a step and the bytes at the peak, as the cost model estimates them.
      traced: of the bytes at the peak, as estimated from a trace of the step.
    """

    step: tuple[float, float]
    peak: tuple[float, float]
    traced: tuple[float, float]


BOUNDS = {
    "fitted": Bounds(step=(0.8, 1.25), peak=(0.88, 1.2), traced=(0.85, 1.15)),
    "unseen": Bounds(step=(0.95, 3.75), peak=(0.95, 1.5), traced=(0.8, 1.5)),
}
"""On v6e unseen steps are estimated at up to 3.7 times the compiled ones: see the page for why."""
FLOPS = (0.99, 1.01)
"""As :class:`Bounds`, of the FLOPs of a step, which no constant estimates."""


@dataclass(frozen=True)
class Case:
    """A plan that was compiled.

    Attributes:
      shape: a configuration, by its path in the repository, or ``own_remat`` and how the layers of its GPT run.
      topology: as :meth:`Topology.parse` reads it.
      plan: what was compiled.
      column: ``fitted`` or ``unseen``.
      step: seconds, by the roofline of the program; ``None`` if they are not known.
      peak_bytes, compute: bytes on one device, and seconds of its FLOPs, likewise.
    """

    shape: str
    topology: str
    plan: Plan
    column: str
    step: float | None
    peak_bytes: float | None
    compute: float | None

    @classmethod
    def of(cls, row: Row) -> Case:
        """Returns the case of a line. A program that is too large has no step."""
        figures, column = row["figures"], "fitted" if row["fitted"] else "unseen"
        too_large = not figures.get("fits", True)
        step, compute = (None if too_large else figures.get(name) for name in ("step", "compute"))
        return cls(row["shape"], row["topology"], plan_of(row), column, step, figures.get("peak_bytes"), compute)

    @property
    def name(self) -> str:
        """The shape without its folder."""
        return Path(self.shape).stem


def cases() -> list[Case]:
    """Returns all cases that were compiled, those of the exhaustive search first."""
    toy = {"shape": "benchmarks/planning/toy.yaml", "topology": str(exhaustive.TOPOLOGY), "fitted": True}
    rows = [*({**toy, **row} for row in read_rows(exhaustive.FILE)), *read_rows(FILE)]
    return [Case.of(row) for row in rows if "figures" in row]


@dataclass(frozen=True)
class Estimate:
    """What the cost model says of a case.

    Attributes:
      case: the case.
      cost: of its step, as estimated.
    """

    case: Case
    cost: StepCost

    @property
    def step(self) -> float | None:
        """The estimated step divided by the compiled one."""
        return self.cost.step / self.case.step if self.case.step else None

    @property
    def peak(self) -> float | None:
        """The estimated peak divided by the compiled one."""
        return self.cost.peak_bytes / self.case.peak_bytes if self.case.peak_bytes else None

    @property
    def flops(self) -> float | None:
        """The estimated FLOPs divided by those of the program."""
        return self.cost.compute / self.case.compute if self.case.compute else None

    @property
    def within(self) -> bool:
        """Whether all are within the bounds of the column."""
        bounds = BOUNDS[self.case.column]
        pairs = (self.step, bounds.step), (self.peak, bounds.peak), (self.flops, FLOPS)
        return all(ratio is None or low <= ratio <= high for ratio, (low, high) in pairs)


@cache
def planner(shape: str) -> RunPlanner | ModelPlanner:
    """Returns the planner of a shape."""
    name, _, layers = shape.partition(" ")
    return own_remat.planner(layers) if layers else RunPlanner(ROOT / name)


@cache
def _model(shape: str, topology: str) -> CostModel:
    return CostModel(planner(shape).workload, Topology.parse(topology))


def estimate(case: Case) -> Estimate:
    """Returns the estimate of a case. The loss of a shape is traced once."""
    return Estimate(case, _model(case.shape, case.topology).cost(case.plan))


def traced(case: Case) -> float | None:
    """Returns the peak as estimated from a trace of the step, divided by the compiled one; ``None`` if unknown."""
    found = traced_bytes(planner(case.shape).run_of(case.plan), Topology.parse(case.topology))
    return found / case.peak_bytes if found is not None and case.peak_bytes else None


@dataclass(frozen=True)
class Ratios:
    """Estimates divided by compiled figures: the least, the median, the greatest, and the median error."""

    least: float
    median: float
    greatest: float
    error: float

    @classmethod
    def of(cls, ratios: Iterable[float | None]) -> Ratios:
        """Returns the summary of those that are known."""
        known = [ratio for ratio in ratios if ratio is not None]
        errors = [abs(ratio - 1.0) for ratio in known]
        return cls(min(known), statistics.median(known), max(known), statistics.median(errors))

    def cells(self) -> str:
        """Returns them as cells of a table."""
        return f"{self.least:.2f} | {self.median:.2f} | {self.greatest:.2f} | {100 * self.error:.0f} %"


def ratios_of(estimates: Sequence[Estimate]) -> tuple[Ratios, Ratios]:
    """Returns the summaries of steps and of peaks."""
    return Ratios.of(one.step for one in estimates), Ratios.of(one.peak for one in estimates)


def correlations(estimates: Iterable[Estimate]) -> dict[tuple[str, str], float]:
    """Returns shape and topology → Spearman's rank correlation of estimated and compiled steps."""
    groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for one in estimates:
        if one.case.step is not None:
            groups[one.case.name, one.case.topology].append((one.cost.step, one.case.step))
    return {
        name: statistics.correlation(*zip(*pairs, strict=True), method="ranked")
        for name, pairs in groups.items()
        if len(pairs) >= FEWEST
    }


def summary(estimates: Sequence[Estimate]) -> str:
    """Returns both columns, as a table in Markdown with a row for each."""
    figures = ("least", "median", "greatest", "median error")
    ratios = [f"{what}: {figure}" if figure == "least" else figure for what in ("step", "peak") for figure in figures]
    head = ("", "shapes", "topologies", "programs", "Spearman of steps", *ratios)
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for column in BOUNDS:
        chosen = [one for one in estimates if one.case.column == column]
        shapes, chips = {one.case.shape for one in chosen}, {one.case.topology for one in chosen}
        ranks = correlations(chosen).values()
        spearman = f"{min(ranks):.2f} to {max(ranks):.2f}" if ranks else "–"
        cells = (len(shapes), len(chips), len(chosen), spearman, *(of.cells() for of in ratios_of(chosen)))
        lines.append(f"| {column} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def table(estimates: Iterable[Estimate], column: str) -> str:
    """Returns the cases of a column as a table in Markdown, but for those of the exhaustive search."""
    head = "| shape, topology | plan | step, ms: estimated, compiled | ratio | peak, GiB: estimated, compiled | ratio |"
    chosen = [one for one in estimates if one.case.column == column and one.case.name != "toy"]
    lines, before = [head, "|---|---|---:|---:|---:|---:|"], ""
    for one in sorted(chosen, key=lambda one: (one.case.name, one.case.topology)):
        where = f"`{one.case.name}`, {one.case.topology}"
        steps = _pair(1e3 * one.cost.step, one.case.step and 1e3 * one.case.step, one.step)
        peaks = _pair(one.cost.peak_bytes / 2**30, one.case.peak_bytes and one.case.peak_bytes / 2**30, one.peak)
        lines.append(f"| {where if where != before else ''} | {one.case.plan.describe()} | {steps} | {peaks} |")
        before = where
    return "\n".join(lines)


def _pair(estimated: float, compiled: float | None, ratio: float | None) -> str:
    if compiled is None or ratio is None:
        return f"{_number(estimated)}, – | –"
    return f"{_number(estimated)}, {_number(compiled)} | {ratio:.2f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def page(text: str, estimates: Sequence[Estimate]) -> str:
    """Returns the text of the page with the tables of these estimates."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    tables = "\n\n".join(
        (summary(estimates), "Unseen:", table(estimates, "unseen"), "Fitted:", table(estimates, "fitted"))
    )
    return f"{before}{MARKS[0]}\n{tables}\n{MARKS[1]}{after}"


def compile_missing() -> None:
    """Compile every case that has neither figures nor a problem."""
    rows = read_rows(FILE)
    for row in rows:
        if "figures" in row or "problem" in row:
            continue
        plan = plan_of(row)
        row |= compiled_row(planner(row["shape"]).run_of(plan), Topology.parse(row["topology"]))
        write_rows(FILE, rows)
        print(row["shape"], row["topology"], plan.describe(), row.get("problem", ""), flush=True)


def main() -> int:
    """Compile, or compare; the exit status is 1 if an estimate is out of the bounds of its column."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile the cases that have no figures")
    parser.add_argument("--page", action="store_true", help=f"write the tables of {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.compile:
        compile_missing()
    estimates = [estimate(case) for case in cases()]
    for column in BOUNDS:
        print(f"{column}\n{table(estimates, column)}\n")
    for (name, topology), rank in correlations(estimates).items():
        print(f"Spearman of the steps of {name} on {topology}: {rank:.2f}")
    print(f"\n{summary(estimates)}")
    outside = [one for one in estimates if not one.within]
    for one in outside:
        print(f"out of bounds: {one.case.name} on {one.case.topology}, {one.case.plan.describe()}")
    if options.page:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), estimates), encoding="utf-8")
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
