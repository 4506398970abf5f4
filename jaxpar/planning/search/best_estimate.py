"""``best_estimate``: the plan with the lowest estimate, without an estimate of every plan.

Each mesh has a *floor*: the cost of a step that recomputes nothing and keeps nothing, with the smallest bubble of any
pipeline on the mesh. No plan on the mesh costs less. Meshes are read in the order of their floors, and the search ends
at the first floor above the best plan: on thousands of devices, most meshes are never expanded into plans.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.experts import ExpertExchange
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.search import FULL, Candidate, Objective
from jaxpar.planning.search.shards import WeightGroup
from jaxpar.planning.search.space import MOST_VIRTUAL, Space, meshes, step_options
from jaxpar.planning.search.step_cost import StepCost
from jaxpar.planning.search.workload import Backward, OutsideLoops
from jaxpar.sharding.mesh import AXES


def best_estimate(
    model: CostModel, space: Space, objective: Objective = "time", refused: Counter[str] | None = None
) -> Candidate | None:
    """Returns the plan with the lowest estimate of those that fit, or ``None`` if none fits.

    Args:
      model: estimates plans.
      space: what may be chosen.
      objective: ``time`` for the seconds of a sequence, ``memory`` for the bytes at the peak.
      refused: is filled as by :func:`jaxpar.planning.search.space.plans`.

    Optimizer state is stored in host memory only where nothing fits without it.
    """
    refused = Counter() if refused is None else refused
    found = _best(model, space, objective, refused, offload=False)
    return _best(model, space, objective, Counter(), offload=True) if found is None and space.offload else found


def _best(
    model: CostModel, space: Space, objective: Objective, refused: Counter[str], *, offload: bool
) -> Candidate | None:
    workload, topology = model.workload, model.topology
    limit = topology.accelerator.hbm_bytes * FULL
    floors = _Floors(model, space, objective)
    best: Candidate | None = None
    lowest: tuple[float, float, int] | None = None
    candidates = meshes(workload, topology.devices, space, refused, offload=offload)
    ordered = sorted((floors.floor(mesh), n, mesh) for n, mesh in enumerate(candidates))
    for floor, n, mesh in ordered:
        if lowest is not None and floor > lowest[0]:
            break
        for plan in step_options(mesh, workload, space):
            cost = model.cost(plan)
            rank = (_value(plan, cost, objective), cost.peak_bytes, n)
            if cost.peak_bytes <= limit and (lowest is None or rank < lowest):
                best, lowest = Candidate(plan, cost), rank
    return best


def _value(plan: Plan, cost: StepCost, objective: Objective) -> float:
    return cost.peak_bytes if objective == "memory" else cost.step / (plan.batch or 1)


class _Floors:
    """The floors of meshes."""

    def __init__(self, model: CostModel, space: Space, objective: Objective):
        passes = [*model.workload.backward.values(), *model.workload.in_pieces.values()]
        alone = [b.outside_loops for b in passes if b.outside_loops is not None]
        least = Backward(
            (),
            min(b.weight_passes for b in passes),
            min(b.attention_passes for b in passes),
            OutsideLoops((), (), any(a.keeps_weights for a in alone)) if alone else None,
        )
        step = replace(model.workload, backward={"": least}, in_pieces={"": least})
        self._model = _FloorModel(step, model.topology, model.calibration)
        # A fixed option leaves fewer plans, so the floor of all is a floor of them.
        mesh = {name: size for name, size in space.fixed.items() if name in AXES}
        self._space = replace(space, remat=("",), accumulate=False, copies=(1,), fixed=mesh)
        self._objective: Objective = objective

    def floor(self, mesh: Plan) -> float:
        """Returns what no plan on a mesh is below."""
        relaxed = {
            replace(plan, microbatches=plan.microbatches * plan.virtual_stages, virtual_stages=1)
            for plan in step_options(mesh, self._model.workload, self._space)
        }
        most = max((plan.microbatches for plan in relaxed), default=1)
        chosen = (plan for plan in relaxed if plan.microbatches == most)
        return min((_value(p, self._model.cost(p), self._objective) for p in chosen), default=math.inf)


class _FloorModel(CostModel):
    """The cost of what every plan on a mesh does."""

    def _gradient_sums(self, plan: Plan) -> float:
        return 0.0

    def _expert_traffic(self, plan: Plan, once: object, passes: float) -> float:
        return 0.0

    def _sends_again(self, found: ExpertExchange, back: Backward) -> bool:
        return back.weight_passes > 3.0  # smaller microbatches have fewer pieces

    def _beside_forward(self, plan: Plan, group: WeightGroup) -> float:
        """With the most chunks, least is gathered before the first forward."""
        return 1.0 - 1.0 / MOST_VIRTUAL if plan.pipeline > 1 and group.layered else 0.0

    def _beside_backward(self, plan: Plan, group: WeightGroup) -> float:
        """With the most chunks, least is scattered after the last backward."""
        return self._beside_forward(plan, group) if plan.zero == 3 else 0.0

    def _working(self, plan: Plan) -> dict[str, float]:
        return {}
