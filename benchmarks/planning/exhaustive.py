"""The planner beside an exhaustive search: every layout of a small Llama on 8 chips, compiled.

    uv run --extra tpu python benchmarks/planning/exhaustive.py --compile   # hours of CPU: writes toy.json
    uv run python benchmarks/planning/exhaustive.py                         # seconds: reads it

The space has every mesh of 8 chips over pipeline, data, context, ulysses and model, each with ZeRO 0, 1 and 3, no
recomputation, one batch, and pipelines of twice as many microbatches as stages. Goals: the planner, which compiles at
most 12 of them, chooses a plan within 1.05 of the best of all; Spearman's rank correlation of estimated and compiled
figures is at least 0.9 for the step and 0.95 for memory, over all plans. Exit status 1 otherwise.

To compile a plan again, delete its line in ``toy.json`` and run ``--compile``: it compiles what the file lacks, one
program after the other, and waits for the lock of the compiler.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.planning.compiled_rows import Row, compiled_row, figures_of, plan_data, plan_of, read_rows, write_rows
from jaxpar.app.plan import RunPlanner
from jaxpar.errors import PlanError
from jaxpar.planning.search.compiled import CompiledPlan
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.search import SearchOptions, search
from jaxpar.planning.search.space import plans
from jaxpar.sharding.hardware.topology import Topology

FOLDER = Path(__file__).parent
FILE = FOLDER / "toy.json"
TOPOLOGY = Topology.parse("v5e:2x4")
CHOSEN, STEP, MEMORY = 1.05, 0.9, 0.95


def toy() -> RunPlanner:
    """The run whose layouts are compiled."""
    return RunPlanner(FOLDER / "toy.yaml")


def space(planner: RunPlanner) -> Iterator[Plan]:
    """The plans that are compiled."""
    everything = replace(planner.space(), remat=("none",), copies=(1,), accumulate=False)
    for plan in plans(planner.workload, TOPOLOGY.devices, everything, Counter()):
        microbatches = plan.microbatches in (1, 2 * plan.pipeline)
        if plan.replica == plan.virtual_stages == 1 and microbatches and not plan.checkpoint_stages:
            yield plan


@dataclass(frozen=True)
class Stored:
    """Compiled plans, as a search takes what it learns of plans.

    Attributes:
      compiled_plans: plan → its figures, or why it has none.
    """

    compiled_plans: dict[Plan, CompiledPlan | str]

    @classmethod
    def read(cls) -> Stored:
        """Returns the plans of ``toy.json``."""
        return cls({plan_of(row): figures_of(row) or row["problem"] for row in read_rows(FILE)})

    def traced_bytes(self, plan: Plan) -> int | None:
        """No plan was traced."""
        return None

    def compiled(self, plan: Plan) -> CompiledPlan:
        """Returns the stored figures of a plan."""
        found = self.compiled_plans[plan]
        if isinstance(found, str):
            raise PlanError(found)
        return found


@dataclass(frozen=True)
class Accuracy:
    """How the planner's estimates and its choice compare with the compiled plans.

    Attributes:
      plans: the number of compiled plans.
      programs: the number that the search compiled.
      chosen: the step of the plan that the search chose, divided by the best of all.
      step, memory: Spearman's rank correlation of estimates and compiled figures.
      ratios: compiled step divided by estimated step, by plan.
    """

    plans: int
    programs: int
    chosen: float
    step: float
    memory: float
    ratios: dict[str, float]


def accuracy(planner: RunPlanner, stored: Stored, layers: int = 1) -> Accuracy:
    """Returns how good the planner is on the stored plans whose stages have at least so many layers."""
    from scipy.stats import spearmanr  # takes 2 seconds, which only this function needs

    model = CostModel(planner.workload, TOPOLOGY)
    most = planner.workload.sizes["layers"] // layers
    known = {
        plan: found
        for plan, found in stored.compiled_plans.items()
        if isinstance(found, CompiledPlan) and plan.pipeline <= most
    }
    costs = {plan: model.cost(plan) for plan in known}
    found = search(model, known, stored, Counter(), SearchOptions(traced=0))
    best = min(one.step for one in known.values())
    return Accuracy(
        len(known),
        len(found.ranked),
        found.ranked[0].step_seconds / best,
        spearmanr([costs[p].step for p in known], [known[p].step for p in known]).statistic,
        spearmanr([costs[p].peak_bytes for p in known], [known[p].peak_bytes for p in known]).statistic,
        {plan.describe(): known[plan].step / costs[plan].step for plan in known},
    )


def compile_all(planner: RunPlanner) -> None:
    """Compile every plan that ``toy.json`` lacks."""
    rows: list[Row] = read_rows(FILE) if FILE.exists() else []
    for plan in space(planner):
        plain = plan_data(plan)
        if any(row["plan"] == plain for row in rows):
            continue
        row = {"plan": plain, **compiled_row(planner.run_of(plan), TOPOLOGY)}
        rows.append(row)
        write_rows(FILE, rows, topology=str(TOPOLOGY))
        print(plan.describe(), row.get("problem", ""), flush=True)


def main() -> int:
    """Compile or compare; the exit status is 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--each", action="store_true", help="print each plan's compiled step divided by its estimate")
    options = parser.parse_args()
    planner = toy()
    if options.compile:
        compile_all(planner)
    found, deeper = accuracy(planner, Stored.read()), accuracy(planner, Stored.read(), 2)
    if options.each:
        for name, ratio in sorted(found.ratios.items(), key=lambda pair: pair[1]):
            print(f"{ratio:6.2f}  {name}")
    print(f"{found.plans} compiled plans; the search compiles {found.programs} of them")
    print(f"its choice takes {found.chosen:.3f} of the best step (goal <= {CHOSEN})")
    print(f"Spearman of step {found.step:.3f} (goal >= {STEP}), of memory {found.memory:.3f} (goal >= {MEMORY})")
    print(f"without stages of one layer ({deeper.plans} plans): {deeper.step:.3f} and {deeper.memory:.3f}")
    return 0 if found.chosen <= CHOSEN and found.step >= STEP and found.memory >= MEMORY else 1


if __name__ == "__main__":
    sys.exit(main())
