"""Calls of the library for an attention case."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.parallel.attention.split.token_order import permutation

from .attention_inputs import where_rule
from .reference import Array

RULES = jp.Rules(batch="data", seq=("context", "ulysses"), q_seq=None, heads="model", kv_heads="model", head_dim=None)
LEARNED = ("sinks", "slopes", "bias")


def layout_of(case: Any) -> jp.Layout:
    spec = jp.MeshSpec(**case.sizes)
    count = int(np.prod(list(case.sizes.values())))
    return jp.Layout(spec.build(jax.devices()[:count]), RULES)


def kept_by_one_device(case: Any) -> Array:
    """The factors that dropout applies to the weights, [batch, heads, queries, keys], drawn by ``dense`` on one
    device.

    With queries of zeros every key has the same weight, and with unit vectors as values the result shows each
    weight separately.
    """
    shape = (case.rows, case.queries, case.query_heads, 1)
    q, k = jnp.zeros(shape), jnp.zeros((case.rows, case.keys, case.query_heads, 1))
    v = jnp.broadcast_to(jnp.eye(case.keys)[None, :, None, :], (*k.shape[:3], case.keys))
    options: dict[str, Any] = {"impl": "dense", "mask": jp.Mask(causal=False), "dropout": case.dropout}
    options |= {"key": jax.random.key(case.seed), "q_offset": case.q_offset or 0}
    with jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), RULES):
        o = jax.jit(lambda q, k, v: jp.attention(q, k, v, **options))(q, k, v)
    return np.where(np.moveaxis(np.asarray(o), 1, 2) > 0, 1 / (1 - case.dropout), 0.0)


def options_of(case: Any, arrays: dict[str, Array]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the options into static ones and arrays; the arrays are traced arguments of the program."""
    mask = {name: getattr(case, name) for name in ("window", "chunk") if getattr(case, name) is not None}
    if isinstance(case.prefix, int):
        mask["prefix"] = case.prefix
    if case.where:
        mask["where"] = where_rule
    if mask and case.causal is not None:
        mask["causal"] = case.causal
    fixed: dict[str, Any] = {"mask": jp.Mask(**mask)} if mask else {}
    if not mask and case.causal is not None:
        fixed["causal"] = case.causal
    for name in ("softcap", "scale", "block", "kv_grad_dtype"):
        if getattr(case, name) is not None:
            fixed[name] = getattr(case, name)
    traced: dict[str, Any] = {}
    if isinstance(case.prefix, tuple):
        traced["prefix"] = np.asarray(case.prefix, np.int32)
    if case.q_offset is not None:
        (traced if case.traced_offset else fixed)["q_offset"] = (
            np.int32(case.q_offset) if case.traced_offset else case.q_offset
        )
    if case.keep_gathered_kv:
        fixed["keep_gathered_kv"] = True
    if case.dropout:
        fixed["dropout"], traced["key"] = case.dropout, jax.random.key(case.seed)
    if case.order in ("contiguous", "zigzag", "striped"):
        fixed["order"] = case.order
    elif case.order is not None:
        (fixed if case.order == "given" else traced)["order"] = arrays["order"].astype(np.int32)
    if case.segments:
        ids = (arrays["q_segments"], arrays["k_segments"])
        # Ids that do not fit 32 bits are passed as numpy arrays: jax would truncate traced ones.
        one = ids[0] if case.queries == case.keys else ids
        wide = case.segments == "wide"
        (fixed if wide else traced)["segment_ids"] = one if wide else jax.tree.map(lambda x: x.astype(np.int32), one)
    if case.alibi == "standard":
        fixed["alibi"] = True
    return fixed, traced


def placed(case: Any, arrays: dict[str, Array]) -> tuple[dict[str, Array], Any, Any]:
    """Reorder ``arrays`` by the case's token order; also returns the position of each query and key in that order."""
    ways = case.context if case.impl == "hybrid" else case.context * case.ulysses
    if case.order in (None, "contiguous"):
        return arrays, np.arange(case.queries), np.arange(case.keys)
    if case.order in ("given", "traced"):
        rows = columns = arrays["order"]
    else:
        rows, columns = (permutation(case.order, n, ways) for n in (case.queries, case.keys))
    new = dict(arrays)
    for name in ("q", "grad", "q_segments"):
        new[name] = arrays[name][:, rows]
    for name in ("k", "v", "k_segments"):
        new[name] = arrays[name][:, columns]
    new["bias"] = arrays["bias"][:, :, rows][..., columns]
    return new, rows, columns


