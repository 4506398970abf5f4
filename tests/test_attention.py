"""Attention under layouts: dense against a plain reference, the TPU kernel in its interpreter, and who takes which."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar as jp
from jaxpar.attn.dispatch import attention
from jaxpar.attn.splash import splash, stated_flops
from jaxpar.errors import LayoutError

RULES = jp.Rules(batch="data", seq="context", heads="model", kv_heads=jp.first_of("model", None), head_dim="ulysses")


def inputs(batch: int, seq: int, heads: int, kv_heads: int, head_dim: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = [(batch, seq, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def reference(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention, head by head."""
    group, seq = q.shape[2] // k.shape[2], q.shape[1]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[3])
    scores = jnp.where(np.tri(seq, dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def largest_gap(f: Any, *x: np.ndarray) -> float:
    """Of values and gradients of ``f`` to the reference, relative to each array's largest entry; NaN is infinitely far."""
    weight = np.random.default_rng(1).normal(size=x[0].shape).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        got, want = (
            jax.jit(
                jax.value_and_grad(lambda *x, g=g: ((o := g(*x)) * weight).sum() + (o**2).sum(), argnums=(0, 1, 2))
            )(*x)
            for g in (f, reference)
        )
    gaps = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()), got, want)
    return max(gap if np.isfinite(gap) else np.inf for gap in jax.tree.leaves(gaps))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "seq", "head_dim"),
    [(2, 2, 128, 128), (4, 2, 130, 64), (4, 1, 7, 6)],
    ids=["whole blocks", "grouped, padded", "one key head, odd sizes"],
)
def test_the_tpu_kernel_equals_the_reference(heads: int, kv_heads: int, seq: int, head_dim: int) -> None:
    x = inputs(2, seq, heads, kv_heads, head_dim)
    assert largest_gap(lambda q, k, v: splash(q, k, v, interpret=True), *x) <= 2e-5


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "sizes", [{"data": 2, "model": 4}, {"data": 2, "context": 4}, {"ulysses": 2, "model": 4}], ids=str
)
def test_dense_equals_the_reference_in_every_layout(sizes: dict[str, int], kv_heads: int) -> None:
    with jp.Layout(jp.MeshSpec(**sizes).build(), RULES):
        assert largest_gap(attention, *inputs(4, 16, 4, kv_heads, 6)) <= 1e-5


def program(topology: str, spec: jp.MeshSpec, kv_heads: int = 4, **options: Any) -> str:
    """What is traced for a topology."""
    layout = jp.Layout(spec.on(topology), RULES)
    shapes = [jax.ShapeDtypeStruct((8, 256, n, 128), jnp.bfloat16) for n in (4, kv_heads, kv_heads)]
    with layout:
        return str(jax.make_jaxpr(lambda *x: attention(*x, **options))(*shapes))


def test_on_a_tpu_each_device_runs_the_kernel_on_its_heads() -> None:
    text = program("v5e:2x4", jp.MeshSpec(data=2, model=4))
    assert "splash_mha_fwd" in text and "bf16[4,256,1,128]" in text
    assert "splash" not in program("h100:8", jp.MeshSpec(data=2, model=4))


def test_fewer_key_heads_than_shards_are_repeated() -> None:
    """Two key heads over four devices: each device needs the one that its query head belongs to."""
    text = program("v5e:2x4", jp.MeshSpec(data=2, model=4), kv_heads=2)
    assert "splash_mha_fwd" in text and "bf16[8,256,2,2,128]" in text


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (jp.MeshSpec(context=4, data=2), "it wants the sequence whole, but the layout splits it over 'context'"),
        (jp.MeshSpec(ulysses=4, data=2), "it wants the head dim whole, but the layout splits it over 'ulysses'"),
    ],
    ids=["sequence", "head dim"],
)
def test_what_the_kernel_cannot_do_is_dense_or_an_error(spec: jp.MeshSpec, text: str) -> None:
    assert "splash" not in program("v5e:2x4", spec)
    with pytest.raises(
        LayoutError, match=re.escape(f"attention(impl='flash'): {text}. Remedy: impl='auto' or 'dense'.")
    ):
        program("v5e:2x4", spec, impl="flash")


def test_flash_elsewhere_is_an_error() -> None:
    with pytest.raises(LayoutError, match=re.escape("its kernel runs on TPU, but the mesh is of gpu devices")):
        program("h100:8", jp.MeshSpec(data=8), impl="flash")


def test_the_kernel_states_the_flops_of_the_blocks_it_visits() -> None:
    # 1,024 positions are 2 × 2 blocks of 512, of which 3 are visited: 2 · B · H · 3 · 512² · D.
    assert stated_flops((2, 1024, 4, 64), 512, 1024) == f"attention_matmul_flops_{2 * 2 * 4 * 3 * 512 * 512 * 128}"
