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
from jaxpar.parallel.attention.cost_model import AttentionRequest, QKVSharding
from jaxpar.parallel.attention.dropout import add_global_indices
from jaxpar.parallel.attention.kernels.dense import dense
from jaxpar.parallel.attention.kernels.gpu_cudnn import cudnn
from jaxpar.parallel.attention.kernels.select import Kernel, KernelChoice, find
from jaxpar.parallel.attention.mask import Mask
from jaxpar.parallel.attention.options import Impl, Options, check_impl, check_order, read, read_keep
from jaxpar.parallel.attention.select import Choice, select_here
from jaxpar.parallel.attention.split import ulysses as exchange
from jaxpar.parallel.attention.split.partition import AttentionPlan, Backend
from jaxpar.parallel.attention.split.token_order import check_given, permutation
from jaxpar.parallel.attention.tiled.padding import SAVED, Arrays, in_one_dtype, result_without_padding, without_padding
from jaxpar.parallel.attention.tiled.tile import AttentionArrays, Segments, TileSpec
from jaxpar.parallel.manual_axes import manual_axes_of
from jaxpar.sharding.hardware.topology import platform_of
from jaxpar.sharding.layout import current_layout, hint, with_sharding
from jaxpar.sharding.resolve import resolve
from jaxpar.sharding.rules import Axes
from jaxpar.utils.call_site import call_site
from jaxpar.utils.contexts import attention_observer