def found_by(case: Any, arrays: dict[str, Array]) -> dict[str, Array]:
    """The result and the gradients as the library computes them in one compiled program, in the order of positions."""
    arrays, rows, columns = placed(case, arrays)
    fixed, traced = options_of(case, arrays)
    learned = {name: arrays[name] for name in LEARNED if _has(case, name)}
    call = {"global": _global, "local": _local, "manual": _manual}[case.form]

    def both(x: Any, learned: Any, traced: Any, grad: Any) -> Any:
        given = {("alibi" if name == "slopes" else name): value for name, value in learned.items()}
        o, back = jax.vjp(lambda x, given: call(case, x, fixed, traced | given), x, given)
        return o, back(grad)

    with layout_of(case):
        x = tuple(arrays[name] for name in "qkv")
        o, ((q, k, v), back) = jax.jit(both)(x, learned, traced, arrays["grad"])
    found = {"o": o, "q": q, "k": k, "v": v, **{("slopes" if n == "alibi" else n): g for n, g in back.items()}}
    host = {name: np.asarray(array) for name, array in found.items()}
    for name, order in (("o", rows), ("q", rows), ("k", columns), ("v", columns)):
        host[name] = host[name][:, np.argsort(order)]
    if "bias" in host:
        host["bias"] = host["bias"][:, :, np.argsort(rows)][..., np.argsort(columns)]
    return host


def _has(case: Any, name: str) -> bool:
    return {"sinks": case.sinks, "slopes": case.alibi == "drawn", "bias": case.bias is not None}[name]


def _dims(case: Any) -> dict[str, Any]:
    return {"q_dims": ("batch", "q_seq", "heads", "head_dim")} if case.impl == "split_kv" else {}


def _global(case: Any, x: Any, fixed: dict[str, Any], arrays: dict[str, Any]) -> jax.Array:
    q, k, v = x
    return jp.attention(q, k, v, impl=case.impl, pad=case.pad, **_dims(case), **fixed, **arrays)


def _manual(case: Any, x: Any, fixed: dict[str, Any], arrays: dict[str, Any]) -> jax.Array:
    """Call attention inside a shard_map over data, where each device has its own rows."""
    fixed, arrays = _with_segments(fixed, arrays)
    specs = {name: _rows(name, case) for name in arrays}
    call = lambda x, arrays: _global(case, x, fixed, arrays)
    row = P("data")
    return jax.shard_map(call, in_specs=((row,) * 3, specs), out_specs=row, axis_names={"data"}, check_vma=False)(
        x, arrays
    )


def _with_segments(fixed: dict[str, Any], arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Move segments to the arrays, which a shard_map splits."""
    names = ("segment_ids",)
    return {n: x for n, x in fixed.items() if n not in names}, arrays | {n: fixed[n] for n in names if n in fixed}


def _rows(name: str, case: Any) -> Any:
    """The PartitionSpec of an option over data."""
    split = name == "segment_ids" or (name == "prefix" and case.rows > 1) or (name == "bias" and case.bias_batch)
    return P("data") if split else P()


def _local(case: Any, x: Any, fixed: dict[str, Any], arrays: dict[str, Any]) -> jax.Array:
    """Call attention_local in a shard_map over all axes, with the sequence sharded over the axes of its impl."""
    fixed, arrays = _with_segments(fixed, arrays)
    axes = tuple(axis for axis in ("context", "ulysses") if case.sizes[axis] > 1)
    queries = None if case.impl == "split_kv" else axes
    ring = axes if case.impl != "hybrid" else ("context",)
    q, kv = P("data", queries), P("data", axes)
    specs: dict[str, Any] = {name: _rows(name, case) for name in arrays}
    if "segment_ids" in arrays:
        specs["segment_ids"] = (q, kv)
        ids = arrays["segment_ids"]
        arrays["segment_ids"] = ids if isinstance(ids, tuple) else (ids, ids)
    if "bias" in arrays:  # rows of the tokens that a device computes, all columns
        computed = None if case.impl in ("ulysses", "split_kv") else ring
        specs["bias"] = P("data" if case.bias_batch else None, None, computed, None)

    def call(x: Any, arrays: Any) -> jax.Array:
        q, k, v = x
        return jp.context.attention_local(q, k, v, impl=case.impl, axis=axes, **fixed, **arrays)

    return jax.shard_map(call, in_specs=((q, kv, kv), specs), out_specs=q, check_vma=False)(x, arrays)
