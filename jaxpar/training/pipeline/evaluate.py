"""Metrics of a batch in a pipeline: forward passes only, each stage with its own layers, no residuals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.batch_rows import numbering
from jaxpar.parallel.pipeline.executor.program import Head
from jaxpar.parallel.pipeline.executor.run import run_forward
from jaxpar.parallel.pipeline.executor.tick_context import TickContext
from jaxpar.parallel.pipeline.options import Pipeline
from jaxpar.parallel.pipeline.schedules.forward_only import forwards
from jaxpar.parallel.pipeline.staged_loss import PipelineLoss
from jaxpar.parallel.precision.policy import Precision
from jaxpar.sharding.layout import Layout
from jaxpar.training.loss import Metrics, key_of
from jaxpar.training.microbatches import means_of, weighted_sum
from jaxpar.training.pipeline.gradients import check_pipeline, join
from jaxpar.training.pipeline.stage_functions import (
    check_rows,
    columns,
    embedding_of,
    given_of,
    layer_input_weights,
    program_of,
    run_embed,
    run_head,
)
from jaxpar.training.pipeline.transfer import ModelSplit, StageTransfer
from jaxpar.training.state import TrainState


@numbering
def evaluate_pipeline(
    layout: Layout, loss_fn: Any, state: TrainState, batch: Any, precision: Precision, options: Pipeline
) -> Metrics:
    """Returns loss and metrics of ``batch``, averaged over microbatches as in training.

    Args:
      layout: the ambient layout.
      loss_fn: a :class:`jaxpar.pipeline.PipelineLoss`.
      state: supplies parameters and key.
      batch: arrays ``[rows, ...]``.
      precision: dtypes of the compute and the gathers.
      options: the pipeline's options; options for backward passes are ignored.

    Raises:
      ConfigError, LayoutError, ModelError: as in training.
    """
    schedule = forwards(options.schedule)
    options = replace(
        options,
        schedule=schedule,
        activation_checkpointing="full",
        grad_reduction="per_step",
        executor="lockstep",
        recompute=(),
    )
    check_pipeline(layout, loss_fn, state, options)
    split = ModelSplit(state, loss_fn)
    batch = loss_fn.prepare(split.model(jax.tree.map(precision.computing, state.params)), batch)
    check_rows(layout, batch, schedule.microbatches)
    in_ticks, x = options.embedding == "per_microbatch", None
    if not in_ticks:
        others = jax.tree.map(precision.computing, split.others(state.params))
        x = columns(layout, run_embed(loss_fn, split, others, batch), loss_fn.dims)
    transfer = StageTransfer.of(layout, split, state, precision, options)
    given = given_of(batch, loss_fn.rows(batch, key_of(state)))
    weights, (pieces, fed) = transfer.scatter_to_stages(state.params, given, x, schedule.microbatches)
    head, embedding = _head(loss_fn, split), embedding_of(loss_fn, split) if in_ticks else None
    program = program_of(layout, loss_fn, split, transfer, schedule=schedule, head=head, join=join, embedding=embedding)
    others = split.others(weights)
    read = layer_input_weights(loss_fn, split, transfer, others, pieces[0])
    sums = run_forward(TickContext.of(program, fed, split.stack(weights), others, pieces, read), fed)
    (loss, metrics), weight = transfer.summed(sums)
    loss, metrics, _ = means_of((loss, metrics, ()), weight)
    return {"loss": loss, **metrics}


def _head(loss_fn: PipelineLoss, split: ModelSplit) -> Head:
    """Returns the head of one microbatch, which gives its contribution to all sums."""

    def head(weights: Any, piece: Any, y: jax.Array) -> tuple[Any, Any]:
        loss, metrics, weight = run_head(loss_fn, split, weights, y, piece)
        return (weighted_sum((loss, metrics), weight, metrics), weight), ((), jnp.stack([weight, weight]))

    return head