Q_DIMS = ("batch", "seq", "heads", "head_dim")
KV_DIMS = ("batch", "seq", "kv_heads", "head_dim")
FULL_SEQUENCE = ("splash", "cudnn")
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
      NoLayoutError: no layout is ambient, nor :func:`jaxpar.unsharded`.
      LayoutError: sizes, dims or heads do not fit the layout or each other, or a position or segment id exceeds int32.
      ConfigError: an option is unknown or out of range.

    >>> import jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> rules = jp.Rules(batch="data", seq="context", heads=None, kv_heads=None, head_dim=None)
    >>> q, kv = jnp.ones((2, 16, 4, 8)), jnp.ones((2, 16, 2, 8))
    >>> with jp.Layout(jp.MeshSpec(data=2, context=-1).build(), rules):
    ...     jax.eval_shape(lambda q, kv: attention(q, kv, kv, mask=jp.Mask(window=4)), q, kv).shape
    (2, 16, 4, 8)
    """
    check_impl(impl)
    if jax.sharding.get_abstract_mesh().empty:  # `init` builds the model, or `unsharded` runs it without a mesh
        impl = "dense"
    keep = read_keep(impl, options)
    rules, array_options, offset = read(q_BSHD, k_BTKD, v_BTKD, options)
    swapped = (heads_axis,) if isinstance(heads_axis, str) else tuple(heads_axis)
    rows, arrays = q_BSHD.shape[1], in_one_dtype(q_BSHD, k_BTKD, v_BTKD)
    given = array_options.segments is not None
    if pad:
        arrays, array_options = _padded(arrays, array_options, (q_dims, kv_dims))
        if array_options.order is not None:
            options["order"] = array_options.order
    q, k, v = (hint(x, *dims) for x, dims in zip(arrays, (q_dims, kv_dims, kv_dims), strict=True))
    sharding = qkv_sharding(q, k, q_dims, kv_dims)
    array_options, first_head = _add_sequence_indices(q, array_options, q_dims)
    # Tokens added by ``pad`` are 0 already, so only the caller's own segments need zeroing.
    segments = _shard_segments(array_options.segments, sharding) if given else None
    q, k, v = without_padding((q, k, v), segments)
    kernel = functools.partial(_kernel, (q, k, v), (rules, array_options, offset), sharding.q[1], swapped)
    order = "given" if array_options.order is not None else options.get("order")
    start = offset if array_options.offset is None else k.shape[1] - q.shape[1]
    hops = all(x is None for x in (array_options.prefix, array_options.offset, array_options.order))
    request = AttentionRequest(rules.mask, order, False, options.get("kv_grad_dtype"), start, hops)
    picked = select_here(impl, q, k, sharding, heads_axis=swapped, kernel=kernel, request=request)
    if impl == "auto" and attention_observer.value is not None:
        attention_observer.value(call_site(), q, k, picked)
    if picked.impl == "dense":
        ring_size = _num_shards(tuple(axis for axis in sharding.q[1] if axis not in swapped))
        plain = functools.partial(_dense, rules, offset, (options.get("order"), ring_size), first_head)
        o = _auto_sharded(plain, sharding)((q, k, v), array_options)
        return result_without_padding(checkpoint_name(hint(o, *q_dims), SAVED), segments, q_BSHD.dtype)[:, :rows]
    if sharding.q[2] != sharding.kv[2]:
        # A shard of the query heads would meet the wrong key heads, so every query head gets its own key head.
        dims = (*kv_dims[:2], q_dims[2], kv_dims[3])
        k, v = (hint(jnp.repeat(x, q.shape[2] // x.shape[2], axis=2), *dims) for x in (k, v))
        sharding = qkv_sharding(q, k, q_dims, dims)
    ring, heads = roles(picked.impl, sharding.kv[1], swapped)
    check_order(picked.impl, options, ring, heads)
    key_source = KEYS[picked.impl] if ring else "here"
    plan = AttentionPlan(
        rules, key_source, ring, heads, offset=offset, keep=keep and bool(ring), full_queries=picked.impl == "split_kv"
    )
    check_heads(q.shape[2] // _num_shards(sharding.q[2]), _num_shards(heads), heads)
    o = hint(_sharded(picked, plan, options, sharding, (q, k, v), array_options, first_head), *q_dims)
    return result_without_padding(o, segments, q_BSHD.dtype)[:, :rows]


def qkv_sharding(q: Any, k: Any, q_dims: Dims = Q_DIMS, kv_dims: Dims = KV_DIMS) -> QKVSharding:
    """Returns the mesh axes that shard queries and keys, arrays or shapes, under the ambient layout."""
    return QKVSharding(_axes(q, q_dims), _axes(k, kv_dims))


def _add_sequence_indices(q: jax.Array, array_options: AttentionArrays, dims: Dims) -> tuple[AttentionArrays, Any]:
    """With dropout, adds the global index of each sequence to the arrays; also returns the index of the first head."""
    if array_options.key is None:
        return array_options, 0
    remedy = (
        "give 'batch' and 'heads' rules with these axes; or, in your own shard_map, call "
        "jp.context.attention_local(batch_axis=..., q_heads_axis=...)."
    )
    rows, heads = manual_axes_of(dims[0]), manual_axes_of(dims[2])
    return add_global_indices(q, array_options, rows, heads, (), remedy=remedy)


def _sharded(
    picked: Choice,
    plan: AttentionPlan,
    options: Options,
    sharding: QKVSharding,
    arrays: Arrays,
    array_options: AttentionArrays,
    first_head: Any,
) -> jax.Array:
    """Runs attention on each device's shards: the partitioner cannot look into kernels and rings."""
    layout, (q, k, v), batch = current_layout(), arrays, arrays[0].shape[0]
    q_spec, kv_spec = PartitionSpec(*sharding.q), PartitionSpec(*sharding.kv)
    rows, head_axes = sharding.q[0], (*sharding.q[2], *plan.heads)
    segments, prefix, bias, key = array_options.segments, array_options.prefix, array_options.bias, array_options.key
    of_bias = [axes if bias is not None and bias.shape[dim] > 1 else None for dim, axes in enumerate((rows, head_axes))]
    specs = AttentionArrays(
        segments=segments and (PartitionSpec(*sharding.q[:2]), PartitionSpec(*sharding.kv[:2])),
        prefix=PartitionSpec(rows if prefix is not None and len(prefix) == batch else None),
        slopes=PartitionSpec(head_axes),
        bias=None if bias is None else PartitionSpec(*of_bias, None if plan.full_queries else plan.ring, None),
        sinks=PartitionSpec(sharding.q[2]),
        key=PartitionSpec(rows) if key is not None and key.ndim == 2 else PartitionSpec(),
        sequences=PartitionSpec(rows),
        offset=PartitionSpec(),
        order=PartitionSpec(),
    )

    def local(q: jax.Array, k: jax.Array, v: jax.Array, array_options: AttentionArrays) -> jax.Array:
        if picked.kernel in FULL_SEQUENCE:
            return _by_kernel(plan, (q, k, v), array_options.segments, picked.kernel)
        engine: Backend = "tpu" if picked.kernel == "tiles" else "jax"
        here = ordered(replace(plan, engine=engine), options, (q.shape[1], k.shape[1]))
        index = jax.lax.axis_index(sharding.q[2]) if sharding.q[2] else 0
        return compute(here, q, k, v, array_options, first_head + index * q.shape[2])

    free = set(layout.mesh.axis_names) - _unusable_axes()
    if not free:
        return local(q, k, v, array_options)
    # Kernels do not declare over which axes their results vary, hence check_vma=False.
    in_specs = (q_spec, kv_spec, kv_spec, specs)
    if jax.sharding.AxisType.Explicit in layout.mesh.axis_types:  # shard_map does not reshard under Explicit axes
        place = lambda spec, x: None if x is None else with_sharding(layout.mesh, x, spec)
        array_options = jax.tree.map(place, specs, array_options)
    run = jax.shard_map(local, in_specs=in_specs, out_specs=q_spec, axis_names=free, check_vma=False)
    return run(q, k, v, array_options)


