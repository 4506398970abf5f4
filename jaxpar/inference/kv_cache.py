"""A sharded key/value cache, optionally in int8. Each device writes and attends to its own slots in place.

Shape suffixes: L layers, B batch, H query heads, K key/value heads, G query heads per key head, T slots, D head dim, R
rows of a group.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.errors import LayoutError, listing
from jaxpar.inference.cached_model import CACHE_DIMS
from jaxpar.parallel.precision.int8 import Int8
from jaxpar.sharding.layout import current_layout, hint, to_spec
from jaxpar.sharding.resolve import Resolved
from jaxpar.sharding.rules import Axes
from jaxpar.training.model import tag

type CachePart = jax.Array | Int8
type CachedKeys = dict[str, CachePart]
"""``keys`` and ``values`` of a cache, or of one of its layers."""
Q_DIMS = ("batch", None, "heads", "head_dim")
"""Logical dims of the queries of one token."""
NEW_DIMS = ("batch", None, "kv_heads", "head_dim")
"""Logical dims of the new keys and values of one token."""


def init_cache(
    layers: int, batch: int, kv_heads: int, slots: int, head_dim: int, dtype: Any, *, value_dim: int | None = None
) -> dict[str, Any]:
    """Returns the shapes of ``keys`` and ``values`` with their logical dims, for :class:`jaxpar.inference.DecoderFns`.

    Args:
      layers, batch, kv_heads, slots, head_dim: the sizes of the dims, in this order.
      dtype: dtype of the cache. With int8, keys and values are each an :class:`jaxpar.inference.Int8` with a scale per
        token and head.
      value_dim: size of a head's value, if it is not ``head_dim``, that of its key.

    Returns:
      ``keys`` and ``values``: tagged shapes [layers, batch, kv_heads, slots, head_dim].

    >>> init_cache(layers=2, batch=8, kv_heads=4, slots=128, head_dim=64, dtype="bfloat16")["keys"].dims
    (None, 'batch', 'kv_heads', 'cache_seq', 'head_dim')
    """
    shape = (layers, batch, kv_heads, slots)

    def part(dim: int) -> Any:
        made = tag(jax.ShapeDtypeStruct((*shape, dim), jnp.dtype(dtype)), *CACHE_DIMS)
        if jnp.dtype(dtype) != jnp.int8:
            return made
        return Int8(made, tag(jax.ShapeDtypeStruct(shape, jnp.float32), *CACHE_DIMS[:-1]), (-1,))

    return {"keys": part(head_dim), "values": part(value_dim or head_dim)}


def fill_cache(x_BSKD: jax.Array, slots: int, dtype: Any = None) -> CachePart:
    """Returns one layer of a cache that holds the keys or values of full prompts.

    Args:
      x_BSKD: keys or values [batch, seq, kv_heads, head_dim].
      slots: cache slots per row; unused ones are 0.
      dtype: dtype of the cache; that of ``x_BSKD`` if not given.

    Returns:
      [batch, kv_heads, slots, head_dim]; for int8 an :class:`jaxpar.inference.Int8`.

    Raises:
      NoLayoutError: no layout is ambient.
      LayoutError: the rules cannot place the cache.

    >>> import jax.numpy as jnp
    >>> import jaxpar as jp
    >>> rules = jp.Rules(batch="data", kv_heads=None, cache_seq=None, head_dim=None)
    >>> with jp.Layout(jp.MeshSpec(data=-1).build(), rules):
    ...     fill_cache(jnp.ones((8, 3, 2, 4)), slots=16).shape
    (8, 2, 16, 4)
    """
    x_BKSD = jnp.swapaxes(x_BSKD[:, :slots], 1, 2)
    missing = slots - x_BKSD.shape[2]
    kept = _to_cache_dtype(jnp.pad(x_BKSD, ((0, 0), (0, 0), (0, missing), (0, 0))), dtype)
    return jax.tree.map(lambda x: hint(x, *CACHE_DIMS[1 : 1 + x.ndim]), kept)


def cached_attention(
    q_B1HD: jax.Array,
    k_B1KD: jax.Array,
    v_B1KD: jax.Array,
    cache: CachedKeys,
    layer: Any,
    at_B: jax.Array,
    group: tuple[Any, int] = (0, 1),
    *,
    window: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[jax.Array, CachedKeys]:
    """Returns a token's attention to all tokens up to its position, and the cache with its keys and values written.

    No device reads another device's slots. Where slots are sharded, each device attends to its own, and three small
    reductions merge the results by the sums of their softmax weights. The softmax is computed in at least fp32.

    Args:
      q_B1HD: queries [batch, 1, heads, head_dim].
      k_B1KD, v_B1KD: keys and values [batch, 1, kv_heads, head_dim]; the size of a value may differ from that of a key.
      cache: ``keys`` and ``values`` [layers, batch, kv_heads, slots, head_dim]: arrays, or
        :class:`jaxpar.inference.Int8` with a scale per token and head. With int8, new keys and values are rounded, and
        the scales multiply scores and probabilities.
      layer: index of the layer; it may be traced.
      at_B: position of each row's token [batch] int, which is its slot.
      group: (number, groups): the rows given are one group of the cache's rows, and row ``i`` is the cache's row
        ``i * groups + number``. The number may be traced.
      window: a token attends to this many tokens, itself and those before it; ``None`` for all. It may be traced.
      scale: factor of the scores; 1 / sqrt(head_dim) if not given.
      softcap: replaces a score s by softcap * tanh(s / softcap).

    Returns:
      The output [batch, 1, heads, head_dim of the values], and the updated cache.

    Raises:
      NoLayoutError: no layout is ambient.
      LayoutError: the mesh axes do not divide the cache or the heads; or all axes are manual, and queries and their
        keys are sharded over different devices.

    >>> import jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> rules = jp.Rules(batch="data", heads=None, kv_heads=None, cache_seq=None, head_dim=None)
    >>> cache = dict.fromkeys(("keys", "values"), jnp.zeros((1, 8, 2, 16, 4)))
    >>> token = jnp.ones((8, 1, 2, 4))
    >>> with jp.Layout(jp.MeshSpec(data=-1).build(), rules):
    ...     y, cache = jax.eval_shape(cached_attention, token, token, token, cache, 0, jnp.zeros(8, int))
    >>> y.shape, cache["keys"].shape
    ((8, 1, 2, 4), (1, 8, 2, 16, 4))
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
    _, rows, kv_heads, ring, dims = places[2].axes
    free = set(layout.mesh.axis_names) - set(jax.sharding.get_abstract_mesh().manual_axes)
    # A first_of rule may resolve a dim differently next to others. One token is smaller than all keys, so the queries
    # move to the rows and heads of their keys, and the results move back.
    q_rows, _, q_heads, _ = places[0].axes
    heads = kv_heads or (() if {*q_heads} & {*rows, *ring} else q_heads)
    moves = (q_rows, q_heads) != (rows, heads)
    if moves and not {*q_rows, *q_heads, *rows, *kv_heads} <= free:  # An enclosing shard_map made axes manual.
        what, sizes = ("heads", (q_B1HD.shape[2], k_B1KD.shape[2])) if q_heads != heads else ("rows", (at_B.size,) * 2)
        ours, theirs = (q_heads, kv_heads) if what == "heads" else (q_rows, rows)
        raise LayoutError(
            f"cached_attention: {sizes[0]} query {what} are sharded over {listing(ours)} and {sizes[1]} key {what} "
            f"over {listing(theirs)}. These axes are manual here, so a device lacks keys that its queries need. "
            "Remedy: use one rule for heads and kv_heads, or kv_heads: null."
        )
    spec = lambda *axes: PartitionSpec(*(own or None for own in axes))
    q_spec, kv_spec, at_spec = spec(rows, (), heads, dims), spec(rows, (), kv_heads, dims), spec(rows)
    cache_spec = to_spec(places[2])
    cache_specs = jax.tree.map(lambda x: PartitionSpec(*cache_spec[: x.ndim]), cache)
    q, k, v = hint(q_B1HD, *Q_DIMS), hint(k_B1KD, *NEW_DIMS), hint(v_B1KD, *NEW_DIMS)

    groups = group[1]
    score_scale = 1 / math.sqrt(q_B1HD.shape[3]) if scale is None else scale

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: CachedKeys,
        at_B: jax.Array,
        layer: Any,
        number: Any,
        window: Any = None,
    ) -> Any:
        first = jax.lax.axis_index(ring) * cache["keys"].shape[3] if ring else jnp.int32(0)
        new = (("keys", k), ("values", v))
        number = number if groups > 1 else 0  # A constant lets the compiler see that all rows are written.
        cache = {name: _written(cache[name], x, layer, at_B - first, (number, groups)) for name, x in new}
        mine = jax.tree.map(lambda x: _group(x, layer, number, groups), cache)
        if heads != kv_heads:  # Query heads are sharded, key heads replicated.
            mine = jax.tree.map(lambda x: _own_heads(x, q.shape[2], heads), mine)
        slots, last = jnp.arange(mine["keys"].shape[2]), (at_B - first)[:, None]
        visible = slots <= last if window is None else (slots <= last) & (slots > last - window)
        o = _attended(q, mine["keys"], mine["values"], visible, ring, scale=score_scale, softcap=softcap)
        return o, cache

    numbers = [layer, group[0], *(() if window is None else (window,))]
    args: Any = (q, k, v, cache, at_B, *(jnp.asarray(x, jnp.int32) for x in numbers))
    # Inside a pipeline stage some axes are already manual, and the cache holds only the stage's layers.
    if not free:
        return local(*args)
    out: tuple[jax.Array, CachedKeys] = jax.shard_map(
        local,
        in_specs=(q_spec, kv_spec, kv_spec, cache_specs, at_spec, *(PartitionSpec() for _ in numbers)),
        out_specs=(q_spec, cache_specs),
        axis_names=free,
        check_vma=False,
    )(*args)
    return (hint(out[0], *Q_DIMS), out[1]) if moves else out


