"""``attention`` on global arrays: picks the implementation and the kernel, and runs them under the ambient layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxpar.parallel.attention.attention_local import KEYS, check_heads, compute, ordered, roles, with_sinks
from jaxpar.parallel.attention.cost_model import AttentionRequest, Spread
from jaxpar.parallel.attention.dropout import counted, manual_of
from jaxpar.parallel.attention.kernels.dense import dense
from jaxpar.parallel.attention.kernels.gpu_flash import mha
from jaxpar.parallel.attention.kernels.select import Kernel, KernelChoice, find
from jaxpar.parallel.attention.mask import Mask
from jaxpar.parallel.attention.options import Impl, Options, check_impl, check_order, read, read_keep
from jaxpar.parallel.attention.padded_tokens import Arrays, result_without_padding, without_padding
from jaxpar.parallel.attention.select import Choice, choice, observed
from jaxpar.parallel.attention.split import ulysses as exchange
from jaxpar.parallel.attention.split.partition import AttentionPlan, Backend
from jaxpar.parallel.attention.split.token_order import check_given, permutation
from jaxpar.parallel.attention.tiled.padding import SAVED
from jaxpar.parallel.attention.tiled.tile import AttentionArrays, Segments, TileArrays, TileSpec
from jaxpar.sharding.hardware.links import links_of
from jaxpar.sharding.hardware.topology import platform_of
from jaxpar.sharding.layout import call_site, current_layout, hint, with_sharding
from jaxpar.sharding.resolve import resolve
from jaxpar.sharding.rules import Axes

Q_DIMS = ("batch", "seq", "heads", "head_dim")
KV_DIMS = ("batch", "seq", "kv_heads", "head_dim")
WHOLE = ("splash", "mha")
"""Kernels that require the full sequence on every device."""

type Dims = Sequence[str | None]


def attention(
    q_BSHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    *,
    impl: Impl = "auto",
    q_dims: Sequence[str | None] = Q_DIMS,
    kv_dims: Sequence[str | None] = KV_DIMS,
    heads_axis: str | Sequence[str] = "ulysses",
    pad: bool = False,
    **options: Unpack[Options],
) -> jax.Array:
    """Returns the softmax attention of global arrays, computed under the ambient layout.

    Attention is causal unless ``causal=False``, and scores are scaled by 1 / sqrt(head_dim) unless ``scale`` is given.
    Every implementation supports every mask, every option and grouped key heads, and returns the same result;
    docs/measured/attention.md has the table. Padded tokens never affect other tokens. A query that sees no key gets a
    result of 0 and gradients of 0.

    Args:
      q_BSHD: queries ``[batch, seq, heads, head_dim]``.
      k_BTKD, v_BTKD: keys and values ``[batch, seq, kv_heads, head_dim]``. ``heads`` is a multiple of ``kv_heads``. The
        values may have another head_dim than the queries and keys.
      impl: the implementation:

        * ``dense`` builds the scores ``[seq, seq]``.
        * ``flash`` requires an unsharded sequence and never builds the scores. It runs a TPU or GPU kernel if one
          supports the mask and the options, and tiles in plain JAX otherwise.
        * ``gather`` all-gathers the keys and values of a sharded sequence.
        * ``ring`` passes them from neighbour to neighbour (Liu et al. 2023, arXiv:2310.01889).
        * ``ring_self_attention`` passes first all keys and then all values, and holds complete rows of scores (Li et
          al. 2021, arXiv:2105.13120).
        * ``ulysses`` exchanges sequence shards for head shards (Jacobs et al. 2023, arXiv:2309.14509).
        * ``hybrid`` exchanges heads over ``heads_axis`` and runs a ring over the other sequence axes.
        * ``split_kv`` is for decoding: the queries are replicated, the keys are sharded, and the devices merge their
          partial results.
        * ``auto`` picks the fastest of these on the mesh's devices by a roofline model. If the device's figures are
          unknown, it picks the one that sends the fewest bytes. :func:`jaxpar.explain` reports the choice and the
          reason.
      q_dims: logical dims of the queries.
      kv_dims: logical dims of the keys and values.
      heads_axis: the mesh axes over which ``hybrid`` and ``auto`` may exchange heads.
      pad: pad a sequence that its mesh axes do not divide with masked tokens, and slice the result back.
      options: see :class:`jaxpar.parallel.attention.options.Options`.

    Returns:
      The result ``[batch, seq, heads, head_dim]`` with the values' head_dim, in the queries' dtype and sharded as the
      queries.

    Raises:
      LayoutError: sizes, dims or heads do not fit the layout or each other, or a position or segment id exceeds int32.
      ConfigError: an option is unknown or out of range.
    """
    check_impl(impl)
    keep = read_keep(impl, options)
    rules, beside, offset = read(q_BSHD, k_BTKD, v_BTKD, options)
    swapped = (heads_axis,) if isinstance(heads_axis, str) else tuple(heads_axis)
    rows, arrays = q_BSHD.shape[1], (q_BSHD, k_BTKD, v_BTKD)
    given = beside.segments is not None
    if pad:
        arrays, beside = _padded(arrays, beside, (q_dims, kv_dims))
        if beside.order is not None:
            options["order"] = beside.order
    q, k, v = (hint(x, *dims) for x, dims in zip(arrays, (q_dims, kv_dims, kv_dims), strict=True))
    spread = Spread(_axes(q, q_dims), _axes(k, kv_dims))
    beside, first_head = _numbered(q, beside, q_dims)
    # Tokens added by ``pad`` are 0 already, so only the caller's own segments need zeroing.
    segments = _as_tokens_lie(beside.segments, spread) if given else None
    q, k, v = without_padding((q, k, v), segments)
    kernel = functools.partial(_kernel, (q, k, v), (rules, beside, offset), spread.q[1], swapped)
    asks = AttentionRequest(rules.mask, "given" if beside.order is not None else options.get("order"))
    asks = replace(
        asks,
        kv_grad_dtype=options.get("kv_grad_dtype"),
        offset=offset if beside.offset is None else k.shape[1] - q.shape[1],
    )
    asks = replace(asks, hops=beside.prefix is None and beside.offset is None and beside.order is None)
    layout = current_layout()
    links = links_of(layout.mesh) if impl == "auto" else None
    picked = choice(impl, q, k, spread, layout.sizes, heads_axis=swapped, kernel=kernel, asks=asks, links=links)
    if impl == "auto":
        observed(call_site, q, k, picked)
    if picked.impl == "dense":
        plain = functools.partial(
            _dense,
            rules=rules,
            offset=offset,
            options=options,
            spread=spread,
            heads_axis=swapped,
            first_head=first_head,
        )
        o = checkpoint_name(hint(_laid_out(plain, spread)(q, k, v, beside), *q_dims), SAVED)
        return result_without_padding(o, segments)[:, :rows]
    if spread.q[2] != spread.kv[2]:
        # A shard of the query heads would meet the wrong key heads, so every query head gets its own key head.
        dims = (*kv_dims[:2], q_dims[2], kv_dims[3])
        k, v = (hint(jnp.repeat(x, q.shape[2] // x.shape[2], axis=2), *dims) for x in (k, v))
        spread = Spread(spread.q, (*spread.kv[:2], spread.q[2], spread.kv[3]))
    ring, heads = roles(picked.impl, spread.kv[1], swapped) if spread.kv[1] else ((), ())
    check_order(picked.impl, options, ring, heads)
    how = KEYS[picked.impl] if ring else "here"
    way = AttentionPlan(
        rules, how, ring, heads, offset=offset, keep=keep and bool(ring), whole=picked.impl == "split_kv"
    )
    check_heads(q.shape[2] // _share(spread.q[2]), _share(heads), heads)
    o = hint(_sharded(picked, way, options, spread, (q, k, v), beside, first_head), *q_dims)
    return result_without_padding(o, segments)[:, :rows]


def shares(
    impl: Impl,
    q: Any,
    k: Any,
    *,
    dims: tuple[Dims, Dims] = (Q_DIMS, KV_DIMS),
    heads_axis: tuple[str, ...] = ("ulysses",),
    asks: AttentionRequest | None = None,
) -> tuple[int, int]:
    """Returns the ring size and the number of devices that exchange heads under the ambient layout.

    Args:
      impl: the implementation, as for :func:`attention`.
      q, k: queries and keys ``[batch, seq, heads, head_dim]``, as arrays or shapes.
      dims: logical dims of the queries, and of the keys and values.
      heads_axis: the mesh axes that exchange sequence for heads.
      asks: the options on which the choice of ``auto`` depends.
    """
    spread, layout = Spread(_axes(q, dims[0]), _axes(k, dims[1])), current_layout()
    links = links_of(layout.mesh) if impl == "auto" else None
    picked = choice(impl, q, k, spread, layout.sizes, heads_axis=heads_axis, asks=asks, links=links)
    ring, heads = roles(picked.impl, spread.kv[1], heads_axis)
    return _share(ring), _share(heads)


def _numbered(q: jax.Array, beside: AttentionArrays, dims: Dims) -> tuple[AttentionArrays, Any]:
    """With dropout, adds the global index of each sequence to the arrays; also returns the index of the first head."""
    if beside.key is None:
        return beside, 0
    remedy = (
        "rules that name them for 'batch' and 'heads'; or jp.context.attention_local(batch_axis=..., "
        "q_heads_axis=...), which is for a shard_map of one's own."
    )
    rows, heads = manual_of(dims[0]), manual_of(dims[2])
    sequences, head = counted(q, rows, heads, (), per_sequence=beside.key.ndim == 2, remedy=remedy)
    return beside._replace(sequences=sequences), head


def _sharded(
    picked: Choice,
    way: AttentionPlan,
    options: Options,
    spread: Spread,
    arrays: Arrays,
    beside: AttentionArrays,
    first_head: Any,
) -> jax.Array:
    """Runs attention on each device's shards: the partitioner cannot look into kernels and rings."""
    layout, (q, k, v), batch = current_layout(), arrays, arrays[0].shape[0]
    q_spec, kv_spec = (PartitionSpec(*(axes or None for axes in split)) for split in (spread.q, spread.kv))
    rows, apart = spread.q[0], (*spread.q[2], *way.heads)
    per = lambda x, size, axes: axes or None if x is not None and size > 1 else None
    some = lambda x, *spec: None if x is None else PartitionSpec(*spec)
    along = lambda axes: PartitionSpec(rows or None, axes or None)
    bias = beside.bias
    specs = AttentionArrays(
        segments=None if beside.segments is None else (along(spread.q[1]), along(spread.kv[1])),
        prefix=some(beside.prefix, rows or None if beside.prefix is not None and len(beside.prefix) == batch else None),
        slopes=some(beside.slopes, apart or None),
        bias=bias
        if bias is None
        else PartitionSpec(
            per(bias, bias.shape[0], rows),
            per(bias, bias.shape[1], apart),
            None if way.whole else way.ring or None,
            None,
        ),
        sinks=some(beside.sinks, spread.q[2] or None),
        key=some(beside.key, *([rows or None] if beside.key is not None and beside.key.ndim == 2 else [])),
        sequences=some(beside.sequences, rows or None),
        offset=some(beside.offset),
        order=some(beside.order),
    )

    def local(q: jax.Array, k: jax.Array, v: jax.Array, beside: AttentionArrays) -> jax.Array:
        if picked.kernel in WHOLE:
            return _by_kernel(way, (q, k, v), beside.segments, picked.kernel)
        engine: Backend = "tpu" if picked.kernel == "tiles" else "jax"
        here = ordered(replace(way, engine=engine), options, (q.shape[1], k.shape[1]))
        return compute(here, q, k, v, beside, first_head + _index(spread.q[2]) * q.shape[2])[0]

    free = set(layout.mesh.axis_names) - set(jax.sharding.get_abstract_mesh().manual_axes)
    if not free:  # an enclosing shard_map has made every axis manual: the arrays are shards already
        return local(q, k, v, beside)
    # Kernels do not declare over which axes their results vary, hence check_vma=False.
    in_specs = (q_spec, kv_spec, kv_spec, specs)
    if jax.sharding.AxisType.Explicit in layout.mesh.axis_types:  # shard_map does not reshard under Explicit axes
        beside = jax.tree.map(lambda x, spec: with_sharding(layout.mesh, x, spec), beside, specs)
    return jax.shard_map(local, in_specs=in_specs, out_specs=q_spec, axis_names=free, check_vma=False)(q, k, v, beside)


