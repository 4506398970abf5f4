"""Loss and gradients of a batch in a pipeline.

The layers are split over the stages; the parts before and after them run on all devices. The axes of the batch and of
the sequence are manual, as for ``grad_reduction="per_step"``: weights are gathered once a step, every device sums its
own gradients over all microbatches, and one reduction follows. The part before the layers runs once for the whole
batch, outside the ticks (``embedding="per_microbatch"``: in the ticks). The part after the layers runs for each
microbatch on all stages in parallel, so rules may shard its weights over ``pipeline`` (``vocab: [pipeline, model]``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError, LayoutError, ModelError
from jaxpar.parallel.batch_rows import batch_rows
from jaxpar.parallel.collectives.gather_reduce import at_least_fp32, batch_axes, seq_axes
from jaxpar.parallel.offload.placement import on_host
from jaxpar.parallel.pipeline.executor.first_ticks import first_ticks
from jaxpar.parallel.pipeline.executor.frozen import trained_part, with_trained
from jaxpar.parallel.pipeline.executor.layer_inputs import LayerInputs, LayerScalars
from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.pipeline.executor.program import Head, TickSums
from jaxpar.parallel.pipeline.executor.run import run
from jaxpar.parallel.pipeline.executor.sequence_chunks import SequenceCarry, check_chunks
from jaxpar.parallel.pipeline.options import Asynchronous, Pipeline
from jaxpar.parallel.pipeline.separate_layers import layer_keys
from jaxpar.parallel.pipeline.staged_loss import PipelineLoss, with_extras
from jaxpar.parallel.precision.policy import INT8
from jaxpar.sharding.layout import Layout
from jaxpar.training.exact_weights import computing
from jaxpar.training.loss import check_names
from jaxpar.training.microbatches import GradientResult, StepConfig, counted, means_of, scale_of, unscaled, weighted_sum
from jaxpar.training.model import leaves_with_paths, show
from jaxpar.training.pipeline import stage_functions
from jaxpar.training.pipeline.adapters import adapter_grads, run_adapted, stage_state
from jaxpar.training.pipeline.head_sums import HeadSums
from jaxpar.training.pipeline.model_split import ModelSplit, check_synchronous
from jaxpar.training.pipeline.transfer import StageTransfer
from jaxpar.training.state import TrainState


def pipeline_gradients(
    layout: Layout, loss_fn: Any, state: TrainState, batch: Any, config: StepConfig, options: Pipeline
) -> GradientResult:
    """Returns loss, metrics and gradients of ``state``'s parameters on ``batch``.

    Args:
      layout, loss_fn, state, batch, config: as for :func:`jaxpar.training.gradients.gradients`.
      options: the pipeline's options.

    Raises:
      ConfigError, LayoutError, ModelError: as for :func:`jaxpar.training.gradients.gradients`, or something that a
        pipeline does not support.
    """
    own, state = state, stage_state(state, loss_fn)
    check_trained(layout, loss_fn, state, config, options)
    if config.grad_reduction == "per_microbatch" and options.grad_reduction == "per_step":  # ZeRO stage 2
        options = replace(options, grad_reduction="per_microbatch")
    schedule, precision, scale = options.schedule, config.precision, scale_of(state, config.precision)
    split = ModelSplit(state, loss_fn)
    batch = split.prepare(state.params, batch, precision)
    stage_functions.check_rows(layout, batch, schedule.microbatches // schedule.sequence_chunks)
    _check_chunks(layout, loss_fn, batch, options)

    others = computing(split.others(state.params), state, precision)
    trained = trained_part(others)
    embed = lambda trained: stage_functions.embed_batch(layout, split, with_trained(others, trained), batch)
    in_ticks = options.embedding == "per_microbatch"
    x, pull = (jax.eval_shape(embed, trained), None) if in_ticks else jax.vjp(embed, trained)
    check_chunks(x, schedule)

    transfer = StageTransfer.of(layout, split, precision, options, batch)
    context, fed = stage_functions.context_of(
        transfer,
        schedule,
        batch,
        None if in_ticks else x,
        head=head_of(split, scale, wide=not transfer.head_parts),
        activation_checkpointing=options.activation_checkpointing,
        independent=options.executor == "independent",
        reduce=transfer.of_one_layer if options.grad_reduction == "per_microbatch" else None,
        reduce_bucket=transfer.of_bucket if options.grad_reduction == "per_chunk" else None,
        reduce_beside=transfer.of_bucket_beside,
        sums=HeadSums(transfer) if transfer.head_parts else TickSums(),
        join=join,
        first_ticks=_first_ticks(transfer, options),
        layer_slots=transfer.residual_slots(options),
        recompute=options.recompute,
        carry=_carry(split, schedule.sequence_chunks),
        embedding=stage_functions.embedding_of(split) if in_ticks else None,
    )
    grads, (sums, weight, head_grads), fed = run(context, fed)
    sums, weight, grads, x = transfer.gather_from_stages(split.join(grads, head_grads), sums, weight, fed)
    if pull is not None:
        (embed_grads,) = pull(x)
        grads = split.add(grads, jax.tree.map(at_least_fp32, embed_grads))
    loss, metrics, grads = means_of((*sums, grads), weight)
    return GradientResult(loss, metrics, own.variables, unscaled(own, adapter_grads(own, grads), scale))


def check_trained(
    layout: Layout, loss_fn: Any, state: TrainState, config: StepConfig, options: Pipeline | Asynchronous
) -> None:
    """Raises if a pipeline cannot train with these arguments.

    Raises:
      ConfigError, ModelError: the first problem.
    """
    check_pipeline(layout, loss_fn, state, options)
    if options.schedule.forward_only:
        raise ConfigError(
            f"pipeline: the schedule {options.schedule.name!r} has no backward passes, so it cannot train. Remedy: use "
            "'1f1b'."
        )
    used = (AXIS, *batch_axes(layout))
    other_axes = ", ".join(f"{a} {size}" for a, size in layout.sizes.items() if size > 1 and a not in used)
    if options.executor == "independent" and other_axes:
        raise ConfigError(
            "pipeline: executor is 'independent', in which each stage runs loops of its own length, but the mesh has "
            f"{other_axes}: layers contain collectives over these axes, so some stages would wait for others forever. "
            "Remedy: set executor='lockstep', or use a mesh of only pipeline and the axes of the batch."
        )
    if config.grad_accum_steps != 1:
        raise ConfigError(
            f"pipeline: grad_accum_steps is {config.grad_accum_steps}, but the schedule's "
            f"{options.schedule.microbatches} microbatches already accumulate gradients. Remedy: leave "
            f"grad_accum_steps out, or use a schedule of "
            f"{config.grad_accum_steps * options.schedule.microbatches} microbatches."
        )
    groups = [name for name, value in vars(config.fusion).items() if isinstance(value, tuple)]
    each = isinstance(options, Asynchronous) and config.grad_reduction == "per_microbatch"
    if groups or each:
        what = f"fusion: {groups[0]} names groups of layers" if groups else "grad_reduction is 'per_microbatch'"
        raise ConfigError(
            f"pipeline: {what}, but each stage gathers its weights and reduces its gradients once per step. Remedy: "
            "leave it out."
        )
    if config.per_device_grads:
        raise ConfigError(
            "pipeline: an optimizer that reduces gradients itself (one_bit_adam) is not supported. Remedy: use "
            "another optimizer, or leave the pipeline out."
        )


def check_pipeline(layout: Layout, loss_fn: Any, state: TrainState, options: Pipeline | Asynchronous) -> None:
    """Raises if no pipeline supports these arguments, in training or evaluation.

    Raises:
      ConfigError, ModelError: the first problem.
    """
    if not isinstance(loss_fn, PipelineLoss):
        raise ConfigError(
            f"pipeline: loss_fn is {getattr(loss_fn, '__name__', type(loss_fn).__name__)!r}, which does not define "
            "the layers. Remedy: use jaxpar.pipeline.PipelineLoss(layers=..., embed=..., layer=..., head=...), which "
            "defines the stack of layers and the parts before and after it."
        )
    if isinstance(options, Asynchronous):
        check_synchronous(state)
    _check_stack(loss_fn, state)
    stages = layout.sizes.get(AXIS, 1)
    if options.schedule.stages != stages:
        raise ConfigError(
            f"pipeline: the schedule {options.schedule.name!r} has {options.schedule.stages} stages, but the mesh's "
            f"axis {AXIS!r} has {stages} devices. Remedy: set stages={stages}, or mesh {{{AXIS}: "
            f"{options.schedule.stages}}}."
        )
    if any(map(on_host, jax.tree.leaves(state.params))):
        raise ConfigError(
            "pipeline: parameters in host memory are not supported. Remedy: keep parameters on the device, or leave "
            "the pipeline out."
        )
    carried = [
        show(("variables", *path))
        for path, x in leaves_with_paths(state.variables)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    if carried:
        raise ModelError(
            f"pipeline: the model carries {', '.join(carried)}, but microbatches pass the stages in an order of their "
            "own, so no state can be carried from one to the next. Remedy: use a model without carried state "
            "(LayerNorm or RMSNorm instead of BatchNorm)."
        )


def _check_stack(loss_fn: PipelineLoss, state: TrainState) -> None:
    """Raises if the layers are separate parameters, of which no rule can give each stage its own."""
    *outer, name = loss_fn.path
    parent = state.params
    for key in outer:
        parent = parent.get(key) if isinstance(parent, Mapping) else None
    if isinstance(parent, Mapping) and layer_keys(parent, name)[1]:
        raise ModelError(
            f"pipeline: the layers {loss_fn.layers!r} are separate parameters, but stages share a stack of layers. "
            f"Remedy: jp.init(layout, jp.pipeline.stack(make_model, {loss_fn.layers!r}), tx), which leaves the model "
            "as it is."
        )


def _first_ticks(transfer: StageTransfer, options: Pipeline) -> int:
    """Returns the number of ticks that gather weights beside their forwards."""
    alone = options.executor == "independent" or options.recompute or options.schedule.sequence_chunks > 1
    if alone or transfer.precision.gather == INT8 or not transfer.gathers_layers:
        return 0
    return first_ticks(options.schedule, options.schedule.table(options.activation_checkpointing))


def join(sums: Any, extras: LayerScalars) -> Any:
    """Adds the layers' own losses and metrics to the sums over microbatches."""
    (loss, metrics), *others = sums
    if not extras:
        return sums
    loss, metrics = with_extras((loss, metrics), extras)
    check_names(metrics)
    return (loss, metrics), *others


