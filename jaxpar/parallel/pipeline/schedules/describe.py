"""Builds the output of ``jaxpar schedule``."""

from __future__ import annotations

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


def answer(asked: Question) -> str:
    """Returns a schedule's summary and ticks, or a comparison of several schedules; draws a single one if requested.

    Args:
      asked: the arguments of the command.

    Raises:
      ScheduleError: no name is given, a picture of several schedules is requested, the costs cannot be parsed, or
        :func:`jaxpar.pipeline.schedule` raises it.
    """
    if not asked.names:
        raise ScheduleError(f"no schedule is named. Schedules: {', '.join(NAMES)}.")
    costs = costs_in(asked.costs) if asked.costs else None
    if len(asked.names) > 1:
        if asked.draw is not None:
            raise ScheduleError(f"a picture is of one schedule, not of {', '.join(asked.names)}. Remedy: one name.")
        return comparison([_made(name, asked, alone=False) for name in asked.names], costs)
    one = _made(asked.names[0], asked, alone=True)
    if asked.draw is not None:
        one.draw(asked.draw, costs=costs, timing=asked.timing)
    return f"{summary(one, costs)}\n\n{chart(one, asked.width)}"


def _made(name: str, asked: Question, alone: bool) -> Schedule:
    """Builds a schedule; in a comparison, a name that takes no chunks is built without them."""
    named = NAMES.get(name)
    chunks, parts = asked.virtual_stages, asked.sequence_chunks
    if named is not None and not alone:
        chunks = chunks if named.chunks == "any" else None
        parts = parts if named.sequences else 1
    return schedule(name, asked.stages, asked.microbatches, chunks=chunks, sequence_chunks=parts)


def costs_in(text: str) -> dict[str, float]:
    """Parses the costs of the command line.

    Args:
      text: pairs such as ``F=1,B=2.5``.

    Raises:
      ScheduleError: a value is not a number.

    >>> costs_in("F=1,B=2.5")
    {'F': 1.0, 'B': 2.5}
    """
    found = {}
    for part in text.split(","):
        kind, _, value = part.partition("=")
        try:
            found[kind.strip()] = float(value)
        except ValueError:
            raise ScheduleError(f"costs {text!r}: {part!r} is no cost. Remedy: as F=1,B=2.") from None
    return found