def _group(x_LBKT: jax.Array, layer: Any, number: Any, groups: int) -> jax.Array:
    """Returns a group's rows of one layer."""
    if groups == 1:
        return jax.lax.dynamic_index_in_dim(x_LBKT, layer, 0, keepdims=False)
    x_LRGKT = x_LBKT.reshape(x_LBKT.shape[0], -1, groups, *x_LBKT.shape[2:])
    # dynamic_slice requires equal dtypes; Python ints are int64 under jax_enable_x64.
    start = [jnp.asarray(n, jnp.int32) for n in (layer, 0, number, *(0,) * (x_LBKT.ndim - 2))]
    sizes = (1, x_LRGKT.shape[1], 1, *x_LBKT.shape[2:])
    return jax.lax.dynamic_slice(x_LRGKT, start, sizes).reshape(-1, *x_LBKT.shape[2:])


def _to_cache_dtype(x: jax.Array, dtype: Any) -> CachePart:
    """Convert keys or values to the cache's ``dtype``."""
    if dtype is not None and jnp.dtype(dtype) == jnp.int8:
        return Int8.of(x, [-1])
    return x if dtype is None else x.astype(dtype)


def _written(
    cache_LBKTD: CachePart, x_B1KD: jax.Array, layer: Any, slot_B: jax.Array, group: tuple[Any, int]
) -> CachePart:
    """Write one slot of each row into a layer. Slots that belong to another device are dropped."""
    slots = cache_LBKTD.shape[3]
    # A negative index would count from the end.
    slot_B = jnp.where(slot_B < 0, slots, slot_B)
    rows_B = jnp.arange(slot_B.shape[0]) * group[1] + group[0]
    new = _to_cache_dtype(x_B1KD[:, 0], cache_LBKTD.dtype)
    return jax.tree.map(lambda old, x: old.at[layer, rows_B, :, slot_B].set(x, mode="drop"), cache_LBKTD, new)


