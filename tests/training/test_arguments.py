"""Tests the errors for arguments that a new user swaps, forgets, or brings from another library."""

from __future__ import annotations

import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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


MADE = "Remedy: state = jp.init(layout, make_model, tx), then state, metrics = step(state, batch)."
WRONG: dict[str, tuple[type[Exception], Any, str]] = {
    "an axis of another library": (
        MeshError,
        lambda: jp.MeshSpec(fsdp=8),  # type: ignore[call-arg]
        (
            "unknown mesh axis 'fsdp'. It is 'data' here. The axes are: pipeline, replica, data, expert, "
            "context, ulysses, model, x, y, z."
        ),
    ),
    "a misspelt axis": (
        MeshError,
        lambda: jp.MeshSpec.from_dict({"dat": 8}),
        (
            "unknown mesh axis 'dat'. Did you mean 'data'? The axes are: pipeline, replica, data, expert, context, "
            "ulysses, model, x, y, z."
        ),
    ),
    "init(make_model, layout, tx)": (
        LayoutError,
        lambda: jp.init(make_model, layout(), TX),  # type: ignore[arg-type]
        "init: layout must be a jaxpar.Layout, got function. Remedy: init(layout, make_model, tx).",
    ),
    "init(layout, tx, make_model)": (
        ModelError,
        lambda: jp.init(layout(), TX, make_model),  # type: ignore[arg-type]
        (
            "tx must be an optax transform, got function. Remedy: init(layout, make_model, tx); make_model is the "
            "transform here."
        ),
    ),
    "another tx": (
        ModelError,
        lambda: jp.init(layout(), make_model, "adam"),  # type: ignore[arg-type]
        "tx must be an optax transform, got str. Remedy: pass one, such as optax.adam(1e-3).",
    ),
    "make_model without a key": (
        ModelError,
        lambda: jp.abstract_state(layout(), lambda: {"w": jnp.ones(2)}, TX),  # type: ignore[arg-type,misc]
        (
            "make_model must be a function of a PRNG key, but it cannot be called with one argument: too many "
            "positional arguments. Remedy: make_model = lambda key: Model(rngs=nnx.Rngs(key))."
        ),
    ),
    "nnx.Optimizer": (
        ModelError,
        lambda: jp.init(layout(), make_model, nnx.Optimizer(Net(rngs=nnx.Rngs(0)), TX, wrt=nnx.Param)),
        (
            "tx is an nnx.Optimizer, but it must be the optax transform that this was made from. Remedy: pass the "
            "transform, such as optax.adam(1e-3); jp.init creates its state, and TrainState holds it."
        ),
    ),
    "an NNX class": (
        ModelError,
        lambda: jp.abstract_state(layout(), Net, TX),
        (
            "make_model is the class Net, but it must be a function of a PRNG key, so that the model can be built in "
            "place. Remedy: make_model = lambda key: Net(rngs=nnx.Rngs(key))."
        ),
    ),
    "a Linen class": (
        ModelError,
        lambda: jp.abstract_state(layout(), Dense, TX),
        (
            "make_model is the class Dense, but it must be a function of a PRNG key, so that the model can be built in "
            "place. Remedy: make_model = lambda key: Dense().init(key, example_input)."
        ),
    ),
    "a model that is a TrainState": (
        ModelError,
        lambda: jp.abstract_state(layout(), lambda key: flax_state(), TX),
        (
            "make_model returned a Flax TrainState, which also holds optimizer state. Remedy: return only the "
            "variables, as in make_model = lambda key: module.init(key, example_input), and pass the optax transform "
            "as tx."
        ),
    ),
    "a state of Flax": (
        StateError,
        lambda: jp.train_step(layout(), loss_fn)(flax_state(), BATCH),
        (
            "step: the first argument must be the TrainState that jp.init returned, got "
            f"flax.training.train_state.TrainState. {MADE}"
        ),
    ),
    "step(batch, state)": (
        StateError,
        lambda: jp.eval_step(layout(), loss_fn)(BATCH, BATCH),
        f"step: the first argument must be the TrainState that jp.init returned, got dict. {MADE}",
    ),
    "train_step(loss_fn, layout)": (
        LayoutError,
        lambda: jp.train_step(loss_fn, layout()),  # type: ignore[arg-type]
        "train_step: layout must be a jaxpar.Layout, got function. Remedy: train_step(layout, loss_fn).",
    ),
    "rng for key": (
        ModelError,
        lambda: jp.train_step(layout(), lambda model, batch, rng: 0.0).trace(abstract(), BATCH),
        (
            "loss_fn needs the arguments 'rng', but a step passes it a model, a batch, and the PRNG key if an argument "
            "is named 'key'. Remedy: name the PRNG key 'key'; put everything else into the batch."
        ),
    ),
    "rng=None for key": (
        ModelError,
        lambda: jp.train_step(layout(), lambda model, batch, rng=None: 0.0).trace(abstract(), BATCH),
        (
            "loss_fn takes 'rng', but a step passes the PRNG key as 'key', so rng would stay None and nothing would be "
            "random. Remedy: name the PRNG key 'key'."
        ),
    ),
    "the name of a schedule": (
        ConfigError,
        lambda: jp.train_step(layout(), loss_fn, pipeline="gpipe"),  # type: ignore[arg-type]
        (
            "pipeline must be a jp.Pipeline or a schedule, got str. Remedy: "
            "pipeline=jp.pipeline.schedule('gpipe', stages=4, microbatches=8)."
        ),
    ),
    "shard_array(x, layout)": (
        LayoutError,
        lambda: jp.shard_array(BATCH["x"], layout(), "batch"),  # type: ignore[arg-type]
        "layout must be a Layout, got ndarray. Remedy: shard_array(layout, x, ...).",
    ),
    "save(state, directory)": (
        CheckpointError,
        lambda: jp.save({"w": jnp.ones(2)}, "run"),  # type: ignore[arg-type]
        "save: directory must be a path, got dict. Remedy: save(directory, state).",
    ),
    "restore(like, directory)": (
        CheckpointError,
        lambda: jp.restore({"w": jnp.ones(2)}, "run"),  # type: ignore[arg-type]
        "restore: directory must be a path, got dict. Remedy: restore(directory, like).",
    ),
    "a loss of the model alone": (
        ModelError,
        lambda: jp.train_step(layout(), lambda model: 0.0).trace(abstract(), BATCH),
        (
            "loss_fn must take a model and a batch, but it takes 1 positional arguments. Remedy: loss_fn = lambda "
            "model, batch: ...."
        ),
    ),
    "a loss that is none": (
        ModelError,
        lambda: jp.train_step(layout(), 0.5).trace(abstract(), BATCH),  # type: ignore[arg-type]
        "loss_fn must be a function of a model and a batch, got float. Remedy: loss_fn = lambda model, batch: ....",
    ),
    "verify without any dims": (
        LayoutError,
        lambda: jp.testing.assert_matches_single_device(layout(), make_model, TX, loss_fn, [BATCH]),
        (
            "batch/x [8, 16] has no logical dims, because dims names none. Remedy: add 'x' to dims, with a name or "
            "None for each of its 2 dims."
        ),
    ),
    "verify without dims": (
        LayoutError,
        lambda: jp.testing.assert_matches_single_device(layout(), make_model, TX, loss_fn, [BATCH], {"y": ()}),
        (
            "batch/x [8, 16] has no logical dims, because dims names 'y'. Remedy: add 'x' to dims, with a name or None "
            "for each of its 2 dims."
        ),
    ),
    "verify with one batch": (
        LayoutError,
        lambda: jp.testing.assert_matches_single_device(layout(), make_model, TX, loss_fn, cast(Any, BATCH), {}),
        "data must be a list with a batch for each step, got one batch. Remedy: data=[batch].",
    ),
}


def abstract() -> Any:
    return jp.abstract_state(layout(), make_model, TX)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_named_with_its_remedy(case: str) -> None:
    kind, call, text = WRONG[case]
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == text


def test_a_donated_state_that_is_used_again_is_named() -> None:
    state, step = jp.init(layout(), make_model, TX), jp.train_step(layout(), loss_fn)
    after, _ = step(state, BATCH)
    text = (
        "step: 3 arrays of the state are deleted, because the state was donated to an earlier call of the step. "
        "Remedy: continue with the state that this call returned: state, metrics = step(state, batch); or "
        "train_step(donate=False), which keeps both in memory."
    )
    with pytest.raises(StateError, match=f"^{re.escape(text)}$"):
        step(state, BATCH)
    with pytest.raises(StateError, match="^evaluate: 3 arrays of the state are deleted, because"):
        jp.eval_step(layout(), loss_fn)(state, BATCH)
    assert int(step(after, BATCH)[0].step) == 2
    assert step.lower(jp.abstract_state(layout(), make_model, TX), BATCH).as_text()
