"""The input of an executor: a schedule's table and the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxpar.parallel.pipeline.executor.grad_buckets import COLUMNS, GradientBuckets, turns_of
from jaxpar.parallel.pipeline.executor.layer_inputs import LayerScalars
from jaxpar.parallel.pipeline.executor.sequence_chunks import SequenceCarry
from jaxpar.parallel.pipeline.executor.stage import StageLayer
from jaxpar.parallel.pipeline.schedules.async_window import AsyncSchedule
from jaxpar.parallel.pipeline.schedules.residual_slots import LAYERED, Kept
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.parallel.pipeline.schedules.table import ALL, FIELDS, ActivationCheckpointing, Table
from jaxpar.sharding.rules import Axes

type Head = Callable[[Any, Any, jax.Array], tuple[Any, tuple[Any, jax.Array]]]


@dataclass(frozen=True)
class Before:
    """The embedding and its backward, if they run in the ticks, one microbatch at a time.

    Attributes:
      given: ``given(weights, microbatch) -> x`` computes the input of the first layer.
      back: ``back(weights, microbatch, cotangent, sums) -> sums`` adds the embedding's gradients to the sums of
        ``head``.
    """

    given: Callable[[Any, Any], jax.Array]
    back: Callable[[Any, Any, jax.Array, Any], Any]


@dataclass(frozen=True)
class PipelineProgram:
    """A schedule with the functions that the executor calls.

    Attributes:
      schedule: which stage does which operation in which tick.
      layer: runs one layer of the model.
      side: ``side(microbatch, read)`` computes the layers' further inputs; ``read`` are weights, replicated over
        stages.
      head: ``head(weights, microbatch, y) -> (sums, (cotangent, counts))``: the microbatch's part of the sums over all
        microbatches, the cotangent of ``y``, and the microbatch's weight in the sums and in the differentiated loss,
        [2].
      join: ``join(sums, extras) -> sums`` adds the layers' scalars, which are weighted sums over layers and
        microbatches.
      axes: the mesh axes of the batch and the sequence. Each device along them has its own rows.
      activation_checkpointing: ``full`` stores the input of a forward, from which the backward recomputes it. ``none``
        stores its residuals.
      divergent: the loops of a stage follow its own row, rather than run whenever any stage needs them.
      reduce: reduces the gradients of one layer for every microbatch; ``None`` leaves each device its own gradients.
      turn: reduces the summed gradients of one layer at the end of a chunk's turn; ``None`` if there are no turns. See
        :mod:`jaxpar.parallel.pipeline.executor.grad_buckets`.
      counts: [stages, chunks], the number of layers in each chunk; ``None`` if all are equal.
      starts: [stages, chunks], the index in the model of the first layer of each chunk.
      dims: the logical dims of the activations between layers.
      kept: the slots of layers, if the first layers of a stage recompute. Only with
        ``activation_checkpointing="none"``.
      again: [stages], the number of layers of each piece that recompute.
      carry: how layers process sequence chunks; ``None`` for full sequences.
      before: the embedding, if it runs in the ticks; ``None`` if it ran for the full batch.
    """

    schedule: Schedule | AsyncSchedule
    layer: StageLayer
    side: Callable[[Any, Any], Any]
    head: Head
    axes: Axes
    activation_checkpointing: ActivationCheckpointing = "full"
    divergent: bool = False
    reduce: Callable[[Any], Any] | None = None
    turn: Callable[[Any], Any] | None = None
    counts: np.ndarray | None = None
    starts: np.ndarray | None = None
    join: Callable[[Any, LayerScalars], Any] = lambda sums, extras: sums
    dims: tuple[str | None, ...] | None = None
    kept: Kept | None = None
    again: tuple[int, ...] = ()
    carry: SequenceCarry | None = None
    before: Before | None = None
    table: Table = field(init=False)
    turns: GradientBuckets | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", self.schedule.table(self.activation_checkpointing))
        object.__setattr__(self, "turns", None if self.turn is None else turns_of(self.schedule, self.table))

    def was_first(self) -> np.ndarray:
        """Returns whether each stage did the backward of the first layers in the previous tick, [ticks + 1, stages]."""
        return np.concatenate([np.zeros((1, self.schedule.stages), np.int32), self.table.column("b_first")])

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of each stage and of all stages together.

        Returns:
          int32 [ticks, stages, columns], and int32 [ticks, columns] in the order of ``EVERY``.
        """
        rows = np.concatenate([self.table.stages, self.was_first()[:-1, :, None]], axis=2)
        does = [self.table.column(f"{kind}_on").any(axis=1) for kind in "fbw"]
        works = self.table.ticks < self.schedule.microbatches
        every = np.concatenate([self.table.ticks, np.stack(does, 1), works], axis=1).astype(np.int32)
        if self.turns is not None:
            rows, every = np.concatenate([rows, self.turns.rows], 2), np.concatenate([every, self.turns.ends], 1)
        if self.kept is not None:
            rows = np.concatenate([rows, self.kept.slots.reshape(*rows.shape[:2], -1)], axis=2)
        return rows, every

    def slots(self, row: jax.Array) -> dict[str, jax.Array]:
        """Returns the slots of layers in a stage's row, [layers] for each name in ``LAYERED``."""
        first = len(FIELDS) + 1 + (0 if self.turns is None else len(COLUMNS))
        columns = row[first:].reshape(len(LAYERED), -1)
        return dict(zip(LAYERED, columns, strict=True))

    def does_again(self) -> tuple[int, int]:
        """Returns the number of layers that are recomputed in all ticks, and the number of ticks.

        With ``divergent``, both numbers are summed over stages.
        """
        most, rounds = (0, 0) if self.kept is None else (self.kept.again, self.kept.rounds)
        count, ticks = self.does("backward")
        return (rounds if self.divergent else count * most), ticks

    def does(self, name: str) -> tuple[int, int]:
        """Returns the number of ticks that contain an operation, and the number of ticks.

        With ``divergent``, both numbers are summed over stages for operations that stages do on their own.

        Args:
          name: a column of ``EVERY``.
        """
        if self.divergent and name in ("forward", "backward", "weights"):
            each = self.table.column(f"{name[0]}_on")
            return int(each.sum()), each.size
        column = self.rows()[1][:, EVERY.index(name)]
        return int(column.sum()), len(column)


EVERY = (*ALL, "forward", "backward", "weights", "feeds", "heads", "drains", "turns")
"""The columns of a tick for all stages: microbatches, then whether any stage does an operation."""


def of_every(every: jax.Array, name: str) -> jax.Array:
    """Returns a column of a tick, by its name in ``EVERY``."""
    return every[EVERY.index(name)]
