"""GradientBuckets: the backwards that a stage does of one chunk, one after the other, whose gradients are summed apart and scattered together.

All stages scatter at once, when the last of them has ended its turn; those that are ahead sum the next one meanwhile. So a few chunks' sums lie
whole at a time, in *slots*, whatever the number of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpar.errors import ConfigError
from jaxpar.parallel.pipeline.schedules.async_window import AsyncSchedule
from jaxpar.parallel.pipeline.schedules.buffer_slots import END, FORWARD, Live, allocate, time
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.parallel.pipeline.schedules.table import Table


@dataclass(frozen=True, eq=False)
class GradientBuckets:
    """Numbers for an executor.

    Attributes:
      slots: how many chunks' sums lie whole.
      rows: int32 [ticks, stages, 4], in the order of ``COLUMNS``.
      ends: int32 [ticks, 1], whether turns are scattered in a tick.
    """

    slots: int
    rows: np.ndarray
    ends: np.ndarray


COLUMNS = ("turn", "turn_begins", "turn_ended", "turn_chunk")
"""The slot to which a tick's gradients are added, and whether they are its first; the slot that is scattered, and the chunk whose sums that is."""


def turns_of(schedule: Schedule | AsyncSchedule, table: Table) -> GradientBuckets:
    """The turns of a schedule.

    Raises:
      ConfigError: stages do not change from chunk to chunk equally often, so that they cannot scatter together.
    """
    kind = "w" if schedule.split else "b"
    on, chunks = table.column(f"{kind}_on"), table.column(f"{kind}_chunk")
    each = [_of_stage(on[:, stage], chunks[:, stage]) for stage in range(schedule.stages)]
    if len({len(turns) for turns in each}) > 1:
        raise ConfigError(
            f"pipeline: grad_reduction is 'per_chunk', for which all stages scatter a chunk's gradients together, but in the schedule {schedule.name!r} of "
            f"{schedule.microbatches} microbatches stages change chunks {', '.join(str(len(turns) - 1) for turns in each)} times. Remedy: "
            f"grad_reduction='per_step' or 'each', or the schedule 'interleaved'."
        )
    ends = [max(turns[number][-1] for turns in each) for number in range(len(each[0]))]
    rows = np.zeros((*on.shape, len(COLUMNS)), np.int32)
    slots = 0
    for stage, turns in enumerate(each):
        lives = [
            Live(time(turn[0], FORWARD), time(end, END), (number, 0))
            for number, (turn, end) in enumerate(zip(turns, ends, strict=True))
        ]
        count, places = allocate(lives)
        slots = max(slots, count)
        for number, (turn, end) in enumerate(zip(turns, ends, strict=True)):
            slot = places[number, 0]
            rows[turn, stage, 0] = slot
            rows[turn[0], stage, 1] = 1
            rows[end, stage, 2:] = slot, chunks[turn[0], stage]
    ended = np.zeros((len(on), 1), np.int32)
    ended[ends] = 1
    return GradientBuckets(slots, rows, ended)


def _of_stage(on: np.ndarray, chunks: np.ndarray) -> list[list[int]]:
    """The ticks of each turn."""
    turns: list[list[int]] = []
    for tick in np.flatnonzero(on):
        if turns and chunks[turns[-1][-1]] == chunks[tick]:
            turns[-1].append(int(tick))
        else:
            turns.append([int(tick)])
    return turns
