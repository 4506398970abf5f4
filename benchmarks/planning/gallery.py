"""Measures the recipes of ``configs/gallery``: memory, roofline and bytes of a step, on the chips of each recipe.

    uv run python benchmarks/planning/gallery.py                        # recipes whose figures are missing or old
    uv run python benchmarks/planning/gallery.py pretrain_1b_v5e        # these
    uv run python benchmarks/planning/gallery.py --page                 # only write the page again

Steps for TPUs are compiled (extra tpu). There is no compiler for GPUs without one, so recipes for them get the
planner's estimates, with memory from a trace of the step. The figures are written to ``configs/gallery/figures.json``
and ``docs/measured/gallery.md``. The exit status is 1 if a recipe does not fit, or could not be measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from jaxpar.analysis.units import show_bytes
from jaxpar.app.config import load_run
from jaxpar.app.gallery import (
    Figures,
    Recipe,
    digest,
    find_recipe,
    gallery_folder,
    read_figures,
    read_recipes,
    show_seconds,
    write_figures,
)  # fmt: skip
from jaxpar.app.job import make_job
from jaxpar.app.model_facts import about
from jaxpar.app.plan import RunPlanner
from jaxpar.errors import JaxparError, MissingExtraError, PlanError
from jaxpar.planning.search.compiled import CompiledPlan, PlannedRun, compile_plan, traced_bytes
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.search import has_values
from jaxpar.planning.search.space import plans
from jaxpar.sharding.hardware.topology import Topology

PAGE = Path(__file__).parents[2] / "docs" / "measured" / "gallery.md"
MARKS = ("<!-- table -->", "<!-- end of table -->")


def run_of(recipe: Recipe, topology: Topology) -> PlannedRun:
    """Returns what a recipe runs on its chips."""
    job = make_job(load_run(recipe.file))
    compiler = {str(platform): options for platform, options in job.config.compiler.items()}
    run = (job.layout(topology.devices), job.make_model, job.tx, job.loss_fn, job.batch_spec())
    return PlannedRun(*run, job.step_options(), compiler, about(job))


def compiled(recipe: Recipe) -> Figures:
    """Returns the figures of a recipe's step, compiled for its chips."""
    topology = Topology.parse(recipe.chips)
    run = run_of(recipe, topology)
    found: CompiledPlan = compile_plan(run, topology)
    if not found.fits:
        raise PlanError(f"{recipe.name} does not fit {recipe.chips}: {found.peak_bytes / 2**30:.2f} GiB at the peak")
    return Figures(
        digest(recipe.file),
        "compiled",
        found.fits,
        found.step,
        found.wire_bytes,
        found.peak_bytes,
        topology.accelerator.hbm_bytes,
        (found.mfu or 0.0) if run.about and run.about.model_flops else 0.0,  # else it is of the program's FLOPs
        {name: version(name) for name in ("jax", "libtpu")},
    )


def estimated(recipe: Recipe) -> Figures:
    """Returns the planner's estimate of a recipe's step, with its memory by a trace."""
    topology = Topology.parse(recipe.chips)
    planner = RunPlanner(recipe.file)
    model, given = CostModel(planner.workload, topology), planner.given(topology.devices)
    space = replace(planner.space(None, topology), fixed={name: value for name, value in given.items() if value})
    found = plans(model.workload, topology.devices, space, Counter(), offload=False)
    plan = next((plan for plan in found if has_values(plan, given)), None)
    if plan is None:
        raise PlanError(f"{recipe.name}: its layout is none of those that the planner estimates")
    run, cost, device = run_of(recipe, topology), model.cost(plan), topology.accelerator
    peak, useful = traced_bytes(run, topology) or cost.peak_bytes, run.about.model_flops if run.about else 0.0
    return Figures(
        digest(recipe.file),
        "estimated",
        peak <= device.hbm_bytes,
        cost.step,
        cost.wire_bytes,
        peak,
        device.hbm_bytes,
        useful / (cost.step * device.rate("bf16") * topology.devices),
        {"jax": version("jax")},
    )


def measure(recipe: Recipe, *, estimate: bool) -> Figures:
    """Returns the figures of a recipe: compiled where there is a compiler for its chips."""
    if estimate or Topology.parse(recipe.chips).platform != "tpu":
        return estimated(recipe)
    try:
        return compiled(recipe)
    except MissingExtraError as error:
        raise SystemExit(f"{error}") from error


def table(recipes: Iterable[Recipe]) -> str:
    """Returns the figures as a table in Markdown."""
    head = "| `configs/gallery/` | chips | figures | fits | peak | step | MFU | a device sends |"
    return "\n".join([head, "|---|---|---|---|---:|---:|---:|---:|", *map(_row, recipes)])


def _row(recipe: Recipe) -> str:
    f = recipe.figures
    if f is None:
        return f"| `{recipe.name}` | {recipe.chips} | not measured | | | | | |"
    mfu = f"{f.model_flops_utilization:.1%}" if f.model_flops_utilization else "–"
    peak, wire = (show_bytes(round(size)) for size in (f.peak_bytes, f.wire_bytes))
    fits = "yes" if f.fits else "no"
    step = show_seconds(f.step_seconds)
    return f"| `{recipe.name}` | {recipe.chips} | {f.source} | {fits} | {peak} | {step} | {mfu} | {wire} |"


def page(text: str, recipes: Iterable[Recipe]) -> str:
    """Returns the text of the page with the table of these recipes."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{table(recipes)}\n{MARKS[1]}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes (default: those without current figures)")
    parser.add_argument("--estimate", action="store_true", help="estimates for TPUs too, where none is compiled yet")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    folder, failed = gallery_folder(), 0
    recipes = read_recipes(folder)
    chosen = [find_recipe(name, recipes) for name in options.names] or [r for r in recipes if r.figures is None]
    for recipe in () if options.page else chosen:
        started = time.monotonic()
        try:
            found = measure(recipe, estimate=options.estimate)
        except JaxparError as error:
            failed += 1
            print(f"{recipe.name}: {error}", flush=True)
            continue
        failed += not found.fits
        write_figures(folder, read_figures(folder) | {recipe.name: found})
        seconds = time.monotonic() - started
        print(f"{recipe.name}: {found.source}, {found.step_seconds:.4f} s, {seconds:.0f} s to measure", flush=True)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), read_recipes(folder)), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
