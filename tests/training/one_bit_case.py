"""A model whose gradients are its batch, for the tests of 1-bit Adam."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar as jp

RULES = jp.Rules(batch=("replica", "data"), embed=None, mlp="model")
MESHES = {
    "1 device": (jp.MeshSpec(), 1),
    "8 ways": (jp.MeshSpec(data=8), 8),
    "two axes, beside tensor parallelism": (jp.MeshSpec(replica=2, data=2, model=2), 8),
    "2 ways": (jp.MeshSpec(data=2), 2),
}
RATE, BLOCK, WARMUP, DECAY = 1e-2, 16, 2, 0.1


def layout_of(mesh: str) -> jp.Layout:
    spec, devices = MESHES[mesh]
    return jp.Layout(spec.build(jax.devices()[:devices]), RULES)


SHAPES = {"odd": (37, 13), "columns": (24, 10), "number": ()}
DIMS: dict[str, tuple[str | None, ...]] = {"odd": (None, None), "columns": ("embed", "mlp"), "number": ()}


def make(key: jax.Array) -> dict[str, Any]:
    del key  # Random numbers would take longer to compile.
    return {
        name: jp.tag(jnp.sin(jnp.arange(math.prod(shape), dtype=jnp.float32)).reshape(shape) + 0.1, *DIMS[name])
        for name, shape in SHAPES.items()
    }


def dot(model: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """A loss whose gradient is the batch, so each row contributes its own gradient."""
    return sum((jnp.mean(jnp.sum(batch[name] * w, range(1, w.ndim + 1))) for name, w in model.items()), jnp.zeros(()))


def rows_of(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {name: random.normal(size=(8, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
