"""``PlanReport``: the plans that were compiled, best first, why the best one wins, and what was left out."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from jaxpar.analysis.checkup.findings import WRONG_IN_XLA
from jaxpar.analysis.compile.ahead_of_time import CRASHED
from jaxpar.analysis.roofline import show_time
from jaxpar.analysis.units import html_table, show_bytes, table_lines
from jaxpar.errors import PlanError
from jaxpar.planning.search.compiled import PlannedRun
from jaxpar.planning.search.pareto import draw_front, seconds
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.search import TOLERANCE, Candidate, Search
from jaxpar.planning.search.workload import Workload
from jaxpar.sharding.hardware.links import Links
from jaxpar.sharding.layout import Layout
from jaxpar.utils.terminal import fit

_COLUMNS = ("", "plan", "step", "MFU", "sends", "exposed", "peak", "")
_MOST_SHOWN = 8


class Planner(Protocol):
    """A model whose layout is planned: what a plan of it runs."""

    @property
    def workload(self) -> Workload:
        """What one step computes and keeps."""

    def run_of(self, plan: Plan) -> PlannedRun:
        """Returns what a plan runs."""

    def config_of(self, plan: Plan) -> Mapping[str, Any]:
        """Returns a plan as plain data, as a configuration's YAML file has it."""


