"""Attention to local, gathered or ring-permuted keys and values (ring: Liu et al. 2023, arXiv:2310.01889).

All arrays are in blocks, see :mod:`jaxpar.parallel.attention.tiled.blockwise`. In the forward pass a ring of n devices
sends keys and values n - 1 times. In the backward pass it sends them n - 1 times again, and their gradients follow one
hop behind: a device adds the gradients that arrive to those that it computed in the meantime.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.attention.split.partition import AttentionPlan, SequenceSplit
from jaxpar.parallel.attention.tiled import blockwise, tile
from jaxpar.parallel.attention.tiled.blockwise import Operands, initial_sums, no_gradients, zeros
from jaxpar.parallel.attention.tiled.tile import FAR, Gradients, Rows, Sums, Tokens
from jaxpar.parallel.collectives.hierarchical import gather_local, scatter_local
from jaxpar.utils.arrays import accumulator

UNROLLED = 3
"""The maximum number of unrolled hops. A loop takes half the memory, and its program does not grow with the ring."""


def gathered(split: SequenceSplit, x: jax.Array) -> jax.Array:
    """All-gathers keys or values over the ring axes."""
    return gather_local(x, split.plan.ring, dim=0)


def _gathered_if_needed(split: SequenceSplit, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, int | None]:
    """Returns the keys and values that the local queries attend to, and their distance (``None`` for all devices')."""
    if split.plan.keys == "here":
        return k, v, 0
    return (k, v, None) if split.plan.keep else (gathered(split, k), gathered(split, v), None)


def one_step_forward(split: SequenceSplit, q: jax.Array, k: jax.Array, v: jax.Array) -> Sums:
    """Returns the softmax sums over the local keys; or over all keys (``gather``), gathered unless ``plan.keep``."""
    k, v, distance = _gathered_if_needed(split, k, v)
    at, extras = (split.queries(), split.keys(distance)), split.extras_of(distance)
    return forward(split.plan, Operands(q, k, v, at, extras, split.expected(distance)), initial_sums(q, v))


def one_step_backward(split: SequenceSplit, q: jax.Array, k: jax.Array, v: jax.Array, rows: Rows) -> Gradients:
    k, v, distance = _gathered_if_needed(split, k, v)
    extras = split.extras_of(distance)
    at, none = (split.queries(), split.keys(distance)), no_gradients(q, k, v, extras)
    found = backward(split.plan, Operands(q, k, v, at, extras, split.expected(distance)), rows, none)
    if split.extras.bias is not None:  # the gradient of the full bias instead of that of the columns in use
        found = found._replace(bias=split.put_bias(zeros(split.extras.bias, found.bias.dtype), found.bias, distance))
    if split.plan.keys == "here":
        return found

    def scatter_back(x: jax.Array) -> jax.Array:
        # Scatter flat rows: for blocks the TPU compiler emits an all-reduce and a slice.
        rows = scatter_local(_cast_kv_grads(split, x).reshape(-1, x.shape[-1]), split.plan.ring, dim=0)
        return rows.reshape(-1, *x.shape[1:]).astype(x.dtype)

    return found._replace(k=scatter_back(found.k), v=scatter_back(found.v))


def ring_forward(split: SequenceSplit, q: jax.Array, k: jax.Array, v: jax.Array) -> Sums:
    """Returns the softmax sums of the local queries over all keys, which the ring passes from device to device."""
    at = split.queries()

    def hop_step(carry: tuple[Sums, Any], distance: Any, before: int, after: int) -> tuple[Sums, Any]:
        del before
        sums, keys = carry
        next_keys = _permute(split, keys, after) if after else None
        places, extras = (at, split.keys(distance)), split.extras_of(distance)
        operands = Operands(q, keys[0], keys[1], places, extras, split.expected(distance))
        return forward(split.plan, operands, sums), next_keys

    # Unroll the first hop: only it has a causal diagonal, so its number of tiles differs from all others.
    return _fold_hops(split.hops(), hop_step, (initial_sums(q, v), (k, v)), 1)[0]


def ring_backward(split: SequenceSplit, q: jax.Array, k: jax.Array, v: jax.Array, rows: Rows) -> Gradients:
    at, hops = split.queries(), split.hops()

    def hop_step(carry: Any, distance: Any, before: int, after: int) -> Any:
        sums, keys, found = carry
        if after and isinstance(distance, int) and distance:
            keys = not_before(split.plan, keys, sums.q)
        next_keys = _permute(split, keys, after) if after else None
        # Gradients of these keys from the previous devices. The transfer overlaps with this device's compute.
        arrived = None if found is None else _permute(split, _cast_kv_grads(split, found), before)
        extras = split.extras_of(distance)
        begin = not_before(split.plan, no_gradients(q, keys[0], keys[1], extras), sums.q)
        begin = begin._replace(q=sums.q, slopes=sums.slopes)
        operands = Operands(q, keys[0], keys[1], (at, split.keys(distance)), extras, split.expected(distance))
        new = backward(split.plan, operands, rows, begin)
        bias = None if sums.bias is None else split.put_bias(sums.bias, new.bias, distance)
        found = new.k, new.v
        if arrived is not None:
            found = jax.tree.map(lambda x, y: x + y.astype(x.dtype), found, arrived)
        return sums._replace(q=new.q, bias=bias, slopes=new.slopes), next_keys, found

    gaps = [b - a for a, b in itertools.pairwise(hops)]
    none = not_before(split.plan, no_gradients(q, k, v, split.extras), rows.delta)
    sums, keys, own = hop_step((none, (k, v), None), 0, 0, gaps[0] if gaps else 0)
    if gaps:
        sums, keys, found = _fold_hops(hops[1:], hop_step, (sums, keys, None), 1)
        arrived = _permute(split, _cast_kv_grads(split, found), split.plan.ring_size - hops[-1])
        own = jax.tree.map(lambda x, y: x + y.astype(x.dtype), own, arrived)
    return sums._replace(k=own[0], v=own[1])


def rows_forward(split: SequenceSplit, q: jax.Array, k: jax.Array, v: jax.Array) -> Sums:
    """Passes all keys round to compute full rows of scores, then all values (Li et al. 2021, arXiv:2105.13120)."""
    at, rules, hops = split.queries(), split.plan.rules, split.hops()
    gaps = [*(b - a for a, b in itertools.pairwise(hops)), 0]
    places = [(_one(at), _one(split.keys(distance))) for distance in hops]
    extras = [split.extras_of(distance) for distance in hops]
    rows, keys = [], k
    for n, gap in enumerate(gaps):
        next_keys = _permute(split, keys, gap) if gap else keys
        s, _ = tile.scores(rules, q[0, 0], keys[0, 0], places[n], extras[n])
        rows.append(jnp.where(tile.seen(rules, places[n], extras[n]), s, FAR))
        keys = next_keys
    # Clamp to FAR: a row without keys may be all -inf, which would give NaN.
    greatest = functools.reduce(jnp.maximum, [jnp.maximum(jnp.max(row, -1), FAR) for row in rows])
    rows = [jnp.where(row <= FAR, 0, jnp.exp(row - greatest[..., None])) for row in rows]
    sums = initial_sums(q[0, 0], v)._replace(
        greatest=greatest, weights=functools.reduce(jnp.add, [jnp.sum(row, -1) for row in rows])
    )
    values = v
    for n, gap in enumerate(gaps):
        next_values = _permute(split, values, gap) if gap else values
        p = rows[n]
        if rules.dropout:
            p = p * tile.kept(rules, places[n], extras[n], p.shape).astype(p.dtype)
        added = jnp.einsum("bkgql,bkld->bkgqd", p.astype(v.dtype), values[0, 0], preferred_element_type=accumulator(v))
        sums, values = sums._replace(values=sums.values + added), next_values
    return jax.tree.map(lambda x: x[None, None], sums)


def _fold_hops(hops: Sequence[int], hop_step: Callable[..., Any], carry: Any, written: int) -> Any:
    """Folds ``hop_step(carry, hop, steps since the last hop, steps to the next)`` over all hops.

    With many hops, the first ``written`` and the last are unrolled, and a loop runs the others.
    """
    gaps = [0, *(b - a for a, b in itertools.pairwise(hops)), 0]
    looped = len(hops) > UNROLLED and set(gaps[1:-1]) == {1}
    for n in range(written if looped else len(hops) - 1):
        carry = hop_step(carry, hops[n], gaps[n], gaps[n + 1])
    if looped:
        carry = jax.lax.fori_loop(hops[written], hops[-1], lambda hop, carry: hop_step(carry, hop, 1, 1), carry)
    return hop_step(carry, hops[-1], gaps[-2], 0)


def _one(tokens: Tokens) -> Tokens:
    """Returns the only block."""
    return jax.tree.map(lambda x: jnp.asarray(x)[0], tokens)


def _permute(split: SequenceSplit, tree: Any, steps: int) -> Any:
    """Returns the arrays of the device ``steps`` places before in the ring (a ``ppermute``)."""
    ring_size = split.plan.ring_size
    pairs = [(i, (i + steps) % ring_size) for i in range(ring_size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, split.plan.ring, pairs), tree)


def _cast_kv_grads(split: SequenceSplit, tree: Any) -> Any:
    dtype = split.plan.kv_grad_dtype
    return tree if dtype is None else jax.tree.map(lambda x: x.astype(dtype), tree)


def forward(plan: AttentionPlan, *arguments: Any) -> Sums:
    """Calls :func:`jaxpar.parallel.attention.tiled.blockwise.forward`, or its TPU kernel, by ``plan.engine``."""
    if plan.engine == "jax":
        return blockwise.forward(plan.rules, *arguments)
    # Imported lazily: the import takes a second, and only TPU programs need it.
    from jaxpar.parallel.attention.tiled import tpu_pallas

    return tpu_pallas.forward(plan.rules, *arguments, mode=plan.engine)


def backward(plan: AttentionPlan, *arguments: Any) -> Gradients:
    """Calls :func:`jaxpar.parallel.attention.tiled.blockwise.backward`, or its TPU kernel, by ``plan.engine``."""
    if plan.engine == "jax":
        return blockwise.backward(plan.rules, *arguments)
    from jaxpar.parallel.attention.tiled import tpu_pallas

    return tpu_pallas.backward(plan.rules, *arguments, mode=plan.engine)


def not_before[T](plan: AttentionPlan, x: T, results: Any) -> T:
    """Delays ``x`` until ``results`` exist, in plain JAX only: the TPU compiler already schedules by memory."""
    return blockwise.not_before(x, results) if plan.engine == "jax" else x
