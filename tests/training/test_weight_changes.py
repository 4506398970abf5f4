"""The share of weights of 16 bits that a step changes: equal to a comparison on the host, in every kind of step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from profiles import few

import jaxpar as jp
from jaxpar.training.model.parts import Tagged

RATE = 2e-4
RULES = jp.Rules(batch="data", layers=None, embed="data", mlp="model")
QUICK = {"xla_backend_optimization_level": 0}


def make_model(key: jax.Array) -> dict[str, Any]:
    up, last = jax.random.split(key)
    weights = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16) / 4
    return {
        "up": jp.tag(weights(up, 3, 16, 8), "layers", "embed", "mlp"),
        "last": jp.tag(weights(last, 8, 16), "mlp", "embed"),
        "scale": jp.tag(jnp.ones((3, 16)), "layers", "embed"),
    }


def make_untagged(key: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: leaf.value, make_model(key), is_leaf=lambda leaf: isinstance(leaf, Tagged))


def loss_fn(model: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    layer = lambda x, w: (x + jnp.tanh(x @ w[0] * w[1].mean()) @ model["last"].astype(jnp.float32), None)
    return jnp.mean(jax.lax.scan(layer, x, (model["up"].astype(jnp.float32), model["scale"]))[0] ** 2)


BATCH = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def share(old: Any, new: Any) -> float:
    """The share of the elements in bf16 that differ."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, (old, new)), strict=True)]
    pairs = [(a, b) for a, b in pairs if a.dtype == jnp.bfloat16]
    return sum((a != b).sum() for a, b in pairs) / sum(a.size for a, _ in pairs)


STEPS = {
    "one device": ({}, lambda tx, _: tx),
    "sharded": ({"data": 4, "model": 2}, lambda tx, _: tx),
    "optimizer on the host": ({"data": 2, "model": 2}, lambda tx, _: jp.offload.to_host(tx, min_bytes=0)),
    "all on the host": (
        {"data": 2, "model": 2},
        lambda tx, _: jp.offload.to_host(tx, parameters=True, min_bytes=0),
    ),
    "optimizer on disk": ({"data": 2, "model": 2}, lambda tx, path: jp.offload.to_disk(tx, path, min_bytes=0)),
}


