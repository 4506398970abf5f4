"""A schedule as text: a summary, a chart of every tick, and a table that compares schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from jaxpar.parallel.pipeline.schedules.simulate import Timing, simulate
from jaxpar.parallel.pipeline.schedules.spec import ScheduleSpec
from jaxpar.parallel.pipeline.schedules.table import ActivationCheckpointing, table_of


def summary(schedule: ScheduleSpec, costs: Mapping[str, float] | None = None) -> str:
    """Returns the sizes, ticks, bubble, stash and buffers of a schedule, one per line.

    Args:
      schedule: the schedule.
      costs: as for :func:`jaxpar.parallel.pipeline.schedules.simulate.costs_of`.
    """
    lines = [("ticks", f"{len(schedule.ticks.rows)}"), ("bubble", _bubbles(schedule, costs))]
    if not schedule.forward_only:
        until_w = f"; until W {', '.join(map(str, schedule.held))}" if schedule.split else ""
        lines += [("stash", ", ".join(map(str, schedule.stash)) + until_w)]
    # Without backwards nothing is stored for them, so the modes do not differ.
    for mode in get_args(ActivationCheckpointing)[: 1 if schedule.forward_only else None]:
        found = ", ".join(f"{name} {size}" for name, size in table_of(schedule, mode).sizes.items() if size)
        mode_text = "" if schedule.forward_only else f" with activation checkpointing {mode!r}"
        lines += [("buffers", found + mode_text)]
    return "\n".join([_title(schedule), *(f"{label:<8}{text}" for label, text in lines)])


def _title(schedule: ScheduleSpec) -> str:
    pieces, parts = schedule.pieces, schedule.sequence_chunks
    chunks = f" of {pieces.chunks} chunks" + (" in a v" if pieces.placement == "v" else "") if pieces.chunks > 1 else ""
    sequences = f" of {parts} sequence chunks" if parts > 1 else ""
    return f"{schedule.name}: {pieces.stages} stages{chunks}, {schedule.microbatches // parts} microbatches{sequences}"


def _bubbles(schedule: ScheduleSpec, costs: Mapping[str, float] | None) -> str:
    found = [(timing, simulate(schedule, costs, timing)) for timing in get_args(Timing)]
    each = ", ".join(f"{one.bubble:.1%} of {one.time:g} by {timing}" for timing, one in found)
    return f"{each} ({found[-1][1].idle:g} between a stage's first and last operation)"


def chart(schedule: ScheduleSpec, width: int = 120) -> str:
    """Returns every tick as text; see :meth:`Schedule.show`."""
    rows = schedule.ticks.rows
    heads = [f"stage {stage}" for stage in range(schedule.stages)]
    columns = [[f"{tick}", *(" ".join(map(str, ops)) or "·" for ops in row)] for tick, row in enumerate(rows)]
    margin = max(map(len, [*heads, "tick"]))
    blocks: list[list[list[str]]] = []
    used = width
    for column in columns:
        wide = max(map(len, column)) + 2
        if used + wide > width:
            blocks.append([])
            used = margin
        blocks[-1].append([cell.ljust(wide - 2) for cell in column])
        used += wide
    line = lambda at, head, block: f"{head:<{margin}}  {'  '.join(column[at] for column in block)}".rstrip()
    lines = [[line(at, head, block) for at, head in enumerate(["tick", *heads])] for block in blocks]
    return "\n\n".join(map("\n".join, lines))


def comparison(schedules: Sequence[ScheduleSpec], costs: Mapping[str, float] | None = None) -> str:
    """Returns a table with one line per schedule.

    The columns are the ticks; the time and the bubble for each timing; and the largest stash of any stage, until B and
    until W, in units of all layers of a stage and a full microbatch. The last columns are the slots of each buffer:
    ``act`` for activation checkpointing ``full``, the others for ``none``.

    Args:
      schedules: the schedules, one per line.
      costs: as for :func:`jaxpar.parallel.pipeline.schedules.simulate.costs_of`.
    """
    rows = [["", "ticks"]]
    rows[0] += [title for timing in get_args(Timing) for title in (f"by {timing}", "bubble")]
    rows[0] += ["stash", "until W", "act", "cot", "res", "own"]
    for one in schedules:
        found = [simulate(one, costs, timing) for timing in get_args(Timing)]
        sizes = table_of(one, "none").sizes | {"act": table_of(one).sizes["act"]}
        parts = one.pieces.chunks * one.sequence_chunks
        row = [one.name, f"{len(one.ticks.rows)}"]
        row += [text for each in found for text in (f"{each.time:g}", f"{each.bubble:.1%}")]
        row += [f"{max(kept) / parts:g}" for kept in (one.stash, one.held)]
        rows.append(row + [f"{sizes[name]}" for name in ("act", "cot", "res", "own")])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [f"{cell:>{wide}}" for cell, wide in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]))
    return "\n".join(lines)
