"""``attention_local``: attention inside a ``shard_map``, and the code that it shares with ``attention``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import ConfigError, LayoutError, listing
from jaxpar.parallel.attention import dropout
from jaxpar.parallel.attention.kernels.select import find
from jaxpar.parallel.attention.options import Options, check_impl, check_order, read, read_keep, read_kv_grad_dtype
from jaxpar.parallel.attention.split import ulysses as exchange
from jaxpar.parallel.attention.split.partition import AttentionPlan, KeySource, side, turns_of
from jaxpar.parallel.attention.split.token_order import check, check_given
from jaxpar.parallel.attention.split.vjp import attend
from jaxpar.parallel.attention.tiled.padding import in_one_dtype, result_without_padding, without_padding
from jaxpar.parallel.attention.tiled.tile import AttentionArrays, varies_over
from jaxpar.parallel.manual_axes import check_manual, enclosing_manual_axes, manual_axes_of
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
            f"attention_local: impl {impl!r} is only valid for global arrays. Remedy: use one of {', '.join(KEYS)}, or "
            f"call jp.attention."
        )
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    check_manual(axes, "attention")
    swapped = (heads_axis,) if isinstance(heads_axis, str) else tuple(heads_axis)
    ring, heads = roles(impl, axes, swapped)
    check_order(impl, options, ring, heads)
    keep = read_keep(impl, options)
    exchange_size, ring_size = jax.lax.axis_size(heads), jax.lax.axis_size(ring)
    tokens = q_BSHD.shape[1] * exchange_size, k_BTKD.shape[1] * exchange_size * ring_size
    full_queries = impl == "split_kv"
    queries = tokens[0] * (1 if full_queries else ring_size)
    rules, array_options, offset = read(q_BSHD, k_BTKD, v_BTKD, options, tokens, queries)
    q, k, v = without_padding(in_one_dtype(q_BSHD, k_BTKD, v_BTKD), array_options.segments)
    plan = AttentionPlan(rules, KEYS[impl], ring, heads, offset=offset, keep=keep, full_queries=full_queries)
    if plan.keys != "rows" and not plan.full_queries:
        platform = platform_of(jax.sharding.get_abstract_mesh())
        lengths = tokens[0], tokens[1] if plan.keys == "gather" else tokens[1] // ring_size
        kernel = find(platform, (q, k, v), rules, array_options, offset, lengths=lengths, split=ring_size > 1).kernel
        # The tile kernel covers what splash does, and it also runs in a shard_map that the caller wrote.
        plan = replace(plan, engine="tpu" if kernel in ("splash", "tiles") else "jax")
    plan = ordered(plan, options, (q.shape[1], k.shape[1]))
    check_heads(q.shape[2], exchange_size, heads)
    slopes, bias = _own_heads(array_options.slopes, heads, 0), _own_heads(array_options.bias, heads, 1)
    array_options = array_options._replace(slopes=slopes, bias=bias)
    first_head: Any = 0
    if rules.dropout:
        array_options, first_head = _add_sequence_indices(q, array_options, axes, (batch_axis, q_heads_axis))
    o = compute(plan, q, k, v, array_options, first_head)
    return result_without_padding(o, array_options.segments, q_BSHD.dtype)


def _add_sequence_indices(
    q: jax.Array, array_options: AttentionArrays, seq: tuple[str, ...], given_axes: tuple[Any, Any]
) -> tuple[AttentionArrays, Any]:
    """Adds the global index of each sequence to the arrays; returns them and the index of the first head."""
    given = [None if x is None else (x,) if isinstance(x, str) else tuple(x) for x in given_axes]
    default_axes = (manual_axes_of("batch", dropout.ROWS), manual_axes_of("heads", dropout.HEADS))
    rows, heads = (
        tuple(axis for axis in dropout.axes_sharding(found, q) if axis not in seq) if named is None else named
        for named, found in zip(given, default_axes, strict=True)
    )
    check_manual((*rows, *heads), "attention")
    remedy = (
        "pass batch_axis=... and q_heads_axis=..., the axes that shard the batch and the query heads (() for none)."
    )
    # Devices along an axis over which the queries are replicated must drop the same weights.
    same = [axis for axis in enclosing_manual_axes() if not dropout.axes_sharding((axis,), q)]
    return dropout.add_global_indices(
        q, array_options, rows, heads, (*seq, *same), remedy=remedy if None in given else None
    )


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
            f"attention(impl='hybrid'): the sequence is sharded over {listing(axes)}, but it must be sharded over the "
            f"axes of a ring, followed by {listing(heads_axis)} to exchange heads. Remedy: use a rule seq=('context', "
            f"'ulysses') on a mesh with both axes, or impl='ring' or 'ulysses'."
        )
    return ring, heads


def ordered(plan: AttentionPlan, options: Options, lengths: tuple[int, int]) -> AttentionPlan:
    """Returns ``plan`` with the token order, the block size and the dtype of the gradients taken from ``options``.

    If the caller gives no order, a ring under a causal mask reorders the tokens into zigzag and back (``relay``).

    Args:
      plan: the plan.
      options: the caller's options.
      lengths: number of queries and of keys on one device, before heads are exchanged.

    Raises:
      ConfigError: the order or ``kv_grad_dtype`` is unknown.
      LayoutError: the order does not fit the number of tokens.
    """
    # CPU caches hold smaller tiles.
    default_block = plan.block // 2 if platform_of(jax.sharding.get_abstract_mesh()) == "cpu" else plan.block
    kv_grad_dtype = read_kv_grad_dtype(options.get("kv_grad_dtype"))
    plan = replace(plan, kv_grad_dtype=kv_grad_dtype, block=options.get("block") or default_block)
    requested, swapped = options.get("order"), jax.lax.axis_size(plan.heads)
    lengths = lengths[0] * swapped, lengths[1] * swapped
    causal = plan.rules.mask.sides == (None, 0) and plan.rules.mask.chunk is None
    tokens = ("the keys' sequence", lengths[1] * plan.ring_size), ("the queries' sequence", lengths[0] * plan.ring_size)
    checked = tokens[: 1 if plan.full_queries else 2][::-1]
    if requested is not None and not isinstance(requested, str):
        for what, length in checked:
            check_given(requested, length, what)
        # Prefixes and offsets given as arrays have no known values here, so every hop may be visible.
        known = isinstance(requested, np.ndarray) and all(options.get(x) is None for x in ("prefix", "q_offset"))
        if not known or plan.ring_size == 1 or plan.full_queries:
            return plan
        block = side(lengths[1], plan.block)
        return replace(plan, turns=turns_of(plan.rules.mask, requested, plan.ring_size, block, plan.offset))
    even = all(length % 2 == 0 for length in lengths)
    relay = requested is None and causal and even and plan.ring_size > 1 and not plan.full_queries
    order: Any = "zigzag" if relay else requested or "contiguous"
    for what, length in checked:
        check(order, length, plan.ring_size, what)
    return replace(plan, order=order, relay=relay)


def check_heads(heads: int, num_shards: int, axes: Sequence[str]) -> None:
    """Raises LayoutError if ``num_shards`` devices along ``axes`` cannot exchange ``heads`` query heads."""
    if heads % num_shards:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise LayoutError(
            f"attention: {heads} query heads cannot be exchanged among {num_shards} devices over {listing(axes)}. "
            f"Remedy: use a number of devices that divides them ({', '.join(map(str, fitting))}), or impl='ring', "
            f"which supports any number."
        )


def compute(
    plan: AttentionPlan, q: jax.Array, k: jax.Array, v: jax.Array, array_options: AttentionArrays, first_head: Any = 0
) -> jax.Array:
    """Returns the attention result of one device's shards.

    Args:
      plan: the plan.
      q, k, v: this device's shards ``[batch, tokens, heads or kv_heads, head_dim]``.
      array_options: array options, with slopes and bias of the heads that this device computes after the head exchange.
      first_head: global index of this device's first query head before the head exchange.

    Returns:
      The result ``[batch, tokens, heads, head_dim]``.
    """
    num_shards = jax.lax.axis_size(plan.heads)
    kv_heads = k.shape[2] * exchange.repeats(k.shape[2], num_shards) // num_shards
    extras = array_options.of_tiles(q.shape[2] // num_shards, kv_heads, first_head)
    q, k, v, segments, extras = _vary_alike(plan, (q, k, v, array_options.segments, extras))
    o, lse, lost = attend(plan, q, k, v, segments, extras)
    if plan.full_queries:
        o, lse = merged(o, lse, lost, plan.ring)
        o = o.astype(q.dtype)
    return o if array_options.sinks is None else with_sinks(o, lse, array_options.sinks)


def with_sinks(o_BSHD: jax.Array, lse_BSH: jax.Array, sinks_H: jax.Array) -> jax.Array:
    """Returns the result with each head's sink logit added to the softmax denominator."""
    # A row without keys has a log-sum-exp of -inf, which a sink of -inf would turn into NaN; its result stays 0.
    lse = jnp.where(jnp.isneginf(lse_BSH), 0, lse_BSH)
    return (o_BSHD * jax.nn.sigmoid(lse - sinks_H.astype(lse.dtype))[..., None]).astype(o_BSHD.dtype)


