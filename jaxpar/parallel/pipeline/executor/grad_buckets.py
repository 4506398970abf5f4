"""``GradientBuckets``: sums the gradients of one chunk over consecutive backwards, then scatters the sums.

A *bucket* has the gradients of consecutive backwards that a stage does for one chunk. All stages scatter a bucket in
the same tick: beside the first backward after the last stage has completed it, or, where no backward follows, at the
end of the tick that completes it. Stages that are ahead meanwhile fill the next one. Only the sums of a few chunks are
therefore unsharded at a time, in *slots*, for any number of chunks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from jaxpar.errors import ConfigError
from jaxpar.parallel.pipeline.schedules.async_window import AsyncSchedule
from jaxpar.parallel.pipeline.schedules.buffer_slots import END, FORWARD, Live, allocate, time
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.parallel.pipeline.schedules.table import Table


@dataclass(frozen=True, eq=False)
class GradientBuckets:
    """The numbers that an executor reads.

    Attributes:
      slots: the number of chunks whose sums are unsharded at a time.
      rows: int32 [ticks, stages, 4], in the order of ``BUCKET_FIELDS``.
      scatters: int32 [ticks, 2], whether the stages scatter a bucket at the end of a tick, and beside its backward.
    """

    slots: int
    rows: np.ndarray
    scatters: np.ndarray


BUCKET_FIELDS = ("bucket", "bucket_begins", "scattered_bucket", "bucket_chunk")
"""The slot to which a tick adds gradients, whether they are its first, the slot to scatter, and that slot's chunk."""


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
    slots = 0
    for stage, buckets in enumerate(each):
        timed = list(enumerate(zip(buckets, at, strict=True)))
        count, places = allocate(Live(time(t[0], FORWARD), time(end, END), (number, 0)) for number, (t, end) in timed)
        slots = max(slots, count)
        for number, (ticks, end) in timed:
            slot = places[number, 0]
            rows[ticks, stage, 0] = slot
            rows[ticks[0], stage, 1] = 1
            rows[end, stage, 2:] = slot, chunks[ticks[0], stage]
    scatters = np.zeros((len(on), 2), np.int32)
    scatters[at, np.asarray(beside, int)] = 1
    return GradientBuckets(slots, rows, scatters)


def _of_stage(on: np.ndarray, chunks: np.ndarray) -> list[list[int]]:
    """Returns the ticks of each bucket of a stage."""
    return [[*ticks] for _, ticks in itertools.groupby(np.flatnonzero(on).tolist(), lambda tick: chunks[tick])]
