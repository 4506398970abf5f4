"""Tests sequences that pass a pipeline in chunks: values and gradients against one device, memory, and errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from error_texts import raises
from one_step import SGD, check_same, initial, layout_of, one_step
from profiles import few

import jaxpar as jp
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.errors import ConfigError, LayoutError, ModelError
from jaxpar.models import llama
from jaxpar.models.llama.layers import rope_table
from jaxpar.models.llama.pipeline import staged_next_token_loss
from jaxpar.models.losses import next_token_loss
from jaxpar.parallel.pipeline.executor.sequence_chunks import Carried, SequenceCarry
from jaxpar.parallel.pipeline.staged_loss import stacked_part

QUICK = {"xla_backend_optimization_level": 0}
"""Each program runs once, so compiling it with optimizations takes longer than running it."""
WIDTH, WORDS, LAYERS, ROWS, SEQ, HEADS, GROUPS, DIM = 8, 16, 4, 8, 8, 4, 2, 4
RULES = jp.Rules(
    batch="data",
    seq="context",
    residual_seq="context",
    embed=None,
    norm=None,
    heads="model",
    kv_heads="model",
    head_dim=None,
    mlp="model",
    vocab=("pipeline", "model"),
    layers="pipeline",
    params={"embed": "data"},
)


def make_model(key: jax.Array) -> Any:
    a, b, c, d, e = jax.random.split(key, 5)
    draw = lambda key, *shape: jax.random.normal(key, (LAYERS, *shape)) / 3
    return {
        "words": jp.tag(jax.random.normal(a, (WORDS, WIDTH)), "vocab", "embed"),
        "blocks": {
            "q": jp.tag(draw(b, WIDTH, HEADS, DIM), "layers", "embed", "heads", "head_dim"),
            "kv": jp.tag(draw(c, WIDTH, GROUPS, 2 * DIM), "layers", "embed", "kv_heads", "head_dim"),
            "o": jp.tag(draw(d, HEADS, DIM, WIDTH), "layers", "heads", "head_dim", "embed"),
        },
        "head": jp.tag(jax.random.normal(e, (WIDTH, WORDS)) / 3, "embed", "vocab"),
    }


def attended(block: Any, x: jax.Array, kv: jax.Array, start: Any, at: jax.Array) -> jax.Array:
    """Causal attention of a chunk that begins at ``start`` to all keys and values, with a position-dependent bias."""
    q = jnp.einsum("bse,ehd->bshd", x, block["q"]).reshape(*x.shape[:2], GROUPS, -1, DIM)
    keys, values = jnp.split(kv, 2, -1)
    scores = jnp.einsum("bskgd,btkd->bkgst", q, keys) + jnp.sin(at)[:, None, None, :, None]
    seen = start + jnp.arange(x.shape[1])[:, None] >= jnp.arange(kv.shape[1])[None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
    o = jnp.einsum("bkgst,btkd->bskgd", weights, values).reshape(*x.shape[:2], HEADS, DIM)
    return x + jnp.einsum("bshd,hde->bse", o, block["o"])


def keys_of(block: Any, x: jax.Array) -> jax.Array:
    return jnp.einsum("bse,ekd->bskd", x, block["kv"])


def layer(block: Any, x: jax.Array, side: jax.Array) -> jax.Array:
    return attended(block, x, keys_of(block, x), 0, side)


def chunked_layer(block: Any, x: jax.Array, side: jax.Array, carry: Any, chunk: jax.Array) -> tuple[jax.Array, Any]:
    start = chunk * x.shape[1]
    kv = jax.lax.dynamic_update_slice_in_dim(carry["kv"], keys_of(block, x), start, 1)
    return attended(block, x, kv, start, side), {"kv": kv}


def after(model: Any, x: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean loss over the counted tokens, whose number differs between chunks."""
    logits = jp.hint(x @ model["head"], "batch", "seq", "vocab")
    counts = (batch["targets"] > 2).astype(jnp.float32)
    right = jax.nn.one_hot(batch["targets"], WORDS)
    losses = jax.nn.logsumexp(logits, -1) - jnp.sum(logits * right, -1)
    weight = jnp.sum(counts * batch["weights"][:, None])
    # A chunk may have no counted token.
    return jnp.sum(losses * counts * batch["weights"][:, None]) / jnp.maximum(weight, 1), {"weight": weight}


