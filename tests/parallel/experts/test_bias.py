"""The bias that balances experts is a parameter that one step moves by its rate, the same in every layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from profiles import few

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.models.losses import next_token_loss
from jaxpar.models.moe.config import preset
from jaxpar.models.moe.model import make_moe

CONFIG = preset("deepseek_v3", layers=2, embed=32, vocab=64, heads=4, kv_heads=4, head_dim=16, mlp=48, expert_mlp=24)
RATE = 0.001


@pytest.mark.slow
def test_a_step_moves_the_bias_against_the_load(layout_of: Callable[..., jp.Layout]) -> None:
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, CONFIG.vocab)
    batch = {"tokens": tokens[:, :16], "targets": tokens[:, 1:]}
    found, norms = [], []
    for layout in (layout_of("ep_latent"), layout_of("ep_latent").on_one_device()):
        for tx in (jp.moe.balanced_bias(optax.adamw(1e-3), RATE), optax.set_to_zero()):
            state = jp.init(layout, make_moe(CONFIG), tx)
            state, metrics = jp.train_step(layout, next_token_loss, clip_norm=0.1)(state, batch)
            found.append(np.asarray(state.params["blocks"]["mixture"]["router_bias"]))
            norms.append(float(metrics["grad_norm"]))
    moved, still, alone, _ = found
    assert (moved == alone).all() and not still.any()
    assert set(np.unique(moved).tolist()) <= {np.float32(-RATE), 0.0, np.float32(RATE)} and moved.any()
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-5)


LAYERS, EXPERTS, ROWS = 4, 4, 24
INPUTS = np.random.default_rng(2).permuted(np.tile(np.arange(4.0, dtype="float32"), (ROWS, 2, 1)), axis=-1)
"""``[rows, seq, experts]``: each token's logits in the first layer, whole numbers and thus exact in any precision."""
NAMES = {"router": ("layers", "embed", None), "load_bias": ("layers", None)}
RULES = jp.Rules(batch="data", seq=None, embed=None, layers="pipeline")


def with_routers(key: jax.Array) -> Any:
    """Layers that only route: each adds a loss, and its router permutes the logits in its own way."""
    routers = jnp.stack([jnp.roll(jnp.eye(EXPERTS), i, 1) for i in range(LAYERS)])
    blocks = {"router": routers, "load_bias": jnp.zeros((LAYERS, EXPERTS))}
    return {
        "blocks": {name: jp.tag(x, *NAMES[name]) for name, x in blocks.items()},
        "shift": jp.tag(jnp.zeros(4), None),
    }


def layer(block: Any, x: jax.Array, side: Any) -> Any:
    logits = jnp.dot(x, block["router"], preferred_element_type=jnp.float32)
    return x, jp.moe.bias_loss(block["load_bias"], jp.moe.Router(EXPERTS, 1)(logits, block["load_bias"]))


ROUTED = jp.pipeline.PipelineLoss(
    layers="blocks",
    embed=lambda model, batch: batch["x"].astype(model["shift"].dtype) + model["shift"],
    layer=layer,
    head=lambda model, x, batch: jnp.mean(x.astype(jnp.float32) ** 2) / 256,  # times the loss scale no overflow
)
"""Runs with and without a pipeline."""


@pytest.mark.parametrize(
    ("precision", "sizes", "zero", "options"),
    [
        ({"compute": "fp16", "reduce": "fp16"}, {"data": 2}, 1, {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("fp16", {"data": 2}, 1, {"grad_accum_steps": 6}),
                ("fp16", {"data": 2}, 3, {}),
                ({"compute": "fp16", "reduce": "fp16"}, {"pipeline": 2, "data": 2}, 3, {"pipeline": "zb_h1"}),
                ("fp16", {"data": 2}, 2, {"grad_accum_steps": 2}),
                ("fp16", {"pipeline": 2, "data": 2}, 1, {"pipeline": "1f1b"}),
                ("bf16", {"data": 2}, 1, {"grad_accum_steps": 6}),
                ({"compute": "bf16", "reduce": "int8"}, {"data": 2}, 1, {}),
                ("bf16", {"pipeline": 2}, 0, {"pipeline": "gpipe"}),
                (None, {"data": 2}, 3, {"grad_accum_steps": 2}),
            )
        ),
    ],
)
def test_the_bias_moves_by_the_exact_load_in_every_precision(
    precision: Any, sizes: dict[str, int], zero: int, options: dict[str, Any]
) -> None:
    """Its gradient is far below what 16 bits or a sum with a scale hold, so it passes through neither."""
    stage = jp.Zero(zero, min_bytes=0)
    layout = jp.Layout(jp.MeshSpec(**sizes).build(jax.devices()[: math.prod(sizes.values())]), stage.rules(RULES))
    if "pipeline" in options:
        options = {"pipeline": jp.Pipeline(jp.pipeline.schedule(options["pipeline"], stages=2, microbatches=6))}
    tx = optax.chain(jp.moe.balanced_bias(optax.sgd(0.0), RATE, name="load_bias"))
    state = jp.init(layout, with_routers, tx, precision=precision)
    step = jp.train_step(layout, ROUTED, precision=precision, **stage.step, **options)
    state, metrics = step(state, {"x": INPUTS})
    assert not metrics["skipped"]
    chosen = np.bincount(INPUTS.argmax(-1).reshape(-1), minlength=EXPERTS)
    expected = np.stack([np.roll(np.sign(chosen.mean() - chosen), i) for i in range(LAYERS)]) * np.float32(RATE)
    assert set(np.sign(expected[0]).tolist()) == {-1.0, 0.0, 1.0}
    np.testing.assert_array_equal(np.asarray(state.params["blocks"]["load_bias"]), expected)


@pytest.mark.parametrize("experts", few([7, 4, 12, 49], 1))
def test_a_balanced_expert_does_not_move(experts: int) -> None:
    """The sign of a small difference is that of whole numbers, whatever their mean rounds to."""
    router, random = jp.moe.Router(experts, 1), np.random.default_rng(experts)
    descend = jax.jit(jax.grad(lambda bias, logits: jp.moe.bias_loss(bias, router(logits))))
    for mean in (3, 12, 41, 301):
        counts = np.full(experts, mean)
        counts[: experts // 4 * 4] += random.permutation(np.resize([-2, 0, 2, 0], experts // 4 * 4))
        logits = jax.nn.one_hot(np.repeat(np.arange(experts), counts)[None], experts)
        np.testing.assert_array_equal(np.sign(descend(jnp.zeros(experts), logits)), np.sign(counts - mean))
        moved = jp.moe.update_bias(jnp.zeros(experts), jnp.asarray(counts, jnp.float32), 1.0)
        np.testing.assert_array_equal(moved, np.sign(mean - counts))


def test_a_bias_that_cannot_have_a_gradient_is_an_error() -> None:
    layout = jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), RULES)
    state = jp.abstract_state(layout, with_routers, optax.sgd(0.1), precision="fp16")
    batch = {"x": jax.ShapeDtypeStruct(INPUTS.shape, INPUTS.dtype)}
    jax.eval_shape(jp.eval_step(layout, ROUTED, precision="fp16"), state, batch)  # its value is 0 in any dtype
    with raises(ConfigError, "bias_loss"):
        jax.eval_shape(jp.train_step(layout, ROUTED, precision="fp16"), state, batch)
