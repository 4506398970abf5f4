"""The arrays that go from tick to tick, and those that one stage has in one tick."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from jaxpar.parallel.pipeline.executor.aux_losses import AuxLosses
from jaxpar.parallel.pipeline.executor.grad_buckets import BUCKET_FIELDS
from jaxpar.parallel.pipeline.schedules.table import FIELDS


class StageCarry(NamedTuple):
    """The arrays of a stage, [stages, devices, ...]; ``()`` stands for what a schedule does not need.

    Every buffer [slots, ...] ends with an extra slot for data that nothing reads.

    Attributes:
      activations: inputs of forwards, [slots, ...]: those to come, and those that a backward recomputes from.
      aux: the scalars of the layers; ``None`` if layers return none.
      received: the cotangents that arrived at the end of the previous tick, by direction, if stages are independent.
      cotangents: of the outputs of chunks, [slots, ...], for backwards.
      grads: the sums of gradients, [chunks, layers, ...], in at least fp32.
      layer_inputs: the inputs of layers that recompute, [slots, 1, ...].
      split_residuals: the data that the B of a split backward stores for its W, [slots, layers, ...].
      residuals: of layers, [slots, layers, ...], or [slots, 1, ...] if some layers recompute; or
        :class:`jaxpar.parallel.pipeline.executor.sequence_chunks.Pools`.
      sent: the input cotangent of the tick's backward, for the stage that runs the previous chunk.
      buckets: the gradient sums of chunks that are not reduced yet, [slots, layers, ...].
    """

    # The order decides which buffers XLA:CPU copies in a tick. Another order took 9 % more memory in one program.

    activations: Any = ()
    aux: AuxLosses | None = None
    received: Any = ()
    cotangents: Any = ()
    grads: Any = ()
    layer_inputs: Any = ()
    split_residuals: Any = ()
    residuals: Any = ()
    sent: Any = ()
    buckets: Any = ()


class HeadGrad(NamedTuple):
    """What the head returns for the backward of a microbatch.

    Attributes:
      cotangent: of the last layer's output.
      weights: [2], the microbatch's weight in the sums and in the differentiated loss.
    """

    cotangent: Any
    weights: jax.Array


class TickCarry(NamedTuple):
    """All arrays that go from tick to tick.

    Attributes:
      head_grad: of the microbatch that passed the head last, [devices, ...].
      stage: those of the stages.
      sums: what the head returned, summed over microbatches, [devices, ...].
      x: the input of the first layer, and then its cotangents, [devices, microbatches + 1, rows, ...]. If the embedding
        runs in the ticks: the input that enters and the cotangent that leaves, [devices, 2, rows, ...].
    """

    head_grad: Any
    stage: StageCarry
    sums: Any
    x: jax.Array


@dataclass(frozen=True)
class TickInputs:
    """The per-device arrays that a stage has in a tick.

    Attributes:
      stage_row: its row of the table.
      global_row: the row of all stages together.
      weights: its weights, [chunks, layers, ...].
      carry: its arrays from tick to tick.
      x: the input of the first layer; see :class:`TickCarry`.
      y: the output of its forward.
      head_grad: what the head returned for the backward of its microbatch.
      batch: [microbatches, rows, ...].
      side_weights: the weights that ``PipelineProgram.side`` receives.
    """

    stage_row: jax.Array
    global_row: jax.Array
    weights: Any
    carry: StageCarry
    x: jax.Array
    y: jax.Array
    head_grad: Any
    batch: Any
    side_weights: Any

    def field(self, name: str) -> jax.Array:
        """Returns a field of the stage's row."""
        return self.stage_row[(*FIELDS, "was_first", *BUCKET_FIELDS).index(name)]

    def updated(self, **arrays: Any) -> TickInputs:
        """Returns these inputs with other arrays in ``carry``."""
        return replace(self, carry=self.carry._replace(**arrays))
