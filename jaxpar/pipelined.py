"""Loss and gradients of a batch by a pipeline: the layers over its stages, what comes before and after them over all devices.

The axes of the batch and of the sequence are manual, as for ``reduce="once"``: weights are gathered once a step, every device sums its own gradients over
all microbatches, and one reduction follows. What comes before the layers runs once for the whole batch, outside of the ticks; what comes
after them, for each microbatch on all stages at once, so that rules may split its weights over ``pipeline`` (``vocab: [pipeline, model]``).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.boarding import Boarding, Split, row_axes
from jaxpar.crossing import batch_axes, wide
from jaxpar.errors import ConfigError, LayoutError, ModelError
from jaxpar.host import on_host
from jaxpar.layout import Layout
from jaxpar.microbatches import Found, How, means_of, scale_of, unscaled
from jaxpar.model import show, to_path
from jaxpar.objective import unpack
from jaxpar.pipeline.asked import Pipeline
from jaxpar.pipeline.executor import Head, Program
from jaxpar.pipeline.layers import AXIS
from jaxpar.staged import Staged
from jaxpar.state import TrainState


def piped(layout: Layout, loss_fn: Any, state: TrainState, batch: Any, how: How, asked: Pipeline) -> Found:
    """Loss, metrics and gradients of ``state``'s parameters on ``batch``, as :func:`jaxpar.gradients.gradients` gives them."""
    _check(layout, loss_fn, state, how, asked)
    schedule, precision, scale = asked.schedule, how.precision, scale_of(state, how.precision)
    split = Split(state, loss_fn)
    batch = loss_fn.prepare(split.model(state.params), batch)
    _check_rows(layout, batch, schedule.microbatches)

    others = jax.tree.map(precision.computing, split.others(state.params))
    before = lambda others: _columns(layout, loss_fn.before(split.model_of(others), batch))
    x, pull = jax.vjp(before, others)

    board = Boarding.of(layout, split, state, precision, asked)
    weights, (pieces, fed) = board.enter(state.params, batch, x, schedule.microbatches)
    program = Program(
        schedule=schedule,
        layer=lambda w, x, side: loss_fn.layer(split.block(w), x, side),
        side=lambda piece: loss_fn.side(split.model_of(split.others(split.shapes)), piece),
        head=_head(loss_fn, split, scale),
        axes=board.axes,
        keeps=asked.keeps,
        divergent=asked.lowering == "divergent",
        reduce=board.of_one_layer if board.each else None,
        counts=board.layers.counts,
        dims=loss_fn.dims,
    )
    grads, (sums, weight, after), fed = program.run(split.stack(weights), split.others(weights), fed, pieces)
    sums, weight, grads, x = board.leave(split.join(grads, after), sums, weight, fed)
    (grads_before,) = pull(x)
    grads = split.add(grads, jax.tree.map(wide, grads_before))
    loss, metrics, grads = means_of((*sums, grads), weight)
    return Found(loss, metrics, state.rest, unscaled(state, grads, scale))


