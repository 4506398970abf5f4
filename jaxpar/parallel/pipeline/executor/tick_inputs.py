"""The data that one stage has in one tick."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpar.parallel.pipeline.executor.carry import StageCarry
from jaxpar.parallel.pipeline.executor.grad_buckets import BUCKET_FIELDS
from jaxpar.parallel.pipeline.schedules.table import FIELDS


@dataclass(frozen=True)
class TickInputs:
    """The per-device arrays that a stage has in a tick.

    Attributes:
      stage_row: its row of the table.
      global_row: the row of all stages together.
      weights: its weights, [chunks, layers, ...].
      carry: its arrays from tick to tick.
      x: the input of the first layer; see :class:`jaxpar.parallel.pipeline.executor.carry.TickCarry`.
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
