"""A pipeline refuses models that carry state (statistics, counters, keys), and the error names the state."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
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


ORDER = (
    "but microbatches pass the stages in an order of their own, so no state can be carried from one to the next. "
    "Remedy: use a model without carried state (LayerNorm or RMSNorm instead of BatchNorm)."
)
INSIDE = (
    "which a pipeline does not support: each stage sees its own microbatch. Remedy: keep counters and statistics out "
    "of the stack; for random numbers, use PipelineLoss(keys=True) instead of carried keys."
)
CARRIED: dict[str, tuple[Any, str]] = {
    "linen, layers": (
        of_linen("layers"),
        (
            f"pipeline: the model carries variables/batch_stats/blocks/norm/mean, "
            f"variables/batch_stats/blocks/norm/var, {ORDER}"
        ),
    ),
    "linen, head": (
        of_linen("head"),
        f"pipeline: the model carries variables/batch_stats/norm/mean, variables/batch_stats/norm/var, {ORDER}",
    ),
    "nnx, statistics of layers": (
        of_modules(inside="statistics"),
        f"pipeline: the model carries variables/blocks/norm/mean, variables/blocks/norm/var, {ORDER}",
    ),
    "nnx, statistics of the head": (
        of_modules(outside="statistics"),
        f"pipeline: the model carries variables/norm/mean, variables/norm/var, {ORDER}",
    ),
    "nnx, keys of layers": (
        of_modules(inside="keys"),
        f"PipelineLoss(layers='blocks'): the layers carry 'blocks/drop/rngs/count', 'blocks/drop/rngs/key', {INSIDE}",
    ),
    "nnx, keys of the head": (
        of_modules(outside="keys"),
        (
            "PipelineLoss(embed=...) changed variables/drop/rngs/count, but a pipeline carries no variables. Remedy: "
            "use a model that changes none; for random numbers in layers, set PipelineLoss(keys=True)."
        ),
    ),
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
    with pytest.raises(ModelError, match=f"^{re.escape(text)}"):
        step.lower(state, {"x": jnp.ones((8, WIDTH))})
