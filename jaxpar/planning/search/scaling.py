"""``scale``: how the step time, MFU and tokens per second of the best plan grow with the number of chips."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from jaxpar.analysis.roofline import show_time
from jaxpar.analysis.units import show_bytes, table_lines
from jaxpar.errors import PlanError
from jaxpar.planning.search.best_estimate import best_estimate
from jaxpar.planning.search.compiled import CompiledPlan
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.experts import has_ragged_exchange
from jaxpar.planning.search.plan import BATCH, Plan
from jaxpar.planning.search.report import Planner
from jaxpar.planning.search.search import CompilerMeasures, SearchOptions, find
from jaxpar.planning.search.space import Space
from jaxpar.planning.search.step_cost import StepCost
from jaxpar.sharding.hardware.accelerators import ACCELERATORS
from jaxpar.sharding.hardware.links import Links, likely_shape
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.utils.plotting import new_figure
from jaxpar.utils.terminal import fit

type Scaling = Literal["weak", "strong"]
_COLUMNS = ("chips", "topology", "batch", "plan", "step", "MFU", "tokens/s", "efficiency", "peak", "network", "")


@dataclass(frozen=True)
class ScaleOptions:
    """The sizes of a scaling study.

    Attributes:
      chips: the numbers of chips.
      scaling: ``weak`` gives each chip the sequences that it has at the smallest size, so the batch grows with the
        chips. ``strong`` keeps the batch.
      compile_up_to: the largest number of chips for which programs are compiled; 0 compiles none.
      programs: the largest number of programs to compile for each size.
    """

    chips: tuple[int, ...]
    scaling: Scaling = "weak"
    compile_up_to: int = 0
    programs: int = 3


@dataclass(frozen=True)
class ScalePoint:
    """The best plan at one size.

    Attributes:
      topology, chips, batch: the hardware, its number of chips, and the sequences of a step.
      plan, cost: the best plan and its estimate; ``None`` if no plan fits.
      compiled: the figures of its program; ``None`` for an estimate.
      tokens, model_flops: of a step over all devices.
    """

    topology: Topology
    chips: int
    batch: int
    plan: Plan | None = None
    cost: StepCost | None = None
    compiled: CompiledPlan | None = None
    tokens: float = 0.0
    model_flops: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds of a step by the roofline of its program, or as estimated; NaN if no plan fits."""
        known = self.compiled or self.cost
        return math.nan if known is None else known.step

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all chips."""
        return self.tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """The model's FLOPs divided by those that the devices could do in the step."""
        return self.model_flops / (self.step_seconds * self.topology.accelerator.rate("bf16") * self.topology.devices)


