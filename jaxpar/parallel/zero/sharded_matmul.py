"""``product``: a matmul whose weight and gradient cross the mesh as told, where the compiler would choose by itself.

The compiler gathers and reduces in the dtype of the compute, and gathers from all devices anew for the backward pass. Here the axes of the
batch are manual: weights may be gathered in int8, gradients reduced in int8, and what a group of neighbours needs for the backward
pass may be kept among them (ZeRO++'s secondary shard, Wang et al. 2023, arXiv:2306.10209).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxpar.errors import ConfigError, LayoutError
from jaxpar.parallel.collectives import gather_reduce, hierarchical, quantized
from jaxpar.parallel.precision import fp8_matmul
from jaxpar.parallel.precision.policy import INT8, Precision
from jaxpar.sharding.layout import current_layout, manual_axes
from jaxpar.sharding.rules import Axes

GATHERED = "gathered_weight"
"""The name of gathered weights for checkpoint policies: saved, they would undo the sharding of the parameters."""
type Regather = bool | int
"""Whether the backward pass gathers weights again: from all, not at all, or within groups of so many devices."""


@dataclass(frozen=True)
class Route:
    """How the weight of one product goes.

    Attributes:
      batch: the axes that the rows of the batch are split over; they are manual.
      stored, wanted: those that weight and gradient are split over.
      summed: dims of the weight that are summed over.
      group: devices of the second round of the gather: all gather at once for each pass, 1 keeps whole weights.
    """

    batch: Axes
    stored: gather_reduce.Parts
    wanted: gather_reduce.Parts
    summed: int
    group: int
    precision: Precision


def route(
    x: jax.Array,
    w: jax.Array | jax.ShapeDtypeStruct,
    dims: tuple[str | None, ...],
    *,
    summed: int,
    reshard_after_forward: Regather,
) -> Route | None:
    """The route of a weight with these logical dims, or ``None`` where the compiler's own way is as good.

    Raises:
      ConfigError: ``reshard_after_forward`` is a number that does not divide the devices which share the weight.
      LayoutError: the rules cannot place it, or do not know ``batch``.
    """
    layout, precision = current_layout(), gather_reduce.asked()
    if INT8 not in (precision.gather, precision.reduce) and isinstance(reshard_after_forward, bool):
        return None
    if jax.sharding.get_abstract_mesh().manual_axes:
        return None  # gathered and reduced already, by those who made them manual
    rows = layout.resolve(("batch",), x.shape[:1], path="the batch of sharded_dot()")
    stored, used, grad = (
        layout.resolve(dims, w.shape, role=role, dtype=w.dtype, path="a weight of sharded_dot()")
        for role in ("params", "activations", "gradients")
    )
    problems = tuple(dict.fromkeys((*rows.problems, *used.problems)))
    if problems:
        raise LayoutError(problems)
    batch = rows.axes[0]
    kept = {axis for dim in used.axes for axis in dim}
    parts, wanted = (
        gather_reduce.parts_of(lies, tuple(axis for axis in batch if axis not in kept)) for lies in (stored, grad)
    )
    spread = [axes for axes in parts.dims if axes]
    devices = math.prod(layout.sizes[axis] for axes in spread for axis in axes)
    if not batch or (devices == 1 and precision.reduce != INT8):
        return None
    group = (
        {True: devices, False: 1}[reshard_after_forward]
        if isinstance(reshard_after_forward, bool)
        else reshard_after_forward
    )
    group = group if spread else 1
    if group < 1 or devices % group or (len(spread) > 1 and 1 < group < devices):
        over = ", ".join(axis for axes in spread for axis in axes)
        raise ConfigError(
            f"reshard_after_forward is {group}, but the {devices} devices over {over} which share a weight {dims} of shape {w.shape} make no "
            f"groups of {group}. Remedy: a divisor of {devices}, true or false."
        )
    return Route(batch, parts, wanted, summed, group, precision)


def product(x: jax.Array, w: jax.Array, way: Route) -> jax.Array:
    """``jnp.tensordot(x, w, way.summed)`` of a stored weight in the dtype of the compute.

    Its gradient is multiplied in that dtype, reduced in that which was asked for, and laid out by the rules for gradients.
    """
    if _at_once(way):
        return _product(way, x, w, ())
    first = functools.partial(_first, way)
    spec = _spec(way.stored)
    kept = _manual(way, first, (spec,), spec)(jax.lax.stop_gradient(w))
    return _product(way, x, w, jax.tree.map(lambda part: checkpoint_name(part, GATHERED), kept))


def _at_once(way: Route) -> bool:
    devices = math.prod(current_layout().sizes[axis] for axes in way.stored.dims for axis in axes)
    return way.group == devices


def _first(way: Route, w: jax.Array) -> Any:
    """The first round of a gather, among the groups: what the backward pass will find."""
    for dim, axes in enumerate(way.stored.dims):
        if axes:
            across = functools.partial(hierarchical.gather_across, axes=axes, dim=dim, group=way.group)
            w = jax.tree.map(across, _packed(way, w))
    return w


def _whole(way: Route, w: Any) -> jax.Array:
    """The second round, within the groups, of what the first has left; or both."""
    if _at_once(way):
        return gather_reduce.gather(w, way.stored, way.precision)
    for dim, axes in enumerate(way.stored.dims):
        if axes:
            w = jax.tree.map(functools.partial(hierarchical.gather_within, axes=axes, dim=dim, group=way.group), w)
    return w if isinstance(w, jax.Array) else quantized.unpack(w)


def _packed(way: Route, w: Any) -> Any:
    if way.precision.gather == INT8 and isinstance(w, jax.Array):
        w = quantized.pack(w)
    return jax.lax.optimization_barrier(w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(way: Route, x: jax.Array, w: jax.Array, kept: Any) -> jax.Array:
    """Of ``w``, or of what is kept of it."""
    given, spec, dtype = kept if _kept(kept) else w, _spec(way.stored), w.dtype

    def local(x: jax.Array, w: Any) -> jax.Array:
        return fp8_matmul.times(x, _whole(way, w).astype(dtype), way.summed, way.precision)

    y = _manual(way, local, (PartitionSpec(way.batch), spec), PartitionSpec(way.batch))(x, given)
    return checkpoint_name(y, fp8_matmul.PRODUCT)  # a policy must not take it for a gather, which is a shard_map too


def _forward(way: Route, x: jax.Array, w: jax.Array, kept: Any) -> tuple[jax.Array, Any]:
    return _product(way, x, w, kept), (x, w, kept)


def _backward(way: Route, saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    x, w, kept = saved
    dtype, given = w.dtype, kept if _kept(kept) else w
    rows = PartitionSpec(way.batch)

    def local(x: jax.Array, w: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole = _whole(way, w).astype(dtype)
        dx = fp8_matmul.input_grad(dy, whole, way.summed, way.precision)
        dw = fp8_matmul.weight_grad(x, dy, way.summed, way.precision)
        return dx.astype(x.dtype), gather_reduce.reduce(dw, way.wanted, way.batch, way.precision).astype(dtype)

    specs = (rows, _spec(way.stored), rows)
    dx, dw = _manual(way, local, specs, (rows, _spec(way.wanted)))(x, given, dy)
    return dx, dw, None


_product.defvjp(_forward, _backward)


def _kept(kept: Any) -> bool:
    return bool(jax.tree.leaves(kept))


def _spec(parts: gather_reduce.Parts) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in parts.dims))


def _manual(way: Route, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """A ``shard_map`` over the batch's axes; and those of size 1, so that what is not there leaves none behind."""
    manual = manual_axes(current_layout(), way.batch)
    # Unchecked: jax would take what is gathered for different on every device.
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False)
