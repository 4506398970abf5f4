"""Simulates how long a schedule takes, and how long its stages are idle."""

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
    """An operation with its start and end times."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation, in units of the costs.

    Attributes:
      time: the total time.
      work: the time of all operations of the busiest stage.
      spans: for each stage, its operations with their times.
    """

    time: float
    work: float
    spans: tuple[tuple[Span, ...], ...]

    @property
    def bubble(self) -> float:
        """The fraction of the time in which the busiest stage is idle."""
        return 1 - self.work / self.time

    @property
    def idle(self) -> float:
        """The longest idle time of any stage between its first and its last operation."""
        return max(
            spans[-1].end - spans[0].start - sum(span.end - span.start for span in spans) for spans in self.spans
        )


def costs_of(schedule: ScheduleSpec, costs: Mapping[str, float] | None) -> dict[str, float]:
    """Returns the cost of one operation of each kind, on one chunk of the model and one sequence chunk.

    Args:
      schedule: the schedule.
      costs: the cost of each kind for all layers of a stage and a full microbatch, 1 each by default. F is a forward, B
        a backward of inputs, W a backward of weights. If the schedule does not split backwards, one costs B + W.

    Raises:
      ScheduleError: a kind is unknown or missing, a cost is negative or infinite, or all costs are 0.
    """
    given = {"F": 1.0, "B": 1.0, "W": 1.0} if costs is None else dict(costs)
    all_zero = not any(given.get(kind, 1) for kind in schedule.kinds)
    wrong = [
        f"{k}={value}" for k, value in given.items() if all_zero or k not in KINDS or not 0 <= value < float("inf")
    ]
    if wrong:
        raise ScheduleError(
            f"schedule {schedule.name!r}: the costs {', '.join(wrong)} are invalid. Remedy: give non-negative numbers "
            "for F, B and W, not all 0."
        )
    if missing := [kind for kind in schedule.kinds if kind not in given]:
        raise ScheduleError(
            f"schedule {schedule.name!r}: costs has no {' and no '.join(missing)}, but the stages do "
            f"{', '.join(schedule.kinds)}. Remedy: give a number for each of these."
        )
    if not schedule.split:
        given["B"] = given.get("B", 0.0) + given.get("W", 0.0)
    parts = schedule.pieces.chunks * schedule.sequence_chunks
    return {kind: given[kind] / parts for kind in schedule.kinds}


def simulate(schedule: ScheduleSpec, costs: Mapping[str, float] | None = None, timing: Timing = "ticks") -> Simulated:
    """Returns how long a schedule takes, and when each stage runs which operation.

    Args:
      schedule: the schedule.
      costs: the costs of F, B and W for all layers of a stage; see :func:`costs_of`.
      timing: ``ticks``: all stages advance together, and a tick lasts as long as all kinds of operations in it, as in
        one program for all stages. ``neighbours``: each stage executes only its own operations, and synchronizes after
        every tick with the stages with which it exchanges. ``stages``: each stage starts an operation as soon as its
        inputs exist, which is a lower bound for any program.

    Raises:
      ScheduleError: ``costs`` or ``timing`` is invalid, or the orders deadlock.

    >>> import jaxpar as jp
    >>> found = simulate(jp.pipeline.schedule("gpipe", stages=2, microbatches=4), {"F": 1, "B": 1, "W": 1})
    >>> found.time, found.work, round(found.bubble, 3)
    (15.0, 12.0, 0.2)
    """
    if timing not in get_args(Timing):
        raise ScheduleError(
            f"schedule {schedule.name!r}: timing must be one of {', '.join(get_args(Timing))}, got {timing!r}."
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
    round_trip = pieces.placement == "interleaved" and pieces.chunks > 1
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
                dependencies = needs(op, piece, pieces.count, schedule.sequence_chunks)
                if any(key not in done for key in dependencies):
                    break
                clock = spans[stage][-1].end if spans[stage] else 0.0
                start = max([clock, *(done[key] for key in dependencies)])
                done[op.kind, op.microbatch, piece] = start + cost[op.kind]
                spans[stage].append(Span(op, start, start + cost[op.kind]))
                left -= 1
        if left == before:
            schedule.ticks  # noqa: B018 (raises the error that describes the deadlock)
    return spans
