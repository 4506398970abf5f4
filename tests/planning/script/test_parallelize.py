"""``jp.parallelize``: what it takes, what it refuses, and runs that equal those of one device.

The three kinds of scripts, complete, are those of ``docs/guides/parallelize.md``; ``tests/test_guides.py`` runs them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from flax import nnx
from profiles import few

import jaxpar as jp
from jaxpar.errors import ConfigError, LayoutError, ModelError, StateError
from jaxpar.planning.search.search import SearchOptions

TX = optax.sgd(0.1, momentum=0.9)
State = dict[str, Any]


def new_state() -> State:
    keys = jax.random.split(jax.random.key(0))
    params = {"up": jax.random.normal(keys[0], (16, 32)) / 4, "down": jax.random.normal(keys[1], (32, 16)) / 6}
    return {"params": params, "opt": TX.init(params), "key": jax.random.key(7), "step": 0}


def step_of(average: Callable[[Any], Any] = lambda grads: grads) -> Callable[..., Any]:
    def train_step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        key, mask = jax.random.split(state["key"])

        def loss_fn(params: Any) -> jax.Array:
            h = jax.nn.relu(batch["x"] @ params["up"])
            h = h * jax.random.bernoulli(mask, 0.9, h.shape)
            return ((h @ params["down"] - batch["x"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = TX.update(average(grads), state["opt"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}
        return new | {"step": state["step"] + 1}, {"loss": loss, "norm": optax.tree.norm(grads)}

    return train_step


def batch_of(number: int, rows: int = 16) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(number).normal(size=(rows, 16)).astype(np.float32)}


def run(step: Callable[..., Any], state: State, numbers: range) -> tuple[State, list[float]]:
    losses = []
    for number in numbers:
        state, metrics = step(state, batch_of(number))
        losses.append(float(metrics["loss"]))
    return state, losses


def assert_same(found: State, expected: State) -> None:
    for x, y in zip(jax.tree.leaves(found["params"]), jax.tree.leaves(expected["params"]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_run_continues_on_another_number_of_devices(tmp_path: Path) -> None:
    state, losses = run(jax.jit(step_of()), new_state(), range(4))
    with jp.parallelize(step_of(), new_state(), batch_of(0), checkpoints=tmp_path) as first:
        _, before = run(first, first.state, range(2))
        first.save()
    four = jp.Layout(jp.MeshSpec(data=4).build(jax.devices()[:4]), jp.Rules(batch="data", embed=None, mlp="data"))
    with jp.parallelize(step_of(), new_state(), batch_of(0), checkpoints=tmp_path, layout=four) as second:
        assert second.steps == 2 and int(second.state["step"]) == 2
        assert second.state["params"]["up"].sharding.spec == jax.P(None, "data")
        again, after = run(second, second.state, range(2, 4))
    np.testing.assert_allclose([*before, *after], losses, rtol=1e-5)
    assert_same(again, state)


def test_the_default_names_and_shards_everything_and_says_why() -> None:
    step = jp.parallelize(step_of(), new_state(), batch_of(0))
    places = {array.path: (array.names, array.resolved.axes) for array in step.placed if array.shape}
    for path in ("state/params", "state/opt/0/trace"):
        assert places[f"{path}/up"] == (("embed", "mlp"), (("data",), ())) and places[f"{path}/down"][0] == (
            "mlp",
            "embed",
        )
    assert places["batch/x"] == (("batch", "embed"), (("data",), ()))
    text = str(step)
    assert text.startswith("FSDP 8 on 8 simulated CPU devices (mesh: data 8)\nwhy: the default: simulated CPU devices")
    assert re.search(r"state/opt/\*/trace/up +16 × 32 +embed, mlp +data, · +256 B", text)


def test_a_plan_for_other_hardware_by_its_estimate() -> None:
    options = SearchOptions(at_least=0, at_most=0, traced=0)
    step = jp.parallelize(step_of(), new_state(), batch_of(0), topology="v5e:2x4", search=options)
    assert re.fullmatch(
        r"the best of \d+ plans for v5e:2x4, estimated in closed form: [\d.e-]+ ms a step", step.choice.reason
    )
    assert step.layout.mesh.size == 8


@pytest.mark.parametrize("reads_index", few([True, False], 1))
def test_a_step_made_for_pmap(reads_index: bool) -> None:
    share = lambda g: g + 0 * jax.lax.axis_index("batch") if reads_index else g
    made = step_of(lambda grads: jax.tree.map(share, jax.lax.pmean(grads, "batch")))
    step = jp.parallelize(made, new_state(), batch_of(0), axis_name="batch", layout="data")
    state, losses = run(step, step.state, range(2))
    expected, reference = run(jax.jit(step_of()), new_state(), range(2))
    np.testing.assert_allclose(losses, reference, rtol=1e-5)
    assert_same(state, expected)


@dataclass(frozen=True)
class Config:
    """A configuration as lm1b has it: a pytree of numbers and a function."""

    width: int
    activation: Callable[[Any], Any]


jax.tree_util.register_dataclass(Config, ["width", "activation"], [])


def test_a_configuration_is_static() -> None:
    def step(state: State, batch: Any, config: Config) -> tuple[State, jax.Array]:
        assert isinstance(config.width, int)
        loss_fn = lambda p: (config.activation(batch["x"] @ p["up"])[:, : config.width] ** 2).mean()
        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        return {**state, "params": optax.apply_updates(state["params"], grads)}, loss

    state = {"params": new_state()["params"], "step": 0}
    jitted = jax.jit(step, static_argnums=2)
    found = jp.parallelize(jitted, state, batch_of(0), Config(8, jax.nn.relu))
    assert [array.path for array in found.placed if array.role == "activations"] == ["batch/x"]


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.head = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.norm(self.up(x))))


@nnx.jit(static_argnames="smoothing")
def nnx_step(model: Classifier, optimizer: nnx.Optimizer, metrics: nnx.Metric, batch: Any, smoothing: float) -> None:
    def loss_fn(model: Classifier) -> jax.Array:
        labels = optax.smooth_labels(jax.nn.one_hot(batch["y"], 4), smoothing)
        return optax.softmax_cross_entropy(model(batch["x"]), labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    metrics.update(loss=loss)
    optimizer.update(model, grads)


@pytest.mark.slow
def test_an_nnx_step_that_returns_nothing_changes_its_objects() -> None:
    rows = {"x": batch_of(0)["x"], "y": np.arange(16) % 4}
    found = []
    for parallel in (False, True):
        model = Classifier(nnx.Rngs(0))
        metrics, optimizer = nnx.metrics.Average("loss"), nnx.Optimizer(model, TX, wrt=nnx.Param)
        step: Any = nnx_step
        if parallel:
            step = jp.parallelize(nnx_step, model, optimizer, metrics, rows, 0.1, layout="data")
            assert step.state == (model, optimizer, metrics)
        for _ in range(2):
            assert step(model, optimizer, metrics, rows, 0.1) is None
        found.append([float(metrics.compute()), *map(np.asarray, jax.tree.leaves(nnx.state(model)))])
    for x, y in zip(*found, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def sows(model: Any, optimizer: Any, batch: Any) -> jax.Array:
    model.seen = nnx.Intermediate(batch["x"])
    loss, grads = nnx.value_and_grad(lambda model: model(batch["x"]).mean())(model)
    optimizer.update(model, grads)
    return loss


def test_errors() -> None:
    state, batch = new_state(), batch_of(0)
    with raises(LayoutError, "batch/x", "of 12"):
        jp.parallelize(step_of(), state, batch_of(0, rows=12))
    with raises(ModelError, "train_step", "function"):
        jp.parallelize(state, batch)  # type: ignore[arg-type]
    with raises(ModelError, "train_step", "changes"):
        jp.parallelize(lambda state, batch: batch["x"].mean(), state, batch)
    with raises(ModelError, "train_step", "computes"):
        jp.parallelize(lambda state, batch: (state, batch["x"]), state, batch)
    with raises(ModelError, "train_step", "array"):
        jp.parallelize(lambda s, rows: step_of()(s, {"x": jnp.asarray(rows)}), state, batch["x"].tolist())
    with raises(ModelError, "train_step", "jax.jit"):
        jax.jit(jp.parallelize(step_of(), state, batch))(state, batch)
    model = Classifier(nnx.Rngs(0))
    with raises(ModelError, "model/seen"):
        jp.parallelize(sows, model, nnx.Optimizer(model, TX, wrt=nnx.Param), batch)
    with raises(ConfigError, "fsdp", "auto"):
        jp.parallelize(step_of(), state, batch, layout="fdsp")
    with raises(ConfigError, "topology v5e:2x2"):
        jp.parallelize(step_of(), state, batch, topology="v5e:2x2")
    with raises(ConfigError, "parallelize: save_interval_steps"):
        jp.parallelize(step_of(), state, batch, save_interval_steps=2)
    with raises(ConfigError, "save", "there"):
        jp.parallelize(step_of(), state, batch).save()


def test_state_that_a_step_has_overwritten() -> None:
    step = jp.parallelize(step_of(), new_state(), batch_of(0))
    old = step.state
    step(old, batch_of(0))
    with raises(StateError, "train_step", "overwritten"):
        step(old, batch_of(1))
    with raises(LayoutError, "batch/x", "of 12"):
        step(step.state, batch_of(1, rows=12))
    assert jnp.isfinite(step(step.state, batch_of(1, rows=8))[1]["loss"])
