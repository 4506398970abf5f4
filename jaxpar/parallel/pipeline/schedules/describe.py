"""Builds the output of ``jaxpar schedule``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Protocol

from jaxpar.errors import ScheduleError
from jaxpar.parallel.pipeline.schedules.registry import NAMES, schedule
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.parallel.pipeline.schedules.simulate import Timing
from jaxpar.parallel.pipeline.schedules.text import chart, comparison, summary


class Question(Protocol):
    """The arguments of the command."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def stages(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def virtual_stages(self) -> int | None: ...
    @property
    def sequence_chunks(self) -> int: ...
    @property
    def costs(self) -> str: ...
    @property
    def draw(self) -> Path | None: ...
    @property
    def timing(self) -> Timing: ...
    @property
    def width(self) -> int: ...


def answer(args: Question) -> str:
    """Returns a schedule's summary and ticks, or a comparison of several schedules; draws a single one if requested.

    Args:
      args: the arguments of the command.

    Raises:
      ScheduleError: no name is given, a picture of several schedules is requested, the costs cannot be parsed, or
        :func:`jaxpar.pipeline.schedule` raises it.
    """
    if not args.names:
        raise ScheduleError(f"no schedule is given. Schedules: {', '.join(NAMES)}.")
    costs = costs_in(args.costs) if args.costs else None
    if len(args.names) > 1:
        if args.draw is not None:
            raise ScheduleError(f"a picture shows one schedule, got {', '.join(args.names)}. Remedy: give one name.")
        return comparison([_build(name, args, single=False) for name in args.names], costs)
    one = _build(args.names[0], args, single=True)
    if args.draw is not None:
        one.draw(args.draw, costs=costs, timing=args.timing)
    return f"{summary(one, costs)}\n\n{chart(one, args.width)}"


def _build(name: str, args: Question, single: bool) -> Schedule:
    """Builds a schedule; in a comparison, a name that takes no chunks is built without them."""
    named = NAMES.get(name)
    chunks, parts = args.virtual_stages, args.sequence_chunks
    if named is not None and not single:
        chunks = chunks if named.chunks == "any" else None
        parts = parts if named.sequences else 1
    return schedule(name, args.stages, args.microbatches, chunks=chunks, sequence_chunks=parts)


def costs_in(text: str) -> dict[str, float]:
    """Parses the costs of the command line.

    Args:
      text: pairs such as ``F=1,B=2.5``.

    Raises:
      ScheduleError: a value is not a finite number.

    >>> costs_in("F=1,B=2.5")
    {'F': 1.0, 'B': 2.5}
    """
    found = {}
    for part in text.split(","):
        kind, _, value = part.partition("=")
        try:
            cost = float(value)
        except ValueError:
            cost = math.nan
        if not math.isfinite(cost):
            raise ScheduleError(f"costs {text!r}: {part!r} is not a cost. Remedy: write costs as in F=1,B=2.")
        found[kind.strip()] = cost
    return found
