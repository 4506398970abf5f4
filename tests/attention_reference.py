"""Reference attention in fp64 numpy, masks for Hypothesis, and every implementation as one compiled function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

import jaxpar as jp

RULES = jp.Rules(batch="data", seq=("context", "ulysses"), q_seq=None, heads=None, kv_heads=None, head_dim=None)
MESHES: dict[str, dict[str, int]] = {
    "dense": {"data": 1},
    "flash": {"data": 1},
    "gather": {"context": 2},
    "ring": {"context": 2},
    "ring_self_attention": {"context": 2},
    "ulysses": {"ulysses": 2},
    "hybrid": {"context": 2, "ulysses": 2},
    "split_kv": {"context": 2},
}
type Arrays = list[np.ndarray]


def random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def documents(seq: int) -> np.ndarray:
    """Segment ids of two packed sequences; the second half of the second is padding, so some queries see nothing."""
    ids = np.sort(np.random.default_rng(2).integers(0, 3, size=(2, seq)), axis=1).astype(np.int32)
    ids[1, seq // 2 :] = -1
    return ids


def masks(sizes: st.SearchStrategy[int], where: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[jp.Mask]:
    """Every valid mask: causal by default, causal explicitly, or of two sides."""
    small, rest = st.none() | st.just(0) | sizes, {"prefix": st.none() | sizes, "chunk": st.none() | sizes}
    rest["where"] = st.none() if where is None else where
    one_side = st.none() | sizes | st.tuples(small, st.just(0))
    two_sides = st.none() | sizes | st.tuples(small, small)
    causal = st.builds(jp.Mask, causal=st.none() | st.just(True), window=one_side, **rest)
    return causal | st.builds(jp.Mask, causal=st.just(False), window=two_sides, **rest)


def sees(mask: jp.Mask, q: np.ndarray, k: np.ndarray, prefix: Any = None) -> np.ndarray:
    """Whether each query at ``q`` sees each key at ``k`` by the mask's definition: [prefixes, queries, keys].

    The positions become Python integers, which do not overflow.
    """
    x, y = (np.asarray(at).astype(object) for at in (q[:, None], k[None]))
    before, behind = mask.window if isinstance(mask.window, tuple) else (None, None)
    if isinstance(mask.window, int):
        before = behind = mask.window - 1
    seen = np.ones((len(q), len(k)), bool)
    seen &= True if before is None else (x - y <= before).astype(bool)
    seen &= True if behind is None or mask.causal else (y - x <= behind).astype(bool)
    seen &= (y <= x).astype(bool) if mask.causal else True
    lengths = [mask.prefix] if prefix is None else np.atleast_1d(prefix).tolist()
    seen = np.stack([seen if n is None else seen | (y < n).astype(bool) for n in lengths])
    if mask.chunk is not None:
        seen = seen & (x // mask.chunk == y // mask.chunk).astype(bool)
    return seen if mask.where is None else seen & np.asarray(mask.where(q[:, None], k[None]))


def reference(x: Arrays, gradient: np.ndarray, seen: np.ndarray, bias: np.ndarray | None = None) -> Arrays:
    """The result, and the gradients of queries, keys, values and of a bias [.., queries, keys], in fp64.

    Args:
      x: queries [batch, seq, heads, head_dim], and keys and values of as many or fewer heads.
      seen: [batch or 1, queries, keys]. With a bias, scores of -1e30 or less are hidden, too.
    """
    q, k, v = (a.astype(np.float64) for a in x)
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(a, group, 2) for a in (k, v))
    scale = 1 / np.sqrt(q.shape[3])
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * scale + (0 if bias is None else bias.astype(np.float64))
    s = np.where(seen[:, None] & ~(s <= -1e30), s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    p /= np.where(total == 0, 1, total)
    g = gradient.astype(np.float64)
    dp = np.einsum("bqhd,bkhd->bhqk", g, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    grouped = lambda a: a.reshape(*a.shape[:2], -1, group, a.shape[3]).sum(3)
    found = [
        np.einsum("bhqk,bkhd->bqhd", p, v),
        np.einsum("bhqk,bkhd->bqhd", ds, k) * scale,
        grouped(np.einsum("bhqk,bqhd->bkhd", ds, q)) * scale,
        grouped(np.einsum("bhqk,bqhd->bkhd", p, g)),
    ]
    if bias is not None:
        folded = tuple(n for n in range(2) if bias.shape[n] == 1)
        found.append(ds.sum(folded, keepdims=True))
    return found


def layout(impl: str) -> jp.Layout:
    spec = jp.MeshSpec(**MESHES[impl])
    return jp.Layout(spec.build(jax.devices()[: spec.abstract().size]), RULES)


def compiled(impl: str, *, forward: bool = False, **fixed: Any) -> Callable[..., Arrays]:
    """A compiled function that returns attention's result and gradients, also of a bias.

    It takes the arrays, the result's gradient, and by name the options that may be traced.

    Args:
      forward: return only the result.
    """
    dims: Any = {"q_dims": ("batch", "q_seq", "heads", "head_dim")} if impl == "split_kv" else {}

    @jax.jit
    def both(x: Any, gradient: Any, learned: Any, traced: Any) -> Any:
        attend = lambda x, learned: jp.attention(
            *x,
            impl=impl,  # type: ignore[arg-type]
            **dims,
            **fixed,
            **learned,
            **traced,
        )
        if forward:
            return attend(x, learned)
        o, back = jax.vjp(attend, x, learned)
        return o, *back(gradient)

    def run(x: Arrays, gradient: np.ndarray, **options: Any) -> Arrays:
        learned = {name: options.pop(name) for name in ("bias",) if name in options}
        with layout(impl):
            return [np.asarray(leaf) for leaf in jax.tree.leaves(both(tuple(x), gradient, learned, options))]

    return run


def arrays(
    rng: np.random.Generator,
    queries: int,
    keys: int,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    dtype: Any = np.float32,
) -> tuple[Arrays, np.ndarray]:
    """Queries, keys, values with another head dim, and a gradient of the result."""
    shapes = (
        (batch, queries, heads, 4),
        (batch, keys, kv_heads, 4),
        (batch, keys, kv_heads, 3),
        (batch, queries, heads, 3),
    )
    *x, gradient = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    return x, gradient


def gap(got: Arrays, want: Arrays) -> float:
    """The largest difference, relative to each array's largest entry; NaN counts as infinite."""
    gaps = [float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)) for a, b in zip(got, want, strict=True)]
    return max(g if np.isfinite(g) else np.inf for g in gaps)


def assert_close(found: Arrays, want: Arrays, bound: float = 1e-5) -> None:
    """Compare relative to each array's largest entry, or to 1: gradients of a row with one key are only rounding."""
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=bound * max(float(np.abs(b).max()), 1))
