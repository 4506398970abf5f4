"""Microbatches: splitting a batch, and weighted sums of loss, metrics and gradients over its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxpar.errors import LayoutError, ModelError
from jaxpar.parallel.collectives.bucketing import CollectiveFusion
from jaxpar.parallel.pipeline.options import Pipeline
from jaxpar.parallel.precision.policy import Precision
from jaxpar.sharding.layout import Layout
from jaxpar.sharding.resolve import Resolved
from jaxpar.training.loss import Metrics
from jaxpar.training.model import leaves_with_paths, show, to_path
from jaxpar.training.state import TrainState
from jaxpar.utils.arrays import at_least_fp32

WeightGather = Literal["per_use", "per_step"]
GradReduction = Literal["per_step", "per_microbatch"]


@dataclass(frozen=True)
class StepConfig:
    """The checked arguments of :func:`jaxpar.train_step` that gradients depend on, under the same names.

    Attributes:
      per_device_grads: the optimizer reduces gradients itself. Gradients are then per-device, with a leading dim
        sharded over the batch's axes.
    """

    grad_accum_steps: int = 1
    weight_gather: WeightGather = "per_use"
    grad_reduction: GradReduction | None = None
    precision: Precision = field(default_factory=Precision)
    fusion: CollectiveFusion = field(default_factory=CollectiveFusion)
    per_device_grads: bool = False
    pipeline: Pipeline | None = None


@dataclass(frozen=True)
class GradientResult:
    """Loss, metrics, carried variables and gradients of one batch."""

    loss: jax.Array
    metrics: Metrics
    variables: Any
    grads: Any


def scale_of(state: TrainState, precision: Precision) -> jax.Array | None:
    """Returns the loss scale, an fp32 scalar, or ``None`` without one.

    Raises:
      ModelError: only one of ``state`` and ``precision`` has a loss scale.
    """
    if (precision.scale is None) is not (state.loss_scale is None):
        mismatch = (
            "the step scales the loss, but the state has no loss scale"
            if state.loss_scale is None
            else "the state has a loss scale, but the step does not scale the loss"
        )
        raise ModelError(f"{mismatch}. Remedy: pass the same precision to init() and train_step().")
    return None if state.loss_scale is None else state.loss_scale["scale"]


def value_and_grad(compute: Callable[[Any], tuple[jax.Array, Any]], scale: jax.Array | None) -> Callable[[Any], Any]:
    """``jax.value_and_grad(compute, has_aux=True)`` with the gradients, but not the loss, multiplied by ``scale``."""
    if scale is None:
        return jax.value_and_grad(compute, has_aux=True)

    def scaled(weights: Any) -> tuple[jax.Array, Any]:
        loss, found = compute(weights)
        return at_least_fp32(loss) * scale, (loss, found)

    def run(weights: Any) -> Any:
        (_, found), grads = jax.value_and_grad(scaled, has_aux=True)(weights)
        return found, grads

    return run


def unscaled(state: TrainState, grads: Any, scale: jax.Array | None) -> Any:
    """Returns the gradients in their parameters' dtypes, divided by ``scale``."""
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    return grads if scale is None else jax.tree.map(lambda g: (at_least_fp32(g) / scale).astype(g.dtype), grads)


def resolved_tree(layout: Layout, state: TrainState, tree: Any, role: str) -> Any:
    """Returns a tree of :class:`Resolved`: how ``role`` shards the parameters, or a tree like them (gradients)."""
    dims = dict(state.metadata.dims)

    def one(keys: Any, x: Any) -> Resolved:
        path = ("params", *to_path(keys))
        name = f"gradient of {show(path)}" if role == "gradients" else show(path)
        return layout.resolve(dims.get(path, (None,) * x.ndim), x.shape, role=role, dtype=x.dtype, path=name)

    return jax.tree_util.tree_map_with_path(one, tree)


def seen_by(state: TrainState, variables: Any, key: Any, n: Any) -> TrainState:
    """Returns the state with carried variables ``variables`` and the key of microbatch ``n``."""
    return replace(state, variables=variables, key=jax.random.fold_in(key, n))


def pieces_of(batch: Any, count: int, num_shards: int, dim: int) -> Any:
    """Reshapes every array ``[rows, ...]`` to ``[microbatches, rows, ...]``, each microbatch with rows of every device.

    Args:
      batch: arrays whose dim 0 is the batch.
      count: number of microbatches.
      num_shards: number of devices that the rows are sharded over.
      dim: 1 if the arrays hold the rows of all devices, in device order; 0 if they hold those of one device.

    Raises:
      LayoutError: ``num_shards * count`` does not divide the rows of some arrays; the error lists all of them.
    """

    check_rows_divide(batch, count, num_shards, "grad_accum_steps")

    def one(x: jax.Array) -> jax.Array:
        if dim == 0:
            return x.reshape(count, -1, *x.shape[1:])
        return x.reshape(num_shards, count, -1, *x.shape[1:]).swapaxes(0, 1).reshape(count, -1, *x.shape[1:])

    return jax.tree.map(one, batch)


