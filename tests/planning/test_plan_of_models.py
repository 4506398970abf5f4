"""Plans of small models of the user's own: what is planned, what each plan trains, and one search from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import in_process_compiler
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from flax import nnx

import jaxpar as jp
from jaxpar.errors import ConfigError, PlanError
from jaxpar.planning.plan import ModelPlanner, plan
from jaxpar.planning.search.compiled import CompiledPlan, compile_plan, traced_bytes
from jaxpar.planning.search.pipeline import StagedModel
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.search import SearchOptions
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.training.remat import RematPolicy

BATCH = {"x": jax.ShapeDtypeStruct((8, 12), "float32")}
STAGED_BATCH = {"x": jax.ShapeDtypeStruct((8, 3), "float32"), "y": jax.ShapeDtypeStruct((8, 5), "float32")}


def make_mlp(key: jax.Array) -> dict[str, jax.Array]:
    up, down = jax.random.split(key)
    return {"up": jax.random.normal(up, (12, 48)), "down": jax.random.normal(down, (48, 12))}


def mlp_loss(model: Any, batch: Any) -> jax.Array:
    return ((jax.nn.relu(batch["x"] @ model["up"]) @ model["down"] - batch["x"]) ** 2).mean()


def make_layers(key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, 4)
    return {"first": jnp.ones((3, 5)), "blocks": {str(i): {"w": jax.random.normal(keys[i], (5, 5))} for i in range(4)}}


def make_stack(key: jax.Array) -> dict[str, Any]:
    layers = make_layers(key)
    return layers | {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *layers["blocks"].values())}


STAGED = jp.pipeline.PipelineLoss(
    layers="blocks",
    embed=lambda model, batch: batch["x"] @ model["first"],
    layer=lambda block, x, side: x + jnp.tanh(x @ block["w"]),
    head=lambda model, x, batch: jnp.mean((x - batch["y"]) ** 2),
)


def mlp() -> ModelPlanner:
    return ModelPlanner.of(make_mlp, mlp_loss, BATCH, optax.adam(1e-3))


def test_a_plan_is_a_layout_an_optimizer_and_options_of_the_step() -> None:
    own = mlp()
    assert own.axes == ("replica", "data", "model") and own.notes == () and not own.sequence_parallel
    sharded = Plan(data=2, model=2, tensor=("mlp",), zero=1, grad_accum_steps=2, offload=True)
    run = own.run_of(sharded)
    assert run.layout.sizes == dict(sharded.mesh) and run.options["grad_accum_steps"] == 2
    assert type(run.tx).__name__ == "Offloaded" and own.run_of(Plan(data=4)).tx is own.tx
    assert run.about is not None and (run.about.tokens, run.about.remat) == (0, "none")
    data = own.config_of(sharded)
    assert data["mesh"] == {"data": 2, "model": 2} and data["rules"]["mlp"] == "model"
    assert data["train"] == {"grad_accum_steps": 2}
    assert data["parallel"] == {"optimizer": {"stage": 1, "axis": ["data"]}}
    assert own.config_of(Plan(data=4)).keys() == {"mesh", "rules"}


def test_a_pipeline_recomputes_its_layers() -> None:
    own = ModelPlanner.of(make_stack, STAGED, STAGED_BATCH, optax.sgd(0.1))
    full = Plan(pipeline=2, data=2, zero=3, remat="full", microbatches=2, virtual_stages=2)
    run = own.run_of(full)
    assert own.config_of(full)["parallel"] == {
        "remat": "full",
        "pipeline": {
            "schedule": "interleaved",
            "microbatches": 2,
            "virtual_stages": 2,
            "activation_checkpointing": "none",
            "grad_reduction": "per_chunk",
        },
    }
    pipeline = run.options["pipeline"]
    assert (pipeline.schedule.name, pipeline.schedule.microbatches) == ("interleaved", 2)
    assert (pipeline.activation_checkpointing, pipeline.grad_reduction) == ("none", "per_chunk")
    text = lambda loss: str(jax.make_jaxpr(jax.grad(loss))(make_stack(jax.random.key(0)), STAGED_BATCH))
    assert "remat" in text(run.loss_fn) and "remat" not in text(STAGED)


def test_layers_in_a_dict_become_one_stack() -> None:
    own = ModelPlanner.of(make_layers, STAGED, STAGED_BATCH, optax.sgd(0.1))
    assert own.staged is not None and own.staged.count == 4 and own.axes[0] == "pipeline" and own.notes == ()
    assert own.workload.sizes["layers"] == 4 and own.workload.policies == ("none", "dots", "full")
    assert own.staged.staged("") is own.staged.staged("none") is STAGED
    assert own.run_of(Plan(data=4)).make_model is own.make_model
    assert own.run_of(Plan(pipeline=4, microbatches=4)).options["pipeline"].schedule.name == "1f1b"
    with raises(ConfigError, "remat: layers", "pipeline"):
        own.staged.staged(RematPolicy("full", layers=(1,)))


class Layer(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.full((5, 5), 0.1))


def test_nnx_layers_are_recomputed_too() -> None:
    layer = lambda block, x, side: x + jnp.tanh(x @ block.w[...])
    staged = StagedModel(replace(STAGED, layer=layer), make_stack, 1).staged("full").layer
    x = jnp.arange(10.0).reshape(2, 5) / 10
    np.testing.assert_array_equal(staged(Layer(), x, None), layer(Layer(), x, None))
    assert "remat" in str(jax.make_jaxpr(lambda x: staged(Layer(), x, None))(x))


def test_experts_are_planned_if_the_weights_and_the_call_name_them() -> None:
    """One of the two alone leaves tokens where they are, so the axis is left out and the report says why."""
    weights = lambda key: {"router": jnp.ones((12, 4)), "up": jp.tag(jnp.ones((4, 12, 12)), "experts", "embed", None)}

    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.einsum("be,end->bnd", batch["x"], jnp.swapaxes(model["up"], 0, 1)).mean()

    own = ModelPlanner.of(weights, loss, BATCH, optax.sgd(0.1))
    assert own.batch["x"].dims == ("batch", None) and "expert" not in own.axes and not own.annotated
    (note,) = own.notes
    assert note == (
        "left out: expert, because up has a dim 'experts', but the model does not call jp.experts, so tokens would "
        "not travel to their experts; to plan it, call jp.experts"
    )


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return in_process_compiler.use(monkeypatch, tmp_path, 4)


def test_the_best_plan_is_compiled_and_reported(compiler: list[str]) -> None:
    lines: list[str] = []
    run = make_mlp, mlp_loss, BATCH, optax.adam(1e-3)
    options = SearchOptions(at_least=1, at_most=1, traced=1)
    fixed = {"data": 4, "zero": 3}
    report = plan(*run, "v5e:2x2", fixed=fixed, options=options, progress=lines.append)
    best = report.best
    assert compiler == ["v5e:2x2"] and best.plan.describe() == "FSDP 4" and lines[0].startswith("FSDP 4: ")
    assert best.compiled is not None and best.compiled.fits and best.compiled.wire_bytes > 0
    assert report.layout(jax.devices()[:4]).sizes == dict(best.plan.mesh) == report.run.layout.sizes
    # The program's peak holds at least the state: weights and both moments of Adam, of which each device has a quarter.
    weights = 2 * 12 * 48 * 4
    assert best.peak_bytes >= 3 * weights / 4
    told = json.loads(report.to_json())
    assert told["plans"][0]["config"] == report.planner.config_of(best.plan) and told["plans"][0]["compiled"]
    assert told["plans"][0]["network"] == {"axes": {}, "bytes": 0, "seconds": 0}
    assert report.headline().startswith("FSDP 4 on v5e:2x2: ")


def test_the_report_names_what_the_best_plan_computes_otherwise_than_xla(compiler: list[str]) -> None:
    """The best plan shards the length of a depthwise convolution over the axis of its features."""

    def make(key: jax.Array) -> dict[str, jax.Array]:
        return make_mlp(key) | {"kernel": jax.random.normal(key, (3, 1, 12))}

    def loss(model: Any, batch: Any) -> jax.Array:
        x = jax.lax.conv_general_dilated(
            batch["x"], model["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=12
        )
        return mlp_loss(model, {"x": x})

    batch = {"x": jax.ShapeDtypeStruct((8, 6, 12), "float32")}
    fixed, options = {"data": 2, "model": 2}, SearchOptions(at_least=1, at_most=1, traced=1)
    report = plan(make, loss, batch, optax.sgd(0.1), "v5e:2x2", fixed=fixed, options=options)
    (remark,) = [line for line in report.remarks() if line.startswith("wrong in XLA: ")]
    assert "convolution of slices: " in remark and "test_plan_of_models.py" in remark
    assert json.loads(report.to_json())["plans"][0]["repaired"] == [remark.removeprefix("wrong in XLA: ")]


def test_a_plan_that_cannot_be_lowered_is_a_problem_of_the_plan(
    compiler: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, topology = mlp().run_of(Plan(data=4)), Topology.parse("v5e:2x2")
    traced = traced_bytes(run, topology)
    assert traced is not None and traced >= 3 * 2 * 12 * 48 * 4

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("a kernel on axes that are not manual")

    monkeypatch.setattr("jaxpar.planning.search.compiled.check_up", refuse)
    with raises(PlanError, "axes", "cannot"):
        compile_plan(run, topology)
    assert compiler == []


def test_of_a_program_that_is_too_large_only_its_bytes_are_known() -> None:
    too_large = SimpleNamespace(bytes=2**30, share=1.5)
    found: Any = SimpleNamespace(roofline=None, memory=None, audit=None, findings=[too_large])
    line = CompiledPlan.of(found)
    assert (line.fits, line.step, line.peak_bytes) == (False, float("inf"), 3 * 2**30)
