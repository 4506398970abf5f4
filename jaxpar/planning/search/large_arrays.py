"""Arrays too large for the memory on the chip: every operation reads them from main memory and writes them there.

Where a chip's matmuls are fast beside its main memory, as those of v6e, this traffic decides how long a step takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxpar.planning.search.calibration import Calibration
from jaxpar.planning.search.plan import LAYERS, Plan
from jaxpar.planning.search.shards import Shards
from jaxpar.planning.search.workload import Factors, KeptArray, Workload

_MOST_PIECES = 64
"""Gradients over more devices are not scattered by einsum: over 32 they are, over 128 and 256 they are not."""


@dataclass(frozen=True)
class LargeArrays:
    """Bytes on one device of the arrays that are larger than a limit, summed over a step.

    Attributes:
      activations: operands and results of the forward pass's matmuls with weights, once for each matmul.
      weights: those weights, once for each matmul.
      stored: gathered weights of the layers, once for each layer.
      scattered: what the layers' weight gradients read for each piece, if they are scattered by einsum: of a matmul's
        operand and result the larger, which does not have the dim that is scattered.
      kept: what the backward pass keeps.
    """

    activations: float = 0.0
    weights: float = 0.0
    stored: float = 0.0
    scattered: float = 0.0
    kept: float = 0.0

    def traffic(self, plan: Plan, fitted: Calibration, passes: float, others: int) -> float:
        """Returns the bytes through main memory in a step, beside those that all arrays have.

        Args:
          plan: the plan.
          fitted: the constants.
          passes: how often matmuls run, in forward passes.
          others: the number of devices that store a part of each weight, if layers gather them, or 1.
        """
        traffic = passes * (fitted.large_activations * self.activations + fitted.large_weights * self.weights)
        traffic += fitted.large_kept * self.kept
        if others == 1:
            return traffic
        if fitted.scatters_by_einsum and plan.model == 1 and others <= _MOST_PIECES:
            traffic += max(others / 2 - 1, 0.0) * self.scattered  # two pieces at a time, one in each direction
        # Each gathered weight is written in both passes, and each gradient before it is scattered.
        return traffic + 3 * plan.grad_accum_steps * self.stored


def large_arrays(
    plan: Plan, workload: Workload, limit: float, kept_bytes: Callable[[Plan, KeptArray], float]
) -> LargeArrays:
    """Returns the arrays of a plan that are larger than a limit. Those of experts and of attention are left out.

    Args:
      plan: the plan.
      workload: the step.
      limit: bytes.
      kept_bytes: the bytes on one device of an array that is kept, of all layers.
    """
    shards, parts = Shards(plan), plan.microbatches if plan.pipeline > 1 else plan.grad_accum_steps
    activations = weights = scattered = 0.0

    def size(*factors: Factors) -> float:
        return shards.local(*factors) * workload.compute_bytes

    for m in workload.matmuls:
        if not m.weight or m.groups:
            continue
        times = m.times / (plan.pipeline if m.layered else 1)
        sides = size(m.shared, m.rows, m.summed), size(m.shared, m.rows, m.columns)
        large = [side for side in sides if side / parts > limit]
        weight = size(m.shared, m.columns, m.summed)
        activations += sum(large) * times
        weights += weight * parts * times if weight > limit else 0.0
        scattered += max(large, default=0.0) * times if m.layered else 0.0

    def layers(array: KeptArray) -> float:
        return dict(array.factors).get(LAYERS, plan.pipeline) / plan.pipeline

    params = ((size(p.factors), p) for p in workload.params if LAYERS in dict(p.factors))
    held = ((kept_bytes(plan, k), k) for k in workload.backward[plan.remat].kept_by(plan) if not k.rows)
    stored = sum(whole for whole, p in params if whole / layers(p) > limit)
    kept = sum(whole for whole, k in held if whole / (layers(k) * parts) > limit)
    return LargeArrays(activations, weights, stored, scattered, kept)
