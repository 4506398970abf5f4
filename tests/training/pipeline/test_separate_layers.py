"""Tests pipelines of models whose layers are a list or numbered, and are stacked for the training state alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from flax import linen as nn
from flax import nnx
from profiles import few

import jaxpar as jp
from jaxpar.errors import AnnotationError, ModelError

LAYERS, WIDTH = 4, 8
TX = optax.adam(1e-2)
RULES = jp.Rules(batch="data", layers="pipeline", unannotated="replicate")
BATCH = {name: np.asarray(jax.random.normal(jax.random.key(i), (8, WIDTH))) for i, name in enumerate("xy")}
SCHEDULE = jp.pipeline.schedule("1f1b", stages=2, microbatches=2)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, scale: float = 1.0):
        init = lambda *args: scale * nnx.initializers.lecun_normal()(*args)
        self.linear = nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=rngs)
        self.scale, self.act = scale, lambda x: scale * jnp.tanh(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.act(self.linear(x))


class Listed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, scales: Any = (1.0,) * LAYERS):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, scale) for scale in scales])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(nn.Dense(WIDTH)(x))


class Numbered(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(WIDTH)(x)
        for _ in range(LAYERS):
            x = LinenBlock()(x)
        return x


def mean_square(x: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((x - batch["y"]) ** 2)


LISTED = jp.pipeline.PipelineLoss(
    layers="blocks",
    embed=lambda model, batch: model.first(batch["x"]),
    layer=lambda block, x, side: block(x),
    head=lambda model, x, batch: mean_square(x, batch),
)
NUMBERED = jp.pipeline.PipelineLoss(
    layers="LinenBlock",
    embed=lambda model, batch: nn.Dense(WIDTH).apply({"params": model["params"]["Dense_0"]}, batch["x"]),
    layer=lambda block, x, side: LinenBlock().apply({"params": block}, x),
    head=lambda model, x, batch: mean_square(x, batch),
)
MODELS = {
    "numbered": (
        lambda key: Numbered().init(key, jnp.ones((1, WIDTH))),
        NUMBERED,
        lambda model, batch: mean_square(Numbered().apply(model, batch["x"]), batch),
    ),
    "nnx.List": (lambda key: Listed(nnx.Rngs(key)), LISTED, lambda model, batch: mean_square(model(batch["x"]), batch)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", few(list(MODELS), 1))
def test_separate_layers_train_in_a_pipeline_as_on_one_device(name: str) -> None:
    make_model, staged, plain = MODELS[name]
    layout = jp.Layout(jp.MeshSpec(pipeline=2).build(jax.devices()[:2]), RULES)
    state = jp.init(layout, jp.pipeline.stack(make_model, staged.layers), TX)
    stack = state.params[staged.layers]
    assert {(x.shape[0], x.sharding.spec[0]) for x in jax.tree.leaves(stack)} == {(LAYERS, "pipeline")}

    one = jp.init(layout.on_one_device(), make_model, TX)
    check(state.model, one.model, equal=True)
    loss = lambda params: plain(one.metadata.kind.merge(params, one.variables), BATCH)
    expected, grads = jax.jit(jax.value_and_grad(loss))(one.params)
    state, metrics = jp.train_step(layout, staged, pipeline=SCHEDULE, return_grads=True)(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    check(replace(state, params=metrics["grads"]).model, replace(one, params=grads).model)


def test_a_checkpoint_of_a_stack_restores_into_separate_layers_and_back(tmp_path: Path) -> None:
    make_model, staged, _ = MODELS["numbered"]
    layout = jp.Layout(jp.MeshSpec(pipeline=2, data=2).build(jax.devices()[:4]), RULES)
    alone = layout.on_one_device()
    state = jp.init(layout, jp.pipeline.stack(make_model, staged.layers), TX)
    jp.save(tmp_path / "stacked", state)
    back = jp.restore(tmp_path / "stacked", jp.abstract_state(alone, make_model, TX))
    check(back.model, state.model, equal=True)
    jp.save(tmp_path / "separate", back)
    like = jp.abstract_state(layout, jp.pipeline.stack(make_model, staged.layers), TX)
    check(jp.restore(tmp_path / "separate", like), state, equal=True)


def check(found: Any, expected: Any, *, equal: bool = False) -> None:
    """Compares the arrays; two modules are never equal, as each has functions of its own."""
    arrays = lambda tree: [
        np.asarray(x) for x in jax.tree.leaves(tree) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]
    for a, b in zip(arrays(found), arrays(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0 if equal else 1e-5, atol=0 if equal else 1e-6)


def test_the_loss_runs_separate_layers_without_a_pipeline() -> None:
    make_model, staged, plain = MODELS["numbered"]
    model = make_model(jax.random.key(0))
    np.testing.assert_allclose(staged(model, BATCH), plain(model, BATCH), rtol=1e-6)


def test_names_of_layers_come_after_the_dim_of_the_stack() -> None:
    block = lambda key: {"w": jp.tag(jax.random.normal(key, (4, 8)), "embed", "mlp"), "b": jnp.ones(8)}
    make_model = lambda key: {"inner": {"h": {str(i): block(key) for i in range(11)}, "out": jnp.ones(8)}}
    layout = jp.Layout(jp.MeshSpec(pipeline=1, data=2).abstract(), RULES.replace(embed=None, mlp="data"))
    state = jp.abstract_state(layout, jp.pipeline.stack(make_model, "inner/h"), TX)
    assert state.params["inner"]["h"]["w"].shape == (11, 4, 8)
    assert dict(state.metadata.dims) == {
        ("params", "inner", "h", "w"): ("layers", "embed", "mlp"),
        ("params", "inner", "h", "b"): ("layers", None),
    }
    assert list(state.model["inner"]["h"]) == [str(i) for i in range(11)]


def test_names_that_annotate_finds_are_those_of_the_stack() -> None:
    make_model, staged, plain = MODELS["numbered"]
    tagged = {name: jp.tag(jax.ShapeDtypeStruct(x.shape, x.dtype), "batch", "embed") for name, x in BATCH.items()}
    named = jp.annotate(make_model, plain, tagged)
    rules = RULES.replace(**{name: None for name in named.names if name != "batch"})
    layout = jp.Layout(jp.MeshSpec(pipeline=2).abstract(), rules)
    state = jp.abstract_state(layout, jp.pipeline.stack(named.make_model, staged.layers), TX)
    names = dict(state.metadata.dims)["params", staged.layers, "Dense_0", "bias"]
    assert names == (
        "layers",
        *dict(jp.abstract_state(layout, named.make_model, TX).metadata.dims)[
            "params", f"{staged.layers}_1", "Dense_0", "bias"
        ],
    )
    assert names[1] is not None


def abstract(make_model: Any, layers: str) -> Any:
    layout = jp.Layout(jp.MeshSpec(pipeline=2, data=2).build(jax.devices()[:4]), RULES)
    return layout, jp.abstract_state(layout, jp.pipeline.stack(make_model, layers), TX)


def pipelined(make_model: Any, staged: Any = LISTED) -> Any:
    layout, state = abstract(make_model, staged.layers)
    return jp.train_step(layout, staged, pipeline=SCHEDULE).trace(state, BATCH)


def unstacked() -> Any:
    layout = jp.Layout(jp.MeshSpec(pipeline=2, data=2).build(jax.devices()[:4]), RULES)
    state = jp.abstract_state(layout, MODELS["nnx.List"][0], TX)
    return jp.train_step(layout, LISTED, pipeline=SCHEDULE).trace(state, BATCH)


WRONG: dict[str, tuple[type[Exception], Any, str]] = {
    "not stacked": (ModelError, unstacked, "layers 'blocks'"),
    "no such layers": (ModelError, lambda: abstract(MODELS["numbered"][0], "Block"), "Block"),
    "layers of other shapes": (
        ModelError,
        lambda: abstract(lambda key: {"h": [{"w": jnp.ones(2)}, {"w": jnp.ones(3)}]}, "h"),
        "float32[3]",
    ),
    "layers of other names": (
        AnnotationError,
        lambda: abstract(lambda key: {"h": [{"w": jp.tag(jnp.ones(2), dim)} for dim in ("batch", "layers")]}, "h"),
        "params/h/1/w",
    ),
    "layers of other code": (
        ModelError,
        lambda: pipelined(lambda key: Listed(nnx.Rngs(key), (1.0, 1.0, 0.5, 1.0))),
        "PipelineLoss(layers='blocks')",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_layers_that_cannot_be_stacked_are_named(case: str) -> None:
    kind, call, text = WRONG[case]
    with raises(kind, text):
        call()
