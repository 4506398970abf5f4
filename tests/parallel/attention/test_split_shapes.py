"""Attention over split sequences of random size, mask and mesh, against dense attention on one device.

Runs a few examples, always the same; the profile ``thorough`` runs ten times as many, about five CPU seconds each.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_reference import masks
from hypothesis import HealthCheck, given, note
from hypothesis import strategies as st
from profiles import examples

import jaxpar as jp

RULES = jp.Rules(batch="data", seq=("context", "ulysses"), heads=None, kv_heads=None, head_dim=None)
MESHES = [(4, 2), (2, 2), (8, 1), (4, 1), (2, 1), (1, 8), (1, 4), (1, 2), (2, 4), (1, 1)]
"""Sizes of context and ulysses, of eight devices; the other devices split the batch."""
MASKS = masks(st.integers(1, 9), st.none() | st.just(lambda q, k: (q + k) % 3 != 0))


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, int], str, tuple[np.ndarray, ...], dict[str, Any]]:
    """A mesh of eight devices, an implementation that fits it, arrays, and options."""
    context, ulysses = draw(st.sampled_from(MESHES))
    data, split = 8 // (context * ulysses), context * ulysses
    impls = ["flash"] if split == 1 else ["ring", "ulysses", "gather", "ring_self_attention"]
    impl = draw(st.sampled_from(["hybrid", *impls] if min(context, ulysses) > 1 else impls))
    apart = {"ulysses": split, "hybrid": ulysses}.get(impl, 1)
    kv_heads = draw(st.integers(1, 3))
    group = draw(st.integers(1, 2)) * apart // math.gcd(kv_heads, apart)
    seq, head_dim, value_dim = draw(st.integers(1, 37)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    rows = data * draw(st.integers(1, 2))
    x = normal(rows, seq, kv_heads * group, head_dim), normal(rows, seq, kv_heads, head_dim)
    options: dict[str, Any] = {"mask": draw(MASKS), "block": draw(st.integers(1, 16))}
    if draw(st.booleans()):
        options["segment_ids"] = np.sort(rng.integers(-1, 3, (rows, seq)), axis=1).astype(np.int32)
    if draw(st.booleans()):
        options["softcap"] = 0.8
    if draw(st.booleans()):
        options["sinks"] = normal(kv_heads * group)
    sizes_drawn = {"data": data, "context": context, "ulysses": ulysses}
    return sizes_drawn, impl, (*x, normal(rows, seq, kv_heads, value_dim)), options


def run(sizes: dict[str, int], impl: str, x: tuple[np.ndarray, ...], options: dict[str, Any]) -> list[np.ndarray]:
    """The result, and the gradients of queries, keys, values and sinks."""
    fixed = {name: value for name, value in options.items() if name != "sinks"}
    learned = {name: value for name, value in options.items() if name == "sinks"}
    gradient = np.cos(np.arange(x[0][..., 0].size * x[2].shape[3], dtype=np.float32)).reshape(*x[0].shape[:3], -1)

    def both(x: Any, learned: Any) -> Any:
        attend = lambda x, learned: jp.attention(*x, impl=impl, pad=True, **fixed, **learned)  # type: ignore[arg-type]
        o, back = jax.vjp(attend, x, learned)
        return o, back(jnp.asarray(gradient))

    spec = jp.MeshSpec(**sizes)
    with jp.Layout(spec.build(jax.devices()[: spec.abstract().size]), RULES):
        found = jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})(x, learned)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


@pytest.mark.slow
@given(problems())
@examples(2, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_any_size_mask_and_mesh_equals_the_plain_form(problem: Any) -> None:
    sizes, impl, x, options = problem
    note(f"{[a.shape for a in x]}")
    want, found = run({"data": 1}, "dense", x, options), run(sizes, impl, x, options)
    for a, b in zip(found, want, strict=True):
        # Gradients of queries that see one key are only the rounding of numbers near 1.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(float(np.abs(b).max()), 1))
