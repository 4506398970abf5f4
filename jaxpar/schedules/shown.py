"""A schedule as text: a summary, every tick, and several schedules beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxpar.schedules.simulate import simulate

if TYPE_CHECKING:
    from jaxpar.schedules.schedule import Schedule


def summary(schedule: Schedule, costs: Mapping[str, float] | None = None) -> str:
    """Size, ticks, bubble, stash and buffers, a line each."""
    lines = [("ticks", f"{len(schedule.ticks.rows)}"), ("bubble", _bubbles(schedule, costs))]
    if not schedule.forward_only:
        lines += [("stash", _stash(schedule))]
    for keeps, label in (("input", "buffers"), ("residuals", "")):
        sizes = schedule.table(keeps).sizes  # type: ignore[arg-type]
        found = ", ".join(f"{name} {size}" for name, size in sizes.items() if size)
        lines += [(label, f"{found} (keeps {keeps})")]
        if schedule.forward_only:
            break
    return "\n".join([_title(schedule), *(f"{label:<8}{text}" for label, text in lines)])


def _title(schedule: Schedule) -> str:
    pieces, parts = schedule.pieces, schedule.sequence_chunks
    chunks = f" of {pieces.chunks} chunks" + (" in a v" if pieces.placement == "v" else "") if pieces.chunks > 1 else ""
    sequences = f" of {parts} sequence chunks" if parts > 1 else ""
    return f"{schedule.name}: {pieces.stages} stages{chunks}, {schedule.microbatches // parts} microbatches{sequences}"


def _bubbles(schedule: Schedule, costs: Mapping[str, float] | None) -> str:
    ticks, stages = simulate(schedule, costs), simulate(schedule, costs, "stages")
    return (
        f"{ticks.bubble:.1%} of {ticks.time:g} by ticks, {stages.bubble:.1%} of {stages.time:g} by stages "
        f"({stages.idle:g} between a stage's first and last operation)"
    )


def _stash(schedule: Schedule) -> str:
    text = ", ".join(map(str, schedule.stash))
    return f"{text}; until W {', '.join(map(str, schedule.held))}" if schedule.split else text


def chart(schedule: Schedule, width: int = 120) -> str:
    """See :meth:`jaxpar.schedules.schedule.Schedule.show`."""
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
    lines = [
        [f"{head:<{margin}}  {'  '.join(column[at] for column in block)}".rstrip() for at, head in enumerate(["tick", *heads])]
        for block in blocks
    ]
    return "\n\n".join(map("\n".join, lines))


def comparison(schedules: Sequence[Schedule], costs: Mapping[str, float] | None = None) -> str:
    """A line for each schedule: ticks, time and bubble by ticks and by stages, and what the stage with most keeps, in whole stages' layers."""
    rows = [("", "ticks", "time", "bubble", "by stages", "bubble", "stash", "until W", "act", "cot", "res", "own")]
    for one in schedules:
        ticks, stages = simulate(one, costs), simulate(one, costs, "stages")
        sizes = one.table("residuals").sizes | {"act": one.table().sizes["act"]}
        parts = one.pieces.chunks * one.sequence_chunks
        rows.append(
            (
                one.name,
                f"{len(one.ticks.rows)}",
                f"{ticks.time:g}",
                f"{ticks.bubble:.1%}",
                f"{stages.time:g}",
                f"{stages.bubble:.1%}",
                f"{max(one.stash) / parts:g}",
                f"{max(one.held) / parts:g}",
                *(f"{sizes[name]}" for name in ("act", "cot", "res", "own")),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [f"{cell:>{wide}}" for cell, wide in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]))
    return "\n".join(lines)
