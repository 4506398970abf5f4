"""The fp16 loss scale follows a table worked out by hand, in every layout; invalid scales are refused."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from profiles import few

import jaxpar as jp
from jaxpar.errors import ConfigError, ModelError
from jaxpar.parallel.precision.policy import LossScale

RULES = jp.Rules(batch="data", embed=None, mlp=None)
TX = optax.sgd(0.1)
# Two finite steps in a row double the scale. The second non-finite step since it last grew, and each one after that,
# halves it.
SCALE = LossScale(initial=64.0, interval=2, hysteresis=2, minimum=16.0)
TABLE = [
    # finite?   scale before, after
    (True, 64, 64),
    (False, 64, 64),  # tolerated: the first of two
    (True, 64, 64),  # one finite step in a row
    (False, 64, 32),  # the second since the scale last grew
    (False, 32, 16),
    (False, 16, 16),  # not below the minimum
    (True, 16, 16),
    (True, 16, 32),  # two in a row: the scale grows and tolerates one again
    (False, 32, 32),
    (True, 32, 32),
    (True, 32, 64),
]


def test_the_scale_moves_as_traced_by_hand() -> None:
    state = SCALE.start()
    for number, (finite, before, after) in enumerate(TABLE):
        assert float(state["scale"]) == before, number
        state = SCALE.next(state, jnp.asarray(finite))
        assert float(state["scale"]) == after, number


def make(key: jax.Array) -> dict[str, Any]:
    return {"w": jp.tag(jax.random.normal(key, (16, 8)) / 4, "embed", "mlp")}


def loss(model: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch.astype(model["w"].dtype) @ model["w"]).astype(jnp.float32) ** 2)


def batches() -> list[np.ndarray]:
    """One batch per row of the table; a bad batch overflows fp16 on one device only."""
    good = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    bad = good.copy()
    bad[3] = 1e6
    return [good if finite else bad for finite, _, _ in TABLE]


LAYOUTS: dict[str, tuple[int, jp.Zero, dict[str, Any]]] = {
    "one device": (1, jp.Zero(0), {}),
    "data parallel": (8, jp.Zero(0), {}),
    "stage 1": (8, jp.Zero(1, min_bytes=0), {}),
    "stage 1, microbatches": (8, jp.Zero(1, min_bytes=0), {"grad_accum_steps": 2}),
    "stage 2": (8, jp.Zero(2, min_bytes=0), {}),
    "stage 3": (8, jp.Zero(3, min_bytes=0), {}),
}


@pytest.mark.parametrize("name", few(LAYOUTS, 2))
def test_every_layout_skips_the_same_steps_and_scales_alike(name: str) -> None:
    devices, zero, options = LAYOUTS[name]
    layout = jp.Layout(jp.MeshSpec(data=-1).build(jax.devices()[:devices]), zero.rules(RULES))
    precision = jp.Precision("fp16", scale=SCALE)
    state = jp.init(layout, make, TX, precision=precision)
    step = jp.train_step(layout, loss, precision=precision, donate=False, **zero.step, **options)
    for batch, (finite, before, after) in zip(batches(), TABLE, strict=True):
        new, metrics = step(state, batch)
        assert (bool(metrics["skipped"]), float(metrics["loss_scale"])) == (not finite, before)
        assert float(new.loss_scale["scale"]) == after
        kept = np.array_equal(jax.device_get(new.params["w"]), jax.device_get(state.params["w"]))
        assert kept is not finite
        state = new


def test_a_scale_keeps_small_gradients_that_would_vanish() -> None:
    layout = jp.Layout(jp.MeshSpec(data=-1).build(), RULES)
    tiny = lambda model, batch: loss(model, batch) * 1e-8
    batch = batches()[0]
    grads = {}
    for name, precision in (
        ("fp32", jp.Precision.of("fp32")),
        ("scaled", jp.Precision("fp16", scale=LossScale(initial=2.0**24))),
    ):
        state = jp.init(layout, make, TX, precision=precision)
        step = jp.train_step(layout, tiny, precision=precision, return_grads=True)
        grads[name] = jax.device_get(step(state, batch)[1]["grads"]["w"])
    with pytest.warns(UserWarning, match="float16"):
        bare = jp.Precision("fp16")
    state = jp.init(layout, make, TX, precision=bare)
    vanished = jp.train_step(layout, tiny, precision=bare, return_grads=True)(state, batch)[1]["grads"]["w"]
    np.testing.assert_allclose(grads["scaled"], grads["fp32"], rtol=1e-2, atol=1e-10)
    assert np.abs(np.asarray(vanished)).max() < 0.1 * np.abs(grads["fp32"]).max()


def test_fp16_scales_unless_told_otherwise() -> None:
    assert jp.Precision.of("fp16").scale == jp.Precision.of({"compute": "fp16"}).scale == LossScale()
    assert jp.Precision.of({"compute": "fp16", "scale": {"initial": 8.0}}).scale == LossScale(initial=8.0)
    assert jp.Precision.of("bf16").scale is None
    assert LossScale() == LossScale(2.0**16, 2.0, 0.5, 2000, 1, 1.0)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"initial": math.nan}, "precision.scale: initial"),
        ({"initial": -1.0}, "-1"),
        ({"growth": 1.0}, "precision.scale: growth"),
        ({"backoff": 1.0}, "precision.scale: backoff"),
        ({"interval": 0}, "precision.scale: interval"),
        ({"hysteresis": 0}, "precision.scale: hysteresis"),
        ({"hysteresis": 2**40}, "1.09951e+12"),
        ({"initial": 8.0, "minimum": 16.0}, "precision.scale: minimum"),
        ({"intial": 8.0}, "intial"),
    ],
)
def test_what_is_no_scale(values: dict[str, float], name: str) -> None:
    with raises(ConfigError, name):
        jp.Precision.of({"compute": "fp16", "scale": values})


@pytest.mark.parametrize(
    ("scale", "name"),
    [
        (8.0, "precision: scale"),
        ({"initial": "much"}, "precision.scale: initial"),
    ],
)
def test_a_scale_in_another_form(scale: Any, name: str) -> None:
    with raises(ConfigError, name):
        jp.Precision.of({"compute": "fp16", "scale": scale})


def test_a_scale_that_could_not_move() -> None:
    layout = jp.Layout(jp.MeshSpec(data=-1).build(), RULES)
    with raises(ConfigError, "skip_nonfinite"):
        jp.train_step(layout, loss, precision="fp16", skip_nonfinite=False)


@pytest.mark.parametrize(
    ("of_state", "of_step", "name"),
    [
        (None, "fp16", "the step"),
        ("fp16", "bf16", "the state"),
    ],
)
def test_a_state_of_another_precision(of_state: Any, of_step: Any, name: str) -> None:
    layout = jp.Layout(jp.MeshSpec(data=-1).build(), RULES)
    state = jp.init(layout, make, TX, precision=of_state)
    with raises(ModelError, name):
        jp.train_step(layout, loss, precision=of_step)(state, batches()[0])
