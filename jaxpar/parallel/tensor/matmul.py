"""Matmuls in two, 2.5 and three dimensions, and their gradients, in a ``shard_map``.

Input and weight are gathered as the route says, multiplied on each device, and the result is summed and scattered. The
backward pass keeps the shards and gathers them again, so activations take no more memory than their shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.errors import ConfigError, LayoutError
from jaxpar.parallel.collectives.gather_reduce import as_rows, current_precision, summing
from jaxpar.parallel.collectives.hierarchical import gather_local, scatter_local
from jaxpar.parallel.precision.fp8_matmul import PRODUCT, input_grad, times, weight_grad
from jaxpar.parallel.precision.policy import INT8, Precision
from jaxpar.parallel.tensor.route import Dims, Move, Operand, Route, is_live, route_of, shardings_of
from jaxpar.sharding.hardware.topology import platform_of
from jaxpar.sharding.layout import current_layout, manual_axes
from jaxpar.sharding.mesh import TENSOR_AXES
from jaxpar.sharding.rules import Axes
from jaxpar.utils.arrays import at_least_fp32
from jaxpar.utils.call_site import call_site
from jaxpar.utils.contexts import hint_observer, matmul_observer

type Plan = tuple[tuple[Route, ...], Any, Precision]
"""The routes of weights with one input, the dtype of the gradients' sums, and the precision of the step."""


def routes(x: Any, ws: Sequence[tuple[Any, Dims]], contracting_dims: int) -> tuple[Route, ...] | None:
    """Returns the routes of the products of ``x`` and weights, or ``None`` where no axis ``x``, ``y``, ``z`` has a part.

    Args:
      x: the input, ``[batch, ..., contracted]``; its shape and dtype.
      ws: the weights as the state stores them, and their logical dims.
      contracting_dims: the number of leading dims of the weights that the products sum over.

    Raises:
      LayoutError: the rules cannot place an array, or order axes as no product can use them.
      ConfigError: the step's precision gathers or reduces in int8.
    """
    layout = current_layout()
    if not is_live(layout.sizes):
        return None
    manual = jax.sharding.get_abstract_mesh().manual_axes
    found = [shardings_of(layout, x, w, dims, contracting_dims, manual) for w, dims in ws]
    if not any(axis in TENSOR_AXES for one in found for axis in one.axes):
        return None
    problems = [text for one in found for text in one.problems]
    made = [] if problems else [route_of(one, dims) for one, (_, dims) in zip(found, ws, strict=True)]
    problems += [text for _, texts in made for text in texts]
    if problems and hint_observer.value is not None:  # explain lists problems and raises none
        for one, (w, dims) in zip(found, ws, strict=True):
            hint_observer.value(call_site(), dims, w, one.with_problems(problems))
        return None
    if problems:
        raise LayoutError(tuple(dict.fromkeys(problems)))
    precision = current_precision()
    if INT8 in (precision.gather, precision.reduce):
        raise ConfigError(
            f"precision: gather: {precision.gather}, reduce: {precision.reduce}: matmuls over the mesh axes x, y and z "
            f"do not support int8. Remedy: unset it, or use the mesh axis model instead of x, y and z."
        )
    picked = tuple(route for route, _ in made)
    if matmul_observer.value is not None:
        matmul_observer.value(call_site(), x, [w for w, _ in ws], picked)
    return picked


