"""Layouts that split a sequence, and queries, keys and values for them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from attention_reference import random

import jaxpar as jp

RULES = jp.Rules(
    batch="data", seq=("context", "ulysses"), heads="model", kv_heads=jp.first_of("model", None), head_dim=None
)
MESHES: dict[str, dict[str, int]] = {
    "flash": {"data": 2},
    "gather": {"context": 4},
    "ring": {"context": 4},
    "ring_self_attention": {"context": 4},
    "ulysses": {"ulysses": 4},
    "hybrid": {"context": 2, "ulysses": 2},
}
BATCH, SEQ, HEADS = 2, 24, 4
QUICK = {"xla_backend_optimization_level": 0}
"""These programs run once: optimizing them takes longer than running them."""


def layout(**sizes: int) -> jp.Layout:
    spec = jp.MeshSpec(**sizes)
    return jp.Layout(spec.build(jax.devices()[: spec.abstract().size]), RULES)


def arrays(kv_heads: int, seq: int = SEQ, keys: int | None = None, dtype: Any = np.float32) -> tuple[np.ndarray, ...]:
    shapes = ((BATCH, seq, HEADS, 6), *((BATCH, keys or seq, kv_heads, n) for n in (6, 5)))
    return tuple(random(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))
