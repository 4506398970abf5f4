"""A model with a stack of layers whose loss runs in a pipeline, and one step of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from one_step import LLAMA_RULES, layout_of, one_step

import jaxpar as jp

QUICK = {"xla_backend_optimization_level": 0}
"""Each program runs once, so compiling it with optimizations takes longer than running it."""
WIDTH, WORDS, LAYERS, ROWS, SEQ = 8, 16, 8, 16, 6
RULES = LLAMA_RULES


def make_model(key: jax.Array) -> Any:
    a, b, c, d = jax.random.split(key, 4)
    return {
        "words": jp.tag(jax.random.normal(a, (WORDS, WIDTH)), "vocab", "embed"),
        "blocks": {
            "up": jp.tag(jax.random.normal(b, (LAYERS, WIDTH, 2 * WIDTH)) / 3, "layers", "embed", "mlp"),
            "down": jp.tag(jax.random.normal(c, (LAYERS, 2 * WIDTH, WIDTH)) / 4, "layers", "mlp", "embed"),
        },
        "head": jp.tag(jax.random.normal(d, (WIDTH, WORDS)) / 3, "embed", "vocab"),
    }


def layer(block: Any, x: jax.Array, side: jax.Array) -> jax.Array:
    return x + jp.hint(jnp.tanh(x @ block["up"] + side[..., None]), "batch", "seq", "mlp") @ block["down"]


def after(model: Any, x: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean loss over the counted tokens, whose number differs between microbatches; the head reuses the embedding."""
    logits = jp.hint(x @ (model["head"] + model["words"].T), "batch", "seq", "vocab")
    right = jax.nn.one_hot(batch["targets"], WORDS)
    counts = (batch["targets"] > 2).astype(jnp.float32)
    losses = jax.nn.logsumexp(logits, -1) - jnp.sum(logits * right, -1)
    weight = jnp.sum(counts)
    return jnp.sum(losses * counts) / weight, {
        "weight": weight,
        "right": jnp.mean(logits.argmax(-1) == batch["targets"]),
    }


LOSS = jp.pipeline.PipelineLoss(
    layers="blocks",
    embed=lambda model, batch: model["words"][batch["tokens"]],
    layer=layer,
    head=after,
    layer_inputs=lambda model, batch: jnp.sin(batch["tokens"].astype(jnp.float32)),
    dims=("batch", "seq", "embed"),
)


def batch_of() -> dict[str, jax.Array]:
    return {
        name: jax.random.randint(jax.random.key(n), (ROWS, SEQ), 0, WORDS)
        for n, name in enumerate(("tokens", "targets"))
    }


def run(
    sizes: dict[str, int],
    pipeline: Any = None,
    loss: Any = LOSS,
    make: Any = make_model,
    batch: Any = None,
    rules: jp.Rules = RULES,
    **options: Any,
) -> tuple[dict[str, float], Any]:
    """Returns the metrics and the gradients of one step."""
    batch = batch_of() if batch is None else batch
    return one_step(layout_of(rules, sizes), loss, make, batch, pipeline=pipeline, **options)[:2]


ONE_F_ONE_B = jp.pipeline.schedule("1f1b", stages=2, microbatches=4)
