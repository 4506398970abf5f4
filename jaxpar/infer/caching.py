"""Keys and values of past tokens: written in place, each device its own slots, and attended to where they lie.

Shape suffixes: L layers, B batch, H query heads, K key/value heads, G query heads of a key head, T slots, D head dim.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import LayoutError, listing
from jaxpar.infer.cached import CACHE_DIMS
from jaxpar.layout import current_layout, hint, to_spec
from jaxpar.rules import Axes, Resolved

type Keys = dict[str, jax.Array]
"""``keys`` and ``values``."""
Q_DIMS = ("batch", None, "heads", "head_dim")
NEW_DIMS = ("batch", None, "kv_heads", "head_dim")


def filled(x_BSKD: jax.Array, slots: int) -> jax.Array:
    """Keys or values of whole prompts as one layer of a cache: [batch, kv_heads, slots, head_dim]."""
    x_BKSD = jnp.swapaxes(x_BSKD[:, :slots], 1, 2)
    missing = slots - x_BKSD.shape[2]
    return hint(jnp.pad(x_BKSD, ((0, 0), (0, 0), (0, missing), (0, 0))), *CACHE_DIMS[1:])


def cached_attention(
    q_B1HD: jax.Array, k_B1KD: jax.Array, v_B1KD: jax.Array, cache: Keys, layer: Any, at_B: jax.Array
) -> tuple[jax.Array, Keys]:
    """Write a token's keys and values into a layer of the cache, and attend from it to all up to its own position.

    No device sees another's slots: where they are split, each attends to its own, and results are merged by the sums of their weights
    (three small reductions). Softmax is in fp32 at least.

    Args:
      q_B1HD: queries [batch, 1, heads, head_dim]; k_B1KD, v_B1KD: keys and values [batch, 1, kv_heads, head_dim].
      cache: ``keys`` and ``values`` [layers, batch, kv_heads, slots, head_dim].
      layer: which of the layers; it may be traced.
      at_B: the position of each row's token, which is its slot.

    Returns:
      [batch, 1, heads, head_dim], and the cache.

    Raises:
      LayoutError: the cache or the heads do not divide among the mesh's axes.
    """
    layout = current_layout()
    places: list[Resolved] = [
        layout.resolve(dims, x.shape, dtype=x.dtype, path=path)
        for path, dims, x in (
            ("queries", Q_DIMS, q_B1HD),
            ("keys", NEW_DIMS, k_B1KD),
            ("cache/keys", CACHE_DIMS, cache["keys"]),
            ("positions", ("batch",), at_B),
        )
    ]
    problems = [text for place in places for text in place.problems]
    if problems:
        raise LayoutError(problems)
    ring, heads, kv_heads = places[2].axes[3], places[0].axes[2], places[1].axes[2]
    _check_heads(q_B1HD.shape[2], k_B1KD.shape[2], heads, kv_heads)
    q_spec, kv_spec, cache_spec, at_spec = (to_spec(place) for place in places)
    q, k, v = hint(q_B1HD, *Q_DIMS), hint(k_B1KD, *NEW_DIMS), hint(v_B1KD, *NEW_DIMS)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, cache: Keys, layer: Any, at_B: jax.Array) -> Any:
        first = jax.lax.axis_index(ring) * cache["keys"].shape[3] if ring else jnp.int32(0)
        cache = {name: _written(cache[name], x, layer, at_B - first) for name, x in (("keys", k), ("values", v))}
        mine = {name: jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False) for name, x in cache.items()}
        if heads != kv_heads:  # queries' heads are split, these are whole
            mine = {name: _own_heads(x, q.shape[2], heads) for name, x in mine.items()}
        return _attended(q, mine["keys"], mine["values"], at_B - first, ring), cache

    out: tuple[jax.Array, Keys] = jax.shard_map(
        local,
        in_specs=(q_spec, kv_spec, kv_spec, {"keys": cache_spec, "values": cache_spec}, None, at_spec),
        out_specs=(q_spec, {"keys": cache_spec, "values": cache_spec}),
        check_vma=False,
    )(q, k, v, cache, jnp.asarray(layer, jnp.int32), at_B)
    return out


def _written(cache_LBKTD: jax.Array, x_B1KD: jax.Array, layer: Any, slot_B: jax.Array) -> jax.Array:
    """A layer with one slot of each row written; a slot that is not here is another device's."""
    slots = cache_LBKTD.shape[3]
    # A negative index would count from the end.
    slot_B = jnp.where(slot_B < 0, slots, slot_B)
    rows_B = jnp.arange(slot_B.shape[0])
    x_BKD = x_B1KD[:, 0].astype(cache_LBKTD.dtype)
    return cache_LBKTD.at[layer, rows_B, :, slot_B].set(x_BKD, mode="drop")


def _attended(q_B1HD: jax.Array, k_BKTD: jax.Array, v_BKTD: jax.Array, last_B: jax.Array, ring: Axes) -> jax.Array:
    """Attention to the slots here up to ``last_B``, merged over ``ring``."""
    wide = jnp.promote_types(q_B1HD.dtype, jnp.float32)
    q_BKGD = q_B1HD.reshape(q_B1HD.shape[0], k_BKTD.shape[1], -1, q_B1HD.shape[3])
    k, v = (x.astype(q_B1HD.dtype) for x in (k_BKTD, v_BKTD))
    s = jnp.einsum("bkgd,bktd->bkgt", q_BKGD, k, preferred_element_type=wide) / math.sqrt(q_B1HD.shape[3])
    seen = jnp.arange(k_BKTD.shape[2]) <= last_B[:, None]
    s = jnp.where(seen[:, None, None], s, -jnp.inf)
    greatest = jnp.max(s, -1, keepdims=True)
    # Of all devices: one of them sees slot 0, so it is finite, and no weight is NaN.
    greatest = jax.lax.pmax(greatest, ring) if ring else greatest
    p = jnp.exp(s - greatest)
    total = jnp.sum(p, -1, keepdims=True)
    o = jnp.einsum("bkgt,bktd->bkgd", p.astype(v.dtype), v, preferred_element_type=wide)
    if ring:
        o, total = jax.lax.psum((o, total), ring)
    return (o / total).astype(q_B1HD.dtype).reshape(q_B1HD.shape)


def _own_heads(x_BKTD: jax.Array, heads: int, axes: Axes) -> jax.Array:
    """Of whole key heads those that this device's ``heads`` query heads look at."""
    group = heads * math.prod(current_layout().sizes[axis] for axis in axes) // x_BKTD.shape[1]
    first = jax.lax.axis_index(axes) * heads // group
    return jax.lax.dynamic_slice_in_dim(x_BKTD, first, max(heads // group, 1), 1)


def _check_heads(heads: int, kv_heads: int, axes: Axes, kv_axes: Axes) -> None:
    """Raises where a device's query heads would need key heads of other devices."""
    group, own = heads // kv_heads, heads // math.prod(current_layout().sizes[axis] for axis in axes)
    if axes != kv_axes and (kv_axes or (own % group and group % own)):
        raise LayoutError(
            f"cached_attention: {heads} query heads are split over {listing(axes)} and {kv_heads} key heads over {listing(kv_axes)}, "
            f"so that a device lacks keys of its queries. Remedy: one rule for heads and kv_heads, or kv_heads: null."
        )
