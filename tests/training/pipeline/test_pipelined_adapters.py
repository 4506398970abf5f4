"""Models with adapters in a pipeline, against one device: Linen, a Llama in NNX, and every kind of schedule."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from error_texts import raises
from flax import nnx
from one_step import LLAMA_RULES, layout_of
from test_models import CONFIG, MAKE, RULES, SEQ, STAGED, WIDTH, WORDS, batch_of, make_linen, whole
from test_separate_layers import BATCH, LISTED, Listed
from test_separate_layers import RULES as UNNAMED

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.models.llama.pipeline import staged_next_token_loss
from jaxpar.models.losses import next_token_loss
from jaxpar.utils.jaxprs import equations

LORA = jp.lora.LoraConfig(rank=3, alpha=12, targets=("*",))
LAYERS_ONLY = jp.lora.LoraConfig(rank=2, targets=("blocks/*",))
STAGES = {"pipeline": 2, "data": 2, "model": 2}
schedule = jp.pipeline.schedule


def trained(state: Any) -> Any:
    """The state with both matrices of each adapter random, equal in every layout."""
    rng, leaves = np.random.default_rng(1), jax.tree.leaves(state.params)
    values = [jax.device_put(rng.normal(size=x.shape).astype(x.dtype) / 8, x.sharding) for x in leaves]
    return dataclasses.replace(state, params=jax.tree.unflatten(jax.tree.structure(state.params), values))


def run(layout: jp.Layout, loss: Any, make: Any, batch: Any, config: Any = LORA, **options: Any) -> tuple[Any, Any]:
    """The state after a step of SGD with momentum, and its metrics, as NumPy arrays."""
    tx = optax.sgd(0.1, momentum=0.9)
    state = trained(jp.init(layout, jp.lora.adapt(make, config), tx))
    frozen = jax.tree.map(np.asarray, jp.lora.frozen_params(state))
    after, metrics = jp.train_step(layout, loss, return_grads=True, **options)(state, batch)
    jax.tree.map(np.testing.assert_array_equal, frozen, jax.tree.map(np.asarray, jp.lora.frozen_params(after)))
    return jax.tree.map(np.asarray, after.params), jax.tree.map(np.asarray, metrics)


def check_equal(got: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    assert got[1]["loss"] == pytest.approx(want[1]["loss"], rel=1e-5)
    assert jax.tree.structure(got[0]) == jax.tree.structure(want[0])
    for tree in (lambda run: run[1]["grads"], lambda run: run[0]):
        for mine, theirs in zip(jax.tree.leaves(tree(got)), jax.tree.leaves(tree(want)), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * max(1.0, np.abs(theirs).max()))
            assert np.abs(theirs).max() > 1e-5


@functools.cache
def linen_alone(*, layers_only: bool = False) -> tuple[Any, Any]:
    config = LAYERS_ONLY if layers_only else LORA
    return run(layout_of(RULES, {"data": 1}), whole, make_linen, batch_of(SEQ, WORDS), config)


@functools.cache
def llama_alone() -> tuple[Any, Any]:
    return run(layout_of(LLAMA_RULES, {"data": 1}), next_token_loss, MAKE, batch_of(16, 32))


LINEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "residuals": (schedule("1f1b", stages=2, microbatches=2), {"activation_checkpointing": "none"}),
    "zero bubble": (schedule("zb_h1", stages=2, microbatches=4), {}),
    "zero 2": (schedule("1f1b", stages=2, microbatches=2), {"grad_reduction": "per_microbatch"}),
    "buckets": (schedule("interleaved", stages=2, microbatches=4, chunks=2), {"grad_reduction": "per_chunk"}),
    "in ticks": (schedule("1f1b", stages=2, microbatches=2), {"embedding": "per_microbatch"}),
    "recompute": (
        schedule("1f1b", stages=2, microbatches=2),
        {"activation_checkpointing": "none", "recompute": (1, 1)},
    ),
    "uneven": (schedule("1f1b", stages=2, microbatches=2), {"layers_per_stage": (3, 1)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LINEN)
def test_a_linen_model_with_adapters_through_stages(case: str) -> None:
    flow, options = LINEN[case]
    layout = layout_of(RULES, STAGES)
    pipeline = jp.Pipeline(flow, **options)
    check_equal(run(layout, STAGED, make_linen, batch_of(SEQ, WORDS), pipeline=pipeline), linen_alone())


@pytest.mark.slow
def test_adapters_of_the_layers_alone() -> None:
    pipeline = jp.Pipeline(schedule("1f1b", stages=2, microbatches=2))
    got = run(layout_of(RULES, STAGES), STAGED, make_linen, batch_of(SEQ, WORDS), LAYERS_ONLY, pipeline=pipeline)
    check_equal(got, linen_alone(layers_only=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flow", "sizes"),
    [
        (schedule("interleaved", stages=2, microbatches=4, chunks=2), {"pipeline": 2, "data": 2, "model": 2}),
        (schedule("1f1b", stages=4, microbatches=4), {"pipeline": 4, "data": 2}),
        (schedule("seq1f1b", 2, 2, sequence_chunks=2), {"pipeline": 2, "data": 2}),
    ],
)
def test_a_llama_with_adapters_through_stages(flow: Any, sizes: dict[str, int]) -> None:
    layout = layout_of(LLAMA_RULES, sizes)
    loss = staged_next_token_loss(CONFIG)
    check_equal(run(layout, loss, MAKE, batch_of(16, 32), pipeline=flow), llama_alone())


@pytest.mark.slow
def test_layers_of_an_nnx_list_with_adapters() -> None:
    make = jp.pipeline.stack(lambda key: Listed(nnx.Rngs(key)), "blocks")
    config = jp.lora.LoraConfig(rank=2, targets=("kernel",))
    plain = jp.Rules(batch="data", layers=None, unannotated="replicate")
    want = run(layout_of(plain, {"data": 1}), LISTED, make, BATCH, config)
    flow = schedule("1f1b", stages=2, microbatches=2)
    check_equal(run(layout_of(UNNAMED, {"pipeline": 2, "data": 2}), LISTED, make, BATCH, config, pipeline=flow), want)


@pytest.mark.slow
def test_an_evaluation_in_stages_and_products_of_no_frozen_weight() -> None:
    layout, flow, batch = layout_of(RULES, STAGES), schedule("1f1b", stages=2, microbatches=2), batch_of(SEQ, WORDS)
    state = trained(jp.init(layout, jp.lora.adapt(make_linen, LORA), optax.sgd(0.1)))
    alone = layout_of(RULES, {"data": 1})
    same = trained(jp.init(alone, jp.lora.adapt(make_linen, LORA), optax.sgd(0.1)))
    got, want = (
        float(jp.eval_step(where, loss, **options)(one, batch)["loss"])
        for where, loss, one, options in ((layout, STAGED, state, {"pipeline": flow}), (alone, whole, same, {}))
    )
    assert got == pytest.approx(want, rel=1e-5)

    def products(make: Any) -> set[tuple[int, ...]]:
        shapes = jp.abstract_state(layout, make, optax.sgd(0.1))
        step = jp.train_step(layout, STAGED, pipeline=flow, donate=False)
        found = equations(jax.make_jaxpr(step)(shapes, batch).jaxpr)
        return {tuple(sorted(eqn.outvars[0].aval.shape)) for eqn in found if eqn.primitive.name == "dot_general"}

    gradient = (WIDTH, 2 * WIDTH)  # of a layer's two matrices
    assert gradient in products(make_linen)
    assert gradient not in products(jp.lora.adapt(make_linen, LAYERS_ONLY))


def test_what_cannot_have_adapters_in_stages_is_an_error() -> None:
    layout = layout_of(jp.Rules(batch="data", unannotated="replicate"), {"pipeline": 1})
    make = jp.lora.adapt(lambda key: {"blocks": {"w": jax.random.normal(key, (2, 4, 4))}}, jp.lora.LoraConfig(rank=1))
    loss = jp.pipeline.PipelineLoss(
        layers="blocks",
        embed=lambda model, batch: batch["x"],
        layer=lambda block, x, side: x @ block["w"],
        head=lambda model, x, batch: (x**2).mean(),
    )
    state, batch = jp.abstract_state(layout, make, optax.sgd(0.1)), {"x": np.ones((4, 4), np.float32)}
    with raises(ConfigError, "blocks/w"):
        jax.eval_shape(jp.train_step(layout, loss, pipeline=schedule("1f1b", 1, 2), donate=False), state, batch)
    pipedream = jp.pipeline.Asynchronous("pipedream_2bw", stages=1, microbatches=2)
    with raises(ConfigError, "jaxpar.lora.adapt"):
        jp.pipeline.pipedream_train_step(layout, loss, pipeline=pipedream).abstract(state, batch)
