"""The U-Net on slices against one device, for images and volumes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.models.unet import UNetConfig, make_unet, segmentation_loss
from tests.profiles import few

CASES: list[dict[str, Any]] = [
    {"mesh": {"data": 2, "context": 2, "ulysses": 2}, "sizes": {"channels": 8, "levels": 3, "remat": True}},
    {"mesh": {"context": 4, "ulysses": 2}, "sizes": {"channels": 4, "levels": 2, "space": 3}},
    {"mesh": {"data": 2, "context": 4}, "sizes": {"channels": 8, "levels": 3}},
    {"mesh": {"context": 8}, "sizes": {"channels": 4, "levels": 1, "in_channels": 2}},
]


UNREAD = jp.Rules(**dict.fromkeys(("batch", "depth", "height", "width", "channels")))


def batch_on(layout: jp.Layout, c: UNetConfig) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shape = (2, *(32, 16, 8)[: c.space])
    image = rng.standard_normal((*shape, c.in_channels)).astype(np.float32)
    place = lambda x, *rest: jp.shard_array(layout, x, *c.dims[:-1], *rest)
    return {"image": place(image, None), "label": place(rng.integers(0, c.classes, shape))}


def step_on(layout: jp.Layout, sizes: dict[str, Any]) -> tuple[float, list[np.ndarray]]:
    state = jp.init(layout, partial(make_unet, **sizes), optax.sgd(0.1))
    step = jp.train_step(layout, segmentation_loss, return_grads=True)
    _, metrics = step(state, batch_on(layout, UNetConfig(**sizes)))
    return float(metrics["loss"]), [np.asarray(g) for g in jax.tree.leaves(metrics["grads"])]


@pytest.mark.slow
@pytest.mark.parametrize("case", few(CASES, 1))
def test_slices_compute_what_one_device_does(case: dict[str, Any]) -> None:
    rules = jp.Rules(
        batch="data", depth=None, height="context", width="ulysses", channels=None, params={"channels": "data"}
    )
    layout = jp.Layout(jp.MeshSpec(**case["mesh"]).build(), rules)
    loss, grads = step_on(layout, case["sizes"])
    right, expected = step_on(layout.on_one_device(), case["sizes"])
    assert loss == pytest.approx(right, rel=1e-5)
    largest = max(float(np.abs(g).max()) for g in expected)
    for found, wanted in zip(grads, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("case", CASES[:2], ids=["images", "volumes"])
def test_each_pixel_has_logits_in_fp32(case: dict[str, Any]) -> None:
    c, layout = UNetConfig(**case["sizes"]), jp.Layout(jp.MeshSpec(data=1).build(jax.devices()[:1]), UNREAD)
    image = jax.ShapeDtypeStruct((2, *(32, 16, 8)[: c.space], c.in_channels), "uint8")
    with layout:
        found = jax.eval_shape(lambda key, x: make_unet(key, **case["sizes"])(x), jax.random.key(0), image)
    assert (found.shape, found.dtype) == ((*image.shape[:-1], c.classes), jnp.float32)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"space": 1}, "unet: space"),
        ({"channels": 6}, "unet: channels"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, Any], name: str) -> None:
    with raises(ConfigError, name):
        UNetConfig(**sizes)
