"""Tests the errors for arguments that a new user swaps, forgets, or brings from another library."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState as FlaxTrainState

import jaxpar as jp
from jaxpar.errors import CheckpointError, ConfigError, LayoutError, MeshError, ModelError, StateError

BATCH = {"x": np.ones((8, 16), np.float32)}
TX = optax.sgd(0.1)


def layout() -> jp.Layout:
    return jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data", embed=None, mlp=None))


def make_model(key: jax.Array) -> Any:
    return {"w": jp.tag(jax.random.normal(key, (16, 8)), "embed", "mlp")}


def loss_fn(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ model["w"]) ** 2)


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.layer = nnx.Linear(4, 4, rngs=rngs)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4)(x)


def flax_state() -> FlaxTrainState:
    return FlaxTrainState.create(apply_fn=None, params={"w": jnp.ones((16, 8))}, tx=TX)


WRONG: dict[str, tuple[type[Exception], Any, str]] = {
    "an axis of another library": (
        MeshError,
        lambda: jp.MeshSpec(fsdp=8),  # type: ignore[call-arg]
        ("fsdp"),
    ),
    "a misspelt axis": (MeshError, lambda: jp.MeshSpec.from_dict({"dat": 8}), "'dat'"),
    "init(make_model, layout, tx)": (
        LayoutError,
        lambda: jp.init(make_model, layout(), TX),  # type: ignore[arg-type]
        "init: layout",
    ),
    "init(layout, tx, make_model)": (
        ModelError,
        lambda: jp.init(layout(), TX, make_model),  # type: ignore[arg-type]
        ("tx"),
    ),
    "another tx": (
        ModelError,
        lambda: jp.init(layout(), make_model, "adam"),  # type: ignore[arg-type]
        "tx",
    ),
    "make_model without a key": (
        ModelError,
        lambda: jp.abstract_state(layout(), lambda: {"w": jnp.ones(2)}, TX),  # type: ignore[arg-type,misc]
        ("make_model must"),
    ),
    "nnx.Optimizer": (
        ModelError,
        lambda: jp.init(layout(), make_model, nnx.Optimizer(Net(rngs=nnx.Rngs(0)), TX, wrt=nnx.Param)),
        "nnx.Optimizer",
    ),
    "an NNX class": (ModelError, lambda: jp.abstract_state(layout(), Net, TX), "Net"),
    "a Linen class": (ModelError, lambda: jp.abstract_state(layout(), Dense, TX), "Dense"),
    "a model that is a TrainState": (
        ModelError,
        lambda: jp.abstract_state(layout(), lambda key: flax_state(), TX),
        "Flax",
    ),
    "a state of Flax": (
        StateError,
        lambda: jp.train_step(layout(), loss_fn)(flax_state(), BATCH),
        "flax.training.train_state.TrainState",
    ),
    "step(batch, state)": (StateError, lambda: jp.eval_step(layout(), loss_fn)(BATCH, BATCH), "jp.init"),
    "train_step(loss_fn, layout)": (
        LayoutError,
        lambda: jp.train_step(loss_fn, layout()),  # type: ignore[arg-type]
        "train_step: layout",
    ),
    "rng for key": (
        ModelError,
        lambda: jp.train_step(layout(), lambda model, batch, rng: 0.0).trace(abstract(), BATCH),
        "loss_fn needs",
    ),
    "rng=None for key": (
        ModelError,
        lambda: jp.train_step(layout(), lambda model, batch, rng=None: 0.0).trace(abstract(), BATCH),
        "loss_fn takes",
    ),
    "the name of a schedule": (
        ConfigError,
        lambda: jp.train_step(layout(), loss_fn, pipeline="gpipe"),  # type: ignore[arg-type]
        ("jp.Pipeline"),
    ),
    "shard_array(x, layout)": (
        LayoutError,
        lambda: jp.shard_array(BATCH["x"], layout(), "batch"),  # type: ignore[arg-type]
        "a Layout",
    ),
    "save(state, directory)": (
        CheckpointError,
        lambda: jp.save({"w": jnp.ones(2)}, "run"),  # type: ignore[arg-type]
        "save: directory",
    ),
    "restore(like, directory)": (
        CheckpointError,
        lambda: jp.restore({"w": jnp.ones(2)}, "run"),  # type: ignore[arg-type]
        "restore: directory",
    ),
    "a loss of the model alone": (
        ModelError,
        lambda: jp.train_step(layout(), lambda model: 0.0).trace(abstract(), BATCH),
        "takes 1",
    ),
    "a loss that is none": (
        ModelError,
        lambda: jp.train_step(layout(), 0.5).trace(abstract(), BATCH),  # type: ignore[arg-type]
        "loss_fn must be",
    ),
    "verify without any dims": (
        LayoutError,
        lambda: jp.testing.assert_matches_single_device(layout(), make_model, TX, loss_fn, [BATCH]),
        "batch/x",
    ),
    "verify without dims": (
        LayoutError,
        lambda: jp.testing.assert_matches_single_device(layout(), make_model, TX, loss_fn, [BATCH], {"y": ()}),
        "'y'",
    ),
    "verify with one batch": (
        LayoutError,
        lambda: jp.testing.assert_matches_single_device(layout(), make_model, TX, loss_fn, cast(Any, BATCH), {}),
        "data",
    ),
}


def abstract() -> Any:
    return jp.abstract_state(layout(), make_model, TX)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_named_with_its_remedy(case: str) -> None:
    kind, call, text = WRONG[case]
    with raises(kind, text):
        call()


def test_a_donated_state_that_is_used_again_is_named() -> None:
    state, step = jp.init(layout(), make_model, TX), jp.train_step(layout(), loss_fn)
    after, _ = step(state, BATCH)
    with raises(StateError, "step", "3 arrays"):
        step(state, BATCH)
    with raises(StateError, "evaluate"):
        jp.eval_step(layout(), loss_fn)(state, BATCH)
    assert int(step(after, BATCH)[0].step) == 2
    assert step.lower(jp.abstract_state(layout(), make_model, TX), BATCH).as_text()
