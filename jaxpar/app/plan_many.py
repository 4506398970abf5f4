"""``jaxpar plan`` for several topologies, and for a range of sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxpar.app.outputs import write_figure
from jaxpar.app.plan import PlanOutputs, RunPlanner, write_best
from jaxpar.errors import PlanError
from jaxpar.planning.search.scaling import ScaleOptions, scale
from jaxpar.planning.search.topologies import Goals, compare_topologies
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.utils.terminal import say


def go_topologies(
    config: Path, settings: Sequence[str], topologies: str, goals: Goals, outputs: PlanOutputs, max_batch: int | None
) -> int:
    """Run ``jaxpar plan`` on topologies separated by commas: rank them, and write what was asked for of the best."""
    parsed = [Topology.parse(name) for name in topologies.split(",")]
    planner = RunPlanner(config, settings)
    space = lambda topology: planner.space(max_batch, topology)
    report = compare_topologies(planner, space, parsed, goals, progress=say)
    outputs.show(report)
    write_best(report.best, planner, outputs)
    return 0


def go_scale(config: Path, settings: Sequence[str], kind: str, options: ScaleOptions, outputs: PlanOutputs) -> int:
    """Run ``jaxpar plan --scale``: print the best plan at each size, and write what was asked for.

    Raises:
      PlanError: a topology instead of a kind is given, no size is small enough to be compiled, or no plan fits any.
    """
    if ":" in kind:
        raise PlanError(
            f"plan: the shape in --topology {kind} has no effect with --scale. Remedy: --topology "
            f"{kind.partition(':')[0]}."
        )
    if 0 < options.compile_up_to < min(options.chips):
        raise PlanError(
            f"plan: --compile-up-to {options.compile_up_to} has no effect: the smallest size of --scale has "
            f"{min(options.chips)} chips. Remedy: --compile-up-to {min(options.chips)}, or leave it out."
        )
    planner = RunPlanner(config, settings)
    report = scale(planner, planner.space(), kind, options, progress=say)
    outputs.show(report)
    write_figure("--picture", outputs.picture, report.draw)
    return 0
