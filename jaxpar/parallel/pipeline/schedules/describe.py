"""Builds the output of ``jaxpar schedule``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxpar.errors import ScheduleError
from jaxpar.parallel.pipeline.schedules.registry import NAMES, schedule
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.parallel.pipeline.schedules.simulate import Timing
from jaxpar.parallel.pipeline.schedules.text import chart, comparison, summary


def answer(
    names: Sequence[str],
    *,
    draw: Callable[[Callable[[], Any]], None] = lambda figure: None,
    costs: str = "",
    timing: Timing = "ticks",
    width: int = 120,
    **sizes: Any,
) -> str:
    """Returns a schedule's summary and ticks, or a comparison of several schedules.

    Args:
      names: of the schedules.
      draw: is given a function that returns the figure of a single schedule.
      costs: as text; see :func:`costs_in`.
      timing, width: of the picture and of the text.
      sizes: ``stages``, ``microbatches``, ``virtual_stages`` and ``sequence_chunks``.

    Raises:
      ScheduleError: no name is given, no schedule takes the chunks, the costs cannot be parsed, or
        :func:`jaxpar.pipeline.schedule` raises it.
    """
    if not names:
        raise ScheduleError(f"no schedule is given. Schedules: {', '.join(NAMES)}.")
    found = costs_in(costs) if costs else None
    if len(names) > 1:
        _check_chunks(names, **sizes)
        return comparison([_build(name, **sizes, single=False) for name in names], found)
    one = _build(names[0], **sizes, single=True)
    draw(lambda: one.draw(costs=found, timing=timing))
    return f"{summary(one, found)}\n\n{chart(one, width)}"


def _check_chunks(names: Sequence[str], virtual_stages: int | None, sequence_chunks: int, **_: int) -> None:
    """Raises for chunks that no schedule of a comparison takes."""
    named = [NAMES[name] for name in names if name in NAMES]
    for option, unused in (
        ("virtual-stages", virtual_stages is not None and not any(one.chunks == "any" for one in named)),
        ("sequence-chunks", sequence_chunks != 1 and not any(one.sequences for one in named)),
    ):
        if unused:
            raise ScheduleError(f"--{option} has no effect on {', '.join(names)}. Remedy: leave it out.")


def _build(
    name: str, stages: int, microbatches: int, virtual_stages: int | None, sequence_chunks: int, single: bool
) -> Schedule:
    """Builds a schedule; in a comparison, a name that takes no chunks is built without them."""
    named = NAMES.get(name)
    if named is not None and not single:
        virtual_stages = virtual_stages if named.chunks == "any" else None
        sequence_chunks = sequence_chunks if named.sequences else 1
    return schedule(name, stages, microbatches, chunks=virtual_stages, sequence_chunks=sequence_chunks)


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