def merged(o: jax.Array, lse: jax.Array, lost: jax.Array | None, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Merges the partial results and log-sum-exps of replicated queries over ``axes``; differentiable by JAX.

    ``lost`` is what the rounding of ``lse`` lost, see :func:`jaxpar.parallel.attention.split.vjp.attend`.
    """
    greatest = jax.lax.pmax(jax.lax.stop_gradient(lse), axes)
    greatest = jnp.where(jnp.isneginf(greatest), 0, greatest)  # the query sees no key on any device
    weight = jnp.exp(lse - greatest if lost is None else lse - greatest + lost)
    total = jax.lax.psum(weight, axes)
    seen = total > 0
    some = jnp.where(seen, total, 1)
    o = jax.lax.psum(o * weight[..., None], axes) / some[..., None]
    return o, jnp.where(seen, greatest + jnp.log(some), -jnp.inf)


def _vary_alike(plan: AttentionPlan, tree: Any) -> Any:
    """Casts all arrays to vary over the same manual axes, as a ``shard_map`` with ``check_vma`` requires."""
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    axes = {axis for x in leaves for axis in varies_over(x)}
    if not axes:
        return tree
    axes |= {*plan.ring, *plan.heads}

    def vary(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        missing = tuple(sorted(axes - varies_over(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def _own_heads(x: Any, axes: tuple[str, ...], dim: int) -> Any:
    """Slices out the heads that this device computes after the head exchange, unless all heads share one entry."""
    if x is None or not axes or x.shape[dim] == 1:
        return x
    heads_per_device = x.shape[dim] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * heads_per_device, heads_per_device, dim)
