"""A model and an optimizer whose sums are exact in fp64, for pipelines that are not flushed between steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpar as jp

WIDTH, WORDS, LAYERS, ROWS, CALLS = 4, 12, 6, 8, 3
RULES = jp.Rules(
    batch="data",
    seq=None,
    embed=None,
    heads=None,
    mlp="model",
    vocab=("pipeline", "model"),
    layers="pipeline",
    params={"embed": "data"},
)


def make_model(key: jax.Array) -> Any:
    """All weights are multiples of 1/4, so sums in fp64 are exact and do not depend on their order."""
    a, b, c = jax.random.split(key, 3)
    quarters = lambda key, *shape: jax.random.randint(key, shape, -2, 3).astype(jnp.float64) / 4
    return {
        "words": jp.tag(quarters(a, WORDS, WIDTH), "vocab", "embed"),
        "blocks": {"w": jp.tag(quarters(b, LAYERS, WIDTH, WIDTH), "layers", "embed", "mlp")},
        "head": jp.tag(quarters(c, WIDTH, WORDS), "embed", "vocab"),
    }


def layer(block: Any, x: jax.Array, side: Any) -> jax.Array:
    h = jp.hint(x @ block["w"] + side[..., None], "batch", "seq", "mlp")
    return x + jnp.where(h > 0, h, 0) / 2


def loss_of(head: Any, x: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    return jnp.mean(jnp.sum((x @ head - batch["targets"]) ** 2, -1)), {"first": x[0, 0, 0]}


LOSS = jp.pipeline.PipelineLoss(
    layers="blocks",
    embed=lambda model, batch: model["words"][batch["tokens"]],
    layer=layer,
    head=lambda model, x, batch: loss_of(model["head"], x, batch),
    layer_inputs=lambda model, batch: batch["tokens"].astype(jnp.float64) / 4,
    dims=("batch", "seq", "embed"),
)
TIED = replace(LOSS, head=lambda model, x, batch: loss_of(model["head"] + model["words"].T, x, batch))
"""The head uses the embedding again."""
READS = replace(
    LOSS,
    layer_inputs=lambda model, batch: batch["tokens"].astype(jnp.float64) / 4 + model["words"][batch["tokens"]].sum(-1),
)
"""``layer_inputs`` reads the embedding in its own version, without a gradient."""


def stepping() -> optax.GradientTransformation:
    """Momentum whose updates are multiples of 1/4: two updates are either equal or clearly different."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count, trace = state
        trace = jax.tree.map(lambda g, t: jnp.round((g + t / 2) * 8) / 8, grads, trace)
        size = jnp.where(count % 2 == 0, 0.25, 0.5)
        return jax.tree.map(lambda t: -jnp.sign(t) * jnp.minimum(jnp.round(abs(t)) / 4, size), trace), (
            count + 1,
            trace,
        )

    return optax.GradientTransformation(
        lambda params: (jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params)), update
    )


def batch_of(number: int) -> dict[str, jax.Array]:
    one, other = jax.random.split(jax.random.key(number))
    return {
        "tokens": jax.random.randint(one, (ROWS, 2), 0, WORDS),
        "targets": jax.random.randint(other, (ROWS, 2, WORDS), -2, 3).astype(jnp.float64),
    }
