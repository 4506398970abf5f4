"""The table of ``attention.py --table``: every implementation × mask and option × key heads × dtype × kind of mesh axes against the plain form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar as jp

RULES = jp.Rules(
    batch="data", seq=("context", "ulysses"), heads="model", kv_heads=jp.first_of("model", None), head_dim=None
)
MESHES = {
    "ring": {"context": 4},
    "gather": {"context": 4},
    "ring_self_attention": {"context": 4},
    "ulysses": {"ulysses": 4},
    "hybrid": {"context": 2, "ulysses": 2},
}
BATCH, SEQ, HEADS, HEAD_DIM = 2, 32, 4, 8
LEARNED = ("bias", "sinks", "alibi")
EXACT = 1e-5
"""The bound of fp32 against fp32, relative to each array's largest entry."""
HALF = 3e-2
"""The bound of bf16 against fp32 of the same numbers, relative in the same way."""


def cases() -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(1)
    ids = np.sort(rng.integers(0, 4, size=(BATCH, SEQ)), axis=1).astype(np.int32)
    ids[:, -3:] = -1
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return {
        "causal": {},
        "full": {"causal": False},
        "window": {"mask": jp.Mask(causal=True, window=5)},
        "two-sided window": {"mask": jp.Mask(window=(3, 6))},
        "documents, padding": {"segment_ids": ids},
        "documents, full": {"segment_ids": ids, "causal": False},
        "prefix": {"prefix": 7},
        "prefix of each": {"prefix": np.array([0, 9])},
        "chunks": {"mask": jp.Mask(causal=True, chunk=8)},
        "function": {"mask": lambda q, k: (q - k) % 3 == 0},
        "function, empty rows": {"mask": lambda q, k: k < q - 2},
        "soft cap": {"softcap": 0.7},
        "scale": {"scale": 0.3},
        "ALiBi": {"alibi": abs(draw(HEADS))},
        "bias of heads": {"bias": draw(1, HEADS, SEQ, SEQ)},
        "bias of sequences": {"bias": draw(BATCH, 1, SEQ, SEQ)},
        "sinks": {"sinks": draw(HEADS)},
        "dropout": {"dropout": 0.3, "key": jax.random.key(3)},
    }


def run(layout: jp.Layout, impl: str, x: tuple[Any, ...], options: dict[str, Any]) -> list[np.ndarray]:
    learned = {name: options[name] for name in LEARNED if name in options}
    fixed = {name: value for name, value in options.items() if name not in learned}

    def loss(x: Any, learned: Any) -> Any:
        o = jp.attention(*x, impl=impl, **fixed, **learned)
        wide = o.astype(jnp.float32)
        weight = jnp.cos(jnp.arange(o.size, dtype=jnp.float32)).reshape(o.shape)
        return jnp.sum(wide * weight) + jnp.sum(wide**2), o

    with layout:
        grads, o = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(x, learned)
    return [np.asarray(leaf, np.float32) for leaf in (o, *jax.tree.leaves(grads))]


def layout_of(explicit: bool, **sizes: int) -> jp.Layout:
    spec = jp.MeshSpec(**sizes)
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    return jp.Layout(spec.build(jax.devices()[: spec.abstract().size], axis_type=kind), RULES)


def table(impls: list[str]) -> int:
    """Print the largest error of each implementation and case, over key heads and kinds of axes; the number of cases out of bounds."""
    print("| mask or option | dtype | " + " | ".join(impls) + " |")
    print("|---|---|" + "---:|" * len(impls))
    bad = 0
    for name, options in cases().items():
        worst = {(impl, half): 0.0 for impl in impls for half in (False, True)}
        for kv_heads in (4, 2, 1):
            shapes = ((BATCH, SEQ, HEADS, HEAD_DIM), *((BATCH, SEQ, kv_heads, HEAD_DIM),) * 2)
            rng = np.random.default_rng(0)
            x = tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)
            halves = tuple(jnp.asarray(a, jnp.bfloat16) for a in x)
            one = layout_of(False, data=1)
            want = run(one, "dense", x, options)
            near = run(one, "dense", tuple(np.asarray(a, np.float32) for a in halves), options)
            for impl in impls:
                for half, explicit in ((False, False), (False, True), (True, False)):
                    found = run(layout_of(explicit, **MESHES[impl]), impl, halves if half else x, options)
                    gaps = [
                        float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9))
                        for a, b in zip(found, near if half else want, strict=True)
                    ]
                    gap = max(g if np.isfinite(g) else np.inf for g in gaps)
                    worst[impl, half] = max(worst[impl, half], gap)
        for half in (False, True):
            row = [worst[impl, half] for impl in impls]
            bad += sum(gap > (HALF if half else EXACT) for gap in row)
            print(
                f"| {name} | {'bf16' if half else 'fp32'} | " + " | ".join(f"{gap:.1e}" for gap in row) + " |",
                flush=True,
            )
    print(f"{bad} out of bounds ({EXACT} in fp32, {HALF} in bf16)")
    return 1 if bad else 0