def sums_of(
    run: Callable[..., Any],
    weights: Any,
    variables: Any,
    pieces: Any,
    count: int,
    place: Callable[[Any], Any] = lambda grads: grads,
) -> tuple[Any, jax.Array, Any]:
    """Returns weighted sums of (loss, metrics, gradients), the sum of the weights, and the carried variables.

    Sums are in fp32 or wider. A microbatch's weight is the metric ``weight`` that ``loss_fn`` returns, 1 by default. A
    microbatch of weight 0 contributes nothing (its loss may be NaN), but the variables it changes are carried on.

    Args:
      run: ``run(weights, variables, piece, n) -> ((loss, (metrics, variables)), grads)`` of microbatch ``n``.
      weights: what ``run`` differentiates.
      variables: carried variables before the first microbatch.
      pieces: arrays ``[microbatches, rows, ...]``.
      count: number of microbatches.
      place: constrains the summed gradients to their sharding in each iteration.

    Raises:
      ModelError: a metric is not a scalar, or ``loss_fn`` changes the shape or dtype of a carried variable.
    """

    def weighted(variables: Any, piece: Any, n: Any) -> tuple[Any, Any]:
        (loss, (metrics, variables)), grads = run(weights, variables, piece, n)
        weight = weight_of(metrics, "loss_fn", ", or set grad_accum_steps=1 and leave grad_reduction out")
        return (weighted_sum((loss, metrics, grads), weight, metrics), weight), variables

    def one(carry: Any, xs: Any) -> tuple[Any, None]:
        sums, variables = carry
        found, variables = weighted(variables, xs[1], xs[0])
        (loss, metrics, grads), weight = jax.tree.map(jnp.add, sums, found)
        return (((loss, metrics, place(grads)), weight), variables), None

    first = jax.tree.map(lambda x: x[0], pieces)
    if count == 1:
        (sums, weight), variables = weighted(variables, first, 0)
    else:
        shapes, after = jax.eval_shape(weighted, variables, first, 0)
        _check_carried(variables, after)
        (loss, metrics, grads), weight = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        carry = (((loss, metrics, place(grads)), weight), variables)
        ((sums, weight), variables), _ = jax.lax.scan(one, carry, (jnp.arange(count), pieces))
    return sums, weight, variables


def weight_of(metrics: Metrics, source: str, instead: str = "") -> jax.Array:
    """Returns the weight of a microbatch, the metric ``weight`` or 1.

    Raises:
      ModelError: a metric is not a scalar.
    """
    for name, value in metrics.items():
        if jnp.shape(value):
            raise ModelError(
                f"{source} returned the metric {name!r} of shape {jnp.shape(value)}, but metrics are averaged over "
                f"microbatches and must be scalars. Remedy: return its mean{instead}."
            )
    return jnp.asarray(metrics.get("weight", 1), jnp.float32)


def weighted_sum(tree: Any, weight: jax.Array, metrics: Metrics) -> Any:
    """Returns what one part of a batch (a microbatch, a device's rows) adds to the sums: ``tree * weight``.

    The products are in fp32 or wider. A part of weight 0 adds exactly 0 whatever its values: its mean is 0 / 0, and
    NaN * 0 would be NaN.
    """
    scaled = jax.tree.map(lambda x: at_least_fp32(x) * weight.astype(at_least_fp32(x).dtype), tree)
    return counted(scaled, weight, metrics)


def counted[T](tree: T, weight: jax.Array, metrics: Metrics) -> T:
    """Returns ``tree``, or zeros where ``weight`` is 0; unchanged if ``loss_fn`` reports no weight."""
    return tree if "weight" not in metrics else jax.tree.map(lambda x: jnp.where(weight == 0, 0, x), tree)


def means_of(sums: Any, weight: jax.Array) -> Any:
    """Divides the sums (loss, metrics, gradients) by the sum of the weights; all are 0 where that is 0."""
    total = jnp.where(weight == 0, 1, weight)
    loss, metrics, grads = jax.tree.map(lambda x: x / total.astype(x.dtype), sums)
    return loss, metrics | ({"weight": weight} if "weight" in metrics else {}), grads


def _check_carried(before: Any, after: Any) -> None:
    """Raises if a microbatch changes the shape or dtype of a carried variable, which ``lax.scan`` cannot carry."""
    was, now = ({path: (x.shape, x.dtype) for path, x in leaves_with_paths(tree)} for tree in (before, after))
    changed = [path for path in was | now if was.get(path) != now.get(path)]
    if changed:
        raise ModelError(
            f"loss_fn changed the shape or dtype of {', '.join(show(('variables', *path)) for path in changed)}, "
            "which must stay the same in the loop over microbatches."
        )


def check_rows_divide(batch: Any, count: int, num_shards: int, where: str) -> None:
    """Raises if ``num_shards`` devices cannot each split an array of a batch into ``count`` equal microbatches.

    ``where`` is the option that sets the number of microbatches.

    Raises:
      LayoutError: the error lists all scalars, and all arrays whose dim 0 is not a multiple of ``num_shards * count``.
    """
    number, leaves = num_shards * count, leaves_with_paths(batch)
    arrays = [(path, x.shape) for path, x in leaves if x.ndim == 0 or x.shape[0] % number]
    if not arrays:
        return
    shown = ", ".join(f"{show(('batch', *path))} {list(shape)}" for path, shape in arrays)
    dims = "their first dims are not multiples" if len(arrays) > 1 else "its first dim is not a multiple"
    if count == 1 and where != "pipeline":
        raise LayoutError(
            f"{shown} cannot be split evenly over {num_shards} devices: {dims} of {number}. Remedy: pad the rows to a "
            f"multiple of {number} and mask the padding out of the loss, or drop the remainder."
        )
    into = f"the {count} microbatches of the pipeline" if where == "pipeline" else f"{count} microbatches ({where})"
    other = "a schedule of fewer microbatches" if where == "pipeline" else f"another {where}"
    raise LayoutError(
        f"{shown} cannot be split into {into} over {num_shards} devices: {dims} of {number}. Remedy: use a batch of a "
        f"multiple of {number} rows, or {other}."
    )
