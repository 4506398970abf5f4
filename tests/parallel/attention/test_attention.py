"""Attention under layouts: dense against a reference, the TPU kernel's interpreter, and which implementation runs."""

from __future__ import annotations

import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from profiles import few, few_pairs

import jaxpar as jp
from jaxpar.errors import LayoutError
from jaxpar.parallel.attention.attention import attention
from jaxpar.parallel.attention.kernels.tpu_splash import splash
from jaxpar.parallel.attention.tiled.tile import TileSpec

RULES = jp.Rules(batch="data", seq="context", heads="model", kv_heads=jp.first_of("model", None), head_dim="ulysses")


def inputs(batch: int, seq: int, heads: int, kv_heads: int, head_dim: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = [(batch, seq, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def reference(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Plain causal attention."""
    group, seq = q.shape[2] // k.shape[2], q.shape[1]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[3])
    scores = jnp.where(np.tri(seq, dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def largest_gap(f: Any, *x: np.ndarray) -> float:
    """The largest relative difference of ``f`` to the reference, in values and gradients; NaN counts as infinite."""
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
    few([(2, 2, 128, 128), (4, 1, 7, 6)], 1, names=4),
    ids=["whole blocks", "one key head, odd sizes"],
)
def test_the_tpu_kernel_equals_the_reference(heads: int, kv_heads: int, seq: int, head_dim: int) -> None:
    x = inputs(2, seq, heads, kv_heads, head_dim)
    rules = TileSpec(jp.Mask(causal=True), head_dim**-0.5)
    assert largest_gap(lambda q, k, v: splash(q, k, v, rules, interpret=True), *x) <= 2e-5


@pytest.mark.parametrize(
    ("sizes", "kv_heads"),
    few_pairs([{"data": 2, "model": 4}, {"data": 2, "context": 4}, {"ulysses": 2, "model": 4}], [1, 2, 4], 1),
    ids=str,
)
def test_dense_equals_the_reference_in_every_layout(sizes: dict[str, int], kv_heads: int) -> None:
    with jp.Layout(jp.MeshSpec(**sizes).build(), RULES):
        assert largest_gap(attention, *inputs(4, 16, 4, kv_heads, 6)) <= 1e-5


def program(topology: str, spec: jp.MeshSpec, kv_heads: int = 4, **options: Any) -> str:
    """The jaxpr of attention for a topology."""
    layout = jp.Layout(spec.on(topology), RULES)
    shapes = [jax.ShapeDtypeStruct((8, 256, n, 128), jnp.bfloat16) for n in (4, kv_heads, kv_heads)]
    with layout:
        return str(jax.make_jaxpr(lambda *x: attention(*x, **options))(*shapes))


def test_on_a_tpu_each_device_runs_the_kernel_on_its_heads() -> None:
    text = program("v5e:2x4", jp.MeshSpec(data=2, model=4))
    assert "splash_mha_fwd" in text and "bf16[4,256,1,128]" in text


def test_on_a_gpu_each_device_runs_the_kernel_on_its_heads() -> None:
    text = program("h100:8", jp.MeshSpec(data=2, model=4))
    assert "target_name=__cudnn$fmhaSoftmax\n" in text and "bf16[4,1,256,128]" in text and "splash" not in text
    packed = program("h100:8", jp.MeshSpec(data=2, context=4), segment_ids=np.zeros((8, 256), np.int32))
    assert "target_name=__cudnn$fmhaScaleBiasSoftmax\n" in packed and "bf16[4,1,256,256]" in packed


def test_ulysses_exchanges_its_result_once() -> None:
    """The backward pass exchanges queries, keys and values again and all gradients, but not the result."""
    rule = jp.RematPolicy("save_attention").rule(["attention"])
    with jp.Layout(jp.MeshSpec(context=4, data=2).on("v5e:2x4"), RULES):
        block = jax.checkpoint(lambda *x: attention(*x, impl="ulysses"), policy=rule)
        shapes = [jax.ShapeDtypeStruct((2, 512, 4, 128), jnp.bfloat16)] * 3
        grad = jax.grad(lambda *x: jnp.sum(block(*x) ** 2).astype(jnp.float32), argnums=(0, 1, 2))
        text = str(jax.make_jaxpr(grad)(*shapes))
    sent = re.findall(r"(\w+)\[[\d,]+\](?:\{[^}]*\})? = all_to_all\[", text)
    assert sorted(sent) == ["bf16"] * (4 + 3 + 1 + 3) + ["f32"]


def test_fewer_key_heads_than_shards_are_repeated() -> None:
    """With two key heads over four devices, each device needs the key head of its query head."""
    text = program("v5e:2x4", jp.MeshSpec(data=2, model=4), kv_heads=2)
    assert "splash_mha_fwd" in text and "bf16[8,256,2,2,128]" in text


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (jp.MeshSpec(context=4, data=2), "context"),
        (jp.MeshSpec(ulysses=4, data=2), "'ulysses'"),
    ],
    ids=["sequence", "head dim"],
)
def test_what_flash_cannot_do_something_else_does(spec: jp.MeshSpec, name: str) -> None:
    # Ulysses exchanges heads for the sequence, so the kernel gets the full sequence. The head dim has no such exchange.
    assert ("splash" in program("v5e:2x4", spec, kv_heads=2)) is (spec.context > 1)
    with raises(LayoutError, name):
        program("v5e:2x4", spec, impl="flash")


@pytest.mark.slow
def test_flash_is_there_without_a_kernel() -> None:
    with jp.Layout(jp.MeshSpec(data=2, model=2).build(jax.devices()[:4]), RULES):
        assert largest_gap(lambda *x: attention(*x, impl="flash", block=8), *inputs(2, 20, 4, 2, 6)) <= 1e-5


def test_double_precision_stays_it() -> None:
    layout = jp.Layout(jp.MeshSpec(data=8).on("h100:8"), RULES)
    with jax.enable_x64(True), layout:
        shapes = [jax.ShapeDtypeStruct((8, 16, 4, 64), jnp.float64)] * 3
        for impl in ("auto", "flash"):
            traced = jax.make_jaxpr(lambda *x, impl=impl: attention(*x, impl=impl))(*shapes)
            assert "cudnn" not in str(traced) and "f32" not in str(traced)


@pytest.mark.parametrize(
    ("topology", "stated"),
    [
        # 1,024 positions are 2 × 2 blocks of 512, of which 3 are visited: 2 · B · H · 3 · 512² · D.
        ("v5e:2x4", [3 * 512 * 512]),
        # 36 of 8 × 8 blocks of 128.
        ("h100:8", [36 * 128 * 128]),
    ],
)
def test_the_kernels_state_the_flops_of_the_blocks_they_visit(topology: str, stated: list[int]) -> None:
    layout = jp.Layout(jp.MeshSpec(data=8).on(topology), RULES)
    shapes = [jax.ShapeDtypeStruct((16, 1024, 4, 128), jnp.bfloat16)] * 3
    with layout:
        text = jax.jit(attention).trace(*shapes).lower(lowering_platforms=("tpu",) if topology[0] == "v" else ("cuda",))
    names = "_".join(str(2 * 2 * 4 * scores * 128) for scores in stated)
    assert f"attention_matmul_flops_{names}/" in text.as_text(debug_info=True)


@pytest.mark.slow
def test_a_devices_tokens_need_not_be_whole_blocks() -> None:
    """With seven tokens per device in blocks of four, the first device's padding is not taken for the second's."""
    q, k, v = inputs(1, 14, 2, 1, 4)
    bias = np.random.default_rng(2).normal(size=(1, 2, 14, 14)).astype(np.float32)
    ids = np.array([[0] * 5 + [1] * 7 + [-1] * 2])

    def loss(*x: jax.Array, **options: Any) -> jax.Array:
        o = attention(*x[:3], bias=x[3], segment_ids=ids, **options)
        return (o * q).sum() + (o**2).sum()

    def both(**options: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda *x: loss(*x, **options), argnums=(0, 1, 2, 3)))(q, k, v, bias)

    with jp.Layout(jp.MeshSpec(context=2).build(jax.devices()[:2]), RULES):
        got, want = both(impl="gather", block=4, order="contiguous"), both(impl="dense")
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


def test_attention_in_fp16_asks_for_no_product_that_a_cpu_lacks() -> None:
    q, k, v = (jax.random.normal(jax.random.key(n), (2, 8, 2, 4)) for n in range(3))
    with jp.Layout(jp.MeshSpec(data=2).build(jax.devices()[:2]), RULES):
        attend = jax.jit(lambda *x: jp.attention(*x, impl="dense"))
        narrow, wide = attend(*(x.astype(jnp.float16) for x in (q, k, v))), attend(q, k, v)
    assert narrow.dtype == jnp.float16
    np.testing.assert_allclose(narrow, wide, rtol=0, atol=5e-3)