def _attended(
    q_B1HD: jax.Array,
    keys: CachePart,
    values: CachePart,
    visible: jax.Array,
    ring: Axes,
    *,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """Attend to the ``visible`` local slots [batch, kv_heads, slots, head_dim], and merge over ``ring``."""
    wide = jnp.promote_types(q_B1HD.dtype, jnp.float32)
    q_BKGD = q_B1HD.reshape(q_B1HD.shape[0], keys.shape[1], -1, q_B1HD.shape[3])
    (k_BKTD, k_scales), (v_BKTD, v_scales) = (_split_scales(x, q_B1HD.dtype) for x in (keys, values))
    s = jnp.einsum("bkgd,bktd->bkgt", q_BKGD, k_BKTD, preferred_element_type=wide) * scale
    s = s if k_scales is None else s * k_scales
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    s = jnp.where(visible[:, None, None], s, -jnp.inf)
    # Unseen slots hold arbitrary numbers, and a weight of 0 times NaN is NaN.
    v_BKTD = jnp.where(visible[:, None, :, None], v_BKTD, jnp.zeros((), v_BKTD.dtype))
    v_scales = None if v_scales is None else jnp.where(visible[:, None, None], v_scales, 0)
    greatest = jnp.max(s, -1, keepdims=True)
    greatest = jax.lax.pmax(greatest, ring) if ring else greatest
    # A row that sees no slot has a maximum of -inf; its output is 0.
    greatest = jnp.where(jnp.isneginf(greatest), 0, greatest)
    p = jnp.exp(s - greatest)
    total = jnp.sum(p, -1, keepdims=True)
    p = p if v_scales is None else p * v_scales
    o = jnp.einsum("bkgt,bktd->bkgd", p.astype(v_BKTD.dtype), v_BKTD, preferred_element_type=wide)
    if ring:
        o, total = jax.lax.psum((o, total), ring)
    o = (o / jnp.where(total == 0, 1, total)).astype(q_B1HD.dtype)
    return o.reshape(*q_B1HD.shape[:3], o.shape[-1])


def _split_scales(x: CachePart, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """Returns the values in ``dtype`` and, for int8, the scale of each slot [batch, kv_heads, 1, slots]."""
    return (x.values.astype(dtype), x.scales[:, :, None]) if isinstance(x, Int8) else (x.astype(dtype), None)


def _own_heads(x_BKT: jax.Array, heads: int, axes: Axes) -> jax.Array:
    """Select from replicated key heads those that this device's ``heads`` query heads attend to.

    The result has one key head for each ``gcd(heads, group)`` neighbouring query heads.
    """
    group = heads * math.prod(current_layout().sizes[axis] for axis in axes) // x_BKT.shape[1]
    neighbours, first = math.gcd(heads, group), jax.lax.axis_index(axes) * heads
    if neighbours in (heads, group):
        return jax.lax.dynamic_slice_in_dim(x_BKT, first // group, heads // neighbours, 1)
    # A key head appears twice where one of its queries has neighbours of other key heads on both sides.
    numbers = (first + jnp.arange(0, heads, neighbours, dtype=jnp.int32)) // group
    return jnp.take(x_BKT, numbers, axis=1, mode="clip")
