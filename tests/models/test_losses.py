"""Gradients of the library's losses in 16 bits neither vanish nor overflow, for any vocabulary, number of tokens and
loss scale."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covers import covering
from one_step import layout_of
from profiles import few

import jaxpar as jp
from jaxpar.models.losses import cross_entropy, linear_cross_entropy, next_token_loss, token_loss

EMBED = 16
RULES = jp.Rules(batch="data", seq=None, embed=None, vocab="model", layers="pipeline", unannotated="replicate")
HALF = ("float16", "bfloat16")
# Every gradient is a product of 16-bit numbers that fp32 sums: each factor is rounded to eps / 2 before, the result
# after it.
BOUND = {dtype: 2 * float(jnp.finfo(dtype).eps) for dtype in HALF}


def inputs(vocab: int, tokens: int, dtype: str, seed: int = 0) -> tuple[jax.Array, jax.Array, Any]:
    """Hidden states [8, tokens / 8, EMBED] and a head [EMBED, vocab], rounded to ``dtype``, and targets."""
    rng = np.random.default_rng((vocab, tokens, seed))
    x = rng.normal(size=(8, tokens // 8, EMBED))
    head = rng.normal(size=(EMBED, vocab)) / np.sqrt(EMBED)
    return jnp.asarray(x, dtype), jnp.asarray(head, dtype), rng.integers(0, vocab, (8, tokens // 8))


def gradients(loss: Any, x: jax.Array, head: jax.Array, *more: Any, scale: float) -> Any:
    """The loss, and its gradients computed with the loss times ``scale`` and then divided by ``scale``, on data 4 x
    model 2."""
    with layout_of(RULES, {"data": 4, "model": 2}):
        value, grads = jax.jit(jax.value_and_grad(lambda x, head: loss(x, head, *more) * scale, (0, 1)))(x, head)
    return value / scale, jax.tree.map(lambda g: np.asarray(g, np.float64) / scale, grads)


def assert_near(found: Any, expected: Any, bound: float) -> None:
    for got, want in zip(found, expected, strict=True):
        assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)


SIZES = [(6, 8), (50, 1024), (1000, 64), (64, 65_536), (32_768, 2048)]
SCALES = [2.0**16, 2.0**10]


@pytest.mark.parametrize(("dtype", "scale", "sizes"), covering(HALF, SCALES, SIZES, keep=1))
def test_16_bit_gradients_equal_those_of_fp32(dtype: str, scale: float, sizes: tuple[int, int]) -> None:
    vocab, tokens = sizes
    x, head, targets = inputs(vocab, tokens, dtype)
    value, expected = gradients(linear_cross_entropy, x.astype("float32"), head.astype("float32"), targets, scale=1.0)
    if scale / tokens > 2.0**12:
        scale /= 2.0**8  # a train step skips a scaled gradient that overflows fp16
    loss, found = gradients(linear_cross_entropy, x, head, targets, scale=scale)
    np.testing.assert_allclose(loss, value, rtol=BOUND[dtype])
    assert_near(found, expected, BOUND[dtype])


@pytest.mark.parametrize(("unit", "dtype"), covering([3e4, 1e-6, 1.0], HALF, keep=2, strength=1))
def test_the_unit_of_a_mask_changes_nothing(dtype: str, unit: float) -> None:
    x, head, targets = inputs(1000, 1024, dtype)
    mask = np.random.default_rng(1).uniform(0, 1, targets.shape).astype(np.float32)
    mask[:3] = 0
    wide = [x.astype("float32"), head.astype("float32")]
    logits = lambda x, head, *more: cross_entropy(x @ head, *more)
    value, expected = gradients(logits, *wide, targets, mask, scale=1.0)
    loss, found = gradients(linear_cross_entropy, x, head, targets, mask * unit, scale=2.0**12)
    np.testing.assert_allclose(loss, value, rtol=BOUND[dtype])
    assert_near(found, expected, BOUND[dtype])


@pytest.mark.parametrize("loss", few([cross_entropy, linear_cross_entropy], 1), ids=["whole", "in pieces"])
def test_fractional_weights_are_divided_by_their_sum(loss: Any) -> None:
    x, head, targets = inputs(50, 16, "float32")
    factors = (x, head) if loss is linear_cross_entropy else (x @ head,)
    mask = jnp.zeros(targets.shape).at[0, 0].set(0.25)
    with layout_of(RULES, {"data": 4, "model": 2}):
        one = optax.softmax_cross_entropy_with_integer_labels((x @ head)[0, 0], targets[0, 0])
        np.testing.assert_allclose(loss(*factors, targets, mask), one, rtol=1e-6)
        assert float(loss(*factors, targets, jnp.zeros(targets.shape))) == 0.0


class Capped:
    """A model of someone else whose ``hidden`` has a loss and a metric of its own, and whose logits are capped."""

    logit_softcap = 2.0

    def __init__(self, hidden: jax.Array, head: jax.Array):
        self.of, self.head = hidden, head

    def hidden(self, tokens: jax.Array) -> Any:
        return self.of, {"loss": jnp.float32(0.25), "load": jnp.float32(3.0)}

    def unembedding(self) -> jax.Array:
        return self.head


def test_held_out_losses_leave_the_losses_of_the_model_out() -> None:
    x, head, targets = inputs(50, 16, "float32")
    model, batch = Capped(x, head), {"tokens": targets, "targets": targets}
    mask = np.random.default_rng(2).integers(0, 2, targets.shape).astype(np.float32)
    masks = {"loss_mask": jnp.asarray(mask)}
    nll = optax.softmax_cross_entropy_with_integer_labels(2.0 * jnp.tanh(x @ head / 2.0), targets)
    with layout_of(RULES, {"data": 1}):
        whole, heldout, masked = jax.jit(
            lambda: (next_token_loss(model, batch), token_loss(model, batch), token_loss(model, {**batch, **masks}))
        )()
    np.testing.assert_allclose(whole[0], nll.mean() + 0.25, rtol=1e-6)
    assert {name: float(value) for name, value in whole[1].items()} == {"aux_loss": 0.25, "load": 3.0}
    np.testing.assert_allclose(heldout, nll.mean(), rtol=1e-6)
    np.testing.assert_allclose(masked[0], (nll * mask).sum() / mask.sum(), rtol=1e-6)
    assert list(masked[1]) == ["weight"] and float(masked[1]["weight"]) == float(mask.sum())


@pytest.mark.slow
def test_fp64_has_gradients_of_all_its_arguments() -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, head = jnp.asarray(rng.normal(size=(8, 2, EMBED))), jnp.asarray(rng.normal(size=(EMBED, 50)))
        targets, mask = rng.integers(0, 50, (8, 2)), jnp.asarray(rng.uniform(size=(8, 2)))
        plain = lambda x, head, mask: cross_entropy(x @ head, targets, mask)
        expected = jax.jit(jax.grad(plain, (0, 1, 2)))(x, head, mask)
        with layout_of(RULES, {"data": 4, "model": 2}):
            loss = lambda x, head, mask: linear_cross_entropy(x, head, targets, mask)
            found = jax.jit(jax.grad(loss, (0, 1, 2)))(x, head, mask)
        assert [g.dtype for g in found] == [jnp.float64] * 3
        assert_near(jax.device_get(found), jax.device_get(expected), 1e-12)


WAYS = {
    "plain": ({}, {"data": 8}),
    "ZeRO 1, 2 microbatches": (jp.Zero(1, min_bytes=0).step | {"grad_accum_steps": 2}, {"data": 8}),
    "pipeline": ({"pipeline": jp.pipeline.schedule("1f1b", stages=2, microbatches=2)}, {"pipeline": 2, "data": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", few(WAYS, 1))
def test_a_loss_scale_of_2_to_the_16_stays(way: str) -> None:
    """The vocabulary and the number of tokens are such that 1 / tokens times a rare token's probability is 0 in
    fp16."""
    options, sizes = WAYS[way]
    vocab, layout = 4096, layout_of(RULES, sizes)
    rng = np.random.default_rng(0)

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        blocks = jp.tag(jax.random.normal(keys[0], (2, EMBED, EMBED)) / 8, "layers", "embed", None)
        table, head = (jax.random.normal(k, (vocab, EMBED)) / 4 for k in keys[1:])
        return {"blocks": {"w": blocks}, "table": table, "head": head.T, "norm": jnp.ones(EMBED)}

    loss = jp.pipeline.PipelineLoss(
        layers="blocks",
        embed=lambda model, batch: model["table"][batch["tokens"]],
        layer=lambda block, x, side: x + jnp.tanh(x @ block["w"]),
        head=lambda model, x, batch: linear_cross_entropy(x * model["norm"], model["head"], batch["targets"]),
    )
    tokens, targets = rng.integers(0, vocab, (2, 32, 64))
    batch = {"tokens": tokens, "targets": targets}

    def one(precision: str | None) -> Any:
        state = jp.init(layout, make, optax.sgd(0.0), precision=precision)
        return jp.train_step(layout, loss, precision=precision, return_grads=True, **options)(state, batch)[1]

    expected, found = one(None), one("fp16")
    assert not found["skipped"]
    assert float(found["loss_scale"]) == 2.0**16
    # Three products in sequence round in fp16, and so do the weights.
    bound = 4 * BOUND["float16"]
    np.testing.assert_allclose(found["grad_norm"], expected["grad_norm"], rtol=bound)
    assert_near(*(jax.tree.leaves(jax.device_get(m["grads"])) for m in (found, expected)), bound)
