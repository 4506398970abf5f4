"""Arrays that do not fit into the memory on the chip, against sums by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from jaxpar.planning.search.calibration import Calibration
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.large_arrays import LargeArrays
from jaxpar.planning.search.plan import Plan
from jaxpar.sharding.hardware.topology import Topology
from tests.planning.llama_workload import llama_workload

MIB = 2**20
BY_EINSUM = "xla_tpu_enable_windowed_einsum_for_reduce_scatter"
FSDP = Plan(data=8, zero=3, remat="none")
"""4 rows of 2,048 tokens a device: 64 MiB for each result of the MLP, 512 MiB for the logits, 16 MiB for the others."""


def model(options: dict[str, bool] | None = None, chips: str = "v6e:2x4") -> CostModel:
    work = replace(llama_workload(), compiler_options={"tpu": options or {}})
    return CostModel(work, Topology.parse(chips))


def traffic(costs: CostModel, plan: Plan) -> float:
    """Bytes through main memory that a model counts for large arrays alone."""
    without = CostModel(costs.workload, costs.topology, replace(costs.calibration, large=math.inf))
    return (costs.cost(plan).hbm - without.cost(plan).hbm) * costs.topology.accelerator.hbm_bandwidth


def test_large_arrays_are_those_of_the_mlp_and_the_logits() -> None:
    found = model()._large(FSDP)
    # 8 layers with 3 matmuls, and the head, whose weight alone is large: 32,768 × 1,024 in bf16.
    assert found == LargeArrays(
        activations=(8 * 3 * 64 + 512) * MIB, weights=64 * MIB, stored=0.0, scattered=8 * 3 * 64 * MIB,
        kept=(8 * 64 + 1024) * MIB,
    )  # fmt: skip


def test_arrays_of_a_microbatch_are_smaller_and_weights_are_read_again() -> None:
    found = model()._large(replace(FSDP, grad_accum_steps=2))
    assert found == LargeArrays(activations=512 * MIB, weights=2 * 64 * MIB, kept=1024 * MIB)


def test_tensor_parallelism_shards_large_arrays() -> None:
    plan = Plan(data=4, model=2, tensor=("mlp", "vocab"), sequence_parallel=True, zero=3, remat="full")
    found = model()._large(plan)
    assert found.activations == (8 * 3 * 64 + 512) * MIB and found.weights == 0.0


def test_large_arrays_move_more_bytes() -> None:
    costs, fitted = model(), Calibration()
    found = costs._large(FSDP)
    expected = 3 * (fitted.large_activations * found.activations + fitted.large_weights * found.weights)
    expected += fitted.large_kept * found.kept + (8 / 2 - 1) * found.scattered
    assert traffic(costs, FSDP) == pytest.approx(expected)


def test_an_einsum_that_scatters_reads_an_operand_again_for_every_second_device() -> None:
    whole, pieces = model({BY_EINSUM: False}), model({BY_EINSUM: True})
    difference = traffic(pieces, FSDP) - traffic(whole, FSDP)
    assert difference == pytest.approx(3 * whole._large(FSDP).scattered)
    plain = replace(FSDP, zero=0)
    assert traffic(pieces, plain) == pytest.approx(traffic(whole, plain))


def test_gradients_over_many_devices_are_scattered_whole() -> None:
    plan = replace(FSDP, data=128)
    whole, pieces = (traffic(model({BY_EINSUM: on}, "v6e:8x16"), plan) for on in (False, True))
    assert pieces == pytest.approx(whole)


def test_gathered_weights_are_written_in_both_passes_and_their_gradients_once() -> None:
    costs = model({BY_EINSUM: False})
    small = replace(costs.calibration, large=4.0 * MIB, large_activations=0.0, large_weights=0.0, large_kept=0.0)
    costs = CostModel(costs.workload, costs.topology, small)
    # Three of 8 MiB in each of 8 layers; those of attention have 2 MiB.
    assert traffic(costs, FSDP) == pytest.approx(3 * 8 * 3 * 8 * MIB)


@pytest.mark.parametrize("chips", ["v5e:2x4", "v5p:2x2x2", "h100:1x8"])
def test_elsewhere_no_array_counts_as_large(chips: str) -> None:
    assert math.isinf(model(chips=chips).calibration.large)
