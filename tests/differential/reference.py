"""Softmax attention in fp64 numpy with gradients by hand. It shares no code with the library, only its documented
semantics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

HIDES = -1e30
"""A bias at or below this hides a key, as -inf does; users pass the smallest number of fp32, bf16 or fp64."""

type Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Problem:
    """Inputs of an attention.

    Attributes:
      q: [batch, queries, heads, head_dim]; k: [batch, keys, kv_heads, head_dim]; v: [batch, keys, kv_heads,
        value_dim].
      grad: the gradient of the result, [batch, queries, heads, value_dim].
      visible: [batch, queries, keys], whether each query sees each key.
      distance: [queries, keys], the distance of their positions, for ``slopes`` [heads].
      bias: [batch or 1, heads or 1, queries, keys]. sinks: [heads].
      keep: [batch, heads, queries, keys], the dropout factors of the weights.
    """

    q: Array
    k: Array
    v: Array
    grad: Array
    visible: Array
    distance: Array
    scale: float
    softcap: float | None = None
    bias: Array | None = None
    slopes: Array | None = None
    sinks: Array | None = None
    keep: Array | None = None


@dataclass(frozen=True)
class Solution:
    """The result and the gradients by name (``o``, ``q``, ``k``, ``v``, ``bias``, ``slopes``, ``sinks``), and for each
    the magnitude of the terms that are summed to its entries."""

    arrays: dict[str, Array]
    sizes: dict[str, float]


def solve(problem: Problem) -> Solution:
    """The result and all gradients. Inputs of queries and keys that are not visible may be NaN."""
    p = problem
    group = p.q.shape[2] // p.k.shape[2]
    seen = np.broadcast_to(p.visible[:, None], (p.q.shape[0], p.q.shape[2], *p.visible.shape[1:]))
    if p.bias is not None:
        seen = seen & (p.bias > HIDES)
    # A token that no other sees, or that sees none, counts as zeros: it may hold NaN.
    rows, columns = seen.any((1, 3)), seen.any((1, 2))
    clean = lambda x, some: np.where(some[:, :, None, None], x.astype(np.float64), 0)
    q, grad = clean(p.q, rows), clean(p.grad, rows)
    k, v = (np.repeat(clean(x, columns), group, 2) for x in (p.k, p.v))
    scores, slope_of_cap = _scores(p, q, k)
    weights, sunk = _softmax(np.where(seen, scores, -np.inf), p.sinks)
    keep = np.ones_like(weights) if p.keep is None else p.keep
    z = weights * keep

    def back(absolute: bool) -> dict[str, Array]:
        """The gradients; with ``absolute``, the sums of the absolute values of their terms."""
        size = np.abs if absolute else lambda x: x
        sign = 1 if absolute else -1
        dweights = np.einsum("bqhd,bkhd->bhqk", size(grad), size(v)) * keep
        inner = np.sum(weights * dweights, -1)
        dscores = weights * (dweights + sign * inner[..., None])
        capped = dscores * slope_of_cap
        found = {
            "o": np.einsum("bhqk,bkhd->bqhd", z, size(v)),
            "q": p.scale * np.einsum("bhqk,bkhd->bqhd", capped, size(k)),
            "k": _grouped(p.scale * np.einsum("bhqk,bqhd->bkhd", capped, size(q)), group),
            "v": _grouped(np.einsum("bhqk,bqhd->bkhd", z, size(grad)), group),
        }
        if p.bias is not None:
            summed = tuple(i for i in (0, 1) if p.bias.shape[i] == 1)
            found["bias"] = dscores.sum(summed, keepdims=True)
        if p.slopes is not None:
            found["slopes"] = sign * np.einsum("bhqk,qk->h", dscores, np.abs(p.distance))
        if p.sinks is not None:
            found["sinks"] = sign * np.sum(sunk * inner, (0, 2))
        return found

    return Solution(back(False), {name: float(np.abs(x).max(initial=0)) for name, x in back(True).items()})


def _scores(p: Problem, q: Array, k: Array) -> tuple[Array, Array | float]:
    """Scores [batch, heads, queries, keys], and the derivative of the soft cap."""
    scores, slope_of_cap = p.scale * np.einsum("bqhd,bkhd->bhqk", q, k), 1.0
    if p.softcap is not None:
        tanh = np.tanh(scores / p.softcap)
        scores, slope_of_cap = p.softcap * tanh, 1 - tanh * tanh
    if p.slopes is not None:
        scores = scores - p.slopes.astype(np.float64)[None, :, None, None] * np.abs(p.distance)
    if p.bias is not None:
        scores = scores + np.where(p.bias > HIDES, p.bias.astype(np.float64), 0)
    return scores, slope_of_cap


def _softmax(scores: Array, sinks: Array | None) -> tuple[Array, Array]:
    """Weights, zero where a row has no key, and the sink's share of each row."""
    sink = np.full(scores.shape[:3], -np.inf)
    if sinks is not None:
        sink = np.broadcast_to(sinks.astype(np.float64)[None, :, None], scores.shape[:3])
    greatest = np.maximum(scores.max(-1, initial=-np.inf), sink)
    greatest = np.where(np.isneginf(greatest), 0, greatest)
    weights, sunk = np.exp(scores - greatest[..., None]), np.exp(sink - greatest)
    total = weights.sum(-1) + sunk
    total = np.where(total > 0, total, 1)
    return weights / total[..., None], sunk / total


def _grouped(x: Array, group: int) -> Array:
    """Gradients of the key heads: the sums over the query heads that share each."""
    return x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3)


def visible(
    at: tuple[Array, Array],
    *,
    causal: bool,
    window: int | tuple[int | None, int | None] | None = None,
    prefix: Array | int | None = None,
    chunk: int | None = None,
    where: Array | None = None,
    segments: tuple[Array, Array] | None = None,
) -> Array:
    """[batch or 1, queries, keys]: the keys that each query sees, by the documentation of ``jaxpar.Mask``.

    Args:
      at: positions of queries and of keys.
      prefix: one length, or one for each sequence.
      where: [queries, keys], a further condition.
    """
    x, y = at[0][:, None].astype(object), at[1][None, :].astype(object)  # Python integers, which do not overflow
    seen = np.ones(np.broadcast_shapes(x.shape, y.shape), bool)
    before, behind = window if isinstance(window, tuple) else (None, None)
    if isinstance(window, int):
        before, behind = window - 1, window - 1
    if before is not None:
        seen &= (x - y <= before).astype(bool)
    if behind is not None:
        seen &= (y - x <= behind).astype(bool)
    if causal:
        seen &= (y <= x).astype(bool)
    seen = seen[None]
    if prefix is not None:
        lengths = np.atleast_1d(np.asarray(prefix, object))
        seen = seen | (y[None] < lengths[:, None, None]).astype(bool)
    if chunk is not None:
        seen = seen & (x // chunk == y // chunk).astype(bool)[None]
    if where is not None:
        seen = seen & where[None]
    if segments is not None:
        a, b = (ids.astype(object) for ids in segments)
        seen = seen & ((a[:, :, None] == b[:, None, :]) & (a[:, :, None] >= 0)).astype(bool)
    return seen
