"""``GradientBuckets``: sums the gradients of one chunk over consecutive backwards, then scatters the sums.

A *turn* is a series of consecutive backwards that a stage does for one chunk. All stages scatter the sums of a turn in
the same tick, when the last stage ends that turn. Stages that are ahead meanwhile sum the next turn. Only the sums of a
few chunks are therefore unsharded at a time, in *slots*, for any number of chunks.
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
    """The numbers that an executor reads.

    Attributes:
      slots: the number of chunks whose sums are unsharded at a time.
      rows: int32 [ticks, stages, 4], in the order of ``COLUMNS``.
      ends: int32 [ticks, 1], whether the stages scatter a turn in a tick.
    """

    slots: int
    rows: np.ndarray
    ends: np.ndarray


COLUMNS = ("turn", "turn_begins", "turn_ended", "turn_chunk")
"""The slot to which a tick adds gradients, whether they are its first, the slot to scatter, and that slot's chunk."""


def turns_of(schedule: Schedule | AsyncSchedule, table: Table) -> GradientBuckets:
    """Returns the turns of a schedule.

    Args:
      schedule: the schedule.
      table: its table.

    Raises:
      ConfigError: the stages do not have equally many turns, so they cannot scatter together.
    """
    kind = "w" if schedule.split else "b"
    on, chunks = table.column(f"{kind}_on"), table.column(f"{kind}_chunk")
    each = [_of_stage(on[:, stage], chunks[:, stage]) for stage in range(schedule.stages)]
    if len({len(turns) for turns in each}) > 1:
        raise ConfigError(
            "pipeline: grad_reduction is 'per_chunk', for which all stages must scatter a chunk's gradients together, "
            f"but in the schedule {schedule.name!r} with {schedule.microbatches} microbatches the stages change "
            f"chunks {', '.join(str(len(turns) - 1) for turns in each)} times. Remedy: set grad_reduction='per_step' "
            "or 'per_microbatch', or use the schedule 'interleaved'."
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
    """Returns the ticks of each turn of a stage."""
    turns: list[list[int]] = []
    for tick in np.flatnonzero(on):
        if turns and chunks[turns[-1][-1]] == chunks[tick]:
            turns[-1].append(int(tick))
        else:
            turns.append([int(tick)])
    return turns
