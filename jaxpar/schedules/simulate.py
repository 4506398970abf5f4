"""How long a schedule lasts, and how much of it a stage stands still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jaxpar.schedules.ticks import needs

if TYPE_CHECKING:
    from jaxpar.schedules.schedule import Schedule


@dataclass(frozen=True)
class Simulated:
    """Time, and the work of the stage that has most, in units of the costs."""

    time: float
    work: float

    @property
    def bubble(self) -> float:
        """The part of the time that the stage with most work stands still."""
        return 1 - self.work / self.time


def costs_of(schedule: Schedule, costs: Mapping[str, float] | None) -> dict[str, float]:
    """Units of an operation of one chunk: by default a forward costs 1, a backward 2, a backward of inputs or weights alone 1, of a
    model's whole stage; a chunk has its share."""
    given = costs or ({"F": 1.0, "B": 1.0, "W": 1.0} if schedule.split else {"F": 1.0, "B": 2.0, "W": 0.0})
    return {kind: value / schedule.pieces.chunks for kind, value in given.items()}


def simulate(
    schedule: Schedule, costs: Mapping[str, float] | None = None, how: Literal["ticks", "stages"] = "ticks"
) -> Simulated:
    """The time of a schedule.

    Args:
      costs: of F, B and W, of all the layers of a stage.
      how: ``ticks``: all stages go on together, and a tick lasts as long as the kinds of operations in it, which is what one program for all
        stages does. ``stages``: each stage goes on as soon as what it waits for is there, which no program can do better.
    """
    cost = costs_of(schedule, costs)
    work = max(sum(cost[op.kind] for op in order) for order in schedule.orders)
    if how == "ticks":
        kinds = ({op.kind for ops in row for op in ops} for row in schedule.ticks.rows)
        return Simulated(sum(cost[kind] for found in kinds for kind in found), work)
    return Simulated(_by_stages(schedule, cost), work)


def _by_stages(schedule: Schedule, cost: Mapping[str, float]) -> float:
    pieces = schedule.pieces
    done: dict[tuple[str, int, int], float] = {}
    clock, at = [0.0] * pieces.stages, [0] * pieces.stages
    left = sum(map(len, schedule.orders))
    while left:
        before = left
        for stage, order in enumerate(schedule.orders):
            while at[stage] < len(order):
                op = order[at[stage]]
                piece = pieces.piece(stage, op.chunk)
                waits = needs(op, piece, pieces.count, schedule.forward_only)
                if any(key not in done for key in waits):
                    break
                clock[stage] = max([clock[stage], *(done[key] for key in waits)]) + cost[op.kind]
                done[op.kind, op.microbatch, piece] = clock[stage]
                at[stage] += 1
                left -= 1
        if left == before:
            schedule.ticks  # noqa: B018 (says who waits for whom)
    return max(clock)
