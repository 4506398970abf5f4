"""The planner against an exhaustive search: all layouts of a small Llama on 8 chips, as the TPU compiler sees them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import optax
import pytest
from flax import nnx

from benchmarks.planning import exhaustive, own_remat
from jaxpar.app.plan import RunPlanner
from jaxpar.planning.plan import ModelPlanner
from jaxpar.planning.search.compiled import CompiledPlan, traced_bytes
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.search import has_values
from jaxpar.planning.search.space import plans
from jaxpar.sharding.hardware.topology import Topology

CONFIGS = Path(__file__).parents[3] / "configs" / "bench"
GALLERY = CONFIGS.parent / "gallery"


@pytest.fixture(scope="module")
def planner() -> RunPlanner:
    return exhaustive.toy()


@pytest.fixture(scope="module")
def found(planner: RunPlanner) -> exhaustive.Accuracy:
    return exhaustive.accuracy(planner, exhaustive.Stored.read())


def test_the_choice_is_nearly_the_best_of_all(found: exhaustive.Accuracy) -> None:
    assert found.plans >= 68 and found.programs <= 12
    assert found.chosen <= exhaustive.CHOSEN


def test_estimates_rank_plans_as_compiled_programs_do(found: exhaustive.Accuracy) -> None:
    assert found.step >= exhaustive.STEP and found.memory >= exhaustive.MEMORY


def test_pipelines_of_one_layer_a_stage_copy_no_buffer() -> None:
    """Where XLA copies the buffer of residuals in every tick, the program moves twice as many bytes."""
    stored = exhaustive.Stored.read().compiled_plans
    names = [f"PP 4 × {split} 2{zero}, 8 microbatches" for split in ("Ulysses", "ring") for zero in ("", ", ZeRO 3")]
    for name in names:
        (one,) = (figures for plan, figures in stored.items() if plan.describe() == name)
        assert isinstance(one, CompiledPlan) and one.hbm < 1.5 * one.compute


def test_the_stored_plans_are_the_whole_space(planner: RunPlanner) -> None:
    assert set(exhaustive.space(planner)) == set(exhaustive.Stored.read().compiled_plans)


def test_estimated_flops_are_those_of_all_compiled_programs(planner: RunPlanner) -> None:
    """Kernels and masks included, on every mesh of the exhaustive search."""
    model = CostModel(planner.workload, exhaustive.TOPOLOGY)
    stored = exhaustive.Stored.read().compiled_plans
    ratios = [model.cost(plan).compute / one.compute for plan, one in stored.items() if isinstance(one, CompiledPlan)]
    assert len(ratios) >= 68 and 0.993 <= min(ratios) and max(ratios) <= 1.007


def test_the_flops_of_an_mfu_are_those_of_the_model(planner: RunPlanner) -> None:
    job, work = planner.job, planner.workload
    assert work.model_flops == pytest.approx((job.tokens or 0) * job.model.flops_per_token(job.config.data.seq))


def given_plan(planner: RunPlanner, topology: Topology) -> Plan:
    """The plan that a run's own layout is."""
    given = planner.given(topology.devices)
    space = replace(planner.space(None, topology), fixed={name: value for name, value in given.items() if value})
    found = plans(planner.workload, topology.devices, space, Counter(), offload=False)
    return next(plan for plan in found if has_values(plan, given))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "chips", "flops", "step"),
    [("1b_cp4_ring", "v5e:4x4", 1.435e14, 0.740), ("8b_1m_hybrid", "v5p:4x4x4", 2.118e16, 46.4)],
)
def test_long_sequences_as_compiled(config: str, chips: str, flops: float, step: float) -> None:
    """The compiled figures are those of docs/measured/attention.md."""
    planner, topology = RunPlanner(CONFIGS / f"{config}.yaml"), Topology.parse(chips)
    cost = CostModel(planner.workload, topology).cost(given_plan(planner, topology))
    assert cost.compute * topology.accelerator.rate("bf16") == pytest.approx(flops, rel=0.01)
    assert cost.step == pytest.approx(step, rel=0.05)
    mfu = planner.workload.model_flops / (cost.step * topology.accelerator.rate("bf16") * topology.devices)
    assert 0.6 < mfu < 0.75


EXPERTS = {
    "mix_ep4": [(None, 531), (Plan(expert=8, context=2, zero=3, remat="dots"), 402)],
    "mix_ep8": [(None, 458)],
    "mix_ep4_capacity": [(None, 440)],
    "ds_ep4": [
        (None, 819),
        (Plan(data=8, expert=2, zero=3, remat="dots"), 777),
        (Plan(data=4, expert=2, context=2, zero=3, remat="dots"), 767),
    ],
    "ds_ep16": [(None, 1380)],
}
"""Configuration → a plan, or ``None`` for its own, and the milliseconds of its compiled step."""


