"""``attention_local``: attention inside a ``shard_map``, and the code that it shares with ``attention``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import ConfigError, LayoutError, listing
from jaxpar.parallel.attention.dropout import HEADS, ROWS, counted, manual_axes, manual_of, splitting
from jaxpar.parallel.attention.kernels.select import find
from jaxpar.parallel.attention.options import Options, check_impl, check_order, read, read_keep, read_kv_grad_dtype
from jaxpar.parallel.attention.padded_tokens import result_without_padding, without_padding
from jaxpar.parallel.attention.split import ulysses as exchange
from jaxpar.parallel.attention.split.partition import AttentionPlan, Backend, KeySource, side, turns_of
from jaxpar.parallel.attention.split.token_order import check, check_given
from jaxpar.parallel.attention.split.vjp import attend
from jaxpar.parallel.attention.tiled.tile import AttentionArrays, TileArrays, varies_over
from jaxpar.sharding.hardware.topology import platform_of

KEYS: dict[str, KeySource] = {
    "flash": "here",
    "gather": "gather",
    "ring": "ring",
    "ring_self_attention": "rows",
    "ulysses": "here",
    "hybrid": "ring",
    "split_kv": "here",
}
"""Maps an implementation to how a device gets the keys of other devices."""


def attention_local(
    q_BSHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    *,
    impl: Literal["flash", "gather", "ring", "ring_self_attention", "ulysses", "hybrid", "split_kv"] = "ring",
    axis: str | Sequence[str] = "context",
    heads_axis: str | Sequence[str] = "ulysses",
    batch_axis: str | Sequence[str] | None = None,
    q_heads_axis: str | Sequence[str] | None = None,
    **options: Unpack[Options],
) -> jax.Array:
    """Returns attention of one device's queries to all keys along ``axis``, inside the caller's ``shard_map``.

    Attention is causal unless ``causal=False``. Padded tokens never affect other tokens. A query that sees no key gets
    a result of 0 and gradients of 0.

    Args:
      q_BSHD: this device's queries ``[batch, tokens, heads, head_dim]``. With ``split_kv``, all queries, replicated.
      k_BTKD, v_BTKD: this device's keys and values ``[batch, tokens, kv_heads, head_dim]``.
      impl: see :func:`jaxpar.attention`.
      axis: the mesh axes that shard the sequence, major to minor.
      heads_axis: for ``hybrid``, those axes of ``axis`` that exchange sequence for heads. They must be the minor ones.
      batch_axis: the manual axes that shard the batch, major to minor. With ``dropout``, each device needs the global
        index of its sequences, so that it drops the same weights as a single device would. Default: the manual axes
        that the ambient rules give ``batch``, or ``replica``, ``data`` and ``expert`` without rules.
      q_heads_axis: the manual axes that shard the query heads, major to minor, for the same purpose. Default: the
        manual axes that the ambient rules give ``heads``, or ``model`` without rules.
      options: see :class:`jaxpar.parallel.attention.options.Options`. ``q_offset`` is the position of the first query
        of the global sequence. A bias has one row for each query that this device computes (after a head exchange, the
        queries of all participating devices) and one column for each key of the global sequence.

    Returns:
      The result for this device's queries, ``[batch, tokens, heads, head_dim]`` with the values' head_dim.

    Raises:
      LayoutError: heads or tokens do not divide, or an axis does not exist or is not manual here.
      ConfigError: an option is unknown. With ``dropout``: it is unknown which dim a manual axis shards, or the number
        of sequences is not a multiple of the number of batch rows on this device.

    >>> import jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> from jax.sharding import PartitionSpec as P
    >>> x = jnp.ones((1, 16, 2, 4))
    >>> with jax.set_mesh(jp.MeshSpec(context=-1).build()):
    ...     ring = lambda x: jp.context.attention_local(x, x, x, impl="ring", order="zigzag")
    ...     y = jax.jit(jax.shard_map(ring, in_specs=P(None, "context"), out_specs=P(None, "context")))(x)
    >>> bool(jnp.allclose(y, x))
    True
    """
    check_impl(impl)
    if impl not in KEYS:
        raise ConfigError(
            f"attention_local: impl is {impl!r}, which is for global arrays. Remedy: one of {', '.join(KEYS)}, or "
            f"jp.attention."
        )
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    _check_axes(axes)
    swapped = (heads_axis,) if isinstance(heads_axis, str) else tuple(heads_axis)
    ring, heads = roles(impl, axes, swapped)
    check_order(impl, options, ring, heads)
    keep = read_keep(impl, options)
    apart, around = exchange.ways_of(heads), exchange.ways_of(ring)
    tokens = q_BSHD.shape[1] * apart, k_BTKD.shape[1] * apart * around
    whole = impl == "split_kv"
    rules, beside, offset = read(q_BSHD, k_BTKD, v_BTKD, options, tokens, tokens[0] * (1 if whole else around))
    q_BSHD, k_BTKD, v_BTKD = without_padding((q_BSHD, k_BTKD, v_BTKD), beside.segments)
    way = AttentionPlan(rules, KEYS[impl], ring, heads, offset=offset, keep=keep, whole=whole)
    if way.keys != "rows" and not way.whole:
        lengths = (
            q_BSHD.shape[1] * apart,
            *(x.shape[1] * apart * (around if way.keys == "gather" else 1) for x in (k_BTKD, v_BTKD)),
        )
        way = replace(way, engine=_engine(way, (q_BSHD, k_BTKD, v_BTKD), lengths, beside, around > 1))
    way = ordered(way, options, (q_BSHD.shape[1], k_BTKD.shape[1]))
    check_heads(q_BSHD.shape[2], apart, heads)
    share = lambda x, dim: x if x is None or not heads or x.shape[dim] == 1 else _own_heads(x, heads, dim)
    beside = beside._replace(slopes=share(beside.slopes, 0), bias=share(beside.bias, 1))
    first_head: Any = 0
    if rules.dropout:
        beside, first_head = _numbered(q_BSHD, beside, axes, batch_axis, q_heads_axis)
    o, _ = compute(way, q_BSHD, k_BTKD, v_BTKD, beside, first_head)
    return result_without_padding(o, beside.segments)


def _numbered(
    q: jax.Array,
    beside: AttentionArrays,
    seq: tuple[str, ...],
    batch_axis: str | Sequence[str] | None,
    q_heads_axis: Any,
) -> tuple[AttentionArrays, Any]:
    """Adds the global index of each sequence to the arrays; returns them and the index of the first head."""
    given = [None if x is None else (x,) if isinstance(x, str) else tuple(x) for x in (batch_axis, q_heads_axis)]
    usual = (manual_of("batch", ROWS), manual_of("heads", HEADS))
    rows, heads = (
        tuple(axis for axis in splitting(found, q) if axis not in seq) if named is None else named
        for named, found in zip(given, usual, strict=True)
    )
    _check_axes((*rows, *heads))
    remedy = "batch_axis=... and q_heads_axis=..., the axes that split the batch and the query heads (() for none)."
    # Devices along an axis over which the queries are replicated must drop the same weights.
    same = [axis for axis in manual_axes() if not splitting((axis,), q)]
    sequences, head = counted(
        q,
        rows,
        heads,
        (*seq, *same),
        per_sequence=beside.key.ndim == 2,
        remedy=None if None not in given else remedy,
    )
    return beside._replace(sequences=sequences), head


def _engine(
    way: AttentionPlan, arrays: tuple[Any, ...], lengths: tuple[int, ...], beside: AttentionArrays, split: bool
) -> Backend:
    """Returns the backend that computes tiles of queries and keys of these lengths."""
    shapes = [
        jax.ShapeDtypeStruct((x.shape[0], n, *x.shape[2:]), x.dtype) for x, n in zip(arrays, lengths, strict=True)
    ]
    platform = platform_of(jax.sharding.get_abstract_mesh())
    found = find(platform, shapes, way.rules, beside, way.offset, split=split)
    # The tile kernel covers what splash does, and it also runs in a shard_map that the caller wrote.
    return "tpu" if found.kernel in ("splash", "tiles") else "jax"


def roles(impl: str, axes: tuple[str, ...], heads_axis: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Splits the axes that shard the sequence into the ring's axes and the axes that exchange heads.

    Args:
      impl: the implementation.
      axes: the mesh axes that shard the sequence, major to minor.
      heads_axis: the mesh axes that ``hybrid`` may exchange heads over.

    Raises:
      LayoutError: ``hybrid`` lacks an axis for the ring or for the heads, or the heads' axes are not the minor ones.
    """
    if impl in ("flash", "dense"):
        return (), ()
    if impl == "ulysses":
        return (), axes
    if impl != "hybrid":
        return axes, ()
    heads = tuple(axis for axis in axes if axis in heads_axis)
    ring = axes[: len(axes) - len(heads)]
    if not heads or not ring or axes != (*ring, *heads):
        raise LayoutError(
            f"attention(impl='hybrid'): the sequence is split over {listing(axes)}, but a ring's axes and then "
            f"{listing(heads_axis)} to exchange heads are wanted. Remedy: a rule seq=('context', 'ulysses') on a mesh "
            f"with both, or impl='ring' or 'ulysses'."
        )
    return ring, heads


