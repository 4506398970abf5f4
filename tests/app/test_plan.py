"""``jaxpar plan``: the configuration of every plan builds, and a run's own layout is one of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from error_texts import raises

from jaxpar.app.cli import main
from jaxpar.app.config import RunConfig, load_run
from jaxpar.app.job import make_job
from jaxpar.app.plan import RunPlanner
from jaxpar.errors import PlanError
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.search import has_values
from jaxpar.planning.search.space import plans
from jaxpar.sharding.mesh import AXES
from jaxpar.utils.yaml_config import build

ROOT = Path(__file__).parents[2]
TINY = """
model: {family: llama, vocab: 64, embed: 32, layers: 4, heads: 8, kv_heads: 4, head_dim: 8, mlp: 64}
data: {source: synthetic, batch: 16, seq: 64}
"""


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> RunPlanner:
    file = tmp_path_factory.mktemp("plan") / "tiny.yaml"
    file.write_text(TINY)
    return RunPlanner(file)


@pytest.mark.slow
def test_a_run_without_a_layout_is_planned_and_every_plan_builds(planner: RunPlanner, tmp_path: Path) -> None:
    space = replace(planner.space(), remat=("none", "full"))
    every = list(plans(planner.workload, 8, space, Counter()))
    assert len(every) > 1000
    for plan in every[:: len(every) // 60]:
        run = planner.run_of(plan)
        assert run.layout.sizes == dict(plan.mesh)
        file = tmp_path / "plan.yaml"
        file.write_text(yaml.safe_dump(planner.config_of(plan)))
        loaded = load_run(file)
        job = make_job(loaded)
        assert job.layout(8) == run.layout and isinstance(build(RunConfig, planner.config_of(plan), "plan"), RunConfig)
        assert job.config.train.grad_accum_steps == plan.grad_accum_steps


OWN = """
model: {factory: "own_models:make_gpt", loss: "own_models:next_byte", args: {layers: 3}}
data: {source: synthetic, batch: 16, seq: 16}
optimizer: {learning_rate: 0.01, warmup: 0}
cpu_devices: 8
output: none
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a run of a model of the user's own."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    file = tmp_path / "own.yaml"
    file.write_text(OWN)
    return file


VIT = """
model:
  factory: "jaxpar.models:init_vit"
  loss: "jaxpar.models:classification_loss"
  args: {image: 8, patch: 4, classes: 2, embed: 8, layers: 1, heads: 2, mlp: 8}
data:
  factory: "jaxpar.data:Gratings"
  args: {size: 8, classes: 2}
  batch: 8
  dims: {images: [batch, null, null, null], labels: [batch]}
"""


@pytest.mark.slow
def test_a_linen_model_is_planned_although_its_factory_runs_it_with_its_constraints(tmp_path: Path) -> None:
    file = tmp_path / "vit.yaml"
    file.write_text(VIT)
    planner = RunPlanner(file)
    every = list(plans(planner.workload, 8, planner.space(), Counter()))
    assert "FSDP 8" in {plan.describe() for plan in every}
    assert planner.run_of(every[0]).layout.sizes == dict(every[0].mesh)


@pytest.mark.slow
def test_an_own_model_is_planned_with_recomputed_layers(own: Path) -> None:
    planner = RunPlanner(own)
    every = list(plans(planner.workload, 8, planner.space(), Counter()))
    assert {plan.remat for plan in every} == {"none", "dots", "full"} and len(planner.notes) == 1
    assert {(plan.context, plan.ulysses) for plan in every if plan.data == 4} == {(1, 1), (2, 1), (1, 2)}
    plan = next(p for p in every if p.remat == "dots")
    own.write_text(yaml.safe_dump(planner.config_of(plan)))
    again = RunPlanner(own)
    assert again.given(8)["remat"] == "dots" and has_values(plan, again.given(8))


OWN_PLANS = [
    Plan(data=2, context=2, ulysses=2, zero=3, remat="dots"),
    Plan(data=2, context=2, model=2, tensor=("heads", "mlp", "vocab"), sequence_parallel=True, zero=3, remat="none"),
]


