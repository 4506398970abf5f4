"""Arrays of an attention case, in the order of their positions, and the inputs of the reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .reference import Array, Problem, visible

DTYPES: dict[str, Any] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def where_rule(q: Any, k: Any) -> Any:
    """A mask as a function of positions: every third pair is hidden."""
    return (q + k) % 3 != 0


def standard_slopes(heads: int) -> Array:
    """The slopes of Press et al. 2021, section 3 and its code, by recursion."""

    def slopes(n: int) -> list[float]:
        if n & (n - 1) == 0:
            return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
        below = 1 << (n.bit_length() - 1)
        return slopes(below) + slopes(2 * below)[::2][: n - below]

    return np.asarray(slopes(heads))


def arrays_of(case: Any) -> dict[str, Array]:
    """All arrays of a case, drawn from its seed."""
    rng, dtype = np.random.default_rng(case.seed), DTYPES[case.dtype]
    normal = lambda *shape: np.asarray(rng.normal(size=shape)).astype(dtype)
    heads = case.query_heads
    arrays = {
        "q": normal(case.rows, case.queries, heads, case.head_dim),
        "k": normal(case.rows, case.keys, case.kv_heads, case.head_dim),
        "v": normal(case.rows, case.keys, case.kv_heads, case.value_dim),
        "grad": normal(case.rows, case.queries, heads, case.value_dim),
        "sinks": normal(heads),
        "slopes": np.asarray(0.5 * rng.random(heads)).astype(dtype),
        "order": rng.permutation(case.keys),
    }
    shape = (case.rows if case.bias_batch else 1, heads if case.bias_heads else 1, case.queries, case.keys)
    arrays["bias"] = _bias(case.bias or "finite", shape, dtype, rng)
    arrays |= dict(zip(("q_segments", "k_segments"), _segments(case, rng), strict=True))
    if case.holes:
        for names, ids in (("qg", arrays["q_segments"]), ("kv", arrays["k_segments"])):
            for name in (n for n in ("q", "k", "v") if n in names):
                arrays[name] = np.where((ids < 0)[:, :, None, None], np.asarray(np.nan, dtype), arrays[name])
    return arrays


def _bias(kind: str, shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> Array:
    bias = rng.normal(size=shape).astype(dtype)
    low = -np.inf if kind.startswith("inf") else float(ml_dtypes.finfo(dtype).min)
    some, rows = rng.random(shape) < 0.3, rng.random((*shape[:3], 1)) < 0.4
    if kind.endswith("rows"):
        return np.where(rows, np.asarray(low, dtype), bias)
    return bias if kind == "finite" else np.where(some, np.asarray(low, dtype), bias)


def _segments(case: Any, rng: np.random.Generator) -> tuple[Array, Array]:
    """Ids of queries and keys: sorted documents, ids with padding below 0, or ids that are equal in 32 bits."""
    shared = case.queries == case.keys
    names = {"wide": [0, 1, 2**31, 2**32, 2**32 + 1], "padding": [-2, -1, 0, 1]}.get(case.segments or "", [0, 1, 2])
    ids = [np.sort(rng.choice(names, (case.rows, n)), axis=1).astype(np.int64) for n in (case.queries, case.keys)]
    return (ids[0], ids[0]) if shared else (ids[0], ids[1])


def positions_of(case: Any) -> tuple[Array, Array]:
    """The positions of queries and of keys; a given order permutes both."""
    return np.arange(case.queries) + (case.q_offset or 0), np.arange(case.keys)


def problem_of(case: Any, arrays: dict[str, Array], keep: Array | None) -> Problem:
    """The reference's inputs. It sees tokens in the order of their positions, whatever their order on devices."""
    at = positions_of(case)
    seen = visible(
        at,
        causal=case.causal is not False,
        window=case.window,
        prefix=case.prefix,
        chunk=case.chunk,
        where=where_rule(at[0][:, None], at[1][None, :]) if case.where else None,
        segments=(arrays["q_segments"], arrays["k_segments"]) if case.segments else None,
    )
    slopes = {"drawn": arrays["slopes"], "standard": standard_slopes(case.query_heads)}
    return Problem(
        q=arrays["q"],
        k=arrays["k"],
        v=arrays["v"],
        grad=arrays["grad"],
        visible=np.broadcast_to(seen, (case.rows, case.queries, case.keys)),
        distance=np.abs(at[0][:, None] - at[1][None, :]).astype(np.float64),
        scale=case.head_dim**-0.5 if case.scale is None else case.scale,
        softcap=case.softcap,
        bias=arrays["bias"] if case.bias else None,
        slopes=slopes[case.alibi] if case.alibi else None,
        sinks=arrays["sinks"] if case.sinks else None,
        keep=keep,
    )