def _check_chunks(layout: Layout, loss_fn: PipelineLoss, batch: Any, options: Pipeline) -> None:
    """Raises if a sequence cannot be split into chunks, or the layers cannot process it in chunks."""
    schedule = options.schedule
    if schedule.sequence_chunks == 1:
        return
    start = f"pipeline: the schedule {schedule.name!r} splits each sequence into {schedule.sequence_chunks} chunks"
    axes = seq_axes(layout)
    problems = {
        ", but the loss does not define what a layer carries from one chunk to the next. Remedy: set "
        "PipelineLoss(chunked_layer=..., chunk_carry=...), or sequence_chunks=1.": loss_fn.chunked_layer is None,
        ", but layers draw random numbers (keys=True) with one key per row, so all chunks of a row would draw the "
        "same numbers. Remedy: set sequence_chunks=1, or use layers that draw none.": loss_fn.keys,
        f", but recompute is {list(options.recompute)}, and the carries of chunks have no slots per layer. Remedy: "
        "set activation_checkpointing='full', or sequence_chunks=1.": options.recompute,
        " and each backward pass in two, but the gradients of the carries of chunks cannot be split. Remedy: use "
        "orders without W.": schedule.split,
        f", but the rule for 'seq' shards it over {', '.join(f'{axis} {layout.sizes[axis]}' for axis in axes)}, so "
        "only some devices would have a chunk. Remedy: set sequence_chunks=1, or remove these axes from the rule for "
        "'seq'.": axes,
    }
    for problem, found in problems.items():
        if found:
            raise ConfigError(start + problem)
    for path, x in leaves_with_paths(batch):
        if x.ndim > 1 and x.shape[1] % schedule.sequence_chunks:
            raise LayoutError(
                f"{show(('batch', *path))} {list(x.shape)}: the schedule {schedule.name!r} splits the second "
                f"dim of the batch's arrays into {schedule.sequence_chunks} chunks, but {schedule.sequence_chunks} "
                f"does not divide {x.shape[1]}. Remedy: use sequences whose length is a multiple of "
                f"{schedule.sequence_chunks}, or another sequence_chunks."
            )