LOSS = jp.pipeline.PipelineLoss(
    layers="blocks",
    embed=lambda model, batch: model["words"][batch["tokens"]],
    layer=layer,
    head=after,
    prepare=lambda model, batch: {**batch, "at": jnp.broadcast_to(jnp.arange(SEQ), (ROWS, SEQ))},
    layer_inputs=lambda model, batch: batch["at"].astype(jnp.float32),
    dims=("batch", "seq", "embed"),
    chunked_layer=chunked_layer,
    chunk_carry=lambda model, batch: {"kv": jnp.zeros((*batch["tokens"].shape, GROUPS, 2 * DIM))},
)


def batch_of() -> dict[str, jax.Array]:
    batch = {
        name: jax.random.randint(jax.random.key(n), (ROWS, SEQ), 0, WORDS)
        for n, name in enumerate(("tokens", "targets"))
    }
    return {**batch, "weights": 1 + jnp.arange(ROWS) / 4}


def lowered(sizes: dict[str, int], pipeline: Any = None, loss: Any = LOSS, batch: Any = None) -> Any:
    layout = layout_of(RULES, sizes)
    with jax.default_matmul_precision("highest"), layout:
        step = jp.train_step(layout, loss, pipeline=pipeline, return_grads=True, donate=False)
        return step.lower(jp.abstract_state(layout, make_model, SGD), batch_of() if batch is None else batch)


def run(sizes: dict[str, int], pipeline: Any = None) -> tuple[dict[str, float], Any]:
    """Returns the metrics and the gradients of one step."""
    return one_step(layout_of(RULES, sizes), LOSS, make_model, batch_of(), pipeline=pipeline)[:2]


@pytest.fixture(scope="module")
def one_device() -> tuple[dict[str, float], Any]:
    return run({"data": 1})


