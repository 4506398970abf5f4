"""``product``: a matmul with a sharded weight that controls how the weight and its gradient are communicated.

The compiler gathers and reduces in the compute dtype, and gathers from all devices again for the backward pass. Here
the mesh axes of the batch are manual. Weights can therefore be gathered in int8 and gradients reduced in int8, and a
group of neighbouring devices can keep a shard for the backward pass (ZeRO++'s secondary shard, Wang et al. 2023,
arXiv:2306.10209).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxpar.errors import ConfigError, LayoutError
from jaxpar.parallel.collectives import gather_reduce, hierarchical, quantized
from jaxpar.parallel.manual_axes import manual_shard_map
from jaxpar.parallel.precision import fp8_matmul
from jaxpar.parallel.precision.policy import INT8, Precision
from jaxpar.sharding.layout import current_layout
from jaxpar.sharding.names import Names
from jaxpar.sharding.rules import Axes

GATHERED = "gathered_weight"
"""The checkpoint name of gathered weights. A policy that saved them would undo the sharding of the parameters."""
type Regather = bool | int
"""Whether the backward pass gathers weights again: from all devices (true), not at all, or in groups of N devices."""


@dataclass(frozen=True)
class Route:
    """How one product communicates its weight and gradient.

    Attributes:
      batch: the mesh axes that shard the rows of the batch; they are manual.
      stored: the manual axes that shard each dim of the weight.
      grad_parts: the manual axes that shard each dim of the gradient.
      summed: the number of leading dims of the weight that the product sums over.
      group: the number of devices in the second round of the gather. If it is all devices, each pass gathers in one
        round; if it is 1, the first round makes full weights, which are kept.
      precision: the dtypes of the compute and the collectives.
    """

    batch: Axes
    stored: gather_reduce.Parts
    grad_parts: gather_reduce.Parts
    summed: int
    group: int
    precision: Precision


def route(
    x: jax.Array, w: Any, dims: Names, *, summed: int, reshard_after_forward: Regather, exact: bool = False
) -> Route | None:
    """Returns the route of a weight with these logical dims, or ``None`` if the compiler's own collectives do as well.

    Args:
      x: the input, ``[batch, ..., embed]``.
      w: the weight as it is stored, or its shape and dtype.
      dims: the weight's logical dims.
      summed: the number of leading dims of the weight that the product sums over.
      reshard_after_forward: see :data:`Regather`.
      exact: whether the weight is gathered in the compute dtype, whatever the precision's ``gather`` is.

    Raises:
      ConfigError: ``reshard_after_forward`` is a number that does not divide the number of devices that share the
        weight.
      LayoutError: the rules cannot place the weight, or do not know ``batch``.
    """
    layout, precision = current_layout(), gather_reduce.current_precision().for_weight(exact)
    if INT8 not in (precision.gather, precision.reduce) and isinstance(reshard_after_forward, bool):
        return None
    if jax.sharding.get_abstract_mesh().manual_axes:
        return None  # code that made these axes manual gathers and reduces by itself
    rows = layout.resolve(("batch",), x.shape[:1], path="the batch of sharded_dot()")
    stored, used, grad = (
        layout.resolve(dims, w.shape, role=role, dtype=w.dtype, path="a weight of sharded_dot()")
        for role in ("params", "activations", "gradients")
    )
    if problems := tuple(dict.fromkeys((*rows.problems, *used.problems))):
        raise LayoutError(problems)
    batch = rows.axes[0]
    kept = {axis for dim in used.axes for axis in dim}
    free = tuple(axis for axis in batch if axis not in kept)
    parts, grad_parts = (gather_reduce.parts_of(resolved, free) for resolved in (stored, grad))
    sharded = [axes for axes in parts.dims if axes]
    devices = math.prod(layout.sizes[axis] for axes in sharded for axis in axes)
    if not batch or (devices == 1 and precision.reduce != INT8):
        return None
    group: int = reshard_after_forward if sharded else 1
    if isinstance(reshard_after_forward, bool):
        group = devices if reshard_after_forward else 1
    if group < 1 or devices % group or (len(sharded) > 1 and 1 < group < devices):
        over = ", ".join(axis for axes in sharded for axis in axes)
        raise ConfigError(
            f"reshard_after_forward is {group}, but the {devices} devices over {over} that share a weight {dims} of "
            f"shape {w.shape} cannot form groups of {group}. Remedy: use a divisor of {devices}, true or false."
        )
    return Route(batch, parts, grad_parts, summed, group, precision)


def product(x: jax.Array, w: jax.Array, plan: Route) -> jax.Array:
    """Returns ``jnp.tensordot(x, w, way.summed)`` of a stored weight, in the compute dtype.

    The gradient of ``w`` is computed in that dtype, reduced in the precision's ``reduce``, and sharded by the role
    ``gradients``.
    """
    if _gathers_in_one_round(plan):
        return _product(plan, x, w, None)
    first = functools.partial(_gather_first_round, plan)
    spec = plan.stored.spec
    kept = manual_shard_map(first, plan.batch, (spec,), spec)(jax.lax.stop_gradient(w))
    return _product(plan, x, w, jax.tree.map(lambda part: checkpoint_name(part, GATHERED), kept))


def _gathers_in_one_round(plan: Route) -> bool:
    devices = math.prod(current_layout().sizes[axis] for axes in plan.stored.dims for axis in axes)
    return plan.group == devices


def _gather_first_round(plan: Route, w: jax.Array) -> Any:
    """The first round of a gather, across the groups: its result is kept for the backward pass."""
    for dim, axes in enumerate(plan.stored.dims):
        if axes:
            packs = plan.precision.gather == INT8 and isinstance(w, jax.Array)
            w = jax.lax.optimization_barrier(quantized.pack(w) if packs else w)
            across = functools.partial(hierarchical.gather_across, axes=axes, dim=dim, group=plan.group)
            w = jax.tree.map(across, w)
    return w


def _gather_second_round(plan: Route, w: Any) -> jax.Array:
    """The second round of a gather, within the groups, on the result of the first; or the gather in one round."""
    if _gathers_in_one_round(plan):
        return gather_reduce.gather(w, plan.stored, plan.precision)
    for dim, axes in enumerate(plan.stored.dims):
        if axes:
            w = jax.tree.map(functools.partial(hierarchical.gather_within, axes=axes, dim=dim, group=plan.group), w)
    return w if isinstance(w, jax.Array) else quantized.unpack(w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(plan: Route, x: jax.Array, w: jax.Array, kept: Any) -> jax.Array:
    """The product with ``w``, or with what the first round of the gather kept of it."""
    w_in, rows, dtype = w if kept is None else kept, PartitionSpec(plan.batch), w.dtype

    def local(x: jax.Array, w: Any) -> jax.Array:
        return fp8_matmul.times(x, _gather_second_round(plan, w).astype(dtype), plan.summed, plan.precision)

    y = manual_shard_map(local, plan.batch, (rows, plan.stored.spec), rows)(x, w_in)
    # A product is a shard_map too; its name tells a policy that it is no gather.
    return checkpoint_name(y, fp8_matmul.PRODUCT)


def _backward(plan: Route, saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    x, w, kept = saved
    dtype, w_in, rows = w.dtype, w if kept is None else kept, PartitionSpec(plan.batch)

    def local(x: jax.Array, w: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        full_w = _gather_second_round(plan, w).astype(dtype)
        dx = fp8_matmul.input_grad(dy, full_w, plan.summed, plan.precision)
        dw = fp8_matmul.weight_grad(x, dy, plan.summed, plan.precision)
        return dx.astype(x.dtype), gather_reduce.reduce(dw, plan.grad_parts, plan.batch, plan.precision).astype(dtype)

    specs = (rows, plan.stored.spec, rows)
    return *manual_shard_map(local, plan.batch, specs, (rows, plan.grad_parts.spec))(x, w_in, dy), None


_product.defvjp(lambda plan, *arrays: (_product(plan, *arrays), arrays), _backward)
