"""Attention over a split sequence: every implementation against dense attention on one device, values and gradients.

Each implementation meets all masks and options here, several together. ``benchmarks/attention/error_table.py`` runs
every mask and option with every implementation separately.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_reference import documents, gap, random
from jax.sharding import PartitionSpec as P
from profiles import few, few_pairs

import jaxpar as jp
from jaxpar.errors import ConfigError, LayoutError
from jaxpar.parallel.attention.split.token_order import permutation
from jaxpar.parallel.attention.split.ulysses_splash import splash_exchanged
from jaxpar.parallel.attention.tiled.padding import KEPT, SAVED

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
LEARNED = ("bias", "sinks", "alibi")
BATCH, SEQ, HEADS = 2, 24, 4
QUICK = {"xla_backend_optimization_level": 0}
"""These programs run once: optimizing them takes longer than running them."""


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "causal, documents, soft cap, sinks": (2, {"segment_ids": documents(SEQ), "softcap": 0.8, "sinks": random(HEADS)}),
    "window, alibi, dropout, one key head": (
        1,
        {"mask": jp.Mask(causal=True, window=7), "alibi": abs(random(HEADS, seed=4)), "dropout": 0.3, "key": 5},
    ),
    "prefixes, bias": (4, {"prefix": np.array([0, 9]), "bias": random(1, HEADS, SEQ, SEQ), "scale": 0.4}),
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


def layout(**sizes: int) -> jp.Layout:
    spec = jp.MeshSpec(**sizes)
    return jp.Layout(spec.build(jax.devices()[: spec.abstract().size]), RULES)


def arrays(kv_heads: int, seq: int = SEQ, keys: int | None = None, dtype: Any = np.float32) -> tuple[np.ndarray, ...]:
    shapes = ((BATCH, seq, HEADS, 6), *((BATCH, keys or seq, kv_heads, n) for n in (6, 5)))
    return tuple(random(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


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


@pytest.mark.parametrize(("impl", "case"), few_pairs(MESHES, CASES, 2))
def test_every_implementation_equals_the_plain_form(
    impl: str, case: str, wanted: Callable[[str], list[np.ndarray]]
) -> None:
    kv_heads, options = CASES[case]
    more = {"block": 5} if impl == "flash" else {}  # several tiles, the last ones padded
    assert gap(run(layout(**MESHES[impl]), impl, arrays(kv_heads), options | more), wanted(case)) <= 1e-5


@pytest.mark.parametrize("case", ["full", "causal, documents, soft cap, sinks"])
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


def test_queries_that_see_nothing_give_zeros_and_no_gradients() -> None:
    ids = np.full((BATCH, SEQ), -1, np.int32)
    found = run(layout(context=4), "ring", arrays(2), {"segment_ids": ids})
    assert all((leaf == 0).all() for leaf in found)


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


def traced(impl: str, gradient: bool, **options: Any) -> str:
    f = lambda *x: jp.attention(*x, impl=impl, **options)
    with layout(**MESHES[impl]):
        g = jax.grad(lambda *x: jnp.sum(f(*x)), argnums=(0, 1, 2)) if gradient else f
        return str(jax.make_jaxpr(g)(*arrays(2)))


@pytest.mark.parametrize(("keep", "saved", "gathers"), [(False, True, 4), (True, True, 2), (True, False, 4)])
def test_kept_keys_are_gathered_once(keep: bool, saved: bool, gathers: int) -> None:
    """The backward pass gathers keys and values again, unless they are kept and the policy saves attention's arrays."""
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names(SAVED, KEPT) if saved else policies.nothing_saveable
    once = jax.checkpoint(lambda *x: jp.attention(*x, impl="gather", keep_gathered_kv=keep), policy=policy)
    with layout(context=4):
        grad = jax.jit(jax.grad(lambda *x: jnp.sum(once(*x) ** 2), argnums=(0, 1, 2)))
        assert grad.lower(*arrays(2)).as_text().count("stablehlo.all_gather") == gathers


@pytest.mark.slow
def test_kept_keys_change_no_number(wanted: Callable[[str], list[np.ndarray]]) -> None:
    case = "window, alibi, dropout, one key head"
    kv_heads, options = CASES[case]
    assert (
        gap(run(layout(context=4), "gather", arrays(kv_heads), options | {"keep_gathered_kv": True}), wanted(case))
        <= 1e-5
    )


