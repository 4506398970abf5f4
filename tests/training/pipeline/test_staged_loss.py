"""A ``PipelineLoss`` whose parts read parameters has the same values and gradients with and without a pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from one_step import SGD, check_grads, layout_of, one_step
from profiles import few

import jaxpar as jp
from jaxpar.errors import ConfigError, ModelError

ROWS, SEQ, WIDTH, WORDS, LAYERS = 8, 4, 8, 12, 4
RULES = jp.Rules(
    batch="data",
    seq=None,
    embed=None,
    mlp="model",
    vocab=("pipeline", "model"),
    layers="pipeline",
    params={"embed": "data"},
)


def make_model(key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, 4)
    draw = lambda key, shape, *dims: jp.tag(jax.random.normal(key, shape) / 2, *dims)
    return {
        "words": draw(keys[0], (WORDS, WIDTH), "vocab", "embed"),
        "blocks": {"up": draw(keys[1], (LAYERS, WIDTH, 6), "layers", "embed", "mlp")},
        "shift": draw(keys[2], (WIDTH,), "embed"),
        "unread": draw(keys[3], (WIDTH,), "embed"),
    }


def layer(block: Any, x: jax.Array, side: Any) -> jax.Array:
    up = block["up"]
    return x + jnp.tanh((x + side["of_words"]) @ up) @ up.T + side["shift"]


def after(model: Any, x: jax.Array, batch: Any) -> jax.Array:
    score = jnp.einsum("bse,ve->bsv", x, model["words"])
    return jnp.mean((score.sum(-1) - batch["targets"]) ** 2 + jnp.sum(model["shift"] ** 2))


LOSS = jp.pipeline.PipelineLoss(
    layers="blocks",
    embed=lambda model, batch: model["words"][batch["tokens"]] * batch["scale"][..., None],
    layer=layer,
    head=after,
    # `prepare` reads a parameter, but no gradient flows through it or through the batch that it returns.
    prepare=lambda model, batch: {**batch, "scale": 1 + jnp.tanh(model["shift"].sum()) * batch["targets"] / 8},
    # `embed` and `head` read the embedding table too. The layers also get "shift" unchanged.
    layer_inputs=lambda model, batch: {"of_words": jnp.sin(model["words"][batch["tokens"]]), "shift": model["shift"]},
    dims=("batch", "seq", "embed"),
)


def plain(params: Any, batch: Any) -> jax.Array:
    """The same loss, written without jaxpar."""
    stopped = jax.lax.stop_gradient(params)
    scale = 1 + jnp.tanh(stopped["shift"].sum()) * batch["targets"] / 8
    side = jnp.sin(stopped["words"][batch["tokens"]])
    x = params["words"][batch["tokens"]] * scale[..., None]
    for up in params["blocks"]["up"]:
        x = x + jnp.tanh((x + side) @ up) @ up.T + stopped["shift"]
    score = jnp.einsum("bse,ve->bsv", x, params["words"])
    return jnp.mean((score.sum(-1) - batch["targets"]) ** 2 + jnp.sum(params["shift"] ** 2))


def batch_of() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "tokens": rng.integers(0, WORDS, (ROWS, SEQ)).astype(np.int32),
        "targets": rng.normal(size=(ROWS, SEQ)).astype(np.float32),
    }


@pytest.fixture(scope="module")
def want() -> tuple[float, Any]:
    with jax.default_matmul_precision("highest"):
        state = jp.init(layout_of(RULES, {"data": 1}), make_model, SGD)
        params = jax.device_get(state.params)
        loss, grads = jax.jit(jax.value_and_grad(plain))(params, batch_of())
    return float(loss), jax.device_get(grads)


def check(found: Any, want: tuple[float, Any]) -> None:
    metrics, grads, _ = found
    assert metrics["loss"] == pytest.approx(want[0], rel=2e-6)
    check_grads(grads, want[1], 5e-6)
    assert np.abs(want[1]["words"]).max() > 0.1 and not np.any(want[1]["unread"])


@pytest.mark.parametrize(
    ("sizes", "options"),
    few(
        [
            ({"data": 1}, {}),
            ({"data": 2, "model": 2}, {}),
            ({"data": 2}, {"grad_accum_steps": 2, "grad_reduction": "per_step"}),
            ({"data": 4}, {"grad_accum_steps": 2, "grad_reduction": "per_microbatch"}),
        ],
        1,
        names=2,
    ),
    ids=["one device", "mesh", "each device's sums", "microbatches"],
)
def test_without_a_pipeline_what_side_and_prepare_read_has_no_gradient(sizes: Any, options: Any, want: Any) -> None:
    check(one_step(layout_of(RULES, sizes), LOSS, make_model, batch_of(), **options), want)


def schedule(name: str, stages: int = 2, microbatches: int = 4, **options: Any) -> Any:
    return jp.pipeline.schedule(name, stages=stages, microbatches=microbatches, **options)


PIPELINES: dict[str, tuple[dict[str, int], Any]] = {
    "gpipe": ({"pipeline": 2}, schedule("gpipe")),
    "1f1b": ({"pipeline": 2, "data": 2, "model": 2}, schedule("1f1b")),
    "none": (
        {"pipeline": 2, "data": 2},
        jp.Pipeline(schedule("1f1b"), activation_checkpointing="none", embedding="per_microbatch"),
    ),
    "interleaved": (
        {"pipeline": 2, "model": 2},
        jp.Pipeline(schedule("interleaved", chunks=2), grad_reduction="per_microbatch"),
    ),
    "zb_v": (
        {"pipeline": 2, "data": 2},
        jp.Pipeline(schedule("zb_v"), executor="independent", activation_checkpointing="none"),
    ),
    "uneven": (
        {"pipeline": 2},
        jp.Pipeline(schedule("1f1b"), layers_per_stage=(3, 1), activation_checkpointing="none", recompute=(2, 0)),
    ),
}


@pytest.mark.parametrize("case", few(PIPELINES, 1))
def test_under_a_pipeline_values_and_gradients_are_the_same(case: str, want: Any) -> None:
    sizes, pipeline = PIPELINES[case]
    check(one_step(layout_of(RULES, sizes), LOSS, make_model, batch_of(), pipeline=pipeline), want)


def chunked_layer(block: Any, x: jax.Array, side: Any, carry: Any, chunk: jax.Array) -> Any:
    return layer(block, x, side), jax.lax.dynamic_update_slice_in_dim(carry, x, chunk * x.shape[1], 1)


CHUNKED = replace(
    LOSS,
    chunked_layer=chunked_layer,
    # jaxpar reads only the shape, so the carry may be computed from a parameter.
    chunk_carry=lambda model, batch: model["words"][batch["tokens"]],
)


@pytest.mark.slow
@pytest.mark.parametrize("activation_checkpointing", few(["full", "none"], 1))
def test_sequences_in_chunks_read_parameters_too(activation_checkpointing: Any, want: Any) -> None:
    pipeline = jp.Pipeline(schedule("seq1f1b", sequence_chunks=2), activation_checkpointing=activation_checkpointing)
    layout = layout_of(RULES, {"pipeline": 2, "data": 2})
    check(one_step(layout, CHUNKED, make_model, batch_of(), pipeline=pipeline), want)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", few([None, schedule("interleaved", chunks=2), schedule("circular")], 1), ids=str)
def test_evaluations_read_parameters_too(pipeline: Any, want: Any) -> None:
    layout = layout_of(RULES, {"pipeline": 2, "data": 2})
    with jax.default_matmul_precision("highest"):
        state = jp.init(layout, make_model, SGD)
        found = jp.eval_step(layout, LOSS, pipeline=pipeline)(state, batch_of())
    assert float(found["loss"]) == pytest.approx(want[0], rel=2e-6)


READS = {
    "indexed": lambda model: model["blocks"]["up"][0],
    "jitted": lambda model: jax.jit(lambda model: jnp.square(model["blocks"]["up"]))(model),
    "summed": lambda model: jnp.sum(model["blocks"]["up"]),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("piece", ["embed", "layer_inputs", "head", "chunk_carry"])
def test_a_piece_that_reads_a_layer_is_named(piece: str, read: str) -> None:
    asks = READS[read]
    own = getattr(CHUNKED, piece)

    def reading(model: Any, *given: Any) -> Any:
        return jax.tree.map(lambda x: x + asks(model).sum(), own(model, *given))

    layout = layout_of(RULES, {"pipeline": 2})
    loss, state = replace(CHUNKED, **{piece: reading}), jp.abstract_state(layout, make_model, SGD)
    step = jp.train_step(layout, loss, pipeline=schedule("seq1f1b", sequence_chunks=2))
    with raises(ModelError, "params/blocks/up"):
        step.trace(state, batch_of())


def test_a_piece_may_hand_on_layers_that_it_does_not_read() -> None:
    whole = replace(LOSS, embed=lambda model, batch: jax.checkpoint(LOSS.embed)(model, batch))
    layout = layout_of(RULES, {"pipeline": 2})
    jp.train_step(layout, whole, pipeline=schedule("1f1b")).trace(
        jp.abstract_state(layout, make_model, SGD), batch_of()
    )


@pytest.mark.slow
def test_prepare_has_all_parameters() -> None:
    """``prepare`` runs once, outside of the stages."""
    loss = replace(
        LOSS, prepare=lambda model, batch: {**batch, "scale": batch["targets"] * model["blocks"]["up"].sum()}
    )
    losses = [
        one_step(layout_of(RULES, {"pipeline": 2}), loss, make_model, batch_of(), pipeline=pipeline)[0]["loss"]
        for pipeline in (None, schedule("1f1b"))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=2e-6)


def test_stages_of_different_versions_name_what_side_reads() -> None:
    layout = layout_of(RULES, {"pipeline": 2})
    step = jp.pipeline.pipedream_train_step(
        layout, LOSS, jp.pipeline.Asynchronous("pipedream", stages=2, microbatches=4)
    )
    with raises(ConfigError, "layer_inputs"):
        step.start(jp.init(layout, make_model, SGD), batch_of())
