"""How long a schedule lasts, and how much of it a stage stands still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from jaxpar.errors import ScheduleError
from jaxpar.parallel.pipeline.schedules.orders import KINDS, Op
from jaxpar.parallel.pipeline.schedules.spec import ScheduleSpec
from jaxpar.parallel.pipeline.schedules.ticks import needs

Timing = Literal["ticks", "neighbours", "stages"]


class Span(NamedTuple):
    """An operation, and when it begins and ends."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Simulated:
    """Time, the work of the stage that has most, and for each stage when it does what, in units of the costs."""

    time: float
    work: float
    spans: tuple[tuple[Span, ...], ...]

    @property
    def bubble(self) -> float:
        """The part of the time that the stage with most work stands still."""
        return 1 - self.work / self.time

    @property
    def idle(self) -> float:
        """The longest that a stage stands still between its first operation and its last."""
        return max(
            spans[-1].end - spans[0].start - sum(span.end - span.start for span in spans) for spans in self.spans
        )


def costs_of(schedule: ScheduleSpec, costs: Mapping[str, float] | None) -> dict[str, float]:
    """Units of an operation of one chunk, which has its share of what is given for all layers of a stage and a whole microbatch.

    B is a backward of inputs, W one of weights; where a schedule does not split them, a backward costs both. Each is 1 by default.

    Raises:
      ScheduleError: a kind that there is not, a missing one, or a cost that is no positive number.
    """
    given = {"F": 1.0, "B": 1.0, "W": 1.0} if costs is None else dict(costs)
    here = "F" if schedule.forward_only else "FBW" if schedule.split else "FB"
    none = not any(given.get(kind, 1) for kind in here)
    wrong = [f"{k}={value}" for k, value in given.items() if none or k not in KINDS or not 0 <= value < float("inf")]
    if wrong:
        raise ScheduleError(
            f"schedule {schedule.name!r}: the costs {', '.join(wrong)} cannot be. Remedy: F, B and W with numbers from 0 on, not all 0."
        )
    if missing := [kind for kind in here if kind not in given]:
        raise ScheduleError(
            f"schedule {schedule.name!r}: costs has no {' and no '.join(missing)}, but the stages do {', '.join(here)}. Remedy: a number "
            "for each of these."
        )
    if not schedule.split:
        given["B"] = given.get("B", 0.0) + given.get("W", 0.0)
    parts = schedule.pieces.chunks * schedule.sequence_chunks
    return {kind: given[kind] / parts for kind in here}


def simulate(schedule: ScheduleSpec, costs: Mapping[str, float] | None = None, timing: Timing = "ticks") -> Simulated:
    """The time of a schedule.

    Args:
      costs: of F, B and W, of all the layers of a stage; see :func:`costs_of`.
      timing: ``ticks``: all stages go on together, and a tick lasts as long as the kinds of operations in it, which is what one program for all
        stages does. ``neighbours``: each stage does its own operations alone, and waits after every tick for the stages that it exchanges
        with. ``stages``: each stage goes on as soon as what it waits for is there, which no program can do better.

    Raises:
      ScheduleError: costs that cannot be, or another ``timing``.
    """
    if timing not in get_args(Timing):
        raise ScheduleError(
            f"schedule {schedule.name!r}: timing is {timing!r}, but one of {', '.join(get_args(Timing))} is wanted."
        )
    cost = costs_of(schedule, costs)
    work = max(sum(cost[op.kind] for op in order) for order in schedule.orders)
    spans = {"ticks": _by_ticks, "neighbours": _by_neighbours, "stages": _by_stages}[timing](schedule, cost)
    time = max(stage[-1].end for stage in spans)
    return Simulated(time, work, tuple(map(tuple, spans)))


def _by_ticks(schedule: ScheduleSpec, cost: Mapping[str, float]) -> list[list[Span]]:
    spans: list[list[Span]] = [[] for _ in range(schedule.stages)]
    now = 0.0
    for row in schedule.ticks.rows:
        for kind in KINDS:
            found = [(stage, op) for stage, ops in enumerate(row) for op in ops if op.kind == kind]
            for stage, op in found:
                spans[stage].append(Span(op, now, now + cost[kind]))
            now += cost[kind] if found else 0.0
    return spans


def _by_neighbours(schedule: ScheduleSpec, cost: Mapping[str, float]) -> list[list[Span]]:
    stages, pieces = range(schedule.stages), schedule.pieces
    round_trip = pieces.placement == "loop" and pieces.chunks > 1
    spans: list[list[Span]] = [[] for _ in stages]
    ends = [0.0 for _ in stages]
    for row in schedule.ticks.rows:
        starts = [max(ends[s % len(ends)] for s in (at - 1, at, at + 1) if round_trip or s in stages) for at in stages]
        for stage, ops in enumerate(row):
            ends[stage] = starts[stage]
            for op in ops:
                spans[stage].append(Span(op, ends[stage], ends[stage] + cost[op.kind]))
                ends[stage] = spans[stage][-1].end
    return spans


def _by_stages(schedule: ScheduleSpec, cost: Mapping[str, float]) -> list[list[Span]]:
    pieces = schedule.pieces
    done: dict[tuple[str, int, int], float] = {}
    spans: list[list[Span]] = [[] for _ in range(pieces.stages)]
    left = sum(map(len, schedule.orders))
    while left:
        before = left
        for stage, order in enumerate(schedule.orders):
            while len(spans[stage]) < len(order):
                op = order[len(spans[stage])]
                piece = pieces.piece(stage, op.chunk)
                waits = needs(op, piece, pieces.count, schedule.sequence_chunks)
                if any(key not in done for key in waits):
                    break
                clock = spans[stage][-1].end if spans[stage] else 0.0
                start = max([clock, *(done[key] for key in waits)])
                done[op.kind, op.microbatch, piece] = start + cost[op.kind]
                spans[stage].append(Span(op, start, start + cost[op.kind]))
                left -= 1
        if left == before:
            schedule.ticks  # noqa: B018 (says who waits for whom)
    return spans