@pytest.mark.slow
def test_a_pipeline_of_an_own_model_computes_what_one_device_does(own: Path) -> None:
    own.write_text(OWN.replace("next_byte", "staged_next_byte").replace("layers: 3", "layers: 4"))
    plan = Plan(pipeline=2, data=4, zero=3, remat="dots", microbatches=2, virtual_stages=2)
    own.write_text(yaml.safe_dump(RunPlanner(own).config_of(plan)))
    assert RunPlanner(own).given(8)["microbatches"] == 2
    assert main(["verify", str(own), "--steps", "1"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("plan", OWN_PLANS, ids=Plan.describe)
def test_a_plan_of_an_own_model_computes_what_one_device_does(plan: Plan, own: Path) -> None:
    own.write_text(yaml.safe_dump(RunPlanner(own).config_of(plan)))
    assert main(["verify", str(own), "--steps", "1"]) == 0


@pytest.mark.slow
def test_settings_are_kept(planner: RunPlanner, tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    fixed = RunPlanner(file, ["mesh.model=2", "parallel.remat=full", "train.steps=7", "mesh.data=-1"])
    assert fixed.fixed == {"model": 2, "remat": "full"}
    every = list(plans(fixed.workload, 8, fixed.space(), Counter()))
    assert every and {(plan.model, plan.remat) for plan in every} == {(2, "full")}
    assert fixed.config_of(every[0])["train"]["steps"] == 7


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("1b_fsdp16", Plan(data=16, zero=3, remat="full")),
        ("1b_dp16_zero1", Plan(data=16, zero=1, remat="full")),
        ("1b_cp4_ring", Plan(data=4, context=4, zero=3, remat="save_attention")),
        ("1b_pp4_fsdp4", Plan(pipeline=4, data=4, zero=3, remat="full", microbatches=8, virtual_stages=4)),
        (
            "8b_pp4_fsdp4_m8_per_chunk",
            Plan(pipeline=4, data=4, zero=3, remat="full", microbatches=8, virtual_stages=8),
        ),
    ],
)
def test_the_runs_own_layout_is_a_plan(name: str, plan: Plan) -> None:
    planner = RunPlanner(ROOT / "configs" / "bench" / f"{name}.yaml")
    given = planner.given(16)
    assert given and {field: value for field, value in given.items() if getattr(plan, field) != value} == {}


def test_the_runs_own_layout_keeps_options_that_no_plan_has() -> None:
    planner = RunPlanner(ROOT / "configs" / "bench" / "8b_pp4_fsdp4_m8.yaml")
    plan = Plan(pipeline=4, data=4, zero=3, remat="full", microbatches=8, virtual_stages=2)
    assert planner.config_of(plan)["parallel"]["pipeline"]["grad_reduction"] == "per_microbatch"
    assert planner.run_of(plan).options["pipeline"] == make_job(planner.loaded).pipeline
    assert planner.own_options(16) and not planner.own_options(8)
    head = RunPlanner(ROOT / "configs" / "bench" / "8b_pp4_fsdp4_m8_per_chunk.yaml")  # head_grad_reduction
    assert head.own_options(16) and not RunPlanner(ROOT / "configs" / "bench" / "1b_pp4_fsdp4.yaml").own_options(16)
    for name in ("ds_ep4_matmuls", "1b_hsdp4x4_sharded"):  # overlap.matmuls, rings
        assert RunPlanner(ROOT / "configs" / "bench" / f"{name}.yaml").own_options(16), name
    assert not RunPlanner(ROOT / "configs" / "bench" / "ds_ep4.yaml").own_options(16)
    other = planner.config_of(replace(plan, virtual_stages=1))
    assert other["parallel"]["pipeline"]["grad_reduction"] == "per_step"


@pytest.mark.slow
def test_a_run_with_half_batches_in_a_pipeline_is_traced_without_its_mesh() -> None:
    planner = RunPlanner(ROOT / "configs" / "llama3_1_70b_seed.yaml")
    assert planner.workload.sizes["layers"] == 80
    given = planner.given(64)
    assert (given["pipeline"], given["model"], given["copies"], given["microbatches"]) == (8, 8, 2, 256)


def test_a_maximum_below_the_batch(planner: RunPlanner) -> None:
    with raises(PlanError, "--max-batch"):
        planner.space(4)


MOE = """
model: {family: FAMILY, vocab: 256, embed: 32, layers: 4, heads: 8, KV, head_dim: 8, experts: 8, k: 2, expert_mlp: 64,
  balance_loss: 0}  # it differs between the whole batch and microbatches
data: {source: synthetic, batch: 16, seq: 64}
optimizer: {learning_rate: 0.01, warmup: 0}
cpu_devices: 8
output: none
"""
LATENT = "kv_heads: 8, mlp: 64, latent_attention: {kv_latent: 16, rope_dim: 8, value_dim: 8}"


def moe(folder: Path, family: str = "mixtral") -> Path:
    kv = "kv_heads: 4" if family == "mixtral" else LATENT
    file = folder / f"{family}.yaml"
    file.write_text(MOE.replace("FAMILY", family).replace("KV", kv))
    return file


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> RunPlanner:
    return RunPlanner(moe(tmp_path_factory.mktemp("moe")))


@pytest.mark.slow
def test_every_plan_of_a_mixture_of_experts_builds(mixtral: RunPlanner, tmp_path: Path) -> None:
    (layers,) = mixtral.workload.experts
    assert (layers.call.experts, layers.call.k, layers.times, layers.layered) == (8, 2, 4, True)
    every = list(plans(mixtral.workload, 8, replace(mixtral.space(), remat=("full",)), Counter()))
    assert {plan.copies for plan in every} == {1} and {plan.expert for plan in every} == {1, 2, 4, 8}
    assert {axis for plan in every if plan.expert > 1 for axis, n in plan.mesh.items() if n > 1} == {*AXES}
    for plan in every[:: len(every) // 40]:
        run = mixtral.run_of(plan)
        file = tmp_path / "plan.yaml"
        file.write_text(yaml.safe_dump(mixtral.config_of(plan)))
        assert run.layout.sizes == dict(plan.mesh) and make_job(load_run(file)).layout(8) == run.layout
    (note,) = mixtral.notes
    assert note == (
        "not considered: two interleaved half batches, which layers with experts do not have, and experts over axes of "
        "the batch or the sequence (experts: [context, data])"
    )


@pytest.mark.parametrize(("name", "expert", "data"), [("mix_ep4", 4, 4), ("mix_ep8", 8, 2), ("ds_ep16", 16, 1)])
def test_layouts_of_experts_are_plans(name: str, expert: int, data: int) -> None:
    planner = RunPlanner(ROOT / "configs" / "bench" / f"{name}.yaml")
    given = planner.given(16)
    plan = Plan(data=data, expert=expert, zero=3, remat="full")
    assert given and {field: value for field, value in given.items() if getattr(plan, field) != value} == {}


MOE_PLANS = [
    (
        "mixtral",
        Plan(
            expert=2, context=2, model=2, tensor=("expert_mlp", "heads"), sequence_parallel=True, zero=3, remat="none"
        ),
    ),
    ("mixtral", Plan(pipeline=2, data=2, expert=2, zero=3, remat="dots", microbatches=2, virtual_stages=2)),
    ("deepseek_v3", Plan(data=2, expert=2, ulysses=2, zero=3, remat="dots")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "plan"), MOE_PLANS, ids=lambda x: x if isinstance(x, str) else x.describe())
def test_a_plan_of_a_mixture_of_experts_computes_what_one_device_does(family: str, plan: Plan, tmp_path: Path) -> None:
    file = moe(tmp_path, family)
    file.write_text(yaml.safe_dump(RunPlanner(file).config_of(plan)))
    assert main(["verify", str(file), "--steps", "1"]) == 0


@pytest.mark.slow
def test_a_planned_mixture_of_experts_trains(mixtral: RunPlanner, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    data = mixtral.config_of(Plan(data=2, expert=4, zero=3, remat="full"))
    file.write_text(yaml.safe_dump(data | {"train": {"steps": 1}}))
    assert main(["train", str(file)]) == 0