def ordered(way: AttentionPlan, options: Options, lengths: tuple[int, int]) -> AttentionPlan:
    """Returns ``way`` with the token order, the block size and the dtype of the gradients taken from ``options``.

    If the caller gives no order, a ring under a causal mask reorders the tokens into zigzag and back (``relay``).

    Args:
      way: the plan.
      options: the caller's options.
      lengths: number of queries and of keys on one device, before heads are exchanged.

    Raises:
      ConfigError: the order or ``kv_grad_dtype`` is unknown.
      LayoutError: the order does not fit the number of tokens.
    """
    # CPU caches hold smaller tiles.
    usual = way.block // 2 if platform_of(jax.sharding.get_abstract_mesh()) == "cpu" else way.block
    way = replace(
        way, kv_grad_dtype=read_kv_grad_dtype(options.get("kv_grad_dtype")), block=options.get("block") or usual
    )
    asked, swapped = options.get("order"), exchange.ways_of(way.heads)
    lengths = lengths[0] * swapped, lengths[1] * swapped
    causal = way.rules.mask.sides == (None, 0) and way.rules.mask.chunk is None
    tokens = ("the keys' sequence", lengths[1] * way.ways), ("the queries' sequence", lengths[0] * way.ways)
    checked = tokens[: 1 if way.whole else 2][::-1]
    if asked is not None and not isinstance(asked, str):
        for what, length in checked:
            check_given(asked, length, what)
        # Prefixes and offsets given as arrays have no known values here, so every hop may be visible.
        known = isinstance(asked, np.ndarray) and all(options.get(x) is None for x in ("prefix", "q_offset"))
        if not known or way.ways == 1 or way.whole:
            return way
        return replace(way, turns=turns_of(way.rules.mask, asked, way.ways, side(lengths[1], way.block), way.offset))
    relay = asked is None and not way.whole and way.ways > 1 and causal and all(length % 2 == 0 for length in lengths)
    order: Any = "zigzag" if relay else asked or "contiguous"
    for what, length in checked:
        check(order, length, way.ways, what)
    return replace(way, order=order, relay=relay)