def _by_kernel(way: AttentionPlan, arrays: Arrays, segments: Segments, kernel: Kernel) -> jax.Array:
    """Runs a kernel that requires the full sequence, between the two head exchanges if heads are exchanged."""
    plain = way.rules == TileSpec(Mask(causal=True), 1 / math.sqrt(arrays[0].shape[3])) and segments is None
    if kernel == "splash" and way.heads and plain:
        from jaxpar.parallel.attention.split.ulysses_splash import splash_exchanged

        return splash_exchanged(*arrays, way.heads)
    repeat = exchange.repeats(arrays[1].shape[2], exchange.ways_of(way.heads))
    q, k, v = (exchange.apart(x, way.heads, n) for x, n in zip(arrays, (1, repeat, repeat), strict=True))
    whole = None if segments is None else tuple(exchange.all_tokens(x, way.heads) for x in segments)
    if kernel == "mha":
        o = mha(q, k, v, way.rules, None if whole is None else whole[0])
    else:
        from jaxpar.parallel.attention.kernels.tpu_splash import splash

        o = splash(q, k, v, way.rules, whole)
    return exchange.together(o, way.heads)


def _as_tokens_lie(segments: Segments, spread: Spread) -> Segments:
    """Shards segments like queries and keys: under Explicit axes ``jnp.where`` requires equal shardings."""
    mesh, context = current_layout().mesh, jax.sharding.get_abstract_mesh()
    if segments is None or jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return segments
    specs = (PartitionSpec(*(axes or None for axes in split[:2])) for split in (spread.q, spread.kv))
    where: Any = context if context.manual_axes else mesh
    a, b = (with_sharding(where, x, spec) for x, spec in zip(segments, specs, strict=True))
    return a, b


