"""Figures of a checkup as SVG: memory by category, bytes on the wire by mesh axes, overlap of compute and transfers.

Equal values give equal SVG text. Each segment of a bar has a tooltip.
"""

from __future__ import annotations

import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from jaxpar.analysis.checkup.footprint import Footprint
from jaxpar.analysis.hlo.audit import Audit
from jaxpar.analysis.roofline import Roofline, show_time
from jaxpar.analysis.units import show_bytes
from jaxpar.utils.plotting import new_figure

# Okabe and Ito's colours, which most people can tell apart.
_COLOURS = (
    "#0072b2",
    "#56b4e9",
    "#999999",
    "#cc79a7",
    "#d55e00",
    "#f0e442",
    "#009e73",
    "#e69f00",
    "#8c564b",
    "#dddddd",
)
_RED = "#cc0000"

type Piece = tuple[float, str, str]
"""A segment of a bar: its size in the bar's unit, its colour and its name; a gap has no name."""


def bars(
    rows: Mapping[str, Sequence[Piece]],
    show: Callable[[float], str],
    legend: Mapping[str, str] | None = None,
    mark: tuple[float, str] | None = None,
    notes: Mapping[str, str] | None = None,
) -> str:
    """Returns horizontal bars as an SVG element.

    Args:
      rows: the label of each bar → its segments, each beginning where the one before ends.
      show: a size → its text, to the right of each bar and in tooltips.
      legend: label → colour.
      mark: the value and the label of a vertical line across all bars.
      notes: the label of a bar → the text to its right, instead of the sum of its segments.

    Raises:
      MissingExtraError: matplotlib is not installed.

    >>> "<title>one: 1 B</title>" in bars({"data": [(1, "red", "one")]}, show_bytes)
    True
    """
    height = 0.1 + 0.28 * (len(rows) + bool(legend) + bool(mark))
    figure = new_figure("drawing a checkup", figsize=(9.2, height), layout="constrained", frameon=False)
    from matplotlib import rc_context
    from matplotlib.patches import Patch

    ax = figure.subplots()
    last = mark[0] if mark else 1e-30
    for y, (label, pieces) in enumerate(rows.items()):
        at = end = 0.0
        for size, colour, name in pieces:
            if name and size:
                style = {"color": colour, "edgecolor": colour, "linewidth": 0.5, "clip_on": False}
                ax.barh(y, size, 0.65, at, gid=f"{name}: {show(size)}", **style)
                end = at + size
            at += size
        text = (notes or {}).get(label) or show(sum(size for size, _, name in pieces if name))
        options = {"textcoords": "offset points", "annotation_clip": False, "va": "center_baseline", "fontsize": 9}
        white = {"facecolor": "white", "linewidth": 0, "pad": 1}  # where the mark crosses the text
        ax.annotate(text, (end, y), (5, 0), bbox=white, **options)
        last = max(last, end)
    ax.set(frame_on=False, xticks=[], xlim=(0, last), ylim=(len(rows) - 0.5, -0.5))
    ax.set_yticks(range(len(rows)), rows, fontsize=9)
    ax.tick_params(length=0)
    if mark:
        ax.axvline(mark[0], color=_RED, linestyle="--", linewidth=1, clip_on=False)
        ax.set_xticks([mark[0]], [mark[1]], color=_RED, fontsize=9)
    if legend:
        handles = [Patch(color=colour, label=name) for name, colour in legend.items()]
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), fontsize=9, frameon=False)
    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxpar", "font.sans-serif": ["DejaVu Sans"]}):
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    # matplotlib numbers the groups of each figure from 1, but an id is unique in a page.
    svg = re.sub(r' id="[\w.]+_\d+"', "", out.getvalue()[out.getvalue().index("<svg") :])
    return re.sub(r'<g id="([^"]*)">', r"<g><title>\1</title>", svg)


def memory_picture(memory: Footprint) -> str:
    """Returns one bar for each category, and one for their sum, compared with the device's memory."""
    sizes = {**memory.categories, "not attributed": max(memory.unattributed, 0)}
    pieces = [(size, c, name) for (name, size), c in zip(sizes.items(), _COLOURS, strict=True) if size]
    note, mark = show_bytes(memory.total), None
    if memory.limit is not None:
        note += f" of {show_bytes(memory.limit)}"
        if memory.limit < 4 * sum(sizes.values()):  # a limit far beyond the bars would shrink them
            mark = (float(memory.limit), f"{show_bytes(memory.limit)} of the device")
    rows = {"at the peak": pieces} | {piece[-1]: [piece] for piece in pieces}
    return bars(rows, lambda size: show_bytes(round(size)), mark=mark, notes={"at the peak": note})


def wire_picture(report: Audit) -> str:
    """Returns the bytes on the wire by mesh axes and kind of collective; empty if the step sends nothing."""
    colours = dict(zip(sorted({c.kind for c in report.collectives}), _COLOURS, strict=False))
    by_axes: dict[str, Counter[str]] = defaultdict(Counter)
    for c in report.collectives:
        by_axes["+".join(c.axes)][c.kind] += c.total_wire_bytes  # type: ignore[assignment]  # a float
    rows = {
        axes: [(size, colours[kind], f"{kind} over {axes}") for kind, size in sorted(found.items())]
        for axes, found in sorted(by_axes.items(), key=lambda item: -item[1].total())
    }
    return bars(rows, lambda size: show_bytes(round(size)), colours) if rows else ""


def overlap_picture(line: Roofline) -> str:
    """Returns the overlap of compute and transfers in a step, by the roofline; sorted, not in program order.

    First come the device's work and the transfers that it hides. The transfers that outlast their compute follow, while
    the device is stalled. The exposed transfers come last, one after the other.
    """
    words = ("work", "hidden under it", "outlasts the work beside it", "nothing beside it")
    legend = dict(zip(words, (_COLOURS[i] for i in (0, 6, 7, 4)), strict=True))
    busy, hidden, stalled, exposed = legend.values()
    work = max(line.compute, line.hbm)
    rows = {"work": [(work, busy, "compute" if line.compute >= line.hbm else "HBM")]}
    waits, at = max(work, line.overlapped - line.stalled), max(work + line.stalled, line.overlapped)
    for t in line.transfers:
        rows[f"links over {'+'.join(t.axes)}"] = [
            (t.hidden, hidden, "hidden under work"),
            (waits - t.hidden, "", ""),
            (t.stalled, stalled, "longer than the work beside it"),
            (at - waits - t.stalled, "", ""),
            (t.exposed, exposed, "nothing beside it"),
        ]
        at += t.exposed
    return bars(rows, show_time, legend, (line.step, f"step {show_time(line.step)}"))