def check_heads(heads: int, ways: int, axes: Sequence[str]) -> None:
    """Raises LayoutError if ``ways`` devices along ``axes`` cannot exchange ``heads`` query heads."""
    if heads % ways:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise LayoutError(
            f"attention: {heads} query heads cannot be exchanged among {ways} devices over {listing(axes)}. Remedy: as "
            f"many devices as divide them ({', '.join(map(str, fitting))}), or impl='ring', which takes any."
        )


def compute(
    way: AttentionPlan, q: jax.Array, k: jax.Array, v: jax.Array, beside: AttentionArrays, first_head: Any = 0
) -> tuple[jax.Array, jax.Array]:
    """Returns the attention result of one device's shards and its log-sum-exp.

    Args:
      way: the plan.
      q, k, v: this device's shards ``[batch, tokens, heads or kv_heads, head_dim]``.
      beside: array options, with slopes and bias of the heads that this device computes after the head exchange.
      first_head: global index of this device's first query head before the head exchange.

    Returns:
      The result ``[batch, tokens, heads, head_dim]`` and the log-sum-exp of the scores ``[batch, tokens, heads]``.
    """
    ways = exchange.ways_of(way.heads)
    kv_heads = k.shape[2] * exchange.repeats(k.shape[2], ways) // ways
    shape = (kv_heads, q.shape[2] // ways // kv_heads)
    bias, slopes = beside.bias, beside.slopes
    if bias is not None:
        bias = bias.reshape(bias.shape[0], *((1, 1) if bias.shape[1] == 1 else shape), *bias.shape[2:])
    slopes = None if slopes is None else slopes.reshape(shape)
    numbers = (beside.sequences, first_head) if way.rules.dropout else None
    extras = TileArrays(bias, slopes, beside.prefix, beside.key, numbers, beside.offset, beside.order)
    q, k, v, segments, extras = _alike(way, (q, k, v, beside.segments, extras))
    dtype = q.dtype
    o, lse = attend(way, q, k, v, segments, extras)
    if way.whole:
        o, lse = merged(o, lse, way.ring)
        o = o.astype(dtype)
    if beside.sinks is not None:
        o, lse = with_sinks(o, lse, beside.sinks), jnp.logaddexp(lse, beside.sinks.astype(lse.dtype))
    return o, lse


def with_sinks(o_BSHD: jax.Array, lse_BSH: jax.Array, sinks_H: jax.Array) -> jax.Array:
    """Returns the result with each head's sink logit added to the softmax denominator."""
    # A row without keys has a log-sum-exp of -inf, which a sink of -inf would turn into NaN; its result stays 0.
    lse = jnp.where(jnp.isneginf(lse_BSH), 0, lse_BSH)
    return (o_BSHD * jax.nn.sigmoid(lse - sinks_H.astype(lse.dtype))[..., None]).astype(o_BSHD.dtype)


def merged(o: jax.Array, lse: jax.Array, axes: Sequence[str]) -> tuple[jax.Array, jax.Array]:
    """Merges the partial results and log-sum-exps of replicated queries over ``axes``; differentiable by JAX."""
    greatest = jax.lax.pmax(jax.lax.stop_gradient(lse), tuple(axes))
    greatest = jnp.where(jnp.isneginf(greatest), 0, greatest)  # the query sees no key on any device
    weight = jnp.exp(lse - greatest)
    total = jax.lax.psum(weight, tuple(axes))
    seen = total > 0
    some = jnp.where(seen, total, 1)
    o = jax.lax.psum(o * weight[..., None], tuple(axes)) / some[..., None]
    return o, jnp.where(seen, greatest + jnp.log(some), -jnp.inf)


def _alike(way: AttentionPlan, tree: Any) -> Any:
    """Casts all arrays to vary over the same manual axes, as a ``shard_map`` with ``check_vma`` requires."""
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    axes = {axis for x in leaves for axis in varies_over(x)}
    if not axes:
        return tree
    axes |= {*way.ring, *way.heads}

    def vary(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        missing = tuple(sorted(axes - varies_over(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def _own_heads(x: jax.Array, axes: Sequence[str], dim: int) -> jax.Array:
    """Slices out the heads that this device computes after the head exchange."""
    each = x.shape[dim] // exchange.ways_of(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(tuple(axes)) * each, each, dim)


def _check_axes(axes: Sequence[str]) -> None:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    missing = [axis for axis in axes if axis not in manual]
    if missing:
        there = listing(manual) if manual else "none"
        raise LayoutError(
            f"attention_local: {listing(missing)} is no manual axis here; manual are: {there}. Remedy: call it inside "
            f"of jax.shard_map over {listing(axes)}, or jp.attention outside of one."
        )
