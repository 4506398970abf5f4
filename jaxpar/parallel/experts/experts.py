"""``experts`` on global arrays: a mixture of experts under the ambient layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxpar.errors import LayoutError
from jaxpar.parallel.collectives import gather_reduce
from jaxpar.parallel.collectives.gather_reduce import EXPERTS, Parts, current_precision, summing
from jaxpar.parallel.experts.dispatch import ExpertFn, swiglu
from jaxpar.parallel.experts.experts_local import Choices, experts_local
from jaxpar.parallel.experts.options import Dispatch, ExpertCall, name_of_dims
from jaxpar.parallel.offload.host_weights import to_device
from jaxpar.parallel.overlap.permute_collectives import ppermute_all_gather, ppermute_reduce_scatter
from jaxpar.parallel.precision.int8 import Int8
from jaxpar.parallel.precision.policy import Precision
from jaxpar.parallel.zero.sharded_matmul import GATHERED
from jaxpar.sharding.hardware.links import links_of
from jaxpar.sharding.layout import Layout, current_layout, with_sharding
from jaxpar.sharding.names import Names
from jaxpar.sharding.resolve import Resolved, num_shards_over, resolve
from jaxpar.sharding.rules import Axes
from jaxpar.utils.contexts import experts_traced

X_DIMS = ("batch", "seq", "embed")
type _Named = tuple[jax.Array, Names]
MOST_DEVICES = 4
"""The most devices over which weights travel as permutes. Over more, no program was compiled."""


class _Gather(NamedTuple):
    """How a weight is gathered.

    Attributes:
      parts: over which axes.
      dtype: the dtype in which the compute uses it.
      precision: of the step.
      rings: the rings around which permutes send it, or ``None`` for a collective.
    """

    parts: Parts
    dtype: Any
    precision: Precision
    rings: tuple[int, ...] | None


def experts(
    x: jax.Array,
    routing: Choices,
    *weights: tuple[jax.Array | Int8, Names],
    x_dims: Sequence[str | None] = X_DIMS,
    expert_fn: ExpertFn = swiglu,
    dispatch: Dispatch = "auto",
    capacity_factor: float | None = None,
    pieces: int | None = None,
    overlap: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of the results of each token's experts, computed under the ambient layout.

    The rule for the dim ``experts``, the first of the weights, says which mesh axes shard the experts; tokens are
    exchanged over these axes. Rules may shard the other dims too: an axis that shards a weight only where it is stored
    (FSDP) is gathered first, and one that also shards it in the compute (an expert split over ``model``) leaves each
    device with a part of the sum, which is added up. Axes that shard the experts may be those that shard the batch or
    the sequence elsewhere (``experts: [context, data]``).

    Args:
      x: the tokens ``[..., embed]``, such as ``[batch, seq, embed]``.
      routing: the weights and the experts of each token ``[..., k]``, as :class:`jaxpar.moe.Router` returns them.
      *weights: pairs of the weights of all experts ``[experts, ...]`` and their logical dims; for ``swiglu`` those of
        gate, up ``[experts, embed, expert_mlp]`` and down ``[experts, expert_mlp, embed]``. A weight of the class
        :class:`jaxpar.inference.Int8`, with one scale for all numbers that a product sums over, is gathered in int8
        and multiplied as integers; it has no gradient.
      x_dims: the logical dims of ``x``.
      expert_fn: what the experts compute: ``expert_fn(rows, row_weights, matmul, *weights)``, where ``rows`` ``[rows,
        embed]`` are those of all experts of a device, ``row_weights`` ``[rows]`` is what the router gives each, and
        ``matmul(rows, w)`` multiplies each row with the matrix ``w[expert]`` of its expert. It must compute each row by
        itself and multiply it with its weight.
      dispatch: how rows reach their experts:

        * ``ragged`` sends one row per choice.
        * ``deduplicated`` sends one row per device that holds any of a token's experts.
        * ``gather`` sends every token to every device, as decoding with few tokens requires.
        * ``all_to_all`` sends the same number of rows to every expert, and requires ``capacity_factor``.
        * ``auto`` picks the one that sends the fewest bytes if the routing is balanced.
      capacity_factor: lets each expert take this multiple of its share of the tokens of each device, and drops the
        choices beyond it, the last tokens first. By default nothing is dropped.
      pieces: the number of pieces in which each device processes its tokens, one after the other, each recomputed in
        the backward pass. By default the fewest with which the worst routing needs as much memory as a balanced one
        needs without pieces.
      overlap: whether weights that are gathered over at most 4 devices, and their gradients, travel as permutes. A TPU
        overlaps permutes with compute beside this call, such as attention, but none of the collectives.

    Returns:
      The results, in the shape, dtype and sharding of ``x``; and the share of all choices that were dropped, an fp32
      scalar, 0 without a capacity.

    Under :func:`jaxpar.unsharded` every expert is computed on whole arrays.

    Raises:
      NoLayoutError: no layout is ambient.
      LayoutError: the rules cannot place an array, or the weights do not have the same experts.
      ConfigError: an option is unknown or out of range, or sizes do not fit each other.

    >>> import jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> from jaxpar.parallel.experts.routing import Router
    >>> rules = jp.Rules(batch=("data", "expert"), seq=None, embed=None, experts="expert", expert_mlp=None)
    >>> up, down = ("experts", "embed", "expert_mlp"), ("experts", "expert_mlp", "embed")
    >>> x, logits, w = jnp.ones((8, 16, 32)), jnp.ones((8, 16, 4)), jnp.ones((4, 32, 64))
    >>> with jp.Layout(jp.MeshSpec(data=-1, expert=4).build(), rules):
    ...     run = lambda: experts(x, Router(experts=4, k=2)(logits), (w, up), (w, up), (w.swapaxes(1, 2), down))
    ...     y, dropped = jax.eval_shape(run)
    >>> y.shape, dropped.shape
    ((8, 16, 32), ())
    """
    arrays, structure = _arrays([(to_device(w), tuple(dims)) for w, dims in weights])
    layout = current_layout()
    options: dict[str, Any] = {"dispatch": dispatch, "capacity_factor": capacity_factor, "pieces": pieces}
    run = functools.partial(_run, structure, expert_fn=expert_fn, **options)
    if jax.sharding.get_abstract_mesh().empty:  # as in unsharded()
        count, k, row = arrays[0][0].shape[0], routing.experts.shape[-1], x.shape[-1] * x.dtype.itemsize
        whole, call = functools.partial(run, axis=()), ExpertCall(count, k, row, **options)
        return _unsharded(x, tuple(x_dims), routing, arrays, whole, call)
    placed = _place(layout, x, arrays, tuple(x_dims), overlap)
    # In a step that sums gradients in fp32, an array in fp32 enters and is rounded inside, so that its gradient leaves
    # in fp32 too.
    wide = [w.astype(summing(w.dtype) or w.dtype) for w, _ in arrays]
    arguments = (x, routing.weights, routing.experts, *wide)
    local = functools.partial(_local, placed, run)
    if not placed.free:
        return local(*arguments)
    if jax.sharding.AxisType.Explicit in layout.mesh.axis_types:
        pairs = zip(arguments, placed.in_specs, strict=True)
        arguments = tuple(with_sharding(layout.mesh, x, spec) for x, spec in pairs)
    specs: Any = {"in_specs": placed.in_specs, "out_specs": (placed.out_spec, PartitionSpec())}
    # check_vma is off: jax would take sums over devices to differ between them.
    return jax.shard_map(local, **specs, axis_names=placed.free, check_vma=False)(*arguments)