def multiply(x: jax.Array, ws: Sequence[jax.Array], found: Sequence[Route]) -> list[jax.Array]:
    """Returns the products of ``x`` and the weights by their routes; weights with one kind of input share its gather.

    Args:
      x: the input.
      ws: the weights as the state stores them, in the compute dtype.
      found: as :func:`routes` returned them.
    """
    groups: dict[Operand, list[int]] = {}
    for i, route in enumerate(found):
        groups.setdefault(route.x, []).append(i)
    results: dict[int, jax.Array] = {}
    for group in groups.values():
        plan = (tuple(found[i] for i in group), summing(ws[group[0]].dtype), current_precision())
        results |= zip(group, _products(plan, x, *(ws[i] for i in group)), strict=True)
    return [results[i] for i in range(len(ws))]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(plan: Plan, x: jax.Array, *ws: jax.Array) -> tuple[jax.Array, ...]:
    found, _, precision = plan

    def local(x: jax.Array, *ws: jax.Array) -> tuple[jax.Array, ...]:
        x = _inside(x, found[0].x)
        return tuple(
            _outside(times(x, _weight(w, route, precision), route.contracting_dims, precision), route.y)
            for w, route in zip(ws, found, strict=True)
        )

    ys = _manual(plan, local, _specs(found), tuple(route.y.spec for route in found))(x, *ws)
    # A product is a shard_map too; its name tells a checkpoint policy that it is no gather.
    return tuple(checkpoint_name(y, PRODUCT) for y in ys)


def _backward(plan: Plan, saved: tuple[jax.Array, ...], dys: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    found, wide, precision = plan

    def local(x: jax.Array, ws: tuple[jax.Array, ...], dys: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x_inside = _inside(x, found[0].x)
        sums, grads = [], []
        for w, dy, route in zip(ws, dys, found, strict=True):
            dy = _inside(dy, route.y)
            sums.append(input_grad(dy, _weight(w, route, precision), route.contracting_dims, precision))
            grad = weight_grad(x_inside, dy, route.contracting_dims, precision, wide)
            grads.append(_outside(grad, route.w_grad).astype(w.dtype))
        return _outside(functools.reduce(jax.numpy.add, sums).astype(x.dtype), found[0].x), *grads

    x, *ws = saved
    specs, results = _specs(found), tuple(route.y.spec for route in found)
    grad_specs = (found[0].x.spec, *(route.w_grad.spec for route in found))
    return _manual(plan, local, (specs[0], specs[1:], results), grad_specs)(x, tuple(ws), dys)


_products.defvjp(lambda plan, *arrays: (_products(plan, *arrays), arrays), _backward)


def _specs(found: Sequence[Route]) -> tuple[Any, ...]:
    return found[0].x.spec, *(route.w.spec for route in found)


def _weight(w: jax.Array, route: Route, precision: Precision) -> jax.Array:
    """Returns a weight as the local product uses it, gathered in the precision's dtype if that is narrower."""
    narrow = precision.gathering(w.dtype) if route.w.moves else None
    if narrow is None:
        return _inside(w, route.w)
    return _inside(jax.lax.optimization_barrier(w.astype(narrow)), route.w).astype(w.dtype)


def _inside(x: jax.Array, operand: Operand) -> jax.Array:
    """Returns the part of an operand that a local product uses."""
    for move in operand.moves:
        x = as_rows(functools.partial(gather_local, axes=move.axes), x, move.dim)
    return x


def _outside(x: jax.Array, operand: Operand) -> jax.Array:
    """Returns the shard of an operand, from what a local product computed of it; partial sums are added."""
    dtype = x.dtype
    mesh = jax.sharding.get_abstract_mesh()
    if set(mesh.axis_names) - set(mesh.manual_axes) and platform_of(current_layout().mesh) == "cpu":
        x = at_least_fp32(x)  # XLA:CPU aborts on a 16-bit sum in a shard_map with some automatic axes
    for move in reversed(operand.moves):
        shard = functools.partial(scatter_local if move.summed else _slice, axes=move.axes)
        x = as_rows(shard, x, move.dim)
    x = jax.lax.psum(x, operand.summed) if operand.summed else x
    return x.astype(dtype)


def _slice(x: jax.Array, axes: Axes, *, dim: int) -> jax.Array:
    size = x.shape[dim] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, dim)


def _manual(plan: Plan, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    axes = {axis for route in plan[0] for axis in route.axes}
    already = jax.sharding.get_abstract_mesh().manual_axes
    manual = manual_axes(current_layout(), axes) - set(already)
    # check_vma is off: jax would assume that a gathered weight differs between devices.
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False)
