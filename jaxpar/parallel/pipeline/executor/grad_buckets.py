"""``GradientBuckets``: sums the gradients of one chunk over consecutive backwards, then scatters the sums.

A *bucket* has the gradients of consecutive backwards that a stage does for one chunk. All stages scatter a bucket in
the same tick: beside the first backward after the last stage has completed it, or, where no backward follows, at the
end of the tick that completes it. Stages that are ahead meanwhile fill the next one. Only the sums of a few chunks are
therefore unsharded at a time, for any number of chunks.

Backwards add to one array, the bucket that a stage fills. A complete bucket moves to a *slot* of another array, where
it waits for the other stages. Were all of them slots of one array, XLA:TPU would copy a slot before every addition.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from jaxpar.errors import ConfigError
from jaxpar.parallel.pipeline.schedules.async_window import AsyncSchedule
from jaxpar.parallel.pipeline.schedules.buffer_slots import BACKWARD, END, Live, allocate, time
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.parallel.pipeline.schedules.table import Table


@dataclass(frozen=True, eq=False)
class GradientBuckets:
    """The numbers that an executor reads.

    Attributes:
      completed: the number of slots for complete buckets; 0 if every bucket is scattered before the next one begins.
      rows: int32 [ticks, stages, 5], in the order of ``BUCKET_FIELDS``.
      scatters: int32 [ticks, 2], whether the stages scatter a bucket at the end of a tick, and beside its backward.
    """

    completed: int
    rows: np.ndarray
    scatters: np.ndarray


BUCKET_FIELDS = ("bucket_begins", "bucket_ends", "completed_bucket", "scattered_bucket", "bucket_chunk")
"""Whether a tick adds the first gradients to a bucket, and whether it adds the last ones and moves the bucket; the slot
to which it moves; the slot that the tick scatters, and that slot's chunk.
"""


def buckets_of(schedule: Schedule | AsyncSchedule, table: Table) -> GradientBuckets:
    """Returns the gradient buckets of a schedule.

    Args:
      schedule: the schedule.
      table: its table.

    Raises:
      ConfigError: the stages do not have equally many buckets, so they cannot scatter together.
    """
    kind = "w" if schedule.split else "b"
    on, chunks = table.column(f"{kind}_on"), table.column(f"{kind}_chunk")
    each = [_of_stage(on[:, stage], chunks[:, stage]) for stage in range(schedule.stages)]
    if len({len(buckets) for buckets in each}) > 1:
        raise ConfigError(
            "pipeline: grad_reduction is 'per_chunk', for which all stages must scatter a chunk's gradients together, "
            f"but in the schedule {schedule.name!r} with {schedule.microbatches} microbatches the stages change "
            f"chunks {', '.join(str(len(turns) - 1) for turns in each)} times. Remedy: set grad_reduction='per_step' "
            "or 'per_microbatch', or use the schedule 'interleaved'."
        )
    ends = [max(buckets[number][-1] for buckets in each) for number in range(len(each[0]))]
    at: list[int] = []
    for end in reversed(ends):  # a tick scatters one bucket at most
        late = not schedule.split and bool(on[end + 1 : end + 2].any()) and end + 1 not in at
        at.insert(0, end + late)
    beside = [tick > end for tick, end in zip(at, ends, strict=True)]
    rows = np.zeros((*on.shape, len(BUCKET_FIELDS)), np.int32)
    rows[:, :, -1] = _chunks_of(chunks, each, at)
    counts = [_fill_rows(rows[:, stage], buckets, at, beside) for stage, buckets in enumerate(each)]
    scatters = np.zeros((len(on), 2), np.int32)
    scatters[at, np.asarray(beside, int)] = 1
    waits = any(after[0] <= end for buckets in each for after, end in zip(buckets[1:], at, strict=False))
    return GradientBuckets(max(counts) if waits else 0, rows, scatters)


def _chunks_of(chunks: np.ndarray, each: list[list[list[int]]], at: list[int]) -> np.ndarray:
    """Returns the chunk of the bucket that each stage scatters in each tick, [ticks, stages]; 0 if it scatters none."""
    found = np.zeros_like(chunks)
    for stage, buckets in enumerate(each):
        found[at, stage] = chunks[[ticks[0] for ticks in buckets], stage]
    return found


def _fill_rows(rows: np.ndarray, buckets: list[list[int]], at: list[int], beside: list[bool]) -> int:
    """Writes all fields of a stage but the chunk, from the ticks of its buckets; returns the number of slots."""
    parts = [BACKWARD if early else END for early in beside]
    timed = list(zip(buckets, at, parts, strict=True))
    count, slots = allocate(
        Live(time(ticks[-1], END), time(tick, part), number) for number, (ticks, tick, part) in enumerate(timed)
    )
    for number, (ticks, tick, _) in enumerate(timed):
        rows[ticks[0], 0] = rows[ticks[-1], 1] = 1
        rows[ticks[-1], 2] = rows[tick, 3] = slots[number]
    return count


def _of_stage(on: np.ndarray, chunks: np.ndarray) -> list[list[int]]:
    """Returns the ticks of each bucket of a stage."""
    return [[*ticks] for _, ticks in itertools.groupby(np.flatnonzero(on).tolist(), lambda tick: chunks[tick])]
