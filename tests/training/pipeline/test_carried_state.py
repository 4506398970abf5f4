"""A pipeline refuses models that carry state (statistics, counters, keys), and the error names the state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from error_texts import raises
from flax import linen, nnx

import jaxpar as jp
from jaxpar.errors import ModelError
from jaxpar.nnx import stacked

WIDTH, LAYERS = 8, 2
RULES = jp.Rules(batch="data", embed=None, layers="pipeline")


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, own: str):
        self.w = nnx.Param(rngs.normal((WIDTH, WIDTH)), logical_dims=("embed", None))
        self.norm = nnx.BatchNorm(WIDTH, use_scale=False, use_bias=False, rngs=rngs) if own == "statistics" else None
        self.drop = nnx.Dropout(0.5, rngs=rngs) if own == "keys" else None


class Model(nnx.Module):
    """Layers and a head that carry batch statistics, or the keys and counts of a dropout."""

    def __init__(self, rngs: nnx.Rngs, inside: str = "", outside: str = ""):
        make = lambda rngs: Block(rngs, inside)
        self.blocks = nnx.split_rngs(splits=LAYERS)(nnx.vmap(make, transform_metadata=stacked("layers")))(rngs)
        self.head = nnx.Param(rngs.normal((WIDTH,)), logical_dims=("embed",))
        self.norm = (
            nnx.BatchNorm(WIDTH, use_scale=False, use_bias=False, rngs=rngs) if outside == "statistics" else None
        )
        self.drop = nnx.Dropout(0.5, rngs=rngs) if outside == "keys" else None


def of_modules(inside: str = "", outside: str = "") -> Any:
    return lambda key: Model(nnx.Rngs(key), inside, outside)


def of_linen(at: str) -> Any:
    """Returns variables of a model whose layers or head normalize by batch statistics."""

    def make(key: jax.Array) -> Any:
        params = {"blocks": {"w": jp.tag(jnp.ones((LAYERS, WIDTH, WIDTH)), "layers", "embed", None)}}
        found = linen.BatchNorm(use_running_average=False, use_scale=False, use_bias=False).init(
            key, jnp.ones((2, WIDTH))
        )
        if at == "head":
            return {"params": params, "batch_stats": {"norm": found["batch_stats"]}}
        stack = jax.tree.map(lambda x: jnp.stack([x] * LAYERS), found["batch_stats"])
        return {"params": params, "batch_stats": {"blocks": {"norm": stack}}}

    return make


CARRIED: dict[str, tuple[Any, str]] = {
    "linen, layers": (of_linen("layers"), "variables/batch_stats/blocks/norm/mean"),
    "linen, head": (of_linen("head"), "variables/batch_stats/norm/mean"),
    "nnx, statistics of layers": (of_modules(inside="statistics"), "variables/blocks/norm/mean"),
    "nnx, statistics of the head": (of_modules(outside="statistics"), "variables/norm/mean"),
    "nnx, keys of layers": (of_modules(inside="keys"), "blocks/drop/rngs/count"),
    "nnx, keys of the head": (of_modules(outside="keys"), "variables/drop/rngs/count"),
}


@pytest.mark.parametrize("case", CARRIED)
def test_state_that_is_carried_is_named(case: str) -> None:
    make, text = CARRIED[case]
    loss = jp.pipeline.PipelineLoss(
        layers="blocks",
        embed=lambda model, batch: model.drop(batch["x"]) if getattr(model, "drop", None) else batch["x"],
        layer=lambda block, x, side: x + jnp.tanh(x @ block.w),
        head=lambda model, x, batch: jnp.mean(x @ model.head),
    )
    layout = jp.Layout(jp.MeshSpec(pipeline=2).abstract(), RULES)
    state = jp.abstract_state(layout, make, optax.sgd(0.1))
    step = jp.train_step(layout, loss, pipeline=jp.pipeline.schedule("1f1b", stages=2, microbatches=4))
    with raises(ModelError, text):
        step.lower(state, {"x": jnp.ones((8, WIDTH))})