def _carry(split: ModelSplit, chunks: int) -> SequenceCarry | None:
    """Returns how the layers process sequences in chunks; ``None`` without chunks."""
    layer = split.loss_fn.chunked_layer
    if chunks == 1 or layer is None:
        return None

    def empty(piece: Any) -> Any:
        call = lambda model: split.loss_fn.chunk_carry(model, piece.batch)
        zeros = lambda w: jnp.zeros(w.shape, w.dtype)  # only the result's shape matters
        others = jax.tree.map(zeros, split.others(split.shapes))
        stage_functions.read_by(split, "chunk_carry", call, others)
        return call(split.model_of(others))

    def carried(w: Any, x: jax.Array, side: LayerInputs, carry: Any, chunk: jax.Array) -> tuple[jax.Array, Any]:
        with batch_rows(side.numbers):
            return run_adapted(lambda w: layer(split.block(w), x, side.given, carry, chunk), w, layer=True)

    return SequenceCarry(carried, empty, chunks)


def head_of(split: ModelSplit, scale: Any, *, wide: bool = True) -> Head:
    """Returns the head of one microbatch: its contribution to all sums, and the cotangent of its input.

    Args:
      split: the parameters and the loss.
      scale: of the loss, or ``None``.
      wide: whether gradients are returned in at least fp32, or as they are computed, which needs less memory.
    """

    def loss_of(trained: Any, weights: Any, y: jax.Array, piece: Any) -> tuple[jax.Array, Any]:
        loss, metrics, weight = stage_functions.run_head(split, with_trained(weights, trained), y, piece)
        scaled = at_least_fp32(loss) * weight * (1 if scale is None else scale)
        return scaled, (loss, metrics, weight)

    def head(weights: Any, piece: Any, y: jax.Array) -> tuple[Any, Any]:
        grad = jax.grad(loss_of, argnums=(0, 2), has_aux=True)
        (grads, cotangent), (loss, metrics, weight) = grad(trained_part(weights), weights, y, piece)
        counts = jnp.stack([weight, weight * (1 if scale is None else scale)])
        grads, cotangent = counted((grads, cotangent), weight, metrics)
        sums = weighted_sum((loss, metrics), weight, metrics)
        grads = split.constrained(jax.tree.map(at_least_fp32, grads) if wide else grads)
        return (sums, weight, grads), (cotangent, counts)

    return head
