"""``gather_dot`` and ``dot_scatter``: matmuls that overlap with the gather or scatter of a sequence beside them.

Under tensor and sequence parallelism, the sequence is gathered before the first matmul of a branch, and the results of
the last one are summed and scattered along the sequence. Here the sequence moves around the ring of devices in pieces,
in both directions, while the matmul works on the pieces that have arrived or that leave next. After Wang et al. 2023
(Overlap communication with dependent computation via decomposition, ASPLOS). Gradients of weights that are scattered
over the devices of the batch move in the same way (:mod:`jaxpar.parallel.overlap.weight_gradient`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxpar.parallel.collectives.gather_reduce import axes_of, current_precision, is_exact, seq_axes, summing
from jaxpar.parallel.manual_axes import manual_shard_map
from jaxpar.parallel.overlap.permute_collectives import Ring
from jaxpar.parallel.overlap.weight_gradient import MOST_DEVICES, grad_ring, scattered_weight_grad
from jaxpar.parallel.precision.fp8_matmul import PRODUCT, input_grad, weight_grad
from jaxpar.parallel.precision.int8 import Int8
from jaxpar.parallel.precision.policy import FP8, INT8, Precision
from jaxpar.parallel.precision.quantized_array import is_quantized
from jaxpar.parallel.tensor.route import WeightDims, is_live
from jaxpar.parallel.tensor.weights import used_sharding
from jaxpar.parallel.zero.gather import Joined, ends, gather_joined, joinable, sharded_dot, split_joined
from jaxpar.parallel.zero.sharded_matmul import GATHERED
from jaxpar.sharding.hardware.accelerators import of_device
from jaxpar.sharding.hardware.topology import device_of, platform_of
from jaxpar.sharding.layout import current_layout, hint
from jaxpar.sharding.resolve import num_shards_over
from jaxpar.sharding.rules import Axes

SEQ = 1
"""The dim of the sequence: arrays are ``[batch, seq, ...]``."""
_ABOUT = 0.75
"""The least part of the time of a transfer that a product beside it must take to count as hiding it."""
_SCATTERED = ("batch", "residual_seq", "embed")

type Weight = tuple[jax.Array, WeightDims]
type _Multiply = Callable[[jax.Array, jax.Array], jax.Array]


class _Plan(NamedTuple):
    """How products and the sequence move; it is hashable.

    Attributes:
      axes: the mesh axes over which the sequence is gathered or scattered.
      joined: for each matrix, the weights that form it.
      summed: the number of dims that the product sums over.
      wide: the dtype in which gradients of weights are summed over devices, if it is wider than theirs.
      grads_last: whether gradients of weights are computed after that of the input has been scattered.
    """

    axes: Axes
    joined: tuple[Joined, ...]
    summed: int
    wide: Any
    grads_last: bool = False


def gather_dot(x: jax.Array, *weights: Weight, dtype: Any = None, joined: bool = True, **options: Any) -> Any:
    """Returns :func:`jaxpar.sharded_dot` of ``x`` with its sequence gathered: ``hint(x, "batch", "seq", "embed")``.

    If the rules shard the dim ``residual_seq`` over mesh axes that shard the columns of the weights but not ``seq``
    (Megatron's sequence parallelism), the gather overlaps with the products on TPUs. Otherwise the compiler gathers.
    Values and gradients are the same.

    Args:
      x: the input ``[batch, seq, embed]``, sharded as ``batch``, ``residual_seq``, ``embed``.
      *weights: pairs of a weight ``[embed, ...]`` and its logical dims.
      dtype, joined: as in :func:`jaxpar.sharded_dot`.
      **options: the other options of :func:`jaxpar.sharded_dot`.

    Returns:
      For each weight an array ``[batch, seq, *weight.shape[1:]]``.

    Raises:
      NoLayoutError, ConfigError, LayoutError: as :func:`jaxpar.sharded_dot`.

    >>> import jax.numpy as jnp
    >>> import jaxpar as jp
    >>> rules = jp.Rules(batch="data", seq=None, residual_seq="model", embed=None, mlp="model")
    >>> with jp.Layout(jp.MeshSpec(data=-1, model=2).build(), rules):
    ...     (y,) = gather_dot(jnp.ones((4, 6, 8)), (jnp.ones((8, 16)), ("embed", "mlp")))
    >>> y.shape
    (4, 6, 16)
    """
    axes = _ring_axes(x, weights, 1, options)
    if axes is None:
        return sharded_dot(hint(x, "batch", "seq", "embed"), *weights, dtype=dtype, joined=joined, **options)
    ws = [w if dtype is None else w.astype(dtype) for w, _ in weights]
    dims = [names for _, names in weights]
    apart = [list(range(len(ws)))] if joined else [[i] for i in range(len(ws))]
    groups = [
        (num_shards, [some[i] for i in group])
        for some in apart
        for num_shards, group in joinable([dims[i] for i in some], [ws[i] for i in some])
    ]
    groups = [(0 if len(group) == 1 and ws[group[0]].ndim == 2 else count, group) for count, group in groups]
    dims_of = lambda count, group: (*dims[group[0]][:2], None) if count else dims[group[0]]
    shapes_of = lambda group: tuple(ws[i].shape for i in group)
    matrices = tuple(Joined(dims_of(count, group), count, shapes_of(group), False) for count, group in groups)
    columns = sum(w.size // w.shape[0] for w in ws) // num_shards_over(axes, current_layout().sizes)
    plan = _Plan(axes, matrices, 1, summing(ws[0].dtype), _hides_pieces(columns, x.dtype))
    products = _gathered(plan, x, *[[ws[i] for i in group] for _, group in groups])
    results: dict[int, jax.Array] = {}
    for (count, group), matrix, y in zip(groups, matrices, map(_named, products), strict=True):
        if count and ws[group[0]].ndim > 2:
            y = jax.lax.optimization_barrier(y)  # keeps the memory layout that heads prefer out of the matmuls
        parts = jnp.split(y, ends(count, matrix.shapes), -1) if count else [y]
        results |= {i: part.reshape(*x.shape[:2], *ws[i].shape[1:]) for i, part in zip(group, parts, strict=True)}
    return tuple(results[i] for i in range(len(ws)))


def dot_scatter(x: jax.Array, weight: Weight, *, dtype: Any = None, summed: int = 1, **options: Any) -> jax.Array:
    """Returns the product of ``x`` and a weight, summed and scattered: ``hint(..., "batch", "residual_seq", "embed")``.

    Where :func:`gather_dot` overlaps the gather of its input, this overlaps the scatter of the result.

    Args:
      x: the input ``[batch, seq, ...]``, whose last dims are sharded as the first dims of the weight.
      weight: a weight ``[..., embed]`` and its logical dims.
      dtype, summed: as in :func:`jaxpar.sharded_dot`.
      **options: the other options of :func:`jaxpar.sharded_dot`.

    Returns:
      An array ``[batch, seq, embed]``.

    Raises:
      NoLayoutError, ConfigError, LayoutError: as :func:`jaxpar.sharded_dot`.

    >>> import jax.numpy as jnp
    >>> import jaxpar as jp
    >>> rules = jp.Rules(batch="data", seq=None, residual_seq="model", embed=None, mlp="model")
    >>> with jp.Layout(jp.MeshSpec(data=-1, model=2).build(), rules):
    ...     dot_scatter(jnp.ones((4, 6, 16)), (jnp.ones((16, 8)), ("mlp", "embed"))).shape
    (4, 6, 8)
    """
    axes = _ring_axes(x, [weight], summed, options)
    if axes is None:
        (y,) = sharded_dot(x, weight, dtype=dtype, summed=summed, **options)
        return hint(y, *_SCATTERED)
    w, dims = weight
    w = w if dtype is None else w.astype(dtype)
    plan = _Plan(axes, (Joined(dims, 0, (w.shape,), False),), summed, summing(w.dtype))
    return _named(_scattered(plan, x, w))


def _named(y: jax.Array) -> jax.Array:
    precision = current_precision()
    # Tells the step that the precision applies, as ``sharded_dot`` does.
    return y if precision.gather is None and precision.reduce is None else checkpoint_name(y, PRODUCT)


def _ring_axes(x: jax.Array, weights: Sequence[Weight], summed: int, options: dict[str, Any]) -> Axes | None:
    """Returns the mesh axes of the ring, or ``None`` where the compiler gathers and scatters.

    The weights have to be sharded over these axes along the dim after ``embed``, or before it if the product is
    scattered.
    """
    layout, precision = current_layout(), current_precision()
    if platform_of(layout.mesh) != "tpu" or jax.sharding.get_abstract_mesh().manual_axes or is_live(layout.sizes):
        return None
    axes = tuple(axis for axis in axes_of(layout, "residual_seq") if axis not in seq_axes(layout))
    size = num_shards_over(axes, layout.sizes)
    if not 1 < size <= MOST_DEVICES or axes != axes_of(layout, "residual_seq") or x.ndim < 3 or x.shape[SEQ] % size:
        return None
    plain = all(not isinstance(w, Int8) and not is_quantized(w) for w, _ in weights)
    whole = isinstance(options.get("reshard_after_forward", True), bool) and not options.get("exact", False)
    if not plain or not whole or FP8 == precision.matmul or INT8 in (precision.gather, precision.reduce):
        return None
    if precision.gather is not None and any(is_exact(dims, precision) for _, dims in weights):
        return None
    for w, dims in weights:
        used = used_sharding(w, dims)
        along = 1 if dims[0] == "embed" else 0
        others = [axes for dim, axes in enumerate(used.axes) if dim != along]
        if used.problems or used.axes[along] != axes or any(others) or w.shape[:summed] != x.shape[x.ndim - summed :]:
            return None
    return axes


def _hides_pieces(columns: int, dtype: Any) -> bool:
    """Returns whether a product with so many columns takes about as long as the piece beside it travels.

    The gradients of its weights are then not needed beside its own scatter, and can be computed beside the next gather,
    such as that of the output projection of attention, whose products are too short.
    """
    device = device_of(current_layout().mesh)
    found = None if device is None else of_device(device.device_kind)
    if found is None:
        return False
    return 2 * columns * found.link_bandwidth >= _ABOUT * found.bf16 * jnp.dtype(dtype).itemsize


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(plan: _Plan, x: jax.Array, *groups: list[jax.Array]) -> tuple[jax.Array, ...]:
    return _gathered_forward(plan, x, *groups)[0]


def _gathered_forward(plan: _Plan, x: jax.Array, *groups: list[jax.Array]) -> tuple[tuple[jax.Array, ...], Any]:
    matrices, spec = _gathered_weights(plan, groups), PartitionSpec(None, plan.axes)
    full, *ys = _gather_and_multiply(plan, x, matrices, spec, lambda x, w: jnp.tensordot(x, w, 1))
    return tuple(ys), (full, matrices)


def _gathered_backward(plan: _Plan, saved: Any, dys: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    (full, matrices), spec = saved, PartitionSpec(None, plan.axes)
    dx = _multiply_and_scatter(plan, dys, matrices, spec, lambda dy, w: input_grad(dy, w, 1, Precision()))
    if plan.grads_last:
        full, dys, dx = jax.lax.optimization_barrier((full, dys, dx))
    grads = [_weight_grads(plan, joined, full, dy) for joined, dy in zip(plan.joined, dys, strict=True)]
    return dx.astype(full.dtype), *grads


_gathered.defvjp(_gathered_forward, _gathered_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scattered(plan: _Plan, x: jax.Array, w: jax.Array) -> jax.Array:
    return _scattered_forward(plan, x, w)[0]


def _scattered_forward(plan: _Plan, x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    (matrix,), spec, summed = _gathered_weights(plan, [[w]]), PartitionSpec(plan.axes), plan.summed
    y = _multiply_and_scatter(plan, [x], [matrix], spec, lambda x, w: jnp.tensordot(x, w, summed))
    return y, (x, matrix)


def _scattered_backward(plan: _Plan, saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    spec, summed = PartitionSpec(plan.axes), plan.summed
    full, dx = _gather_and_multiply(plan, dy, [w], spec, lambda dy, w: input_grad(dy, w, summed, Precision()))
    (grad,) = _weight_grads(plan, plan.joined[0], x, full)
    return dx.astype(x.dtype), grad


_scattered.defvjp(_scattered_forward, _scattered_backward)


def _gathered_weights(plan: _Plan, groups: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    """Returns the matrices, gathered over the axes that shard only their storage."""
    pairs = zip(plan.joined, groups, strict=True)
    return [checkpoint_name(gather_joined(joined, *ws), GATHERED) for joined, ws in pairs]


def _weight_grads(plan: _Plan, joined: Joined, x: jax.Array, dy: jax.Array) -> list[jax.Array]:
    """Returns the gradients of the weights that form a matrix, from an input and a gradient with whole sequences."""
    dtype = jnp.result_type(x, dy)
    ring = grad_ring(joined.dims, x, dy, plan.summed, dtype if plan.wide is None else plan.wide)
    if ring is not None:
        return list(split_joined(joined.num_shards, joined.shapes, scattered_weight_grad(ring, x, dy, plan.wide)))
    grad = weight_grad(x, dy, plan.summed, Precision(), plan.wide)
    grad = hint(grad, *joined.dims, role="gradients")
    if plan.wide is not None:
        grad = jax.lax.optimization_barrier(grad).astype(dtype)  # else the compiler rounds before it sums
    return list(split_joined(joined.num_shards, joined.shapes, grad))


def _gather_and_multiply(
    plan: _Plan, x: jax.Array, ws: Sequence[jax.Array], spec: PartitionSpec, multiply: _Multiply
) -> list[jax.Array]:
    """Returns ``x`` with whole sequences, and its products with the weights, which are sharded as ``spec``."""

    def local(x: jax.Array, *ws: jax.Array) -> list[jax.Array]:
        ring, size, whole = Ring.of(plan.axes), x.shape[SEQ], list[jax.Array]()
        for distance, offset, part in ring.halves(x, SEQ):
            found = [part, *(multiply(part, w) for w in ws)]
            whole = whole or [jnp.zeros((y.shape[0], size * ring.size, *y.shape[2:]), y.dtype) for y in found]
            start = (ring.index() + distance) % ring.size * size + offset
            pairs = zip(whole, found, strict=True)
            whole = [jax.lax.dynamic_update_slice_in_dim(all_of, y, start, SEQ) for all_of, y in pairs]
        return whole

    columns = PartitionSpec(None, None, plan.axes)
    out_specs = [PartitionSpec(), *[columns] * len(ws)]
    in_specs = PartitionSpec(None, plan.axes), *[spec] * len(ws)
    return manual_shard_map(local, plan.axes, in_specs, out_specs)(x, *ws)


def _multiply_and_scatter(
    plan: _Plan, xs: Sequence[jax.Array], ws: Sequence[jax.Array], spec: PartitionSpec, multiply: _Multiply
) -> jax.Array:
    """Returns the sum of the products of each ``x`` and its weight, summed over devices and scattered."""

    def local(xs: Sequence[jax.Array], ws: Sequence[jax.Array]) -> jax.Array:
        ring = Ring.of(plan.axes)
        piece = xs[0].shape[SEQ] // ring.size

        def part(distance: int, start: int, size: int) -> jax.Array:
            at = (ring.index() + distance) % ring.size * piece + start
            rows = [jax.lax.dynamic_slice_in_dim(x, at, size, SEQ) for x in xs]
            products = [multiply(x, w) for x, w in zip(rows, ws, strict=True)]
            # Without the barrier the compiler fuses the product with the addition of a part that is still arriving.
            return jax.lax.optimization_barrier(functools.reduce(jnp.add, products))

        return ring.summed_halves(part, piece, SEQ)

    columns = PartitionSpec(None, None, plan.axes)
    specs = ([columns] * len(xs), [spec] * len(ws))
    return manual_shard_map(local, plan.axes, specs, PartitionSpec(None, plan.axes))(list(xs), list(ws))
