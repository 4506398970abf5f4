"""Metrics of a batch in a pipeline: forward passes only, each stage with its own layers, no residuals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.batch_rows import numbering
from jaxpar.parallel.pipeline.executor.program import Head
from jaxpar.parallel.pipeline.executor.run import run_ticks
from jaxpar.parallel.pipeline.options import Pipeline
from jaxpar.parallel.precision.policy import Precision
from jaxpar.sharding.layout import Layout
from jaxpar.training.exact_weights import computing
from jaxpar.training.loss import Metrics
from jaxpar.training.microbatches import means_of, weighted_sum
from jaxpar.training.pipeline import stage_functions
from jaxpar.training.pipeline.adapters import stage_state
from jaxpar.training.pipeline.gradients import check_pipeline, join
from jaxpar.training.pipeline.model_split import ModelSplit
from jaxpar.training.pipeline.transfer import StageTransfer
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
    schedule = options.schedule.forwards()
    options = Pipeline(schedule, layers_per_stage=options.layers_per_stage, embedding=options.embedding)
    state = stage_state(state, loss_fn)
    check_pipeline(layout, loss_fn, state, options)
    split = ModelSplit(state, loss_fn)
    batch = split.prepare(state.params, batch, precision)
    stage_functions.check_rows(layout, batch, schedule.microbatches)
    in_ticks, x = options.embedding == "per_microbatch", None
    if not in_ticks:
        others = computing(split.others(state.params), state, precision)
        x = stage_functions.embed_batch(layout, split, others, batch)
    transfer = StageTransfer.of(layout, split, precision, options, batch)
    embedding = stage_functions.embedding_of(split) if in_ticks else None
    fields = {"head": _head(split), "join": join, "embedding": embedding}
    context, fed = stage_functions.context_of(transfer, schedule, batch, x, **fields)
    (loss, metrics), weight = transfer.summed(run_ticks(context, fed).sums)
    loss, metrics, _ = means_of((loss, metrics, ()), weight)
    return {"loss": loss, **metrics}


def _head(split: ModelSplit) -> Head:
    """Returns the head of one microbatch, which gives its contribution to all sums."""

    def head(weights: Any, piece: Any, y: jax.Array) -> tuple[Any, Any]:
        loss, metrics, weight = stage_functions.run_head(split, weights, y, piece)
        return (weighted_sum((loss, metrics), weight, metrics), weight), ((), jnp.stack([weight, weight]))

    return head
