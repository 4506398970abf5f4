"""Accelerator kernels: their interpreter against plain JAX, which kernel is selected, and what it receives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_reference import documents, gap
from jax.sharding import PartitionSpec as P
from profiles import few

import jaxpar as jp
from jaxpar.parallel.attention.attention_local import compute, ordered
from jaxpar.parallel.attention.kernels.select import find
from jaxpar.parallel.attention.kernels.tpu_splash import Lazy, splash
from jaxpar.parallel.attention.options import read
from jaxpar.parallel.attention.split.partition import AttentionPlan, Backend, KeySource
from jaxpar.parallel.attention.tiled.tpu_pallas import EMPTY, FIRST, LAST, MASKED, visits

RULES = jp.Rules(batch="data", seq=("context", "ulysses"), heads="model", kv_heads="model", head_dim=None)
QUICK = {"xla_backend_optimization_level": 0}
"""These programs run once, so optimizing them does not pay."""


def random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def arrays(seq: int, keys: int, dims: tuple[int, int], dtype: Any = np.float32) -> tuple[jax.Array, ...]:
    """Arrays of two sequences, two query heads and one key head."""
    shapes = ((2, seq, 2, dims[0]), (2, keys, 1, dims[0]), (2, keys, 1, dims[1]))
    return tuple(random(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


def both(f: Any, *x: jax.Array) -> list[np.ndarray]:
    """The result and the gradients of queries, keys and values."""

    def loss(*x: jax.Array) -> Any:
        o = f(*x).astype(jnp.float32)
        return jnp.sum(o * jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape)) + jnp.sum(o**2), o

    grads, o = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True), compiler_options=QUICK)(*x)
    return [np.asarray(leaf, np.float32) for leaf in (o, *grads)]


def by_tiles(engine: Backend, keys: KeySource, x: tuple[jax.Array, ...], options: dict[str, Any]) -> list[np.ndarray]:
    """Compute like :func:`jaxpar.context.attention_local`, on one device or in a ring of two."""
    rules, beside, offset = read(*x, options)
    ring = ("context",) if keys == "ring" else ()

    def local(q: Any, k: Any, v: Any, segments: Any) -> jax.Array:
        own = beside._replace(segments=segments)
        way = AttentionPlan(rules, keys, ring, offset=offset, engine=engine)
        return compute(ordered(way, options, (q.shape[1], k.shape[1])), q, k, v, own)

    if not ring:
        return both(lambda *x: local(*x, beside.segments), *x)
    spec = P(None, "context")
    mesh = jp.MeshSpec(context=2).build(jax.devices()[:2])
    # The kernel's interpreter does not track the axes over which its loops vary.
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return both(lambda *x: mapped(*x, beside.segments), *x)


@pytest.mark.parametrize(
    ("keys", "x", "options", "bound"),
    few(
        [
            (
                "here",
                arrays(140, 200, (8, 8)),
                {
                    "q_offset": -70,
                    "mask": jp.Mask(prefix=9, window=2**31),
                    "segment_ids": (documents(140), documents(200)),
                    "softcap": 0.8,
                },
                2e-6,
            ),
            (
                "here",
                arrays(140, 300, (64, 24), jnp.bfloat16),
                {
                    "q_offset": 160,
                    "prefix": np.array([0, 9]),
                    "mask": jp.Mask(causal=False, window=(30, 50), chunk=250),
                    "scale": 0.3,
                },
                2e-2,
            ),
            ("ring", arrays(256, 256, (8, 8)), {"segment_ids": documents(256), "softcap": 0.8}, 2e-6),
        ],
        1,
        names=4,
    ),
    ids=[
        "queries before the keys, documents, soft cap",
        "bfloat16, fewer queries, prefixes, a two-sided window in chunks",
        "a ring, documents, soft cap",
    ],
)
def test_the_kernel_of_tiles_equals_plain_jax(keys: KeySource, x: Any, options: Any, bound: float) -> None:
    got, want = by_tiles("interpret", keys, x, options | {"block": 128}), by_tiles("jax", "here", x, options)
    assert gap(got, want) <= bound
    if "segment_ids" in options:  # padding gives zeros and receives no gradients
        assert all((leaf[1, 128:] == 0).all() for leaf in got)


@pytest.mark.slow
def test_splash_takes_masks_and_documents() -> None:
    x, mask = arrays(130, 130, (16, 16)), jp.Mask(causal=False, window=(70, 20), chunk=100)
    options: Any = {"mask": mask, "softcap": 0.9, "scale": 0.2, "segment_ids": documents(130)}
    rules, beside, _ = read(*x, options)
    got = both(lambda *x: splash(*x, rules, beside.segments, interpret=True), *x)
    assert gap(got, by_tiles("jax", "here", x, options)) <= 5e-6


@pytest.mark.parametrize(
    "mask",
    [
        jp.Mask(causal=True),
        jp.Mask(causal=False),
        jp.Mask(causal=False, window=(3, 9)),
        jp.Mask(causal=True, window=5, prefix=11),
        jp.Mask(causal=False, chunk=12),
    ],
)
def test_a_lazy_mask_says_of_blocks_what_all_of_their_scores_say(mask: jp.Mask) -> None:
    lazy, at = Lazy(mask, 30, 32), np.arange(32)
    every = np.broadcast_to(lazy.mask_function(at[:, None], at[None]), (32, 32))
    np.testing.assert_array_equal(
        every[:30, :30], np.broadcast_to(mask.visible(at[:30, None], at[None, :30]), (30, 30))
    )
    assert not every[:30, 30:].any() and every.any(1).all()
    for i, j in np.ndindex(8, 8):
        rows, columns = slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4)
        told, seen = lazy[rows, columns], every[rows, columns]
        # A block reported as full or empty is so. A block that is full or empty may also be reported as partial.
        assert (told.any() or not seen.any()) and (seen.all() or not told.all())
    assert lazy.visited(4) >= every.sum() and lazy == Lazy(mask, 30, 32) != Lazy(mask, 29, 32)


def test_a_long_sequences_mask_is_looked_at_by_blocks() -> None:
    """Evaluating all 131,072² scores would take minutes."""
    lazy = Lazy(jp.Mask(causal=True), 2**17, 2**17)
    assert lazy.visited(512) == 256 * 257 // 2 * 512**2
    assert lazy[0:512, 512:1024].tolist() == [[False, False]] and lazy[512:1024, 0:512].tolist() == [[True, True]]


@pytest.mark.parametrize("xp", [np, jnp], ids=["known", "traced"])
def test_tiles_are_listed_by_row_and_by_column(xp: Any) -> None:
    some = xp.array([[True, True], [False, False], [True, False]])
    every = xp.array([[True, False], [False, False], [False, False]])

    def listed(**how: bool) -> list[tuple[int, int]]:
        f = lambda a, b: visits(a, b, **how)
        found = (jax.jit(f) if xp is jnp else f)(some, every)
        assert found is not None
        return [(int(n) >> 4, int(n) & 15) for n in found.tiles[: int(found.count)]]

    assert listed(by_row=True) == [(0, FIRST), (1, LAST | MASKED), (4, FIRST | LAST | MASKED)]
    alone = FIRST | LAST | MASKED
    # The second row is listed but not computed.
    assert listed(by_row=True, placeholders=True) == [(0, FIRST), (1, LAST | MASKED), (2, alone | EMPTY), (4, alone)]
    assert listed(by_row=False) == [(0, FIRST), (2, LAST | MASKED), (3, FIRST | LAST | MASKED)]


def test_where_nothing_is_seen_one_masked_tile_is_visited_or_none() -> None:
    none = np.zeros((2, 2), bool)
    assert visits(none, none, by_row=True) is None
    found = jax.jit(lambda x: visits(x, x, by_row=True))(none)
    assert found is not None and int(found.count) == 1 and int(found.tiles[0]) == FIRST | LAST | MASKED | EMPTY


BIG = jax.ShapeDtypeStruct((1, 2**18, 2, 64), jnp.bfloat16)
SMALL = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16)
IDS = np.zeros((1, 1024), np.int32)
WIDE = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.float64)


def test_no_module_imports_the_deprecated_kernels_of_jax() -> None:
    files = Path(jp.__file__).parent.rglob("*.py")
    assert [file.name for file in files if "pallas.ops.gpu" in file.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize(
    ("platform", "x", "options", "split", "found"),
    [
        ("tpu", SMALL, {}, False, "splash"),
        (
            "tpu",
            SMALL,
            {"mask": jp.Mask(causal=False, window=9, prefix=3), "softcap": 3.0, "scale": 0.1},
            False,
            "splash",
        ),
        ("tpu", SMALL, {}, True, "tiles"),
        ("tpu", SMALL, {"segment_ids": IDS}, False, "splash"),
        ("tpu", SMALL, {"segment_ids": (IDS, IDS + 1)}, False, "tiles"),
        ("tpu", SMALL, {"q_offset": 5}, False, "tiles"),
        ("tpu", SMALL, {"prefix": np.array([4])}, False, "tiles"),
        ("cpu", SMALL, {}, False, "kernels run only on TPU and GPU, but the mesh has cpu devices"),
        ("tpu", WIDE, {}, False, "the kernel computes in float32, but the queries are float64"),
        ("tpu", SMALL, {"alibi": True, "dropout": 0.1, "key": 0}, True, "the kernel does not support alibi or dropout"),
        ("tpu", SMALL, {"mask": lambda q, k: q != k}, False, "the kernel does not support mask functions"),
        (
            "tpu",
            BIG,
            {},
            True,
            "the kernel supports at most 65536 tiles, but 262144 queries and 262144 keys need 262144",
        ),
    ],
)
def test_which_kernel_is_found_and_why_not(platform: str, x: Any, options: Any, split: bool, found: str) -> None:
    options = options | ({"key": jax.random.key(0)} if "key" in options else {})
    rules, beside, offset = read(x, x, x, options)
    kernel, why = find(platform, (x, x, x), rules, beside, offset, split=split)
    assert found in (kernel, why) and bool(kernel) is not bool(why)


def traced(spec: jp.MeshSpec, impl: Any, tokens: int = 4096, **options: Any) -> Any:
    """Attention, traced for 8 TPUs."""
    shapes = [jax.ShapeDtypeStruct((1, tokens, 8, 64), jnp.bfloat16)] * 3
    with jp.Layout(spec.on("v5e:2x4"), RULES):
        return jax.jit(lambda *x: jp.attention(*x, impl=impl, **options)).trace(*shapes)


@pytest.mark.parametrize("impl", ["ring", "gather"])
def test_on_tpus_a_ring_computes_by_the_kernel(impl: str) -> None:
    # Zigzag: each device has two chunks of 256 queries, and meets 512 keys of each device.
    text = traced(jp.MeshSpec(context=8), impl, order="zigzag").lower(lowering_platforms=("tpu",)).as_text()
    assert "attend_forward" in text and "splash" not in text
    flops = [int(n) for n in re.findall(r"flops\\22:(\d+)", text)]
    tile = 2 * 8 * 256 * 256 * 2 * 64
    # With its own keys, a device computes two partial tiles and a full one; with another device's keys, two tiles.
    assert flops == ([3 * tile, 2 * tile, 2 * tile] if impl == "ring" else [17 * tile])


def test_heads_exchanged_the_segments_of_all_tokens_are_there() -> None:
    text = str(traced(jp.MeshSpec(ulysses=8), "ulysses", segment_ids=np.zeros((1, 4096), np.int32)).jaxpr)
    assert "splash_mha_fwd" in text and "all_gather" in text


def test_padded_tokens_are_segments_of_the_same_kernel() -> None:
    text = str(traced(jp.MeshSpec(ulysses=8), "ulysses", 4091, pad=True).jaxpr)
    assert "splash_mha_fwd" in text and "i32[1,4096]" in text