def _laid_out(plain: Callable[..., jax.Array], spread: Spread) -> Callable[..., jax.Array]:
    """Lets the compiler shard ``plain``, because under Explicit axes JAX cannot derive a sharding for the scores."""
    mesh = current_layout().mesh
    free = set(mesh.axis_names) - set(jax.sharding.get_abstract_mesh().manual_axes)
    if jax.sharding.AxisType.Explicit not in mesh.axis_types or not free:
        return plain
    out = PartitionSpec(*(axes or None for axes in spread.q))
    laid_out: Callable[..., jax.Array] = jax.sharding.auto_axes(plain, out_sharding=out)
    return laid_out


def _dense(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beside: AttentionArrays,
    *,
    rules: TileSpec,
    offset: int,
    options: Options,
    spread: Spread,
    heads_axis: tuple[str, ...],
    first_head: Any,
) -> jax.Array:
    plain = rules == TileSpec(Mask(causal=True), 1 / math.sqrt(q.shape[3])) and not _asks(beside, offset, options)
    alike = q.shape[1:4:2] == k.shape[1:4:2] == v.shape[1:4:2]
    # JAX's own attention accumulates fp64 in fp32, and for fp16 it requests a dot that CPUs and TPUs lack.
    if plain and alike and q.dtype.itemsize <= 4 and q.dtype != jnp.float16:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)
    ways = _share(tuple(axis for axis in spread.q[1] if axis not in heads_axis))
    order: Any = "contiguous" if options.get("order") is None else options["order"]
    at = [_at(order, x.shape[1], ways, what) for x, what in ((q, "the queries' sequence"), (k, "the keys' sequence"))]
    numbers = (beside.sequences, first_head) if rules.dropout else None
    group = (k.shape[2], q.shape[2] // k.shape[2])
    bias, slopes = beside.bias, beside.slopes
    if bias is not None:
        bias = bias.reshape(bias.shape[0], *((1, 1) if bias.shape[1] == 1 else group), *bias.shape[2:])
    slopes = None if slopes is None else slopes.reshape(group)
    extras = TileArrays(bias, slopes, beside.prefix, beside.key, numbers)
    start = offset if beside.offset is None else beside.offset
    o, lse = dense(rules, q, k, v, (at[0] + start, at[1]), beside.segments, extras)
    if beside.sinks is not None:
        o = with_sinks(o, lse, beside.sinks)
    return o


def _at(order: Any, length: int, ways: int, what: str) -> jax.Array:
    """Returns the position of every token, in the order in which the tokens are stored."""
    if isinstance(order, str):
        return jnp.asarray(permutation(order, length, ways))  # type: ignore[arg-type]
    check_given(order, length, what)
    return jnp.asarray(order, jnp.int32)


def _asks(beside: AttentionArrays, offset: int, options: Options) -> bool:
    """Whether any array option, query offset or token order is given."""
    return any(x is not None for x in beside) or bool(offset) or options.get("order") not in (None, "contiguous")


def _kernel(
    arrays: Arrays, asked: tuple[TileSpec, AttentionArrays, int], seq: Axes, heads_axis: tuple[str, ...], impl: str
) -> KernelChoice:
    """Returns the kernel for ``impl`` on the shards of one device."""
    ring, _ = roles(impl, seq, heads_axis) if seq else ((), ())
    ways, platform = _share(ring), platform_of(current_layout().mesh)
    if ring and KEYS[impl] == "rows":
        return KernelChoice("", "whole rows of scores are no tiles")
    own, of_keys = ways, 1 if KEYS[impl] == "gather" else ways
    shapes = [
        jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // n, *x.shape[2:]), x.dtype)
        for x, n in zip(arrays, (own, of_keys, of_keys), strict=True)
    ]
    return find(platform, shapes, *asked, split=ways > 1)


def _padded(arrays: Arrays, beside: AttentionArrays, dims: tuple[Dims, Dims]) -> tuple[Arrays, AttentionArrays]:
    """Pads the sequences with masked tokens to the multiple that their sharding requires."""
    missing = []
    for x, names in zip(arrays[:2], dims, strict=True):
        # Every sharding divides this length, so resolving it returns all axes that the rules name.
        long = jax.ShapeDtypeStruct((x.shape[0], 2 * x.shape[1] * current_layout().mesh.size, *x.shape[2:]), x.dtype)
        missing.append(-x.shape[1] % (2 * _share(_axes(long, names)[1])))
    if not any(missing):
        return arrays, beside
    order = beside.order
    if order is not None:  # padded tokens get the positions after all others
        check_given(order, arrays[1].shape[1], "the keys' sequence")
        order = jnp.concatenate([order, len(order) + jnp.arange(missing[1], dtype=order.dtype)])
    given = beside.segments or tuple(jnp.zeros((x.shape[0], x.shape[1]), jnp.int32) for x in arrays[:2])
    rows, columns = (
        jnp.pad(x, ((0, 0), (0, more)), constant_values=-1) for x, more in zip(given, missing, strict=True)
    )
    fill = lambda x, more: jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))
    q, k, v = (fill(x, more) for x, more in zip(arrays, (missing[0], missing[1], missing[1]), strict=True))
    bias = beside.bias
    if bias is not None:
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, missing[0]), (0, missing[1])))
    return (q, k, v), beside._replace(segments=(rows, columns), bias=bias, order=order)


def _axes(x: Any, dims: Dims) -> tuple[Axes, ...]:
    """Returns the mesh axes of each dim of ``x``, without those that an enclosing ``shard_map`` has made manual."""
    layout, manual = current_layout(), jax.sharding.get_abstract_mesh().manual_axes
    sizes = {axis: 1 if axis in manual else size for axis, size in layout.sizes.items()}
    return resolve(layout.rules, sizes, tuple(dims), x.shape, itemsize=x.dtype.itemsize).axes


def _share(axes: Sequence[str]) -> int:
    return math.prod(current_layout().sizes[axis] for axis in axes)


def _index(axes: Sequence[str]) -> Any:
    return jax.lax.axis_index(tuple(axes)) if axes else 0
