"""Matmuls in two, 2.5 and three dimensions, and their gradients, in a ``shard_map``.

Input and weight are gathered as the route says, multiplied on each device, and the result is summed and scattered. The
backward pass keeps the shards and gathers them again, so activations take no more memory than their shards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpar.errors import ConfigError, LayoutError
from jaxpar.parallel.collectives.gather_reduce import current_precision, summing
from jaxpar.parallel.precision.fp8_matmul import PRODUCT, input_grad, times, weight_grad, widened
from jaxpar.parallel.precision.policy import INT8, Precision
from jaxpar.parallel.tensor.local import run_manual, to_inside, to_outside
from jaxpar.parallel.tensor.route import MatmulOperand, MatmulRoute, WeightDims, is_live, route_of, shardings_of
from jaxpar.sharding.layout import current_layout
from jaxpar.sharding.mesh import TENSOR_AXES
from jaxpar.utils.call_site import call_site
from jaxpar.utils.contexts import hint_observer, matmul_observer

type ProductPlan = tuple[tuple[MatmulRoute, ...], Any, Precision]
"""The routes of weights with one input, the dtype of the gradients' sums, and the precision of the step."""


def routes(
    x: Any, ws: Sequence[tuple[Any, WeightDims]], contracting_dims: int, *, observed: bool = True
) -> tuple[MatmulRoute, ...] | None:
    """Returns the routes of the products of ``x`` and weights, or ``None`` if no axis ``x``, ``y`` or ``z`` has a part.

    A ``matmul_observer`` also receives the routes of products in one dimension.

    Args:
      x: the input, ``[batch, ..., contracted]``; its shape and dtype.
      ws: the weights as the state stores them, and their logical dims.
      contracting_dims: the number of leading dims of the weights that the products sum over.
      observed: whether a ``matmul_observer`` receives the routes.

    Raises:
      LayoutError: the rules cannot place an array, or order axes as no product can use them.
      ConfigError: the step's precision gathers or reduces in int8.
    """
    layout = current_layout()
    observer = matmul_observer.value if observed else None
    if not is_live(layout.sizes) and observer is None:
        return None
    manual = jax.sharding.get_abstract_mesh().manual_axes
    found = [shardings_of(layout, x, w, dims, contracting_dims, manual) for w, dims in ws]
    several = any(axis in TENSOR_AXES for one in found for axis in one.axes)
    if not several and observer is None:
        return None
    problems = tuple(dict.fromkeys(text for one in found for text in one.problems))
    made = [] if problems else [route_of(one, dims) for one, (_, dims) in zip(found, ws, strict=True)]
    problems += tuple(dict.fromkeys(text for _, texts in made for text in texts))
    if problems and not several:
        return None
    if problems and hint_observer.value is not None:  # explain lists problems and raises none
        for one, (w, dims) in zip(found, ws, strict=True):
            hint_observer.value(call_site(), dims, w, replace(one.w, problems=problems))
        return None
    if problems:
        raise LayoutError(problems)
    precision = current_precision()
    if several and INT8 in (precision.gather, precision.reduce):
        raise ConfigError(
            f"precision: gather: {precision.gather}, reduce: {precision.reduce}: matmuls over the mesh axes x, y and z "
            f"do not support int8. Remedy: unset it, or use the mesh axis model instead of x, y and z."
        )
    picked = tuple(route for route, _ in made)
    if observer is not None:
        observer(call_site(), x, [w for w, _ in ws], picked)
    return picked if several else None


def product_name(x: Any, ws: Sequence[Any]) -> str:
    """Returns the checkpoint name of the products of ``x`` and weights while a ``matmul_observer`` receives routes."""
    return f"products of {tuple(x.shape)} and {[tuple(w.shape) for w in ws]}"


