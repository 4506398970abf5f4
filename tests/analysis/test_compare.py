"""The differences that ``verify`` accepts as rounding, and those that it reports."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from flax import nnx
from profiles import few

import jaxpar as jp
from jaxpar.analysis.compare import gradient_gaps
from jaxpar.errors import VerificationError

DIMS = {"x": ("batch", None), "y": ("batch",), "s": (None,)}
RULES = jp.Rules(batch="data", embed="data", mlp=None)


def make(key: jax.Array) -> Any:
    return {
        "w": jp.tag(0.1 * jax.random.normal(key, (16, 8)), "embed", "mlp"),
        "c": jp.tag(np.zeros(8, np.float32), "mlp"),
    }


def loss(params: Any, batch: Any) -> jax.Array:
    """A constant added to all classes does not change the softmax: with ``s`` of ones, the gradient of ``c`` is zero
    up to rounding."""
    logits = batch["x"] @ params["w"] + params["c"].mean() * batch["s"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def batches(scales: tuple[np.ndarray, ...] = (np.ones(8), np.arange(8))) -> list[dict[str, np.ndarray]]:
    """The gradient of ``c`` is pure rounding in the first batch, and a small difference of large sums in the second."""
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(64, 16)).astype(np.float32),
            "y": rng.integers(0, 8, 64).astype(np.int32),
            "s": scale.astype(np.float32),
        }
        for scale in scales
    ]


def devices(**sizes: int) -> jp.Layout:
    return jp.Layout(jp.MeshSpec(**sizes).build(), RULES)


def matches(loss_fn: Any = loss, tx: Any = None, data: Any = None, make_model: Any = make) -> Any:
    tx = tx or optax.adam(0.1, eps=1e-12)
    return jp.testing.assert_matches_single_device(devices(data=8), make_model, tx, loss_fn, data or batches(), DIMS)


@pytest.mark.slow
def test_adam_on_noise_is_no_difference_of_layouts() -> None:
    verdict = matches()
    assert verdict.passed and verdict.gradients < 1e-5 and verdict.updates < 1e-6


@pytest.mark.slow
def test_a_gradient_that_cancels_out_is_held_against_what_a_last_bit_changes() -> None:
    """The gradient of ``c`` is about 1, a sum of terms of about 1e5."""
    large = np.random.default_rng(1).normal(size=(64, 16)) * 1e5
    large[32:] = 1 / 512 - large[:32]
    wide = [batch | {"x": large.astype(np.float32)} for batch in batches()]
    linear = lambda params, batch: (batch["x"].sum(1) * params["c"].mean()).mean() + (params["w"] ** 2).sum()
    assert matches(linear, data=wide).passed


@pytest.mark.slow
def test_a_small_error_of_a_gradient_that_cancels_out_is_found() -> None:
    def wrong(params: Any, batch: Any) -> jax.Array:
        many = jp.current_layout().sizes["data"] > 1
        return loss(params, batch) + (1e-3 * params["c"].mean() if many else 0.0)

    with raises(VerificationError, "gradient of c", "step 1"):
        matches(wrong)


def test_an_update_that_differs_is_found_where_gradients_agree() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        many = jp.current_layout().sizes["data"] > 1
        return jax.tree.map(lambda g: g * (-0.101 if many else -0.1), updates), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with raises(VerificationError, "params/", "step 1"):
        matches(tx=tx)


class Counted(nnx.Module):
    """A weight, and a carried number that the last step alone does not reveal."""

    def __init__(self, key: jax.Array) -> None:
        self.w = nnx.Param(jax.random.normal(key, (16,)), out_sharding=("embed",))
        self.seen = nnx.BatchStat(jnp.zeros(()))


@pytest.mark.parametrize("wrong", few([True, False], 1))
def test_a_carried_variable_that_differs_is_found(wrong: bool) -> None:
    def count(model: Counted, batch: Any) -> jax.Array:
        off = wrong and jp.current_layout().sizes["data"] > 1
        model.seen[...] = model.seen[...] + batch["x"].mean() + 0.01 * off
        return ((batch["x"] @ model.w[...]) ** 2).mean()

    if not wrong:
        assert matches(count, make_model=Counted).passed
        return
    with raises(VerificationError, "variables/seen", "step 1"):
        matches(count, make_model=Counted)


def test_a_gradient_of_noise_alone_is_held_against_the_largest() -> None:
    want = {"w": np.float32([1.0, 0.5]), "small": np.float32([1e-5]), "bias": np.float32([3e-9])}
    near = gradient_gaps(want, want | {"bias": np.float32([-3e-8]), "small": np.float32([1e-5 + 3e-8])})
    assert near["bias"] < 1e-7  # rounding of terms that cancel
    assert near["small"] > 1e-5  # small, but a gradient
    assert gradient_gaps(want, want | {"bias": np.float32([1e-3])})["bias"] > 1e-5
