"""What an executor carries out: a schedule's table, and what is done at its places."""

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
    """What comes before the layers, where that is done microbatch by microbatch.

    Attributes:
      given: ``given(weights, microbatch) -> x``, for the first layer.
      back: ``back(weights, microbatch, cotangent, sums) -> sums`` of a head's results, with the gradients added.
    """

    given: Callable[[Any, Any], jax.Array]
    back: Callable[[Any, Any, jax.Array, Any], Any]


@dataclass(frozen=True)
class PipelineProgram:
    """What is carried out.

    Attributes:
      schedule: which microbatch is where, and when.
      layer: of the model.
      side: ``side(microbatch, read)``, what layers want to know of it; ``read`` are weights, replicated over the stages.
      head: ``head(weights, microbatch, y) -> (sums, (cotangent, counts))``: what one microbatch adds to the sums over all, the cotangent of ``y``, and
        [2] what the microbatch counts in sums, and in what is differentiated.
      join: ``join(sums, extras) -> sums`` with what layers gave beside ``x``, summed over layers and microbatches as they count.
      axes: of the batch and the sequence, over which each device has its own rows.
      keeps: of a forward: its input, from which the backward computes it again, or its residuals.
      divergent: a stage's loops run as often as its own row says, and not as any stage's does.
      reduce: of one layer's gradients, done with every microbatch; ``None`` leaves them each device's own.
      turn: of the sums of one layer's gradients, done when a chunk's turn ends (see :mod:`jaxpar.parallel.pipeline.executor.grad_buckets`); ``None``: there are no turns.
      counts: [stages, chunks], how many layers each has; ``None`` where all have as many.
      starts: [stages, chunks], the number in the model of the first of them.
      dims: logical dims of what goes from layer to layer.
      kept: where each layer keeps what, if the first of a stage compute theirs again; of ``residuals``.
      again: [stages], how many do.
      carry: how layers take sequences in chunks; ``None`` where they take them whole.
      before: what makes the first layer's input in the ticks; ``None`` where that has been made of the whole batch.
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
        """[ticks + 1, stages]: whether the tick before had the backward of the model's first layers."""
        return np.concatenate([np.zeros((1, self.schedule.stages), np.int32), self.table.column("b_first")])

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """What a stage reads of a tick, and what all stages do: see ``EVERY``."""
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
        """A row's slots of layers, [layers] each."""
        first = len(FIELDS) + 1 + (0 if self.turns is None else len(COLUMNS))
        columns = row[first:].reshape(len(LAYERED), -1)
        return dict(zip(LAYERED, columns, strict=True))

    def does_again(self) -> tuple[int, int]:
        """How many layers are computed again in all ticks, of how many ticks; of what stages do by themselves, in the mean of all stages."""
        most, rounds = (0, 0) if self.kept is None else (self.kept.again, self.kept.rounds)
        count, ticks = self.does("backward")
        return (rounds if self.divergent else count * most), ticks

    def does(self, name: str) -> tuple[int, int]:
        """In how many ticks something is done, of how many; of what stages do by themselves, in the mean of all stages."""
        if self.divergent and name in ("forward", "backward", "weights"):
            each = self.table.column(f"{name[0]}_on")
            return int(each.sum()), each.size
        column = self.rows()[1][:, EVERY.index(name)]
        return int(column.sum()), len(column)


EVERY = (*ALL, "forward", "backward", "weights", "feeds", "heads", "drains", "turns")
"""Columns of a tick: microbatches, and whether any stage does something."""


def of_every(every: jax.Array, name: str) -> jax.Array:
    """A column of a tick."""
    return every[EVERY.index(name)]
