"""Draws the picture of :meth:`Schedule.draw`: the operations of each stage over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpar.parallel.pipeline.schedules.simulate import Simulated, Timing, simulate
from jaxpar.parallel.pipeline.schedules.spec import ScheduleSpec
from jaxpar.utils.plotting import new_figure

COLOURS = {"F": (0.27, 0.51, 0.76), "B": (0.90, 0.55, 0.23), "W": (0.45, 0.66, 0.36)}
MEANINGS = {"F": "forward", "B": "backward", "W": "backward of weights"}
PALE = 0.55
"""The fraction of white in the colour of a stage's last chunk."""
NARROW = 0.09
"""In inches: narrower bars have no number."""


def picture(schedule: ScheduleSpec, path: Any, costs: Mapping[str, float] | None, timing: Timing) -> Any:
    """Draws a schedule; see :meth:`Schedule.draw` for the arguments."""
    found = simulate(schedule, costs, timing)
    width, height = min(16.0, max(7.0, 0.16 * _operations(found))), 1.1 + 0.34 * schedule.stages
    figure = new_figure("Schedule.draw()", figsize=(width, height), layout="constrained")
    ax = figure.subplots()
    scale = (width - 1.0) / found.time
    for stage, spans in enumerate(found.spans):
        for kind in schedule.kinds:
            for chunk in range(schedule.pieces.chunks):
                bars = [span for span in spans if span.op.kind == kind and span.op.chunk == chunk]
                colour = shade(kind, chunk, schedule.pieces.chunks)
                ranges = [(span.start, span.end - span.start) for span in bars]
                ax.broken_barh(ranges, (stage - 0.45, 0.9), facecolor=colour, edgecolor="white", linewidth=0.5)
                for span in bars:
                    digits = len(str(span.op.microbatch))
                    if (span.end - span.start) * scale >= NARROW * max(digits, 1.3):
                        middle = (span.start + span.end) / 2
                        ax.text(middle, stage, span.op.microbatch, ha="center", va="center_baseline", fontsize=7)
    _label(ax, schedule, found, timing)
    if path is not None:
        figure.savefig(path)
    return figure


def _operations(found: Simulated) -> float:
    """Returns the total time as a multiple of the shortest operation."""
    durations = (span.end - span.start for spans in found.spans for span in spans if span.end > span.start)
    return found.time / min(durations, default=1)


def shade(kind: str, chunk: int, chunks: int) -> tuple[float, ...]:
    """Returns the RGB colour of an operation: its kind selects the hue, and later chunks are paler."""
    white = PALE * chunk / max(chunks - 1, 1)
    return tuple(white + (1 - white) * part for part in COLOURS[kind])


def _label(ax: Any, schedule: ScheduleSpec, found: Simulated, timing: str) -> None:
    from matplotlib.patches import Patch

    ax.set_xlim(0, found.time)
    ax.set_ylim(schedule.stages - 0.5, -0.5)
    ax.set_yticks(range(schedule.stages), [f"stage {stage}" for stage in range(schedule.stages)], fontsize=8)
    ax.tick_params(axis="x", labelsize=8)
    ax.tick_params(length=0, axis="y")
    ax.spines[["top", "right", "left"]].set_visible(False)
    parts, count = schedule.sequence_chunks, schedule.microbatches // schedule.sequence_chunks
    sequences = f" of {parts} sequence chunks" if parts > 1 else ""
    title = f"{schedule.name}: {count} microbatches{sequences}, bubble {found.bubble:.1%} by {timing}"
    ax.set_title(title, loc="left", fontsize=10)
    meanings = MEANINGS | ({"B": "backward of inputs"} if schedule.split else {})
    chunks = schedule.pieces.chunks
    handles = [
        Patch(color=shade(kind, chunk, chunks), label=meanings[kind] + (f", chunk {chunk}" if chunks > 1 else ""))
        for kind in schedule.kinds
        for chunk in sorted({0, chunks - 1})
    ]
    columns = len(schedule.kinds)
    ax.get_figure(root=True).legend(handles=handles, loc="outside lower left", ncols=columns, fontsize=8, frameon=False)
