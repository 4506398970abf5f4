"""Weights side by side in a pipeline: one product where a layer asks for several, and the gradients of one device."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.errors import LayoutError, ModelError
from jaxpar.state import abstract_state
from jaxpar.together import parted, parts

QUICK = {"xla_backend_optimization_level": 0}
WIDTH, HEADS, LAYERS, ROWS, SEQ = 8, 2, 8, 8, 4
RULES = jp.Rules(
    batch="data", seq=None, embed=None, heads="model", mlp=None, layers="pipeline", params={"embed": "data"}
)
DIMS = {"q": ("embed", "heads", "mlp"), "k": ("embed", "heads", "mlp"), "o": ("mlp", "embed")}


def make_model(key: jax.Array) -> Any:
    shapes = {"q": (WIDTH, HEADS, 4), "k": (WIDTH, HEADS, 2), "o": (2 * HEADS, WIDTH)}
    keys = dict(zip(shapes, jax.random.split(key, 3), strict=True))
    stack = {
        name: jp.tag(jax.random.normal(keys[name], (LAYERS, *shape)) / 3, "layers", *DIMS[name])
        for name, shape in shapes.items()
    }
    return {"blocks": {"mix": {"q": stack["q"], "k": stack["k"]}, "o": stack["o"]}}


def layer(block: Any, x: jax.Array, side: Any) -> jax.Array:
    q, k = jp.project(x, (block["mix"]["q"], DIMS["q"]), (block["mix"]["k"], DIMS["k"]))
    (y,) = jp.project((jnp.tanh(q[..., :2]) * k + q[..., 2:]).reshape(*x.shape[:2], -1), (block["o"], DIMS["o"]))
    return x + y


LOSS = jp.Staged(
    layers="blocks",
    before=lambda model, batch: batch["x"],
    layer=layer,
    after=lambda model, x, batch: jnp.mean((x - batch["y"]) ** 2),
    dims=("batch", "seq", "embed"),
    together=(("mix/q", "mix/k"),),
)


def laid(sizes: dict[str, int]) -> jp.Layout:
    return jp.Layout(jp.MeshSpec(**sizes).build(jax.devices()[: int(np.prod(list(sizes.values())))]), RULES)


def gradients(sizes: dict[str, int], loss: jp.Staged, pipeline: Any = None) -> Any:
    layout = laid(sizes)
    batch = {name: jax.random.normal(jax.random.key(n), (ROWS, SEQ, WIDTH)) for n, name in enumerate("xy")}
    with jax.default_matmul_precision("highest"), layout:
        state = jp.init(layout, make_model, optax.sgd(0.1))
        step = jp.train_step(layout, loss, pipeline=pipeline, keep_grads=True, donate=False)
        _, metrics = step.lower(state, batch).compile(compiler_options=QUICK)(state, batch)
    return jax.device_get(metrics["grads"])


def products(sizes: dict[str, int], loss: jp.Staged, pipeline: Any, precision: Any = None) -> int:
    """How many there are in the step as it is traced."""
    layout = laid(sizes)
    batch = {name: jax.ShapeDtypeStruct((ROWS, SEQ, WIDTH), jnp.float32) for name in "xy"}
    with layout:
        state = abstract_state(layout, make_model, optax.sgd(0.1), precision)
        step = jp.train_step(layout, loss, pipeline=pipeline, precision=precision)
        return str(step.trace(state, batch).jaxpr).count("dot_general")


@pytest.fixture(scope="module")
def one_device() -> Any:
    return gradients({"data": 1}, LOSS)


@pytest.mark.parametrize(
    ("name", "chunks", "more"),
    [("interleaved", 2, {"reduce": "chunk", "layers": (3, 2, 1, 2), "keeps": "residuals"}), ("zb_uniform", 1, {})],
)
def test_gradients_are_those_of_one_device(name: str, chunks: int, more: Any, one_device: Any) -> None:
    pipeline = jp.Pipeline(jp.schedule(name, stages=2, microbatches=4, chunks=chunks), **more)
    got = gradients({"pipeline": 2, "data": 2}, LOSS, pipeline)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(one_device), strict=True)
    for (keys, a), b in pairs:
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= 2e-6 * np.abs(b).max(), jax.tree_util.keystr(keys)


def test_a_layer_multiplies_once_where_the_mesh_lets_it() -> None:
    pipeline = jp.Pipeline(jp.schedule("1f1b", stages=2, microbatches=4))
    apart = replace(LOSS, together=())
    alone, beside_model = {"pipeline": 2, "data": 2}, {"pipeline": 2, "data": 2, "model": 2}
    assert products(alone, LOSS, pipeline) < products(alone, apart, pipeline)
    # Heads may be split over `model`, and int8 has a scale for each weight.
    assert products(beside_model, LOSS, pipeline) == products(beside_model, apart, pipeline)
    packed = jp.Precision(gather="int8")
    assert products(alone, LOSS, pipeline, packed) == products(alone, apart, pipeline)


def test_a_weight_that_no_layer_has_is_named() -> None:
    text = "Staged(together=...) names 'mix/p', which no layer has. Did you mean 'mix/q'? Layers have mix/k, mix/q, o."
    with pytest.raises(ModelError, match=f"^{re.escape(text)}"):
        products(
            {"pipeline": 2, "data": 2},
            replace(LOSS, together=(("mix/q", "mix/p"),)),
            jp.Pipeline(jp.schedule("1f1b", 2, 4)),
        )


def test_a_part_alone_cannot_be_multiplied() -> None:
    q, k = parts(jnp.ones((8, 12)), [(8, 2, 4), (8, 2, 2)])
    text = (
        "project(): 1 weights of shapes [8, 2, 4] are asked for, but those of shapes [8, 2, 4], [8, 2, 2] lie side by side as one matrix "
        "(Staged(together=...)), and are multiplied at once. Remedy: all of them in this order in one call of project, or leave them out of together."
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(text)}"):
        jp.project(jnp.ones((2, 8)), (q, DIMS["q"]))
    with pytest.raises(LayoutError, match=re.escape("in this order")):
        jp.project(jnp.ones((2, 8)), (k, DIMS["k"]), (q, DIMS["q"]))


def test_parts_come_back_as_they_were() -> None:
    whole = jnp.arange(2 * 3 * 8.0).reshape(2, 3, 8)
    a, b = parted(whole, [(2, 3), (2,)])
    assert np.array_equal(a, whole[..., :6].reshape(2, 3, 2, 3)) and np.array_equal(b, whole[..., 6:])