def test_a_ring_sends_no_more_often_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four devices send keys and values three times forward and three times back, and their gradients three times."""
    monkeypatch.setattr("jaxpar.parallel.attention.split.ring.UNROLLED", 4)
    assert traced("ring", False, order="zigzag").count("ppermute[") == 2 * 3
    assert traced("ring", True, order="zigzag").count("ppermute[") == 2 * 3 * 3


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["ring", "gather", "ulysses"])
def test_an_audit_counts_the_tiles_that_devices_visit(impl: str) -> None:
    """Of 16 × 16 tiles of 16 tokens, 4 devices visit 136 in equal parts, with 7 matmuls for each of 4 heads."""
    shapes = [jax.ShapeDtypeStruct((1, 256, heads, 8), jnp.float32) for heads in (4, 2, 2)]
    where = layout(**MESHES[impl])
    with where:
        loss = lambda *x: jnp.sum(jp.attention(*x, impl=impl, block=16) ** 2)
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), compiler_options=QUICK).lower(*shapes).compile()
    report = jp.audit(compiled, mesh=where.mesh)
    assert report.matmul_flops == 7 * 2 * 8 * 4 * 16 * 16 * 136 // 4
    assert "LOWER BOUNDS" not in str(report)


@pytest.mark.slow
def test_the_backward_pass_takes_no_memory_before_it_begins() -> None:
    """The ring holds at most 13 arrays the size of a device's queries.

    It would hold 20 if it made zeros, blocks and the keys of later hops at the start.
    """
    shape, dims, where = (1, 1024, 4, 32), ("batch", "seq", "heads", "head_dim"), layout(context=4)
    given = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where.sharding(dims, shape))
    with where:
        ring = jax.grad(lambda *x: jnp.sum(jp.attention(*x, impl="ring", order="zigzag", block=16)), argnums=(0, 1, 2))
        program = jax.jit(ring, compiler_options=QUICK).lower(given, given, given).compile()
    assert program.memory_analysis().temp_size_in_bytes <= 13 * math.prod(shape)


def test_a_window_ends_the_ring_early() -> None:
    near = {"mask": jp.Mask(causal=True, window=6)}  # within the neighbour's six tokens
    assert traced("ring", False, **near).count("ppermute[") == 2


def test_a_ring_has_no_loops_over_no_tiles() -> None:
    """In zigzag only the first hop has masked tiles; later the compiler could overlap a transfer with an empty loop."""
    first, in_the_loop, last = 2, 1, 1
    assert traced("ring", False, order="zigzag").count("while[") == first + in_the_loop + last


@pytest.mark.slow
def test_what_attention_made_is_kept_so_that_the_ring_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpar.parallel.attention.split.ring.UNROLLED", 4)

    def permutes(policy: str) -> int:
        rule = jp.RematPolicy(policy).rule(["attention"])
        block = jax.checkpoint(lambda *x: jp.attention(*x, impl="ring", order="zigzag"), policy=rule)
        with layout(context=4):
            grad = jax.jit(jax.grad(lambda *x: jnp.sum(block(*x) ** 2), argnums=(0, 1, 2)))
            return grad.lower(*arrays(2)).as_text().count("collective_permute")

    assert permutes("full") - permutes("save_attention") == 2 * 3


@pytest.mark.parametrize(
    ("sizes", "options", "kind", "text"),
    [
        (
            {"context": 4},
            {"impl": "ring", "order": "zigzag", "seq": 20},
            LayoutError,
            (
                "attention: the queries' sequence has 20 tokens, but order 'zigzag' over 4 devices requires a multiple "
                "of 8. Remedy: use pad=True (adds 4 masked tokens), or order='striped', which requires a multiple of 4."
            ),
        ),
        (
            {"ulysses": 8},
            {"impl": "ulysses"},
            LayoutError,
            (
                "attention: 4 query heads cannot be exchanged among 8 devices over 'ulysses'. Remedy: use a number of "
                "devices that divides them (1, 2, 4), or impl='ring', which supports any number."
            ),
        ),
        (
            {"context": 4},
            {"impl": "hybrid"},
            LayoutError,
            (
                "attention(impl='hybrid'): the sequence is sharded over 'context', but it must be sharded over the "
                "axes of a ring, followed by 'ulysses' to exchange heads. Remedy: use a rule seq=('context', "
                "'ulysses') on a mesh with both axes, or impl='ring' or 'ulysses'."
            ),
        ),
        (
            {"data": 1},
            {"dropout": 0.1},
            ConfigError,
            (
                "attention: dropout is 0.1, but no key is given. Remedy: pass key=jax.random.key(...), a new one in "
                "every step, or dropout=0."
            ),
        ),
        (
            {"ulysses": 4},
            {"impl": "ulysses", "order": "zigzag"},
            LayoutError,
            (
                "attention(impl='ulysses'): order 'zigzag' applies to the devices of a ring, but there is no ring: the "
                "sequence is exchanged for heads over 'ulysses'. Remedy: use impl='ring' or 'hybrid', or "
                "order='contiguous' for tokens in their natural order."
            ),
        ),
        (
            {"data": 1},
            {"dropout": 1.0},
            ConfigError,
            "attention: dropout must be a fraction >= 0 and < 1, got 1.0.",
        ),
        ({"data": 1}, {"softcap": 0}, ConfigError, "attention: softcap must be a number > 0, got 0."),
        (
            {"data": 1},
            {"segment_ids": np.zeros((2, 3), int)},
            LayoutError,
            ("attention: segment_ids of the queries must be integers [2, 24], one per token, got int32[2, 3]."),
        ),
        (
            {"data": 1},
            {"bias": np.zeros((1, 3, 24, 24))},
            LayoutError,
            (
                "attention: bias must have the shape [2 or 1, 4 or 1, 24, 24] (batch, heads, queries, keys), got [1, "
                "3, 24, 24]."
            ),
        ),
        (
            {"data": 1},
            {"sinks": np.zeros(3)},
            LayoutError,
            "attention: sinks must be one number for each of 4 query heads, got shape [3].",
        ),
        (
            {"data": 1},
            {"prefix": np.zeros(3, int)},
            LayoutError,
            "attention: prefix must be one number, or one for each of 2 sequences, got shape [3].",
        ),
        (
            {"data": 1},
            {"casual": True},
            ConfigError,
            "attention: unknown option 'casual'. Did you mean 'causal'? The options are: causal, mask,",
        ),
        (
            {"data": 1},
            {"impl": "rings"},
            ConfigError,
            "attention: unknown impl 'rings'. Did you mean 'ring'? The implementations are: auto, dense,",
        ),
        (
            {"context": 4},
            {"impl": "ring", "order": "zigzagged"},
            ConfigError,
            "attention: unknown order 'zigzagged'. Did you mean 'zigzag'? The orders are: contiguous, zigzag, striped.",
        ),
        (
            {"context": 4},
            {"impl": "ring", "kv_grad_dtype": "float16"},
            ConfigError,
            "attention: kv_grad_dtype must be 'float32' or 'bfloat16', got 'float16'. Did you mean 'bfloat16'?",
        ),
        (
            {"context": 4},
            {"impl": "ring", "keep_gathered_kv": True},
            ConfigError,
            (
                "attention(impl='ring'): keep_gathered_kv=True keeps gathered keys and values for the backward pass, "
                "but only impl 'gather' gathers them. Remedy: use impl='gather', or leave keep_gathered_kv out."
            ),
        ),
        (
            {"context": 4},
            {"impl": "gather", "keep_gathered_kv": "all"},
            ConfigError,
            "attention: keep_gathered_kv must be True or False, got 'all'.",
        ),
        (
            {"data": 1},
            {"keys": 32},
            LayoutError,
            (
                "attention: 24 queries and 32 keys under a mask that compares their positions, but the position of the "
                "first query is unknown. Remedy: pass q_offset=8 if the last query is at the last key, q_offset=0 if "
                "the first query is at the first key, or causal=False."
            ),
        ),
        (
            {"data": 1},
            {"kv_heads": 3},
            LayoutError,
            "attention: 4 query heads are not a multiple of 3 key heads, so they cannot share the key heads evenly.",
        ),
        (
            {"data": 1},
            {"mask": jp.Mask(causal=True), "causal": False},
            ConfigError,
            (
                "attention: causal is False, but the mask has causal=True. Remedy: leave causal out, or set it in the "
                "mask."
            ),
        ),
        (
            {"data": 1},
            {"mask": "causal"},
            ConfigError,
            "attention: mask must be a jp.Mask or a function of two positions, got str.",
        ),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_an_error(
    sizes: dict[str, int], options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    options = dict(options)
    x = arrays(options.pop("kv_heads", 2), options.pop("seq", SEQ), options.pop("keys", None))
    with layout(**sizes), pytest.raises(kind, match=f"^{re.escape(text)}"):
        jp.attention(*x, **options)


def test_the_local_form_says_what_it_misses() -> None:
    x = arrays(2)
    text = (
        "attention_local: 'context' is not a manual axis here; the manual axes are: none. Remedy: call it inside "
        "jax.shard_map over 'context', or call jp.attention outside."
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(text)}"):
        jp.context.attention_local(*x)
    text = "attention_local: impl 'dense' is only valid for global arrays. Remedy: use one of flash, gather,"
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
        jp.context.attention_local(*x, impl="dense")
    mesh, spec = jp.MeshSpec(context=4).build(jax.devices()[:4]), P(None, "context")
    local = lambda q, k, v: jp.context.attention_local(q, k, v, bias=jnp.zeros((1, 1, q.shape[1], k.shape[1])))
    text = (
        "attention: bias must have the shape [2 or 1, 4 or 1, 6, 24] (batch, heads, queries, keys), got [1, 1, 6, 6]."
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(text)}"):
        jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec), *x)