@pytest.mark.slow
@pytest.mark.parametrize("config", EXPERTS)
def test_experts_as_compiled(config: str) -> None:
    """The compiled figures are those of docs/measured/plan.md."""
    planner, topology = RunPlanner(CONFIGS / f"{config}.yaml"), Topology.parse("v5e:4x4")
    model = CostModel(planner.workload, topology)
    for plan, compiled in EXPERTS[config]:
        step = 1e3 * model.cost(plan or given_plan(planner, topology)).step
        # Experts beside a ring are the only one of these plans that is further away.
        assert step == pytest.approx(
            compiled, rel=0.09 if plan is not None and plan.expert * plan.context == 4 else 0.05
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "plan", "compiled"),
    [
        ("1b_pp4_fsdp4", None, 216),
        ("8b_pp4_fsdp4_m8_per_chunk", None, 1362),
        (
            "8b_pp4_fsdp4_m8",
            Plan(pipeline=8, context=2, zero=3, remat="dots", microbatches=32, virtual_stages=4),
            1554,
        ),
        (
            "8b_pp4_fsdp4_m8",
            Plan(pipeline=4, context=4, zero=3, remat="dots", microbatches=32, virtual_stages=8),
            3525,
        ),
        (
            "ds_ep4",
            Plan(pipeline=4, expert=2, context=2, zero=3, remat="full", microbatches=4, virtual_stages=4),
            1095,
        ),
    ],
)
def test_pipelines_of_chunks_as_compiled(config: str, plan: Plan | None, compiled: float) -> None:
    """The compiled figures are those of docs/measured/plan.md and pipeline.md."""
    planner, topology = RunPlanner(CONFIGS / f"{config}.yaml"), Topology.parse("v5e:4x4")
    cost = CostModel(planner.workload, topology).cost(plan or given_plan(planner, topology))
    # The pipeline of experts was compiled when its layers moved to their stages by an all-to-all, which takes 52 ms.
    assert 1e3 * cost.step == pytest.approx(compiled, rel=0.12 if config == "ds_ep4" else 0.06)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "plan", "mebibytes"),
    [
        ("1b_fsdp16", Plan(data=16, zero=3, remat="none"), 10_772),
        ("1b_cp4_ring", Plan(data=4, context=4, zero=3, remat="save_attention"), 3_052),
        ("8b_fsdp16", Plan(data=16, zero=3, remat="full"), 10_015),
        ("mix_ep4", Plan(expert=8, context=2, zero=3, remat="dots"), 7_854),
        ("ds_ep4", Plan(data=4, expert=2, context=2, zero=3, remat="dots"), 12_831),
        ("1b_pp4_fsdp4", Plan(pipeline=4, data=4, zero=3, remat="full", microbatches=8, virtual_stages=4), 2_515),
    ],
)
def test_traced_memory_is_within_a_tenth_of_compiled(config: str, plan: Plan, mebibytes: float) -> None:
    """Plans that are shown and were not compiled have the memory of their trace; compiled: docs/measured/plan.md."""
    traced = traced_bytes(RunPlanner(CONFIGS / f"{config}.yaml").run_of(plan), Topology.parse("v5e:4x4"))
    assert traced is not None and traced / 2**20 == pytest.approx(mebibytes, rel=0.1)


OWN_GPT = {
    "list": {"none": (11.56, 1.68), "dots": (10.5, 0.80), "full": (11.98, 0.48)},
    "scan": {"none": (12.91, 2.38), "dots": (10.81, 0.72), "full": (12.61, 0.47)},
}
"""How the layers run → recomputation policy → milliseconds and GiB of the compiled step, from docs/measured/plan.md."""


@pytest.mark.slow
@pytest.mark.parametrize("layers", OWN_GPT)
def test_layers_in_a_list_and_in_a_scan_as_compiled(layers: str) -> None:
    """In a list XLA keeps fewer activations, and gathers weights once if it recomputes nothing."""
    batch = {name: jax.ShapeDtypeStruct((own_remat.ROWS, own_remat.SEQ), "int32") for name in ("tokens", "targets")}
    make_model = lambda key: own_remat.GPT(nnx.Rngs(key), scanned=layers == "scan")
    planner = ModelPlanner.of(make_model, own_remat.loss_fn, batch, optax.adamw(1e-3))
    model = CostModel(planner.workload, own_remat.TOPOLOGY)
    for policy, (step, peak) in OWN_GPT[layers].items():
        plan = Plan(data=8, zero=3, remat=policy)
        cost = model.cost(plan)
        assert 1e3 * cost.step == pytest.approx(step, rel=0.15)
        assert cost.peak_bytes / 2**30 == pytest.approx(peak, rel=0.2)
        traced = traced_bytes(planner.run_of(plan), own_remat.TOPOLOGY)
        assert traced is not None and traced / 2**30 == pytest.approx(peak, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "chips", "step"), [("1b_v6e", "v6e:4x4", 81.0), ("8b_v6e", "v6e:4x8", 569.4)])
def test_main_memory_of_v6e_as_compiled(config: str, chips: str, step: float) -> None:
    """The compiled steps are those of docs/measured/gallery.md; the constants were fitted to these two and the 70B."""
    planner, topology = RunPlanner(GALLERY / f"pretrain_{config}.yaml"), Topology.parse(chips)
    plan = Plan(data=topology.devices, zero=3, remat="none" if config == "1b_v6e" else "dots")
    assert 1e3 * CostModel(planner.workload, topology).cost(plan).step == pytest.approx(step, rel=0.1)