@dataclass(frozen=True)
class ScalingReport:
    """The best plan at each size, smallest first.

    Attributes:
      points: one for each size.
      scaling: whether the batch grows with the chips (``weak``) or stays (``strong``).
    """

    points: tuple[ScalePoint, ...]
    scaling: Scaling

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the cells of the table."""
        first = next((p for p in self.points if p.plan is not None), None)
        return [_cells(point, first) for point in self.points]

    def remarks(self) -> list[str]:
        """Returns what the figures are and what they leave out."""
        batch = "the batch grows with the chips" if self.scaling == "weak" else "the batch is the same at every size"
        return [
            f"{self.scaling} scaling: {batch}; efficiency: tokens/s of a chip, divided by those at the first size",
            "an estimate is a closed form that no compiler has seen; estimates and rooflines ignore latency",
        ]

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """Returns the report, in lines of at most ``width`` columns."""
        table = table_lines([_COLUMNS, *self.rows()], width, below=(3, -2, -1))
        return fit("\n".join([*table, "", *self.remarks()]) + "\n", width)

    def to_json(self) -> str:
        """Returns every point as JSON."""
        return json.dumps({"scaling": self.scaling, "points": [_facts(p) for p in self.points]}, indent=1)

    def draw(self) -> Any:
        """Returns step time, MFU and tokens per second over chips; hollow markers and dashed lines are estimates.

        Raises:
          MissingExtraError: matplotlib is not installed.
        """
        figure = new_figure("ScalingReport.draw", figsize=(7, 7), layout="constrained")
        found = [p for p in self.points if p.plan is not None]
        panels = figure.subplots(3, sharex=True)
        figures: tuple[tuple[str, Callable[[ScalePoint], float]], ...] = (
            ("seconds a step", lambda p: p.step_seconds),
            ("MFU, %", lambda p: 100 * p.mfu),
            ("tokens/s", lambda p: p.tokens_per_second),
        )
        for axes, (label, value) in zip(panels, figures, strict=True):
            _plot(axes, found, value)
            axes.set(ylabel=label)
            axes.grid(alpha=0.3)
        panels[0].set(ylim=(0, 1.15 * max((p.step_seconds for p in found), default=1.0)))
        panels[1].set(ylim=(0, 100))
        panels[2].set_yscale("log")
        if found:
            ideal = [found[0].tokens_per_second * p.chips / found[0].chips for p in found]
            panels[2].plot([p.chips for p in found], ideal, color="0.6", lw=0.8, label="linear")
        panels[2].set_xscale("log", base=2)
        panels[2].set(xlabel="chips")
        panels[2].set_xticks([p.chips for p in self.points], [str(p.chips) for p in self.points])
        panels[2].legend()
        kind = self.points[0].topology.kind
        figure.suptitle(f"{self.scaling} scaling on {kind}; hollow and dashed: estimates")
        return figure


def scale_sizes(text: str) -> tuple[int, ...]:
    """Returns the powers of two of a range.

    Raises:
      PlanError: the text is no such range.

    >>> scale_sizes("16:128")
    (16, 32, 64, 128)
    """
    found = re.fullmatch(r"(\d+):(\d+)", text)
    low, high = (int(found[1]), int(found[2])) if found else (0, 0)
    if low < 1 or high < low or low & (low - 1) or high & (high - 1):
        raise PlanError(f"--scale must be LOW:HIGH in powers of two, got {text!r}. Remedy: write it as 16:8192.")
    return tuple(2**i for i in range(low.bit_length() - 1, high.bit_length()))


def topology_of(kind: str, chips: int) -> Topology:
    """Returns the topology of a number of chips: one slice as near to a square as possible, then several largest ones.

    Raises:
      MeshError: the kind is unknown.

    >>> [str(topology_of("v5e", n)) for n in (8, 256, 1024)], str(topology_of("h100", 64))
    (['v5e:2x4', 'v5e:16x16', 'v5e:16x16*4'], 'h100:8x8')
    """
    accelerator = Topology.parse(f"{kind}:{'x'.join('1' * _dims(kind))}").accelerator
    inside = min(chips, 2 ** int(math.log2(accelerator.domain)))
    shape = sorted(likely_shape(accelerator, inside), key=lambda n: (n == 1, n)) if accelerator.torus else [inside]
    return Topology(kind, tuple(shape), chips // inside)


def _dims(kind: str) -> int:
    known = ACCELERATORS.get(kind)
    return max(known.torus, 1) if known is not None else 1


def scale(
    planner: Planner,
    space: Space,
    kind: str,
    options: ScaleOptions,
    *,
    progress: Callable[[str], None] = lambda line: None,
) -> ScalingReport:
    """Returns the fastest plan at each size.

    Args:
      planner: the model; its batch is that of the smallest size.
      space: what may be chosen.
      kind: of the accelerator, such as ``v5e``.
      options: the sizes, and which of them are compiled.
      progress: is given a line for each program that is compiled, and for each size.

    Raises:
      MeshError: the kind is unknown.
      MissingExtraError: there is no compiler for the devices, and programs are to be compiled.
      PlanError: no plan fits any size.
    """
    points = []
    for point in _points(planner, space, kind, options, progress):
        points.append(point)
        progress(f"{point.chips} chips: {point.plan.describe() if point.plan else 'no plan fits'}")
    if all(point.plan is None for point in points):
        raise PlanError(
            f"no plan fits {points[0].topology} to {points[-1].topology}. Remedy: more chips, or a smaller batch."
        )
    return ScalingReport(tuple(points), options.scaling)


def _points(
    planner: Planner, space: Space, kind: str, options: ScaleOptions, progress: Callable[[str], None]
) -> Iterator[ScalePoint]:
    own = planner.workload.sizes.get(BATCH, 1)
    for chips in options.chips:
        topology = topology_of(kind, chips)
        batch = own * chips // options.chips[0] if options.scaling == "weak" else own
        here = replace(space, slices=topology.slices, ragged=has_ragged_exchange(topology), batches=(batch,))
        of_size = lambda line, chips=chips: progress(f"{chips} chips, compiled: {line}")
        point = _best(planner, here, ScalePoint(topology, chips, batch), options, of_size)
        if point.plan is not None:
            about = planner.run_of(point.plan).about
            if about is not None:
                point = replace(point, tokens=about.tokens, model_flops=about.model_flops)
        yield point


def _best(
    planner: Planner, space: Space, point: ScalePoint, options: ScaleOptions, progress: Callable[[str], None]
) -> ScalePoint:
    """The point with its fastest plan: compiled if its size is to be, and estimated if not."""
    model = CostModel(planner.workload, point.topology)
    if point.chips > options.compile_up_to:
        found = best_estimate(model, space)
        return point if found is None else replace(point, plan=found.plan, cost=found.cost)
    measures = CompilerMeasures(planner.run_of, point.topology)
    search = SearchOptions(at_least=1, at_most=options.programs, traced=0)
    searched = find(model, space, measures, search, progress=progress)
    if not searched.ranked:
        return point
    best = searched.ranked[0]
    return replace(point, plan=best.plan, cost=best.cost, compiled=best.compiled)


def _plot(axes: Any, points: list[ScalePoint], value: Callable[[ScalePoint], float]) -> None:
    """A solid line through compiled points, and a dashed one through estimates."""
    for one, other in itertools.pairwise(points):
        solid = one.compiled is not None and other.compiled is not None
        axes.plot([one.chips, other.chips], [value(one), value(other)], "-" if solid else "--", color="tab:blue")
    for compiled, face, label in ((True, "tab:blue", "compiled"), (False, "white", "estimate")):
        chosen = [p for p in points if (p.compiled is not None) == compiled]
        if chosen:
            axes.plot(
                [p.chips for p in chosen], [value(p) for p in chosen], "o",
                color="tab:blue", markerfacecolor=face, label=label,
            )  # fmt: skip


def _cells(point: ScalePoint, first: ScalePoint | None) -> tuple[str, ...]:
    cells = [f"{point.chips:,}", str(point.topology), f"{point.batch:,}"]
    if point.plan is None or point.cost is None or first is None:
        return (*cells, "no plan fits", *[""] * (len(_COLUMNS) - 4))
    known = point.compiled or point.cost
    efficiency = point.tokens_per_second / point.chips / (first.tokens_per_second / first.chips)
    axes = " × ".join(f"{axis} {n}" for axis, n in Links.of(point.topology, point.plan.mesh).crossing.items())
    network = f"{axes}: {show_bytes(round(known.network_bytes))}, {show_time(known.network_seconds)}" if axes else ""
    figures = (
        show_time(point.step_seconds),
        f"{point.mfu:.1%}",
        f"{point.tokens_per_second:,.0f}",
        f"{efficiency:.0%}",
    )
    plan = replace(point.plan, batch=0).describe()
    note = "compiled" if point.compiled is not None else "estimate"
    return (*cells, plan, *figures, show_bytes(round(known.peak_bytes)), network, note)


def _facts(point: ScalePoint) -> dict[str, Any]:
    found = {"chips": point.chips, "topology": str(point.topology), "batch": point.batch}
    if point.plan is None or point.cost is None:
        return {**found, "plan": None}
    known = point.compiled or point.cost
    return {
        **found,
        "plan": point.plan.describe(),
        "choices": asdict(point.plan),
        "compiled": point.compiled is not None,
        "step_seconds": point.step_seconds,
        "estimated_step_seconds": point.cost.step,
        "mfu": point.mfu,
        "tokens_per_second": point.tokens_per_second,
        "peak_bytes": known.peak_bytes,
        "network_bytes": known.network_bytes,
        "network_seconds": known.network_seconds,
    }
