"""What an optimizer makes of a gradient that is rounding alone is not held against a layout."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

import jaxpar as jp
from jaxpar.inspect.compare import gradient_gaps

DIMS = {"x": ("batch", None), "y": ("batch",), "s": (None,)}


def make(key: jax.Array) -> Any:
    return {
        "w": jp.tag(0.1 * jax.random.normal(key, (16, 8)), "embed", "mlp"),
        "c": jp.tag(np.zeros(8, np.float32), "mlp"),
    }


def loss(params: Any, batch: Any) -> jax.Array:
    """The same to all classes changes no soft-max: of ``s`` of ones, the gradient of ``c`` is zero but for rounding."""
    logits = batch["x"] @ params["w"] + params["c"].mean() * batch["s"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    scales = (np.ones(8), np.arange(8))
    return [
        {
            "x": rng.normal(size=(64, 16)).astype(np.float32),
            # Half of the classes, or the second batch's gradient of ``c`` would be a small difference of large sums: mostly rounding.
            "y": rng.integers(0, 4, 64).astype(np.int32),
            "s": scale.astype(np.float32),
        }
        for scale in scales
    ]


def test_adam_on_noise_is_no_difference_of_layouts() -> None:
    layout = jp.Layout(jp.MeshSpec(data=8).build(), jp.Rules(batch="data", embed="data", mlp=None))
    verdict = jp.testing.assert_matches_single_device(layout, make, optax.adam(0.1, eps=1e-12), loss, batches(), DIMS)
    assert verdict.passed and verdict.gradients < 1e-5


def test_a_gradient_of_noise_alone_is_held_against_the_largest() -> None:
    want = {"w": np.float32([1.0, 0.5]), "small": np.float32([1e-5]), "bias": np.float32([3e-9])}
    near = gradient_gaps(want, want | {"bias": np.float32([-3e-8]), "small": np.float32([1e-5 + 3e-8])})
    assert near["bias"] < 1e-7  # rounding of what cancels out in it
    assert near["small"] > 1e-5  # small, but a gradient
    assert gradient_gaps(want, want | {"bias": np.float32([1e-3])})["bias"] > 1e-5
