"""Tests Linen modules and a Llama with sharded attention in a pipeline, against one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from one_step import LLAMA_RULES, check_same, layout_of, one_step
from profiles import few

import jaxpar as jp
from jaxpar.linen import axes
from jaxpar.models import llama
from jaxpar.models.llama.pipeline import staged_next_token_loss
from jaxpar.models.losses import next_token_loss

WORDS, WIDTH, LAYERS, ROWS, SEQ = 16, 8, 4, 8, 6
NORMAL = nn.initializers.normal(0.3)
RULES = jp.Rules(
    batch="data",
    seq=None,
    embed=None,
    norm=None,
    mlp="model",
    vocab=("pipeline", "model"),
    layers="pipeline",
    params={"embed": "data"},
)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        h = nn.LayerNorm(scale_init=axes(nn.initializers.ones)("norm"), bias_init=axes(nn.initializers.zeros)("norm"))(
            x
        )
        h = nn.Dense(2 * WIDTH, use_bias=False, kernel_init=axes(NORMAL)("embed", "mlp"))(h)
        h = jp.hint(nn.tanh(h), "batch", "seq", "mlp")
        return x + nn.Dense(WIDTH, use_bias=False, kernel_init=axes(NORMAL)("mlp", "embed"))(h), None


class Model(nn.Module):
    """Embedding, layers, and the embedding again as the head."""

    def setup(self) -> None:
        self.words = nn.Embed(WORDS, WIDTH, embedding_init=axes(NORMAL)("vocab", "embed"))
        stack = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        self.blocks = stack()

    def before(self, tokens: jax.Array) -> jax.Array:
        return self.words(tokens)

    def after(self, x: jax.Array) -> jax.Array:
        return self.words.attend(x)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.after(self.blocks(self.before(tokens), None)[0])


def make_linen(key: jax.Array) -> Any:
    return Model().init(key, jnp.zeros((1, SEQ), jnp.int32))


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    right = jnp.sum(logits * jax.nn.one_hot(targets, WORDS), -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - right)


def whole(variables: Any, batch: Any) -> jax.Array:
    return cross_entropy(Model().apply(variables, batch["tokens"]), batch["targets"])


STAGED = jp.pipeline.PipelineLoss(
    layers="blocks",
    embed=lambda variables, batch: Model().apply(variables, batch["tokens"], method="before"),
    layer=lambda block, x, side: Layer().apply({"params": block}, x, None)[0],
    head=lambda variables, x, batch: cross_entropy(Model().apply(variables, x, method="after"), batch["targets"]),
    dims=("batch", "seq", "embed"),
)


def batch_of(seq: int, words: int) -> dict[str, jax.Array]:
    keys = enumerate(("tokens", "targets"))
    return {name: jax.random.randint(jax.random.key(n), (ROWS, seq), 0, words) for n, name in keys}


@pytest.mark.slow
def test_a_linen_model_through_stages() -> None:
    batch = batch_of(SEQ, WORDS)
    want = one_step(layout_of(RULES, {"data": 1}), whole, make_linen, batch)
    schedule = jp.pipeline.schedule("1f1b", stages=2, microbatches=2)
    layout = layout_of(RULES, {"pipeline": 2, "data": 2, "model": 2})
    got = one_step(layout, STAGED, make_linen, batch, pipeline=jp.Pipeline(schedule, activation_checkpointing="none"))
    check_same(got, want)
    assert want[1]["blocks"]["Dense_0"]["kernel"].shape == (LAYERS, WIDTH, 2 * WIDTH)


CONFIG = llama.LlamaConfig(vocab=32, embed=16, layers=4, heads=4, kv_heads=2, head_dim=4, mlp=32, remat="full")
MAKE = llama.make_llama(CONFIG)


@functools.cache
def llama_alone() -> Any:
    return one_step(layout_of(LLAMA_RULES, {"data": 1}), next_token_loss, MAKE, batch_of(16, 32))


@pytest.mark.parametrize(
    ("impl", "sizes", "schedule", "kind", "embedding"),
    few(
        [
            (
                "ring",
                {"pipeline": 2, "context": 2, "model": 2},
                jp.pipeline.schedule("interleaved", stages=2, microbatches=4, chunks=2),
                "collective-permute",
                "per_step",
            ),
            (
                "ulysses",
                {"pipeline": 2, "ulysses": 2},
                jp.pipeline.schedule("1f1b", stages=2, microbatches=4),
                "all-to-all",
                "per_microbatch",
            ),
        ],
        0,
        names=5,
    ),
)
def test_a_llama_whose_attention_crosses_the_mesh_inside_of_a_stage(
    impl: Any, sizes: dict[str, int], schedule: Any, kind: str, embedding: Any
) -> None:
    config, layout = replace(CONFIG, context=jp.context.Context(impl=impl)), layout_of(LLAMA_RULES, sizes)
    loss, pipeline = (
        staged_next_token_loss(config),
        jp.Pipeline(schedule, activation_checkpointing="none", embedding=embedding),
    )
    got = one_step(layout, loss, llama.make_llama(config), batch_of(16, 32), MAKE, pipeline=pipeline)
    check_same(got, llama_alone())
    # The collectives run inside the layers, between the devices that share a stage's sequence.
    axis = "context" if impl == "ring" else "ulysses"
    crossing = [c for c in jp.audit(got[2], mesh=layout.mesh).select(kind) if "own_layers/" in c.op_name]
    assert crossing and {c.axes for c in crossing} == {(axis,)}
