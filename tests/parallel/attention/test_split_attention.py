"""Attention over a split sequence: every implementation against dense attention on one device, values and gradients.

Each implementation meets each option, several together, here or in a file beside this one.
``benchmarks/attention/error_table.py`` runs every mask and option with every implementation separately.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_reference import documents, gap, random
from covers import covering
from jax.sharding import PartitionSpec as P
from profiles import few
from split_arrays import BATCH, HEADS, MESHES, QUICK, RULES, SEQ, arrays, layout

import jaxpar as jp
from jaxpar.parallel.attention.split.token_order import permutation
from jaxpar.parallel.attention.split.ulysses_splash import splash_exchanged

LEARNED = ("bias", "sinks", "alibi")


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "causal, documents, soft cap, sinks": (2, {"segment_ids": documents(SEQ), "softcap": 0.8, "sinks": random(HEADS)}),
    "window, alibi, dropout, one key head": (
        1,
        {"mask": jp.Mask(causal=True, window=7), "alibi": abs(random(HEADS, seed=4)), "dropout": 0.3, "key": 5},
    ),
    "prefixes, bias, soft cap, sinks": (
        4,
        {
            "prefix": np.array([0, 9]),
            "bias": random(1, HEADS, SEQ, SEQ),
            "scale": 0.4,
            "softcap": 0.8,
            "sinks": random(HEADS),
        },
    ),
    "two-sided, bias of all heads, documents": (
        2,
        {
            "mask": jp.Mask(causal=False, window=(3, 5)),
            "bias": random(BATCH, 1, SEQ, SEQ),
            "segment_ids": documents(SEQ),
        },
    ),
    "a function, chunks": (2, {"mask": jp.Mask(causal=False, chunk=8, where=lambda q, k: (q - k) % 3 != 1)}),
    "full": (2, {"causal": False}),
}


def run(
    where: jp.Layout, impl: str, x: tuple[np.ndarray, ...], options: dict[str, Any], gradients: bool = True
) -> list[np.ndarray]:
    """The result, and the gradients of queries, keys, values and learned options."""
    learned = {name: options[name] for name in LEARNED if name in options}
    fixed = {name: value for name, value in options.items() if name not in learned}
    if "key" in fixed:
        fixed["key"] = jax.random.key(fixed["key"])

    def loss(x: Any, learned: Any) -> Any:
        o = jp.attention(*x, impl=impl, **fixed, **learned)
        weight = jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape)
        return jnp.sum(o * weight) + jnp.sum(o**2), o

    with where:
        if not gradients:
            return [np.asarray(jax.jit(lambda *x: loss(*x)[1], compiler_options=QUICK)(x, learned))]
        grads, o = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True), compiler_options=QUICK)(x, learned)
    return [np.asarray(leaf) for leaf in (o, *jax.tree.leaves(grads))]


@pytest.fixture(scope="module")
def wanted() -> Callable[[str], list[np.ndarray]]:
    """The result and gradients of a case on one device."""
    return functools.cache(lambda case: run(layout(data=1), "dense", arrays(CASES[case][0]), CASES[case][1]))


COMMON = "prefixes, bias, soft cap, sinks"
"""The case that every implementation meets; in the others they take turns."""


@pytest.mark.parametrize(
    ("impl", "case"),
    covering(MESHES, [COMMON], keep=1) + covering(MESHES, [c for c in CASES if c != COMMON], keep=0, strength=1),
)
def test_every_implementation_equals_the_plain_form(
    impl: str, case: str, wanted: Callable[[str], list[np.ndarray]]
) -> None:
    kv_heads, options = CASES[case]
    more = {"block": 5} if impl == "flash" else {}  # several tiles, the last ones padded
    assert gap(run(layout(**MESHES[impl]), impl, arrays(kv_heads), options | more), wanted(case)) <= 1e-5


@pytest.mark.parametrize("case", few(["causal, documents, soft cap, sinks", "full"], 1))
def test_the_plain_form_takes_a_split_sequence_under_explicit_axes(
    case: str, wanted: Callable[[str], list[np.ndarray]]
) -> None:
    """The layout of the scores does not follow from those of queries and keys, so the compiler chooses one."""
    kv_heads, options = CASES[case]
    mesh = jp.MeshSpec(context=4).build(jax.devices()[:4], axis_type=jax.sharding.AxisType.Explicit)
    assert gap(run(jp.Layout(mesh, RULES, explicit=True), "dense", arrays(kv_heads), options), wanted(case)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("impl", few(["ring", "hybrid"], 1))
def test_a_split_sequence_under_explicit_axes(impl: str, wanted: Callable[[str], list[np.ndarray]]) -> None:
    case = "causal, documents, soft cap, sinks"
    kv_heads, options = CASES[case]
    mesh = jp.MeshSpec(**MESHES[impl]).build(jax.devices()[:4], axis_type=jax.sharding.AxisType.Explicit)
    assert gap(run(jp.Layout(mesh, RULES, explicit=True), impl, arrays(kv_heads), options), wanted(case)) <= 1e-5


@pytest.mark.slow
def test_queries_that_see_nothing_give_zeros_and_no_gradients() -> None:
    ids = np.full((BATCH, SEQ), -1, np.int32)
    found = run(layout(context=4), "ring", arrays(2), {"segment_ids": ids})
    assert all((leaf == 0).all() for leaf in found)


@pytest.mark.slow
@pytest.mark.parametrize("order", few(["zigzag", "striped", "contiguous"], 1))
def test_tokens_may_lie_in_any_order(order: str, wanted: Callable[[str], list[np.ndarray]]) -> None:
    case = "causal, documents, soft cap, sinks"
    kv_heads, options = CASES[case]
    at = permutation(order, SEQ, 4)
    x = tuple(a[:, at] for a in arrays(kv_heads))
    options = options | {"order": order, "segment_ids": documents(SEQ)[:, at]}
    # The loss weights results by position, so only the result itself is compared.
    (found,) = run(layout(context=4), "ring", x, options, gradients=False)
    assert gap([found[:, np.argsort(at)]], wanted(case)[:1]) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("impl", few(["ring", "ulysses", "gather"], 1))
def test_fewer_queries_than_keys(impl: str) -> None:
    x, options = arrays(2, seq=8, keys=SEQ), {"q_offset": SEQ - 8}
    want = run(layout(data=1), "dense", x, options)
    assert gap(run(layout(**MESHES[impl]), impl, x, options), want) <= 1e-5


@pytest.mark.slow
def test_a_sequence_that_does_not_divide_is_filled_up_on_request() -> None:
    x = arrays(2, seq=21)
    want = run(layout(data=1), "dense", x, {})
    assert gap(run(layout(context=4), "ring", x, {"pad": True}), want) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("impl", few(["hybrid", "ring"], 1))
def test_double_precision_is_kept_from_end_to_end(impl: str) -> None:
    with jax.enable_x64(True):
        x = arrays(2, dtype=np.float64)
        want = run(layout(data=1), "dense", x, {})
        assert gap(run(layout(**MESHES[impl]), impl, x, {}), want) <= 1e-14


@pytest.mark.slow
def test_double_precision_of_heads_in_parts() -> None:
    """The tiles are too large for all heads together, so a loop with a 64-bit counter computes parts of the heads."""
    with jax.enable_x64(True):
        x, one = arrays(2, seq=96, dtype=np.float64), layout(data=1)
        assert gap(run(one, "flash", x, {"block": 96}), run(one, "dense", x, {})) <= 1e-14


@pytest.fixture(scope="module")
def in_16_bits() -> tuple[Callable[..., list[float]], list[float]]:
    """Relative RMS errors in bf16 with 8 query and 4 key heads: a function of a layout, and those of one device."""
    draw = lambda heads, seed: jnp.asarray(random(1, 128, heads, 8, seed=seed), jnp.bfloat16)
    half = draw(8, 0), draw(4, 1), draw(4, 2)
    exact = run(layout(data=1), "dense", tuple(np.asarray(a, np.float32) for a in half), {})

    def error(where: jp.Layout, impl: str) -> list[float]:
        found = run(where, impl, half, {"block": 8})
        square = lambda a, b: float(((a.astype(np.float64) - b) ** 2).mean() / (b.astype(np.float64) ** 2).mean())
        return [square(a, b) ** 0.5 for a, b in zip(found, exact, strict=True)]

    return error, error(layout(data=1), "flash")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("impl", "sizes"),
    few(
        [
            ("ring", {"context": 8}),
            ("gather", {"context": 8}),
            ("ulysses", {"ulysses": 8}),  # more devices than key heads
            ("hybrid", {"context": 4, "ulysses": 2}),
        ],
        1,
        names=2,
    ),
)
def test_the_error_of_16_bits_does_not_grow_with_the_devices(impl: str, sizes: dict[str, int], in_16_bits: Any) -> None:
    """Sums are in fp32 from the first hop to the last, so eight devices are as exact as one."""
    error, one = in_16_bits
    eight = error(layout(**sizes), impl)
    assert min(eight) > 1e-4 and np.divide(eight, one).max() <= 1.05, (one, eight)


@pytest.mark.slow
def test_inside_a_shard_map_of_two_axes_that_keeps_count() -> None:
    """One flat map with gradients, as a pipeline calls it."""
    x = arrays(2)
    mesh = jp.MeshSpec(data=2, context=4).build()
    spec = P("data", "context")
    local = lambda q, k, v: jp.context.attention_local(q, k, v, impl="ring")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)

    def loss(*x: Any) -> Any:
        o = mapped(*x)
        return jnp.sum(o * jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape)) + jnp.sum(o**2), o

    grads, o = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True), compiler_options=QUICK)(*x)
    want = run(layout(data=1), "dense", x, {})
    assert gap([np.asarray(leaf) for leaf in (o, *grads)], want) <= 1e-5


@pytest.mark.slow
def test_heads_exchanged_around_the_tpu_kernel() -> None:
    """In the kernel's interpreter: four query heads, one key head, two devices, and tokens that fill no block."""
    shapes = ((1, 136, 4, 16), *((1, 136, 1, 16),) * 2)
    x = tuple(random(*shape, seed=seed) for seed, shape in enumerate(shapes))
    spec = P(None, "ulysses")
    local = lambda *x: splash_exchanged(*x, ("ulysses",), interpret=True)
    mapped = jax.shard_map(local, mesh=layout(ulysses=2).mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def loss(*x: Any) -> Any:
        o = mapped(*x)
        return jnp.sum(o * jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape)) + jnp.sum(o**2), o

    grads, o = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True), compiler_options=QUICK)(*x)
    want = run(layout(data=1), "dense", x, {})
    assert gap([np.asarray(leaf) for leaf in (o, *grads)], want) <= 1e-5


@pytest.mark.slow
def test_kept_keys_change_no_number(wanted: Callable[[str], list[np.ndarray]]) -> None:
    case = "window, alibi, dropout, one key head"
    kv_heads, options = CASES[case]
    assert (
        gap(run(layout(context=4), "gather", arrays(kv_heads), options | {"keep_gathered_kv": True}), wanted(case))
        <= 1e-5
    )
