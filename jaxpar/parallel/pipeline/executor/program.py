"""The input of an executor: a schedule's table and the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.parallel.pipeline.executor.grad_buckets import BUCKET_FIELDS, GradientBuckets, buckets_of
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
class Embedding:
    """The embedding and its backward, if they run in the ticks, one microbatch at a time.

    Attributes:
      forward: ``forward(weights, microbatch) -> x`` computes the input of the first layer.
      grads: ``grads(weights, microbatch, cotangent) -> gradients`` of the embedding, as ``head`` returns its own.
    """

    forward: Callable[[Any, Any], jax.Array]
    grads: Callable[[Any, Any, jax.Array], Any]


class TickSums:
    """Sums over microbatches of what the head returns, [devices, ...]; gradients, if any, are its last entry."""

    def empty(self, found: Any) -> Any:
        """Returns zeros for the sums, from the shapes of what the head returns."""
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), found)

    def add(self, sums: Any, found: Any) -> Any:
        """Adds what the head returned for a microbatch."""
        return jax.tree.map(jnp.add, sums, found)

    def add_grads(self, sums: Any, grads: Any) -> Any:
        """Adds gradients of the embedding for a microbatch."""
        *others, have = sums
        return *others, jax.tree.map(jnp.add, have, grads)


@dataclass(frozen=True)
class PipelineProgram:
    """A schedule with the functions that the executor calls.

    Attributes:
      schedule: which stage does which operation in which tick.
      layer: runs one layer of the model.
      side: ``side(microbatch, side_weights)`` computes the layers' further inputs; ``side_weights`` are replicated over
        stages.
      head: ``head(weights, microbatch, y) -> (sums, (cotangent, counts))``: the microbatch's part of the sums over all
        microbatches, the cotangent of ``y``, and the microbatch's weight in the sums and in the differentiated loss,
        [2].
      sums: sums what ``head`` returns.
      join: ``join(sums, extras) -> sums`` adds the layers' scalars, which are weighted sums over layers and
        microbatches.
      axes: the mesh axes of the batch and the sequence. Each device along them has its own rows.
      activation_checkpointing: ``full`` stores the input of a forward, from which the backward recomputes it. ``none``
        stores its residuals.
      independent: the loops of a stage follow its own row. Otherwise the stages run in lockstep: a loop runs on all
        stages if any of them needs it.
      reduce: reduces the gradients of one layer for every microbatch; ``None`` leaves each device its own gradients.
      reduce_bucket: reduces the gradients of one layer once a bucket, a tree of
        :class:`jaxpar.parallel.pipeline.executor.layer_slice.LayerSlice`; ``None`` if there are no buckets. See
        :mod:`jaxpar.parallel.pipeline.executor.grad_buckets`.
      reduce_beside: the same beside compute.
      counts: [stages, chunks], the number of layers in each chunk; ``None`` if all are equal.
      starts: [stages, chunks], the index in the model of the first layer of each chunk.
      dims: the logical dims of the activations between layers.
      layer_slots: the slots of layers, if the first layers of a stage recompute. Only with
        ``activation_checkpointing="none"``.
      recompute: [stages], the number of layers of each piece that recompute.
      carry: how layers process sequence chunks; ``None`` for full sequences.
      embedding: the embedding, if it runs in the ticks; ``None`` if it ran for the full batch.
      first_ticks: the number of ticks that gather weights beside their forwards; see
        :mod:`jaxpar.parallel.pipeline.executor.first_ticks`.
      gather_layer: gathers the weights of one layer beside compute, if there are such ticks.
      shard_specs: the specs of their shards [stages, chunks, layers, ...], a tree.
      ticks: the range of ticks that the current scan runs.
      weight_specs: the specs of the layers' weights [stages, chunks, layers, ...], a tree; ``None`` if all of them are
        sharded over the stages alone.
    """

    schedule: Schedule | AsyncSchedule
    layer: StageLayer
    side: Callable[[Any, Any], Any]
    head: Head
    axes: Axes
    activation_checkpointing: ActivationCheckpointing = "full"
    independent: bool = False
    reduce: Callable[[Any], Any] | None = None
    reduce_bucket: Callable[[Any], Any] | None = None
    reduce_beside: Callable[[Any], Any] | None = None
    counts: np.ndarray | None = None
    starts: np.ndarray | None = None
    sums: TickSums = field(default_factory=TickSums)
    join: Callable[[Any, LayerScalars], Any] = lambda sums, extras: sums
    dims: tuple[str | None, ...] | None = None
    layer_slots: Kept | None = None
    recompute: tuple[int, ...] = ()
    carry: SequenceCarry | None = None
    embedding: Embedding | None = None
    first_ticks: int = 0
    gather_layer: Callable[[Any], Any] | None = None
    shard_specs: Any = None
    ticks: tuple[int, int | None] = (0, None)
    weight_specs: Any = None
    table: Table = field(init=False)
    buckets: GradientBuckets | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", self.schedule.table(self.activation_checkpointing))
        buckets = None if self.reduce_bucket is None else buckets_of(self.schedule, self.table)
        object.__setattr__(self, "buckets", buckets)

    def was_first(self) -> np.ndarray:
        """Returns whether each stage did the backward of the first layers in the previous tick, [ticks + 1, stages]."""
        return np.concatenate([np.zeros((1, self.schedule.stages), np.int32), self.table.column("b_first")])

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of each stage and of all stages together.

        Returns:
          int32 [ticks, stages, columns], and int32 [ticks, columns] in the order of ``GLOBAL_FIELDS``.
        """
        rows = np.concatenate([self.table.stages, self.was_first()[:-1, :, None]], axis=2)
        does = [self.table.column(f"{kind}_on").any(axis=1) for kind in "fbw"]
        works = self.table.ticks < self.schedule.microbatches
        global_rows = np.concatenate([self.table.ticks, np.stack(does, 1), works], axis=1).astype(np.int32)
        if self.buckets is not None:
            rows = np.concatenate([rows, self.buckets.rows], axis=2)
            global_rows = np.concatenate([global_rows, self.buckets.scatters], axis=1)
        if self.layer_slots is not None:
            rows = np.concatenate([rows, self.layer_slots.slots.reshape(*rows.shape[:2], -1)], axis=2)
        return rows, global_rows

    def slots(self, stage_row: jax.Array) -> dict[str, jax.Array]:
        """Returns the slots of layers in a stage's row, [layers] for each name in ``LAYERED``."""
        first = len(FIELDS) + 1 + (0 if self.buckets is None else len(BUCKET_FIELDS))
        columns = stage_row[first:].reshape(len(LAYERED), -1)
        return dict(zip(LAYERED, columns, strict=True))

    def recomputed_layers(self) -> tuple[int, int]:
        """Returns the number of layers that are recomputed in all ticks, and the number of ticks.

        With ``independent``, both numbers are summed over stages.
        """
        most, total = (0, 0) if self.layer_slots is None else (self.layer_slots.again, self.layer_slots.rounds)
        count, ticks = self.active_ticks("backward")
        return (total if self.independent else count * most), ticks

    def active_ticks(self, name: str) -> tuple[int, int]:
        """Returns the number of ticks in the current scan that contain an operation, and the number of its ticks.

        With ``independent``, both numbers are summed over stages for operations that stages do on their own.

        Args:
          name: a field of ``GLOBAL_FIELDS``; or ``backward_alone``, the backwards beside which no bucket is scattered;
            or ``bucket_ends``, of which every stage has equally many.
        """
        if self.independent and name in ("forward", "backward", "weights"):
            each = self.table.column(f"{name[0]}_on")
            return int(each.sum()), each.size
        if name == "backward_alone":
            (total, ticks), (beside, _) = self.active_ticks("backward"), self.active_ticks("buckets_beside")
            return total - beside, ticks
        if name == "bucket_ends":
            assert self.buckets is not None
            rows = self.buckets.rows[slice(*self.ticks), 0]
            return int(rows[:, BUCKET_FIELDS.index(name)].sum()), len(rows)
        column = self.rows()[1][slice(*self.ticks), GLOBAL_FIELDS.index(name)]
        return int(column.sum()), len(column)


GLOBAL_FIELDS = (*ALL, "forward", "backward", "weights", "feeds", "heads", "drains", "buckets", "buckets_beside")
"""The fields of a tick for all stages: microbatches, then whether any stage does an operation.

The last two are ``GradientBuckets.scatters``.
"""


def global_field(global_row: jax.Array, name: str) -> jax.Array:
    """Returns a field of the row of all stages, by its name in ``GLOBAL_FIELDS``."""
    return global_row[GLOBAL_FIELDS.index(name)]