def _by_kernel(plan: AttentionPlan, arrays: Arrays, segments: Segments, kernel: Kernel) -> jax.Array:
    """Runs a kernel that requires the full sequence, between the two head exchanges if heads are exchanged."""
    if kernel == "splash" and plan.heads and segments is None and _is_plain(plan.rules, arrays[0]):
        from jaxpar.parallel.attention.split.ulysses_splash import splash_exchanged

        return splash_exchanged(*arrays, plan.heads)
    repeat = exchange.repeats(arrays[1].shape[2], jax.lax.axis_size(plan.heads))
    q, k, v = (exchange.seq_to_heads(x, plan.heads, n) for x, n in zip(arrays, (1, repeat, repeat), strict=True))
    segments_of_all = None if segments is None else tuple(exchange.all_tokens(x, plan.heads) for x in segments)
    if kernel == "cudnn":
        o = cudnn(q, k, v, plan.rules, segments_of_all, attached=_attached())
    else:
        from jaxpar.parallel.attention.kernels.tpu_splash import splash

        o = splash(q, k, v, plan.rules, segments_of_all)
    return exchange.heads_to_seq(o, plan.heads)


def _shard_segments(segments: Segments, sharding: QKVSharding) -> Segments:
    """Shards segments like queries and keys: under Explicit axes ``jnp.where`` requires equal shardings."""
    mesh, context = current_layout().mesh, jax.sharding.get_abstract_mesh()
    if segments is None or jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return segments
    specs = (PartitionSpec(*axes[:2]) for axes in (sharding.q, sharding.kv))
    where: Any = context if context.manual_axes else mesh
    a, b = (with_sharding(where, x, spec) for x, spec in zip(segments, specs, strict=True))
    return a, b


def _auto_sharded(plain: Callable[..., jax.Array], sharding: QKVSharding) -> Callable[..., jax.Array]:
    """Lets the compiler shard ``plain``, because under Explicit axes JAX cannot derive a sharding for the scores."""
    mesh = current_layout().mesh
    free = set(mesh.axis_names) - _unusable_axes()
    if jax.sharding.AxisType.Explicit not in mesh.axis_types or not free:
        return plain
    return jax.sharding.auto_axes(plain, out_sharding=PartitionSpec(*sharding.q))


def _dense(
    rules: TileSpec, offset: int, tokens: tuple[Any, int], head: Any, arrays: Arrays, array_options: AttentionArrays
) -> jax.Array:
    """Returns plain attention, for tokens in an order over a ring of a size; ``head`` is the first one's index."""
    (q, k, v), (order, ring_size) = arrays, tokens
    no_options = not offset and all(x is None for x in array_options)
    one_size = q.shape[1] == k.shape[1] and q.shape[3] == v.shape[3]
    # JAX's own attention accumulates fp64 in fp32, and for fp16 it requests a dot that CPUs and TPUs lack.
    supported = one_size and q.dtype.itemsize <= 4 and q.dtype != jnp.float16
    if supported and no_options and _is_plain(rules, q) and order in (None, "contiguous"):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)
    order = "contiguous" if order is None else order
    names = ("the queries' sequence", "the keys' sequence")
    at = [_positions(order, x.shape[1], ring_size, what) for x, what in zip((q, k), names, strict=True)]
    extras = array_options.of_tiles(q.shape[2], k.shape[2], head)
    start = offset if array_options.offset is None else array_options.offset
    o, lse = dense(rules, q, k, v, (at[0] + start, at[1]), array_options.segments, extras)
    return o if array_options.sinks is None else with_sinks(o, lse, array_options.sinks)