@dataclass(frozen=True)
class PlanReport:
    """The result of :func:`jaxpar.plan`.

    Attributes:
      search: every plan with what is known of it.
      planner: the model that was planned.
    """

    search: Search
    planner: Planner

    @property
    def best(self) -> Candidate:
        """The best compiled plan.

        Raises:
          PlanError: no plan fits.
        """
        ranked = self.search.ranked
        if ranked:
            return ranked[0]
        tried = [c for c in self.search.candidates if c.problem]
        reasons = "; ".join(f"{c.plan.describe()}: {c.problem.splitlines()[0]}" for c in tried[:3])
        if self.search.crashed:
            raise PlanError(
                f"no plan could be compiled for {self.search.topology}, because {CRASHED}: {reasons}. "
                "Remedy: fix another mesh with --set, such as mesh.model=1, or more --programs."
            )
        raise PlanError(
            f"no plan fits {self.search.topology}: {self.search.too_large} plans exceed its memory by their estimate, "
            f"and {len(tried)} others failed{': ' if reasons else ''}{reasons}. Remedy: more devices, or a smaller "
            "batch."
        )

    @property
    def run(self) -> PlannedRun:
        """What the best plan trains: the model, the loss, the optimizer and the options of the step."""
        return self.planner.run_of(self.best.plan)

    def layout(self, devices: Sequence[Any] | None = None) -> Layout:
        """Returns the layout of the best plan.

        Args:
          devices: of its mesh; by default all of this machine.

        Raises:
          MeshError: there are more or fewer of them than the plan is for.
        """
        work = self.planner.workload
        return self.best.plan.layout(work.names, devices, work.stored)[0]

    def why(self) -> str:
        """Returns why the best plan beats the next one of another kind, in one sentence."""
        ranked = self.search.ranked
        if len(ranked) < 2:
            return "no other plan was compiled"
        best, other = ranked[:2]
        if self.search.objective == "memory":
            less = other.peak_bytes - best.peak_bytes
            return f"{show_bytes(round(less))} less at the peak than {other.plan.describe()}"
        parts = []
        found, beaten = best.compiled, other.compiled
        if found is not None and beaten is not None and best.plan.batch == other.plan.batch:
            # Compute and memory traffic overlap, so only the longer of them counts.
            work = "compute" if found.compute >= found.hbm else "memory traffic"
            gains = {work: max(beaten.compute, beaten.hbm) - max(found.compute, found.hbm)}
            gains["exposed communication"] = beaten.exposed - found.exposed
            for what, gain in gains.items():
                if abs(gain) > 0.002 * best.step_seconds:
                    parts.append(f"{show_time(abs(gain))} {'less' if gain > 0 else 'more'} {what}")
        less_time = show_time(abs(seconds(other) - seconds(best))) + (" a sequence" if best.plan.batch else "")
        reason = f": {', '.join(parts)}" if parts else ""
        return f"{less_time} before {other.plan.describe()}{reason}"

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the cells of the ranked table: compiled plans, then the best estimates that were not compiled."""
        ranked = self.search.ranked
        waiting = self.search.waiting()[: max(_MOST_SHOWN - len(ranked), 0)]
        found = [_cells(str(i), c, self.search, "as given" if c.given else "") for i, c in enumerate(ranked, 1)]
        return [*found, *(_cells("", c, self.search, "estimate") for c in waiting)]

    @property
    def columns(self) -> tuple[str, ...]:
        """The head of the ranked table; ``network`` is what crosses slices or hosts, where there are several."""
        return _COLUMNS if self.search.topology.slices == 1 else (*_COLUMNS[:-1], "network", "")

    def headline(self) -> str:
        """Returns the best plan and its figures in a line."""
        best = self.best
        line = best.compiled
        text = f"{best.plan.describe()} on {self.search.topology}: {show_time(best.step_seconds)} a step"
        text += f", MFU {line.mfu:.1%}" if line is not None and line.mfu is not None else ""
        return f"{text}, {show_bytes(round(best.peak_bytes))} at the peak"

    def remarks(self) -> list[str]:
        """Returns how the search went: what was compiled, what failed, and what was left out."""
        found, compiled = self.search, len(self.search.ranked)
        left = found.waiting()
        work, plan = self.planner.workload, found.ranked[0].plan if compiled else Plan()
        program = found.ranked[0].compiled if compiled else None
        stored = plan.how_stored(plan.names(work.names), work.stored)
        lines = [
            *found.notes,
            *([f"{plan.describe()}: {stored}"] if stored else []),
            *(f"{WRONG_IN_XLA}: {text}" for text in (program.repaired if program else ())),
            f"{len(found.candidates):,} plans fit by their estimate, {found.too_large:,} do not; {compiled} compiled",
        ]
        if left:
            best, lowest = found.value(found.ranked[0]) if compiled else 0.0, found.expected(left[0])
            share = best / lowest if lowest else 1.0
            lines.append(
                f"the best program takes {share:.2f} × the lowest estimate left"
                + ("" if share <= TOLERANCE else f", more than {TOLERANCE}: more programs may find a better plan")
            )
        lines += [f"failed: {c.plan.describe()}: {c.problem.splitlines()[0]}" for c in found.candidates if c.problem]
        lines += [f"left out ({count} meshes): {reason}" for reason, count in found.refused.most_common(5)]
        return lines

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """Returns the report, in lines of at most ``width`` columns."""
        lines = [self.headline(), f"why: {self.why()}", ""]
        lines += [*table_lines([self.columns, *self.rows()], width, below=(1, -1)), "", *self.remarks()]
        return fit("\n".join(lines) + "\n", width)

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{html.escape(line)}</li>" for line in self.remarks())
        head = f"<b>{html.escape(self.headline())}</b><br>why: {html.escape(self.why())}"
        return f"<div>{head}{html_table(self.rows(), self.columns)}<ul>{notes}</ul></div>"

    def to_json(self) -> str:
        """Returns the plans, best first, and what was left out, as JSON."""
        search = self.search
        shown = [*search.ranked, *search.waiting()[:20]]
        facts = {
            "topology": str(search.topology),
            "objective": search.objective,
            "search": list(search.notes),
            "plans": [self._facts(candidate) for candidate in shown],
            "failed": [{"plan": c.plan.describe(), "problem": c.problem} for c in search.candidates if c.problem],
            "fitting": len(search.candidates),
            "too_large": search.too_large,
            "left_out": dict(search.refused),
        }
        return json.dumps(facts, indent=1)

    def _facts(self, c: Candidate) -> dict[str, Any]:
        line = c.compiled
        return {
            "plan": c.plan.describe(),
            "choices": asdict(c.plan),
            "config": dict(self.planner.config_of(c.plan)),
            "compiled": line is not None,
            "step_seconds": c.step_seconds,
            "mfu": None if line is None else line.mfu,
            "repaired": [] if line is None else line.repaired,
            "tokens_per_second": None if line is None else line.tokens_per_second,
            "wire_bytes": c.figures.wire_bytes,
            "exposed_bytes": c.figures.exposed_bytes,
            "network": self._network(c),
            "peak_bytes": c.peak_bytes,
            "estimated": {
                "step_seconds": c.cost.step,
                "wire_bytes": c.cost.wire_bytes,
                "exposed_bytes": c.cost.exposed_bytes,
                "peak_bytes": c.cost.peak_bytes,
                "traced_peak_bytes": c.traced_bytes,
            },
        }

    def _network(self, c: Candidate) -> dict[str, Any]:
        """What crosses slices or hosts."""
        axes = Links.of(self.search.topology, c.plan.mesh).crossing
        return {"axes": axes, "bytes": c.figures.network_bytes, "seconds": c.figures.network_seconds}

    def draw(self) -> Any:
        """Returns the plans as a picture: step time against memory, and the front of those that nothing beats in both.

        Raises:
          MissingExtraError: matplotlib is not installed.
        """
        return draw_front(self.search, self.best)


def _cells(rank: str, c: Candidate, search: Search, note: str) -> tuple[str, ...]:
    line, topology = c.compiled, search.topology
    mfu = f"{line.mfu:.1%}" if line is not None and line.mfu is not None else ""
    sizes = (show_bytes(round(n)) for n in (c.figures.wire_bytes, c.figures.exposed_bytes, c.peak_bytes))
    cells = [rank, c.plan.describe(), show_time(search.expected_step(c)), mfu, *sizes]
    if topology.slices > 1:
        axes = " × ".join(f"{axis} {n}" for axis, n in Links.of(topology, c.plan.mesh).crossing.items())
        cells.append(f"{axes}: {show_bytes(round(c.figures.network_bytes))}, {show_time(c.figures.network_seconds)}")
    return (*cells, note)