def _check(layout: Layout, loss_fn: Any, state: TrainState, how: How, asked: Pipeline) -> None:
    """What a pipeline cannot do."""
    if not isinstance(loss_fn, Staged):
        raise ConfigError(
            f"pipeline: loss_fn is {getattr(loss_fn, '__name__', type(loss_fn).__name__)!r}, which does not say what the layers are. Remedy: "
            f"jaxpar.Staged(layers=..., before=..., layer=..., after=...), which names the stack and what comes before and after it."
        )
    stages = layout.sizes.get(AXIS, 1)
    if asked.schedule.stages != stages:
        raise ConfigError(
            f"pipeline: the schedule {asked.schedule.name!r} has {asked.schedule.stages} stages, but the mesh's axis {AXIS!r} has {stages} "
            f"devices. Remedy: stages={stages}, or mesh {{{AXIS}: {asked.schedule.stages}}}."
        )
    if asked.schedule.forward_only:
        raise ConfigError(
            f"pipeline: the schedule {asked.schedule.name!r} has no backwards, so nothing can be trained. Remedy: '1f1b'."
        )
    if asked.schedule.sequence_chunks != 1:
        raise ConfigError(
            f"pipeline: the schedule {asked.schedule.name!r} cuts each sequence into {asked.schedule.sequence_chunks} chunks, but stages here take "
            f"whole sequences. Remedy: sequence_chunks=1, or context parallelism (seq: context)."
        )
    others = {axis: size for axis, size in layout.sizes.items() if size > 1 and axis not in (AXIS, *batch_axes(layout))}
    if asked.lowering == "divergent" and others:
        said = ", ".join(f"{axis} {size}" for axis, size in others.items())
        raise ConfigError(
            f"pipeline: lowering is 'divergent', in which each stage runs loops of its own length, but the mesh has {said}: collectives over it "
            f"stand inside of layers, where some stages would wait for others for ever. Remedy: lowering='uniform', or a mesh of pipeline and "
            f"the axes of the batch alone."
        )
    if how.accumulate != 1:
        raise ConfigError(
            f"pipeline: accumulate is {how.accumulate}, but the schedule's {asked.schedule.microbatches} microbatches are the accumulation. "
            f"Remedy: leave accumulate out, or a schedule of {how.accumulate * asked.schedule.microbatches}."
        )
    groups = [name for name, value in vars(how.fusion).items() if isinstance(value, tuple)]
    if groups or how.reduce == "each":
        what = f"fusion: {groups[0]} names groups of layers" if groups else "reduce is 'each'"
        raise ConfigError(
            f"pipeline: {what}, but each stage gathers its weights at once, and reduces its gradients once a step. Remedy: leave it out."
        )
    if how.own or any(map(on_host, jax.tree.leaves(state.params))):
        what = (
            "an optimizer that reduces gradients itself (one_bit_adam)"
            if how.own
            else "parameters in the host's memory"
        )
        raise ConfigError(f"pipeline: {what} cannot be. Remedy: leave it out, or the pipeline.")
    carried = [
        show(("rest", *to_path(keys)))
        for keys, x in jax.tree_util.tree_leaves_with_path(state.rest)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    if carried:
        raise ModelError(
            f"pipeline: the model carries {', '.join(carried)}, but microbatches pass the stages in an order of their own, so no state can be "
            f"carried from one to the next. Remedy: a model without it (LayerNorm or RMSNorm in the place of BatchNorm)."
        )


def _check_rows(layout: Layout, batch: Any, microbatches: int) -> None:
    """Every array has rows for each device's microbatches, and a sequence that its axes divide."""
    ways = math.prod(layout.sizes[axis] for axis in batch_axes(layout))
    for keys, x in jax.tree_util.tree_leaves_with_path(batch):
        what = f"{show(('batch', *to_path(keys)))} {list(x.shape)}"
        if x.ndim == 0 or x.shape[0] % (ways * microbatches):
            raise LayoutError(
                f"{what} cannot be cut into the {microbatches} microbatches of the pipeline over {ways} devices: its first dim is no multiple of "
                f"{ways * microbatches}. Remedy: a batch of a multiple of {ways * microbatches} rows, or a schedule of fewer microbatches."
            )
        _, *seq = row_axes(layout, x)
        parts = math.prod(layout.sizes[axis] for axes in seq for axis in axes)
        if x.ndim > 1 and x.shape[1] % parts:
            raise LayoutError(
                f"{what}: under a pipeline the rule of 'seq' splits the second dim of the batch's arrays over {parts} devices, which do not divide "
                f"{x.shape[1]}. Remedy: a sequence of a multiple of {parts}, or no rule of 'seq' over those axes."
            )


def _head(loss_fn: Staged, split: Split, scale: Any) -> Head:
    """What comes after the layers, of one microbatch: its share of all sums, and the cotangent of what it is given."""

    def loss_of(after: Any, y: jax.Array, piece: Any) -> tuple[jax.Array, Any]:
        loss, metrics, updates = unpack(loss_fn.after(split.model_of(after), y, piece))
        if updates is not None:
            raise ModelError(
                "Staged(after=...) returned a third value (updates), but a pipeline carries no variables. Remedy: return loss or (loss, aux)."
            )
        for name, value in metrics.items():
            if jnp.shape(value):
                raise ModelError(
                    f"Staged(after=...) returned the metric {name!r} of shape {jnp.shape(value)}, but microbatches are averaged, so scalars are "
                    f"wanted. Remedy: return its mean."
                )
        weight = jnp.asarray(metrics.get("weight", 1), jnp.float32)
        scaled = wide(loss) * weight * (1 if scale is None else scale)
        return scaled, (loss, metrics, weight)

    def head(after: Any, piece: Any, y: jax.Array) -> tuple[Any, jax.Array]:
        grad = jax.grad(loss_of, argnums=(0, 1), has_aux=True)
        (grads, cotangent), (loss, metrics, weight) = grad(after, y, piece)
        sums = jax.tree.map(lambda x: wide(x) * weight.astype(wide(x).dtype), (loss, metrics))
        return (sums, weight, split.laid(jax.tree.map(wide, grads))), cotangent

    return head


def _columns(layout: Layout, x: jax.Array) -> jax.Array:
    """What the first layer is given, its last dim over the stages: only the first wants it whole, a microbatch at a time."""
    stages = layout.sizes.get(AXIS, 1)
    if x.shape[-1] % stages:
        return x
    spec = PartitionSpec(*row_axes(layout, x), *(None,) * (x.ndim - 1 - len(row_axes(layout, x))), AXIS)
    return jax.lax.with_sharding_constraint(x, spec)
