"""Optimizer state in host memory: bitwise equal results, the placement of arrays, and what is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from covers import covering
from error_texts import raises

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.training.offload.host_update import entangled
from jaxpar.training.state import abstract_state, shape_state

RULES = jp.Rules(batch="data", layers=None, embed=None, mlp=None)
LAYERS = 3
LR = 1e-2
pytestmark = pytest.mark.filterwarnings("ignore:offload. simulated CPU devices use host memory:UserWarning")

# Each with the reason that prevents an update layer by layer, if any.
OPTIMIZERS: dict[str, tuple[Callable[[], optax.GradientTransformation], str | None]] = {
    "adamw": (lambda: optax.adamw(LR), None),
    "lion": (lambda: optax.lion(LR), None),
    "a schedule, bf16 moments": (lambda: optax.adam(optax.cosine_decay_schedule(LR, 9), mu_dtype="bfloat16"), None),
    "masked": (lambda: optax.masked(optax.adam(LR), lambda p: jax.tree.map(lambda x: x.ndim == 3, p)), None),
    "injected": (lambda: optax.inject_hyperparams(optax.adam)(LR), None),
    "clipped": (lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(LR)), "reduce_sum"),
    "adafactor": (lambda: optax.adafactor(LR, min_dim_size_to_factor=8, momentum=0.9), "reduce_sum"),
    "muon": (lambda: optax.contrib.muon(LR), "reshape"),
}


def make(key: jax.Array) -> dict[str, Any]:
    up, down, last = jax.random.split(key, 3)
    return {
        "up": jp.tag(jax.random.normal(up, (LAYERS, 16, 24)) / 4, "layers", "embed", "mlp"),
        "down": jp.tag(jax.random.normal(down, (LAYERS, 24, 16)) / 5, "layers", "mlp", "embed"),
        "scale": jp.tag(jnp.ones((LAYERS, 16)), "layers", "embed"),
        "last": jp.tag(jax.random.normal(last, (16, 8)), "embed", None),
    }


def loss(model: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    layer = lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1] * w[2], None)
    x, _ = jax.lax.scan(layer, x, (model["up"], model["down"], model["scale"]))
    return jnp.mean((x @ model["last"]) ** 2)


def layout_of(stage: int) -> jp.Layout:
    return jp.Layout(jp.MeshSpec(data=8).build(), jp.Zero(stage=stage, min_bytes=512).rules(RULES))


def after(tx: Any, stage: int, steps: int = 3, bad: int | None = None) -> tuple[jp.TrainState, list[bool]]:
    """The state after ``steps`` steps (batch ``bad`` is not finite), and which steps were skipped."""
    layout, skipped = layout_of(stage), []
    state = jp.init(layout, make, tx)
    step = jp.train_step(layout, loss, **jp.Zero(stage=stage).step)
    for i in range(steps):
        x = np.random.default_rng(i).normal(size=(8, 16)).astype(np.float32)
        state, metrics = step(state, x * (np.nan if i == bad else 1))
        skipped.append(bool(metrics["skipped"]))
    return state, skipped


def goes_by_layers(tx: Any, stage: int) -> bool:
    layout, tx = layout_of(stage), jp.offload.to_host(tx, min_bytes=0)
    shapes = (abstract_state(layout, make, tx), jax.ShapeDtypeStruct((8, 16), "float32"))
    text = str(jp.train_step(layout, loss, **jp.Zero(stage=stage).step).trace(*shapes).jaxpr)
    return "<host>[3,16" in text and "dynamic_update_slice" in text


@pytest.mark.slow
def test_square_matrices_go_where_their_own_state_lies() -> None:
    """Arrays, and their shards, with equal shapes but opposite shardings."""

    def square(key: jax.Array) -> dict[str, Any]:
        up, down = (jax.random.normal(k, (LAYERS, 16, 16)) / 4 for k in jax.random.split(key))
        return {"up": jp.tag(up, "layers", "embed", "mlp"), "down": jp.tag(down, "layers", "mlp", "embed")}

    def loss(model: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean(
            jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1], None), x, (model["up"], model["down"]))[0] ** 2
        )

    rules = jp.Rules(batch="replica", layers=None, embed="data", mlp="model")
    layout = jp.Layout(jp.MeshSpec(replica=2, data=2, model=2).build(), rules)
    x, found = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32), []
    for tx in (optax.adam(LR), jp.offload.to_host(optax.adam(LR), min_bytes=0)):
        state = jp.init(layout, square, tx)
        found.append(jp.train_step(layout, loss)(state, x)[0].params)
    for name in ("up", "down"):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-6)


def kinds(state: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(state.opt_state)
    return {jax.tree_util.keystr(keys): x.sharding.memory_kind for keys, x in leaves}


@pytest.mark.parametrize(
    ("name", "stage"),
    covering(OPTIMIZERS, [1, 0, 3], keep=1, strength=1),
    ids=str,
)
def test_steps_are_the_same_and_by_layers_to_the_bit(name: str, stage: int) -> None:
    tx, tangled = OPTIMIZERS[name]
    expected, skipped = after(tx(), stage, bad=1)
    found, skipped_too = after(jp.offload.to_host(tx(), min_bytes=0), stage, bad=1)
    assert skipped == skipped_too == [False, True, False]
    assert entangled(found) == tangled
    assert goes_by_layers(tx(), stage) is (tangled is None)
    parts = [(s.params, s.opt_state) for s in (expected, found)]
    for a, b in zip(*map(jax.tree.leaves, parts), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        # The compiler fuses sums of matrices and rounding to bf16 differently.
        atol = 0 if name in ("adamw", "lion", "masked", "injected") else 1e-6 * np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.slow
def test_matrices_wait_in_the_hosts_memory_before_and_after_a_step() -> None:
    tx = jp.offload.to_host(optax.adam(LR), min_bytes="2KiB")
    with pytest.warns(UserWarning) as said:
        state = jp.init(layout_of(1), make, tx)
    assert (
        str(said[0].message)
        == "offload: simulated CPU devices use host memory, so offloading saves no memory; the results are the same."
    )
    large = {f"[0].{moment}['{name}']" for moment in ("mu", "nu") for name in ("up", "down")}
    for found in (state, after(tx, 1)[0]):
        lies = kinds(found)
        assert {path for path, kind in lies.items() if kind == "pinned_host"} == large
        assert all(x.sharding.memory_kind == "device" for x in jax.tree.leaves(found.params))


def test_explain_names_what_waits_and_counts_it_for_no_device() -> None:
    batch = jp.tag(jax.ShapeDtypeStruct((8, 16), "float32"), "batch", "embed")
    plain = jp.explain(layout_of(1), make, optax.adam(LR), batch=batch, loss_fn=loss)
    found = jp.explain(
        layout_of(1), make, jp.offload.to_host(optax.adam(LR), min_bytes="2KiB"), batch=batch, loss_fn=loss
    )
    row = next(row for row in found.rows if row.path == "opt_state/0/mu/up")
    assert row.device_bytes == 0
    assert row.why[-1] == "in host memory, 576 B per device"
    moved = 2 * 2 * 4 * LAYERS * 16 * 24 // 8
    assert plain.total("opt_state").device_bytes - found.total("opt_state").device_bytes == moved
    assert plain.memory is not None and found.memory is not None
    assert plain.memory.parts["optimizer"] - found.memory.parts["optimizer"] == moved


def test_shapes_know_the_memory_and_a_wrong_size_is_named() -> None:
    tx = jp.offload.to_host(optax.sgd(LR, momentum=0.9), min_bytes=0)
    leaves = jax.tree.leaves(abstract_state(layout_of(0), make, tx).opt_state)
    assert sorted(x.sharding.memory_kind or "device" for x in leaves if x.shape) == ["pinned_host"] * 4
    assert entangled(shape_state(layout_of(0), make, tx)) is None
    with raises(ConfigError, "offload: min_bytes", "much"):
        jp.offload.to_host(optax.sgd(LR), min_bytes="much")
