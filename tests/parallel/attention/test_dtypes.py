"""Queries, keys, values, biases and slopes of any dtypes: values and gradients against attention in fp64 in numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_reference import MESHES, gap, layout, random, reference
from covers import covering
from error_texts import raises

import jaxpar as jp
from jaxpar.errors import LayoutError

BATCH, SEQ, HEADS, KV_HEADS = 2, 8, 4, 2
BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 4e-2, "float16": 8e-3}
"""The rounding of products of 8 terms and of results, in each dtype."""
DTYPES = {
    "fp64 with an fp32 bias": ("float64", "float64", "float64", "float32"),
    "fp64 with a bf16 bias": ("float64", "float64", "float64", "bfloat16"),
    "fp32 with an fp64 bias": ("float32", "float32", "float32", "float64"),
    "fp64 queries of fp32 keys": ("float64", "float32", "float32", "float64"),
    "fp32 queries of fp64 keys": ("float32", "float64", "float64", "float32"),
    "fp64 values": ("float32", "float32", "float64", "float32"),
    "fp32 queries of bf16 keys": ("float32", "bfloat16", "bfloat16", "float32"),
    "bf16 queries of fp32 values": ("bfloat16", "bfloat16", "float32", "float32"),
    "bf16 queries of fp16 keys": ("bfloat16", "float16", "float16", "bfloat16"),
}
"""Of queries, keys, values, and bias and slopes."""


def draw(*shape: int, seed: int, dtype: str) -> np.ndarray:
    return random(*shape, seed=seed, dtype=jnp.dtype(dtype))


IMPLS = [*MESHES, "auto"]


@pytest.mark.parametrize(("impl", "third"), covering(IMPLS, range(3), keep=1))
def test_arrays_of_several_dtypes(impl: str, third: int) -> None:
    """Every implementation meets one case of each third of the list: other biases, 64 beside 32 bits, and 16 bits."""
    kinds = list(DTYPES.values())[3 * third + IMPLS.index(impl) % 3]
    with jax.enable_x64(True), layout("ring" if impl == "auto" else impl):
        shapes = (BATCH, SEQ, HEADS, 6), (BATCH, SEQ, KV_HEADS, 6), (BATCH, SEQ, KV_HEADS, 5)
        x = [draw(*shape, seed=i, dtype=kind) for i, (shape, kind) in enumerate(zip(shapes, kinds[:3], strict=True))]
        bias = draw(1, HEADS, SEQ, SEQ, seed=3, dtype=kinds[3])
        slopes = abs(draw(HEADS, seed=4, dtype=kinds[3]))
        gradient = draw(BATCH, SEQ, HEADS, 5, seed=5, dtype=kinds[0])
        how: Any = {"impl": impl}
        how |= {"q_dims": ("batch", "q_seq", "heads", "head_dim")} if impl == "split_kv" else {}

        def attend(q: Any, k: Any, v: Any, bias: Any, slopes: Any) -> jax.Array:
            return jp.attention(q, k, v, bias=bias, alibi=slopes, q_offset=0, **how)

        def both(*given: Any) -> Any:
            o, back = jax.vjp(attend, *given)
            return o, *back(gradient)

        results = jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})(*x, bias, slopes)
    assert [a.dtype for a in results] == [a.dtype for a in (x[0], *x, bias, slopes)]
    rows, columns = np.arange(SEQ)[:, None], np.arange(SEQ)
    apart = abs(rows - columns)
    whole = bias.astype(np.float64) - slopes.astype(np.float64)[:, None, None] * apart
    *expected, of_scores = reference(x, gradient, (rows >= columns)[None], whole)
    expected += [of_scores, -(of_scores * apart).sum((0, 2, 3))]
    bound = max(BOUNDS[kind] for kind in kinds[:3])
    for result, right in zip(results, expected, strict=True):
        assert gap([np.asarray(result, np.float64)], [right]) <= max(bound, BOUNDS[result.dtype.name])


def test_standard_slopes_where_64_bits_are_enabled() -> None:
    """They are fp64 there, whatever the queries are."""
    with jax.enable_x64(True), layout("flash"):
        x = draw(1, SEQ, HEADS, 6, seed=0, dtype="float32")
        attend = lambda x, impl: jp.attention(x, x, x, impl=impl, alibi=True).sum()
        gradient, right = jax.jit(lambda x: [jax.grad(attend)(x, impl) for impl in ("flash", "dense")])(x)
    assert gap([np.asarray(gradient)], [np.asarray(right)]) <= 1e-5


def test_a_bias_of_integers_or_lists() -> None:
    x = draw(1, SEQ, HEADS, 6, seed=0, dtype="float32")
    bias = np.random.default_rng(0).integers(-3, 3, (1, 1, SEQ, SEQ))
    biases = bias, bias.astype(float).tolist(), bias.astype(np.float32)
    with layout("flash"):
        attend = lambda x, bias: jp.attention(x, x, x, impl="flash", bias=bias).sum()
        *gradients, right = jax.jit(lambda x: [jax.grad(attend)(x, own) for own in biases])(x)
    assert max(gap([np.asarray(gradient)], [np.asarray(right)]) for gradient in gradients) <= 1e-5


def test_a_bias_of_booleans_is_refused() -> None:
    x = draw(1, SEQ, HEADS, 6, seed=0, dtype="float32")
    with layout("dense"), raises(LayoutError, "attention: bias", "numbers"):
        jp.attention(x, x, x, bias=np.ones((1, 1, SEQ, SEQ), bool))