# mesh, microbatches, chunks of a sequence, activation_checkpointing, layers of each piece, embedding
CASES: list[tuple[dict[str, int], int, int, Any, tuple[int, ...], Any]] = [
    ({"pipeline": 2, "data": 2}, 4, 2, "none", (3, 1), "per_step"),
    ({"pipeline": 4, "model": 2}, 2, 4, "full", (), "per_step"),
    ({"pipeline": 2, "data": 2}, 2, 4, "full", (), "per_microbatch"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", few(CASES, 1), ids=str)
def test_chunks_give_the_gradients_of_one_device(case: Any, one_device: Any) -> None:
    sizes, microbatches, chunks, activation_checkpointing, layers, embedding = case
    schedule = jp.pipeline.schedule("seq1f1b", sizes["pipeline"], microbatches, sequence_chunks=chunks)
    check_same(
        run(
            sizes,
            jp.Pipeline(
                schedule,
                activation_checkpointing=activation_checkpointing,
                layers_per_stage=layers,
                embedding=embedding,
            ),
        ),
        one_device,
    )


@pytest.mark.slow
def test_one_chunk_is_the_program_of_whole_sequences() -> None:
    texts = [
        lowered({"pipeline": 2}, jp.Pipeline(schedule, activation_checkpointing="none")).as_text()
        for schedule in (jp.pipeline.schedule("1f1b", 2, 4), jp.pipeline.schedule("seq1f1b", 2, 4, sequence_chunks=1))
    ]
    assert texts[0] == texts[1]


LLAMA = llama.LlamaConfig(vocab=32, embed=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=32, remat="save_attention")


# `most` bounds the residuals without the carry, in multiples of the input's size.
@pytest.mark.parametrize(("remat", "most"), [("full", 1), ("save_attention", 2), ("none", None)])
def test_no_chunk_keeps_a_copy_of_all_keys_and_values(remat: str, most: int | None) -> None:
    config = replace(LLAMA, remat=remat, context=jp.context.Context(block=8))
    loss, make, chunks, seq = staged_next_token_loss(config), llama.make_llama(config), 4, 64
    batch = {name: jax.ShapeDtypeStruct((1, seq), jnp.int32) for name in ("tokens", "targets")}
    layout = jp.Layout(jp.MeshSpec(data=1).build(jax.devices()[:1]), RULES)

    def kept(key: jax.Array) -> Any:
        model = make(key)
        leaves, block = stacked_part(model, loss.path)
        how = SequenceCarry(
            lambda w, *args: loss.chunked_layer(block(w), *args), lambda batch: loss.chunk_carry(model, batch), chunks
        )  # type: ignore[misc]
        pieces = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, chunks, 1, seq // chunks), x.dtype), batch)
        weights, no = [w[None] for w in leaves], jnp.asarray(0)
        one = Carried(lambda w, x, side: x, weights, no, no, carry=how, like=how.shapes(pieces))
        side = rope_table(jnp.zeros((1, seq // chunks), jnp.int32), config), None, None
        return one.kept(jnp.zeros((1, seq // chunks, config.embed)), side)[1]

    with layout:
        shapes = [x.shape for x in jax.eval_shape(kept, jax.random.key(0))]
    assert (1, seq, config.kv_heads, config.head_dim) not in shapes
    assert (1, seq // chunks, config.embed) in shapes
    if most is not None:
        assert sum(np.prod(shape) for shape in shapes if len(shape) > 1) <= most * seq // chunks * config.embed


@pytest.mark.slow
def test_a_configured_llama_trains_in_chunks_on_packed_documents(tmp_path: Path) -> None:
    """The gradients of the first step and the losses of three steps equal those of one device on full sequences."""
    file = tmp_path / "run.yaml"
    run = {
        "model": {
            "family": "llama",
            **{name: getattr(LLAMA, name) for name in ("vocab", "embed", "layers", "heads", "kv_heads")},
        },
        "layout": str(Path(__file__).parents[3] / "configs" / "layouts" / "pp_fsdp.yaml"),
        "mesh": {"pipeline": 2, "data": 2},
        "parallel": {
            "pipeline": {
                "schedule": "seq1f1b",
                "microbatches": 2,
                "sequence_chunks": 4,
                "activation_checkpointing": "none",
            },
            "remat": LLAMA.remat,
        },
        "optimizer": {"name": "sgd", "learning_rate": 0.3, "warmup": 0, "clip_norm": None},
    }
    run["model"].update(head_dim=LLAMA.head_dim, mlp=LLAMA.mlp)
    file.write_text(yaml.safe_dump(run))
    job = make_job(load_run(file))
    batch = {
        name: jax.random.randint(jax.random.key(n), (ROWS, 16), 0, 32) for n, name in enumerate(("tokens", "targets"))
    }
    batch["segment_ids"] = jnp.cumsum(batch["tokens"] < 4, axis=1, dtype=jnp.int32)

    def trained(layout: jp.Layout, loss: Any, **options: Any) -> Any:
        with jax.default_matmul_precision("highest"), layout:
            step = jp.train_step(layout, loss, return_grads=True, donate=False, **options)
            state = jp.abstract_state(layout, job.make_model, job.tx)
            compiled = step.lower(state, batch).compile(compiler_options=QUICK)
            state = initial(state, job.make_model, RULES, job.tx)
        found = []
        for _ in range(3):
            state, metrics = compiled(state, batch)
            found.append((float(metrics["loss"]), jax.device_get(metrics["grads"])))
        return {str(n): loss for n, (loss, _) in enumerate(found)}, found[0][1]

    want = trained(layout_of(RULES, {"data": 1}), next_token_loss)
    got = trained(job.layout(jax.devices()[:4]), job.loss_fn, **job.step_options())
    check_same(got, want)
    assert want[0]["2"] < want[0]["0"] - 0.1


def chunked(**options: Any) -> Any:
    return jp.pipeline.schedule("seq1f1b", 2, 2, **{"sequence_chunks": 2, **options})


OWN = ["F0 F1 B1 B0 W1 W0", "F0 F1 B1 B0 W1 W0"]
ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no carry": ({"loss": replace(LOSS, chunked_layer=None)}, ConfigError, "seq1f1b"),
    "context parallelism": ({"sizes": {"pipeline": 2, "context": 2}}, ConfigError, "'seq'"),
    "split backwards": ({"pipeline": jp.pipeline.schedule(OWN, 2, 1, sequence_chunks=2)}, ConfigError, "'own'"),
    "sequence": ({"pipeline": chunked(sequence_chunks=3)}, LayoutError, "batch/at"),
    "what comes before": (
        {"loss": replace(LOSS, embed=lambda model, batch: model["words"][batch["tokens"][:, 1:]])},
        ModelError,
        "embed=",
    ),
    "a carry without a sequence": (
        {"loss": replace(LOSS, chunk_carry=lambda model, batch: {"kv": jnp.zeros((4, GROUPS, DIM))})},
        ModelError,
        "PipelineLoss(chunk_carry=...)",
    ),
    "a part in the place of the carry": (
        {"loss": replace(LOSS, chunked_layer=lambda block, x, side, carry, chunk: (x, {"kv": keys_of(block, x)}))},
        ModelError,
        "PipelineLoss(chunked_layer=...)",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_is_named(case: str) -> None:
    asked, error, text = ERRORS[case]
    options = {"sizes": {"pipeline": 2}, "pipeline": chunked(), **asked}
    with raises(error, text):
        lowered(**options)