def _run(
    structure: Any, x: jax.Array, weights: jax.Array, chosen: jax.Array, *stored: jax.Array, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the results of the experts, and the number of choices that were dropped."""
    return experts_local(x, _Chosen(weights, chosen), *jax.tree.unflatten(structure, stored), **options)


def _unsharded(
    x: jax.Array, x_dims: Names, routing: Choices, arrays: Sequence[_Named], run: Callable[..., Any], call: ExpertCall
) -> tuple[jax.Array, jax.Array]:
    """Returns the results on whole arrays, as plain JAX computes them; ``run(x, weights, choices, *arrays)``."""
    _check_weights(arrays)
    stored = [w for w, _ in arrays]
    if experts_traced.value is not None:  # a plan reads the call and the names of its dims
        x = checkpoint_name(x, name_of_dims(x_dims))
        stored = [checkpoint_name(w, name_of_dims(dims)) for w, dims in arrays]
        run = jax.checkpoint(run) if experts_traced.value == "pieces" else run
    y, dropped = run(x, routing.weights, routing.experts, *stored)
    y = y if experts_traced.value is None else checkpoint_name(y, call.name)
    return y, dropped / math.prod(routing.experts.shape)


def _arrays(weights: Sequence[tuple[jax.Array | Int8, Names]]) -> tuple[list[_Named], Any]:
    """Returns all arrays of the weights with their dims, and the structure that puts them together again."""
    found: list[_Named] = []
    for w, dims in weights:
        pairs = ((w.values, dims), (w.scales, w.of_scales(dims))) if isinstance(w, Int8) else ((w, dims),)
        found.extend(pairs)
    return found, jax.tree.structure([w for w, _ in weights])


@dataclass(frozen=True)
class _Placed:
    """The arrays of a call, and how the devices share them.

    Attributes:
      sizes: of the mesh axes of the ambient layout.
      free: the mesh axes that this call makes manual; the others are manual already.
      tokens: all axes along which devices have different tokens.
      expert_axes: the axes that shard the experts.
      summed: the axes that shard the experts' other dims in the compute, over which results are added up.
      scatters: the dim of ``x`` along which they are scattered, or ``None`` to leave the sum replicated.
      gathers: how each weight is gathered.
      in_specs: of x, the router's weights and choices, and each weight.
      out_spec: of the result.
    """

    sizes: Mapping[str, int]
    free: frozenset[str]
    tokens: Axes
    expert_axes: Axes
    summed: Axes
    scatters: int | None
    gathers: tuple[_Gather, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_spec: PartitionSpec


def _place(layout: Layout, x: jax.Array, weights: Sequence[Any], x_dims: Names, overlap: bool) -> _Placed:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    free = frozenset(axis for axis in layout.mesh.axis_names if axis not in manual)
    _check_weights(weights)
    stored = [_resolve(layout, w, dims, "params", free) for w, dims in weights]
    for w, dims in weights:
        _resolve(layout, w, dims, "activations", free)  # only to raise
    # With manual axes a local shape may not divide by them, so the axes of all devices are resolved without it.
    whole = [layout.resolve(dims) for _, dims in weights]
    expert_axes = whole[0].axes[0]
    summed = tuple(dict.fromkeys(axis for found in whole for dim in found.axes[1:] for axis in dim))
    precision, gathers = current_precision(), list[_Gather]()
    for found, (w, dims) in zip(stored, weights, strict=True):
        axes = tuple(axis for dim in found.axes for axis in dim if axis not in (*expert_axes, *summed))
        parts = gather_reduce.parts_of(found, axes, exact=gather_reduce.is_exact(dims, precision))
        gathers.append(_Gather(parts, w.dtype, precision, _rings(layout, parts) if overlap else None))
    x_axes = _resolve(layout, x, x_dims, "activations", free).axes
    in_axes = tuple(tuple(axis for axis in dim if axis not in summed) for dim in x_axes)
    tail = next((dim for dim, axes in enumerate(x_axes) if axes and axes[-len(summed) :] == summed), None)
    out_axes = in_axes if tail is None or not summed else x_axes
    tokens = tuple(axis for dim in layout.resolve(x_dims).axes for axis in dim if axis not in summed)
    routed = PartitionSpec(*in_axes[:-1], None)
    specs = (PartitionSpec(*in_axes), routed, routed, *(PartitionSpec(*found.axes) for found in stored))
    scatters, out_spec = tail if summed else None, PartitionSpec(*out_axes)
    return _Placed(layout.sizes, free, tokens, expert_axes, summed, scatters, tuple(gathers), specs, out_spec)


def _resolve(layout: Layout, x: jax.Array, dims: Names, role: str, free: frozenset[str]) -> Resolved:
    """Returns how the axes in ``free`` shard an array that is local along the others."""
    sizes = {axis: size for axis, size in layout.sizes.items() if axis in free}
    found = resolve(layout.rules, sizes, dims, x.shape, role=role, itemsize=x.dtype.itemsize, path="experts()")
    if found.problems:
        raise LayoutError(found.problems)
    return found


def _check_weights(weights: Sequence[_Named]) -> None:
    first, dims = weights[0]
    for w, names in weights:
        if names[0] != EXPERTS or w.shape[0] != first.shape[0]:
            raise LayoutError(
                f"experts: the first dim of each weight must be the same experts, got {names} of shape {list(w.shape)} "
                f"beside {dims} of shape {list(first.shape)}. Remedy: weights [experts, ...] whose first dim is called "
                f"{EXPERTS!r}."
            )


def _local(
    placed: _Placed, run: Callable[..., Any], x: jax.Array, weights: jax.Array, chosen: jax.Array, *ws: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Runs the experts on this device's tokens, with every axis manual."""
    gathered = [checkpoint_name(_gather(how, w), GATHERED) for how, w in zip(placed.gathers, ws, strict=True)]
    token_axes = tuple(axis for axis in placed.expert_axes if axis in placed.tokens)
    y, dropped = run(x, weights, chosen, *gathered, axis=placed.expert_axes, token_axis=token_axes)
    if placed.summed and placed.scatters is not None:
        y = jax.lax.psum_scatter(y, placed.summed, scatter_dimension=placed.scatters, tiled=True)
    elif placed.summed:
        y = jax.lax.psum(y, placed.summed)
    tokens = tuple(axis for axis in placed.tokens if axis in placed.free)
    dropped = jax.lax.psum(dropped, tokens) if tokens else dropped
    return y, dropped / (math.prod(chosen.shape) * num_shards_over(tokens, placed.sizes))


@dataclass(frozen=True)
class _Chosen:
    weights: jax.Array
    experts: jax.Array


def _rings(layout: Layout, parts: Parts) -> tuple[int, ...] | None:
    """Returns the rings around which a weight travels, or ``None`` if its gather stays a collective."""
    axes = tuple(axis for _, axes in parts.crossed for axis in axes)
    if len(parts.crossed) != 1 or num_shards_over(axes, layout.sizes) > MOST_DEVICES:
        return None
    links = links_of(layout.mesh, layout.rings)
    return (num_shards_over(axes, layout.sizes),) if links is None else links.rings(axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(how: _Gather, w: jax.Array) -> jax.Array:
    """Returns a gathered weight in the dtype of the compute; its gradient is reduce-scattered in the weight's dtype."""
    if not any(how.parts.dims):
        return w.astype(how.dtype)
    if how.rings is None:
        return gather_reduce.gather(w.astype(how.dtype), how.parts, how.precision).astype(how.dtype)
    one = functools.partial(ppermute_all_gather, rings=how.rings)
    return gather_reduce.gather(w.astype(how.dtype), how.parts, how.precision, one).astype(how.dtype)


def _gather_backward(how: _Gather, like: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    if not any(how.parts.dims):
        return (grad.astype(like.dtype),)
    axes = tuple(axis for dim in how.parts.dims for axis in dim)
    wide = jax.lax.optimization_barrier(grad.astype(like.dtype))
    if how.rings is None:
        return (gather_reduce.reduce(wide, how.parts, axes, how.precision).astype(like.dtype),)
    scatter = functools.partial(ppermute_reduce_scatter, rings=how.rings)
    return (gather_reduce.reduce(wide, how.parts, axes, how.precision, scatter).astype(like.dtype),)


_gather.defvjp(lambda how, w: (_gather(how, w), w[:0]), _gather_backward)
