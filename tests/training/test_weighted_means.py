"""Parts of a batch without counted rows (devices, microbatches, sequence chunks) do not change a weighted mean."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_step import SGD, check_grads, initial, layout_of
from profiles import few

import jaxpar as jp

ROWS, SEQ, WIDTH, LAYERS = 16, 4, 4, 2
RULES = jp.Rules(batch="data", embed=None, layers="pipeline")
QUICK = {"xla_backend_optimization_level": 0}


def make_model(key: jax.Array) -> dict[str, Any]:
    blocks = jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / 2
    return {"blocks": jp.tag(blocks, "layers", "embed", None), "head": jp.tag(jnp.ones(WIDTH), "embed")}


def batch_of(seed: int, every: int = 4) -> dict[str, np.ndarray]:
    """Rows in groups of ``every``. About half of the groups, among them the first, have no counted token."""
    random = np.random.default_rng(seed)
    groups = random.permutation(ROWS // every) % 2 == 0
    groups[0] = False
    mask = groups.repeat(every)[:, None] & (random.random((ROWS, SEQ)) < 0.7)
    mask[-1, -1] = True
    x, y = random.normal(size=(2, ROWS, SEQ, WIDTH)).astype(np.float32)
    return {"x": x, "y": y, "mask": mask.astype(np.float32)}


def mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean over the counted values, which is 0 / 0 where nothing counts."""
    return jnp.sum(values * mask) / jnp.sum(mask)


def layer(block: jax.Array, x: jax.Array, mask: jax.Array) -> Any:
    """A layer with its own loss and metric over the counted tokens."""
    y = x + jnp.tanh(x @ block)
    return y, {"loss": 0.1 * mean(jnp.mean(y**2, -1), mask), "size": mean(jnp.mean(abs(y), -1), mask)}


def after(model: Any, x: jax.Array, batch: Any) -> Any:
    errors = jnp.mean((x * model["head"] - batch["y"]) ** 2, -1)
    wrong = mean((errors > 1).astype(jnp.float32), batch["mask"])
    return mean(errors, batch["mask"]), {"weight": jnp.sum(batch["mask"]), "wrong": wrong}


LOSS = jp.pipeline.PipelineLoss(
    "blocks", lambda model, batch: batch["x"], layer, after, layer_inputs=lambda model, batch: batch["mask"]
)
BARE = jp.pipeline.PipelineLoss(
    "blocks",
    lambda model, batch: batch["x"],
    lambda block, x, side: layer(block, x, side)[0],
    after,
    layer_inputs=lambda model, batch: batch["mask"],
    chunked_layer=lambda block, x, side, carry, chunk: (x + jnp.tanh(x @ block), carry),
    chunk_carry=lambda model, batch: {},
)


on = functools.partial(layout_of, RULES)


def stepped(layout: jp.Layout, batch: Any, loss: Any = LOSS, **options: Any) -> tuple[dict[str, float], Any]:
    """Returns the metrics and the gradients of one step."""
    with jax.default_matmul_precision("highest"), layout:
        shapes = jp.abstract_state(layout, make_model, SGD)
        step = jp.train_step(layout, loss, return_grads=True, donate=False, **options)
        compiled = step.lower(shapes, batch).compile(compiler_options=QUICK)
        _, metrics = compiled(initial(shapes, make_model, RULES), batch)
    grads = jax.device_get(metrics.pop("grads"))
    return {name: float(value) for name, value in metrics.items()}, grads


def piped(name: str, microbatches: int, **options: Any) -> dict[str, Any]:
    kept = {key: options.pop(key) for key in ("activation_checkpointing", "executor") if key in options}
    return {"pipeline": jp.Pipeline(jp.pipeline.schedule(name, stages=2, microbatches=microbatches, **options), **kept)}


ZERO = jp.Zero(1, min_bytes=0)
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "ZeRO 1": ({"data": 4}, ZERO.step),
    "ZeRO 1, microbatches": ({"data": 2}, {**ZERO.step, "grad_accum_steps": 2}),
    "microbatches": ({"data": 2}, {"grad_accum_steps": 2}),
    "microbatches, reduced each time": ({"data": 1}, {"grad_accum_steps": 4, "grad_reduction": "per_microbatch"}),
    "1f1b": ({"pipeline": 2, "data": 2}, piped("1f1b", 2)),
    "zb_h1": ({"pipeline": 2}, piped("zb_h1", 4, activation_checkpointing="none")),
}


@pytest.mark.parametrize("name", few(CASES, 1))
def test_parts_without_counted_rows_add_nothing(name: str) -> None:
    sizes, options = CASES[name]
    layout = layout_of(ZERO.rules(RULES) if name.startswith("ZeRO") else RULES, sizes)
    batch = batch_of(len(name))
    want, got = stepped(on({"data": 1}), batch), stepped(layout, batch, **options)
    assert want[0]["loss"] > 0 and not got[0]["skipped"]
    for metric, value in want[0].items():
        assert got[0][metric] == pytest.approx(value, rel=1e-5), metric
    check_grads(got[1], want[1], 1e-5)


@pytest.mark.slow
def test_chunks_of_sequences_without_counted_tokens_add_nothing() -> None:
    batch = batch_of(5)
    batch["mask"][:, : SEQ // 2] = 0  # The first chunk has no counted token.
    want = stepped(on({"data": 1}), batch, BARE)
    got = stepped(on({"pipeline": 2}), batch, BARE, **piped("seq1f1b", 2, sequence_chunks=2))
    assert got[0]["loss"] == pytest.approx(want[0]["loss"], rel=1e-5)
    check_grads(got[1], want[1], 1e-5)


@pytest.mark.parametrize("seed", few(range(2), 1))
def test_an_evaluation_by_a_pipeline_leaves_them_out(seed: int) -> None:
    batch, found = batch_of(seed), []
    for sizes, pipeline in (({"data": 1}, None), ({"pipeline": 2, "data": 2}, jp.pipeline.schedule("1f1b", 2, 2))):
        layout = on(sizes)
        with jax.default_matmul_precision("highest"), layout:
            state = jp.init(layout, make_model, optax.sgd(0.1))
            step = jp.eval_step(layout, LOSS, pipeline=pipeline).lower(state, batch)
            found.append(jax.device_get(step.compile(compiler_options=QUICK)(state, batch)))
    want, got = found
    assert want.keys() == got.keys()
    for metric, value in want.items():
        assert float(got[metric]) == pytest.approx(float(value), rel=1e-5), metric


@pytest.mark.slow
def test_a_batch_in_which_nothing_counts() -> None:
    """With microbatches, loss and gradients are 0. In one piece, the loss is NaN, and the step is skipped."""
    batch = batch_of(0)
    batch["mask"][:] = 0
    cut, grads = stepped(on({"data": 2}), batch, grad_accum_steps=2)
    assert (cut["loss"], cut["weight"], cut["grad_norm"], cut["skipped"]) == (0, 0, 0, 0)
    assert not any(np.any(g) for g in jax.tree.leaves(grads))
    whole, _ = stepped(on({"data": 2}), batch)
    assert np.isnan(whole["loss"]) and whole["skipped"]