def multiply(
    x: jax.Array, ws: Sequence[jax.Array], found: Sequence[MatmulRoute], precision: Precision
) -> list[jax.Array]:
    """Returns the products of ``x`` and the weights by their routes; weights with one kind of input share its gather.

    Args:
      x: the input.
      ws: the weights as the state stores them, in the compute dtype.
      found: as :func:`routes` returned them.
      precision: the dtypes of the products and of the gathers of weights.
    """
    groups: dict[MatmulOperand, list[int]] = {}
    for i, route in enumerate(found):
        groups.setdefault(route.x, []).append(i)
    results: dict[int, jax.Array] = {}
    for group in groups.values():
        plan = (tuple(found[i] for i in group), summing(ws[group[0]].dtype), precision)
        results |= zip(group, _products(plan, x, *(ws[i] for i in group)), strict=True)
    return [results[i] for i in range(len(ws))]


def product(route: MatmulRoute | None, x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns ``x @ w`` by a route, or by the compiler if there is none. It has no gradient of its own."""
    return x @ w if route is None else _products(((route,), None, Precision()), x, w)[0]


def product_grads(
    route: MatmulRoute | None, x: jax.Array, w: jax.Array, dy: jax.Array, dtypes: tuple[Any, Any]
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of ``x`` and ``w`` in :func:`product`, computed and summed over devices in ``dtypes``."""

    def local(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        if route is not None:
            x, dy = to_inside(x, route.x), to_inside(dy, route.y)
        rows = tuple(range(x.ndim - 1))
        dx = jnp.tensordot(*widened(dy, w, dtypes[0]), (-1, 1), preferred_element_type=dtypes[0])
        dw = jnp.tensordot(*widened(x, dy, dtypes[1]), (rows, rows), preferred_element_type=dtypes[1])
        return (dx, dw) if route is None else (to_outside(dx, route.x), to_outside(dw, route.w_grad))

    if route is None:
        return local(x, w, dy)
    specs = (route.x.spec, route.w.spec, route.y.spec), (route.x.spec, route.w_grad.spec)
    return run_manual((route,), local, *specs)(x, w, dy)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(plan: ProductPlan, x: jax.Array, *ws: jax.Array) -> tuple[jax.Array, ...]:
    found, _, precision = plan

    def local(x: jax.Array, *ws: jax.Array) -> tuple[jax.Array, ...]:
        x = to_inside(x, found[0].x)
        return tuple(
            to_outside(times(x, _weight(w, route, precision), route.contracting_dims, precision), route.y)
            for w, route in zip(ws, found, strict=True)
        )

    ys = run_manual(found, local, _specs(found), tuple(route.y.spec for route in found))(x, *ws)
    # A product is a shard_map too; its name tells a checkpoint policy that it is no gather.
    return tuple(checkpoint_name(y, PRODUCT) for y in ys)


def _backward(plan: ProductPlan, saved: tuple[jax.Array, ...], dys: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    found, wide, precision = plan

    def local(x: jax.Array, ws: tuple[jax.Array, ...], dys: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x_inside = to_inside(x, found[0].x)
        sums, grads = [], []
        for w, dy, route in zip(ws, dys, found, strict=True):
            dy = to_inside(dy, route.y)
            sums.append(input_grad(dy, _weight(w, route, precision), route.contracting_dims, precision))
            grad = weight_grad(x_inside, dy, route.contracting_dims, precision, wide)
            grads.append(to_outside(grad, route.w_grad).astype(w.dtype))
        return to_outside(functools.reduce(jnp.add, sums).astype(x.dtype), found[0].x), *grads

    x, *ws = saved
    specs, results = _specs(found), tuple(route.y.spec for route in found)
    grad_specs = (found[0].x.spec, *(route.w_grad.spec for route in found))
    return run_manual(found, local, (specs[0], specs[1:], results), grad_specs)(x, tuple(ws), dys)


_products.defvjp(lambda plan, *arrays: (_products(plan, *arrays), arrays), _backward)


def _specs(found: Sequence[MatmulRoute]) -> tuple[Any, ...]:
    return found[0].x.spec, *(route.w.spec for route in found)


def _weight(w: jax.Array, route: MatmulRoute, precision: Precision) -> jax.Array:
    """Returns a weight as the local product uses it, gathered in the precision's dtype if that is narrower."""
    if (narrow := precision.gathering(w.dtype) if route.w.moves else None) is None:
        return to_inside(w, route.w)
    return to_inside(jax.lax.optimization_barrier(w.astype(narrow)), route.w).astype(w.dtype)