DEFAULT = ("sharded", "optimizer on disk")
"""The steps that run by default: one program, and one beside which the host updates."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.slow) for n in STEPS])
@pytest.mark.filterwarnings("ignore:offload. simulated CPU devices")
def test_each_kind_of_step_counts_the_weights_that_it_changes(name: str, tmp_path: Path) -> None:
    sizes, place = STEPS[name]
    devices = jax.devices()[: int(np.prod(list(sizes.values()), dtype=int))]
    layout = jp.Layout(jp.MeshSpec(**sizes).build(devices), RULES)
    tx = place(optax.adamw(RATE, weight_decay=0.1), tmp_path)
    state = jp.init(layout, make_model, tx)
    if name == "optimizer on disk":
        with jp.offload.disk_offloaded_train_step(layout, loss_fn, state, donate=False) as step:
            new, metrics = step(state, BATCH)
    else:
        lowered = jp.train_step(layout, loss_fn, donate=False).lower(state, BATCH)
        new, metrics = lowered.compile(QUICK)(state, BATCH)
    expected = share(state.params, new.params)
    assert 0.1 < expected < 0.7
    assert float(metrics["weights_changed"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("layout", ["fsdp", "data"])
def test_a_parallelized_script_counts_too(layout: Any) -> None:
    tx = optax.adamw(RATE, weight_decay=0.1)
    params = make_untagged(jax.random.key(0))

    def script(params: Any, opt_state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    step = jp.parallelize(script, params, tx.init(params), BATCH, layout=layout, donate=False)
    assert step.weights_changed is None
    params, opt_state = step.state
    for _ in range(2):
        old, (params, opt_state, _) = params, step(params, opt_state, BATCH)
        expected = share(old, params)
        assert 0.1 < expected < 0.7
        assert step.weights_changed == pytest.approx(expected, rel=1e-6)


def explicit() -> jp.Layout:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    return jp.Layout(mesh, RULES, explicit=True)


def zero(stage: int) -> jp.Layout:
    rules = jp.Rules(batch="data", layers=None, embed=None, mlp=None)
    return jp.Layout(jp.MeshSpec(data=8).build(), jp.Zero(stage=stage, min_bytes=16).rules(rules))


@pytest.mark.parametrize("layout", few([lambda: zero(1), explicit], 1), ids=["ZeRO 1", "explicit axes"])
def test_a_sample_is_taken_on_any_mesh(layout: Callable[[], jp.Layout]) -> None:
    squares = lambda model, x: sum((w.astype(jnp.float32) ** 2).sum() for w in jax.tree.leaves(model)) + x.sum()
    state = jp.init(layout(), make_model, optax.adamw(RATE))
    new, metrics = jp.train_step(layout(), squares, donate=False).lower(state, BATCH).compile(QUICK)(state, BATCH)
    assert float(metrics["weights_changed"]) == pytest.approx(share(state.params, new.params), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", few(["pipedream", "pipedream_2bw"], 1))
def test_a_pipeline_that_is_not_flushed_counts_too(schedule: Any) -> None:
    loss = jp.pipeline.PipelineLoss(
        "blocks",
        lambda model, x: x,
        lambda block, x, side: x + jnp.tanh(x @ block),
        lambda model, x, batch: (x**2).mean(),
    )
    layout = jp.Layout(
        jp.MeshSpec(pipeline=2).build(jax.devices()[:2]), jp.Rules(batch=None, layers="pipeline", embed=None)
    )
    pipeline = jp.pipeline.Asynchronous(schedule, stages=2, microbatches=2)
    step = jp.pipeline.pipedream_train_step(layout, loss, pipeline, donate=False)
    weights = jax.random.normal(jax.random.key(1), (2, 16, 16), jnp.bfloat16) / 4
    state = jp.init(layout, lambda key: {"blocks": jp.tag(weights, "layers", "embed", "embed")}, optax.sgd(0.02))
    state = step.start(state, BATCH)
    for _ in range(2):
        before, (state, metrics) = state, step(state, BATCH)
    changed = share(before.params, state.params)
    assert 0.05 < changed < 0.95
    assert float(metrics["weights_changed"]) == pytest.approx(changed, rel=1e-6)


def test_a_step_counts_no_weights_in_fp32() -> None:
    layout = jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), RULES)
    step = lambda dtype, rate: jp.train_step(layout, lambda model, x: (x @ model["w"]).sum() ** 2)(
        jp.init(layout, lambda key: {"w": jp.tag(jnp.ones((16, 4), dtype), "embed", "mlp")}, optax.sgd(rate)), BATCH
    )[1]
    assert "weights_changed" not in step(jnp.float32, 1e-3)
    assert float(step(jnp.bfloat16, 1e-9)["weights_changed"]) == 0.0


def test_large_weights_are_sampled() -> None:
    layout = jp.Layout(jp.MeshSpec(data=2, model=2).build(jax.devices()[:4]), RULES)
    weights = jax.random.normal(jax.random.key(0), (3, 512, 1024), jnp.bfloat16) / 4
    make = lambda key: {"w": jp.tag(weights, "layers", "embed", "mlp"), "scale": jp.tag(jnp.ones(8), "mlp")}
    state = jp.init(layout, make, optax.sign_sgd(2e-4))
    loss = lambda model, x: (model["w"].astype(jnp.float32) * x.mean()).sum() + model["scale"].sum()
    new, metrics = jp.train_step(layout, loss, donate=False)(state, BATCH)
    expected = share(state.params, new.params)
    assert 0.1 < expected < 0.9
    assert abs(float(metrics["weights_changed"]) - expected) < 4 * np.sqrt(
        expected * (1 - expected) / (4 * 3 * 16 * 128)
    )
