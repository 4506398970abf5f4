"""The pruned search for the lowest estimate finds what the search of all plans finds, and looks at few of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from covers import covering

from jaxpar.planning.search.best_estimate import best_estimate
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.search import FULL, Objective
from jaxpar.planning.search.space import Space, plans, tensor_dims
from jaxpar.planning.search.step_cost import StepCost
from jaxpar.planning.search.workload import Workload
from jaxpar.sharding.hardware.topology import Topology
from tests.planning.llama_workload import llama_workload

AXES = ("pipeline", "replica", "data", "context", "ulysses", "model")


def space_of(work: Workload, topology: Topology, **more: Any) -> Space:
    return Space(AXES, tensor_dims(work), True, remat=("none", "full"), copies=(1, 2), slices=topology.slices, **more)


def of_all(model: CostModel, space: Space, objective: Objective) -> tuple[Plan, StepCost] | None:
    """The lowest estimate of all plans that fit, the first one of equals."""
    limit = model.topology.accelerator.hbm_bytes * FULL
    made = plans(model.workload, model.topology.devices, space, Counter())
    costs = ((plan, model.cost(plan)) for plan in made)
    fitting = [(plan, cost) for plan, cost in costs if cost.peak_bytes <= limit]
    return min(fitting, key=lambda found: rank(*found, objective), default=None)


def rank(plan: Plan, cost: StepCost, objective: Objective) -> tuple[float, float]:
    value = cost.peak_bytes if objective == "memory" else cost.step / (plan.batch or 1)
    return value, cost.peak_bytes


SEARCHES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("v5e:2x4", 32, 2048, {}),
    ("h100:2x4", 4, 4096, {"fixed": {"model": 4}}),
    ("v5e:2x4", 8, 2048, {"batches": (8, 256)}),
    ("v5e:2x2*4", 32, 2048, {}),
    ("v5e:2x4*2", 4, 32768, {}),
    ("v5e:2x2", 64, 8192, {}),
    ("h100:4x2", 8, 1024, {"fixed": {"remat": "full", "pipeline": 4}}),
]


@pytest.mark.parametrize(
    ("search", "objective"), covering(SEARCHES, ["time", "memory"], keep=2, strength=1), ids=lambda case: str(case)
)
def test_pruning_changes_no_result(search: tuple[str, int, int, dict[str, Any]], objective: Objective) -> None:
    name, batch, seq, more = search
    work, topology = llama_workload(batch, seq), Topology.parse(name)
    model, space = CostModel(work, topology), space_of(work, topology, **more)
    best, expected = best_estimate(model, space, objective), of_all(model, space, objective)
    assert best is not None and expected is not None
    assert (best.plan, best.cost) == expected


class Counted(CostModel):
    """A cost model that counts the plans that it estimates."""

    estimated = 0

    def cost(self, plan: Plan) -> StepCost:
        self.estimated += 1
        return super().cost(plan)


def test_most_plans_are_never_estimated() -> None:
    work, topology = llama_workload(batch=512), Topology.parse("v5e:8x8*4")
    model, space = Counted(work, topology), space_of(work, topology)
    assert best_estimate(model, space) is not None
    assert model.estimated < 0.05 * sum(1 for _ in plans(work, topology.devices, space, Counter()))


def test_no_plan_fits_a_device_that_is_too_small() -> None:
    work, topology = llama_workload(batch=1, seq=2**22), Topology.parse("v5e:1x1")
    refused: Counter[str] = Counter()
    assert best_estimate(CostModel(work, topology), space_of(work, topology), refused=refused) is None
    assert not refused


def test_a_larger_batch_costs_what_a_workload_of_that_batch_costs() -> None:
    topology = Topology.parse("v5e:8x8")
    small, large = (CostModel(llama_workload(batch), topology) for batch in (16, 256))
    for plan in (Plan(data=64, zero=3, remat="full"), Plan(pipeline=2, data=32, zero=3, remat="none", microbatches=4)):
        scaled, own = small.cost(replace(plan, batch=256)), large.cost(plan)
        assert scaled.step == pytest.approx(own.step)
        assert scaled.peak_bytes == pytest.approx(own.peak_bytes)
        assert scaled.wire_bytes == pytest.approx(own.wire_bytes)
