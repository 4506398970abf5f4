"""The data that one stage has in one tick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.parallel.pipeline.executor.grad_buckets import COLUMNS
from jaxpar.parallel.pipeline.schedules.table import FIELDS


@dataclass(frozen=True)
class TickInputs:
    """The data that a stage has in a tick.

    Attributes:
      row: its row of the table.
      every: the row of all stages.
      weights: its weights, [chunks, layers, ...].
      now: its part of the carry.
      y: the output of its forward.
      cotangent: from the head: the cotangent of its input, and the weights (``counts``) of the microbatch.
      pieces: the batch.
      read: the weights that ``side`` reads.
    """

    row: jax.Array
    every: jax.Array
    weights: Any
    now: dict[str, Any]
    y: jax.Array
    cotangent: Any
    pieces: Any
    read: Any

    def at(self, name: str) -> jax.Array:
        """Returns a field of the row."""
        return self.row[(*FIELDS, "was_first", *COLUMNS).index(name)]