def _is_plain(rules: TileSpec, q: jax.Array) -> bool:
    """Whether attention is causal, with the default scale and no other static option."""
    return rules == TileSpec(Mask(causal=True), 1 / math.sqrt(q.shape[3]))


def _positions(order: Any, length: int, num_shards: int, what: str) -> jax.Array:
    """Returns the position of every token, in the order in which the tokens are stored."""
    if isinstance(order, str):
        return jnp.asarray(permutation(order, length, num_shards))  # type: ignore[arg-type]
    check_given(order, length, what)
    return jnp.asarray(order, jnp.int32)


def _kernel(
    arrays: Arrays, find_arguments: tuple[TileSpec, AttentionArrays, int], seq: Axes, heads_axis: Axes, impl: str
) -> KernelChoice:
    """Returns the kernel for ``impl`` on the shards of one device."""
    ring, _ = roles(impl, seq, heads_axis)
    num_shards = _num_shards(ring)
    if ring and KEYS[impl] == "rows":
        return KernelChoice("", "ring_self_attention computes full rows of scores, not tiles")
    keys = arrays[1].shape[1] // (1 if KEYS[impl] == "gather" else num_shards)
    lengths = arrays[0].shape[1] // num_shards, keys
    platform, split = platform_of(current_layout().mesh), num_shards > 1
    return find(platform, arrays, *find_arguments, lengths=lengths, split=split, attached=_attached())


def _attached() -> bool:
    """Whether the devices of the ambient layout are attached to this machine."""
    return isinstance(current_layout().mesh, jax.sharding.Mesh)


def _padded(arrays: Arrays, array_options: AttentionArrays, dims: tuple[Dims, Dims]) -> tuple[Arrays, AttentionArrays]:
    """Pads the sequences with masked tokens to the multiple that their sharding requires."""
    missing = []
    for x, names in zip(arrays[:2], dims, strict=True):
        # Every sharding divides this length, so resolving it returns all axes that the rules name.
        long = jax.ShapeDtypeStruct((x.shape[0], 2 * x.shape[1] * current_layout().mesh.size, *x.shape[2:]), x.dtype)
        missing.append(-x.shape[1] % (2 * _num_shards(_axes(long, names)[1])))
    if not any(missing):
        return arrays, array_options
    order = array_options.order
    if order is not None:  # padded tokens get the positions after all others
        check_given(order, arrays[1].shape[1], "the keys' sequence")
        order = jnp.concatenate([order, len(order) + jnp.arange(missing[1], dtype=order.dtype)])
    ids = array_options.segments or tuple(jnp.zeros((x.shape[0], x.shape[1]), jnp.int32) for x in arrays[:2])
    alike = ids[0] is ids[1] or (array_options.segments is None and ids[0].shape == ids[1].shape)
    fill = lambda x, more, value=0: jnp.pad(x, [(0, more * (dim == 1)) for dim in range(x.ndim)], constant_values=value)
    rows = fill(ids[0], missing[0], -1)
    # Equal ids stay one object, by which `find` knows that every query sees a key.
    columns = rows if alike and missing[0] == missing[1] else fill(ids[1], missing[1], -1)
    q, k, v = (fill(x, more) for x, more in zip(arrays, (missing[0], missing[1], missing[1]), strict=True))
    bias = array_options.bias
    if bias is not None:
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, missing[0]), (0, missing[1])))
    return (q, k, v), array_options._replace(segments=(rows, columns), bias=bias, order=order)


def _axes(x: Any, dims: Dims) -> tuple[Axes, ...]:
    """Returns the mesh axes of each dim of ``x``, without those that an enclosing ``shard_map`` has made manual."""
    layout, unusable = current_layout(), _unusable_axes()
    sizes = {axis: 1 if axis in unusable else size for axis, size in layout.sizes.items()}
    return resolve(layout.rules, sizes, tuple(dims), x.shape, itemsize=x.dtype.itemsize).axes


def _unusable_axes() -> set[str]:
    """The mesh axes that shard nothing here: those that an enclosing ``shard_map`` has made manual.

    While ``init`` builds a model there is no mesh, and none can be used: Linen runs the model on an example, whose
    sizes need not fit the mesh.
    """
    context = jax.sharding.get_abstract_mesh()
    return set(current_layout().mesh.axis_names if context.empty else context.manual_axes)


def _num_shards(axes: Sequence[str]) -> int:
    return math.prod(current_layout().sizes[axis] for axis in axes)
