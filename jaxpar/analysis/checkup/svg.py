"""Figures of a checkup as SVG: memory by category, bytes on the wire by axes, overlap of compute and transfers."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.analysis.checkup.footprint import Footprint
from jaxpar.analysis.hlo.audit import Audit
from jaxpar.analysis.roofline import Roofline, show_time
from jaxpar.analysis.units import show_bytes

WIDTH = 880
"""The width of a figure in pixels."""

_LEFT, _ROW, _BAR = 150, 30, 18
_ROOM = WIDTH - _LEFT - 120
# Okabe and Ito's colours, which most people can tell apart.
_COLOURS = ("#0072b2", "#56b4e9", "#999999", "#cc79a7", "#d55e00", "#f0e442", "#009e73", "#e69f00", "#dddddd")


@dataclass(frozen=True)
class Piece:
    """A segment of a bar: where it begins and its size, both in the bar's unit, its colour and its tooltip."""

    begin: float
    size: float
    colour: str
    title: str


def bars(rows: Sequence[tuple[str, Sequence[Piece], str]], end: float, mark: tuple[float, str] | None = None) -> str:
    """Returns horizontal bars as SVG text.

    Args:
      rows: for each bar, the label on its left, its segments, and the text on its right.
      end: the value at the right edge, in the bars' unit.
      mark: the value and the label of a vertical line across all bars.

    >>> bars([("data", [Piece(0, 1, "red", "one")], "1 B")], 2).count("<rect")
    1
    """
    scale = _ROOM / max(end, mark[0] if mark else 0.0, 1e-30)
    height = _ROW * len(rows) + (26 if mark else 8)
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" font-family="sans-serif" font-size="12">']
    for i, (name, pieces, value) in enumerate(rows):
        top = i * _ROW + 4
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 14}" text-anchor="end">{html.escape(name)}</text>')
        for piece in pieces:
            wide = max(piece.size * scale, 0.5)
            parts.append(
                f'<rect x="{_LEFT + piece.begin * scale:.1f}" y="{top}" width="{wide:.1f}" height="{_BAR}" '
                f'fill="{piece.colour}"><title>{html.escape(piece.title)}</title></rect>'
            )
        last = max((piece.begin + piece.size for piece in pieces), default=0.0)
        parts.append(f'<text x="{_LEFT + last * scale + 6:.1f}" y="{top + 14}">{html.escape(value)}</text>')
    if mark:
        x = _LEFT + mark[0] * scale
        line = _ROW * len(rows) + 4
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{line}" stroke="#c00" stroke-dasharray="4 3"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{line + 14}" text-anchor="middle" fill="#c00">{html.escape(mark[1])}</text>'
        )
    return "".join(parts) + "</svg>"


def memory_picture(memory: Footprint) -> str:
    """Returns one bar for each category, and one for their sum, compared with the device's memory."""
    rows: list[tuple[str, list[Piece], str]] = []
    whole: list[Piece] = []
    sizes = {**memory.categories, "not attributed": max(memory.unattributed, 0)}
    at = 0
    for (name, size), colour in zip(sizes.items(), _COLOURS, strict=True):
        if size:
            whole.append(Piece(at, size, colour, f"{name}: {show_bytes(size)}"))
            rows.append((name, [Piece(0, size, colour, f"{name}: {show_bytes(size)}")], show_bytes(size)))
            at += size
    of = f" of {show_bytes(memory.limit)}" if memory.limit is not None else ""
    # A limit far beyond the bars would shrink them.
    near = memory.limit is not None and memory.limit < 4 * at
    mark = (float(memory.limit), f"{show_bytes(memory.limit)} of the device") if near and memory.limit else None
    return bars([("at the peak", whole, show_bytes(memory.total) + of), *rows], at, mark)


def wire_picture(report: Audit) -> str:
    """Returns the bytes on the wire by mesh axes, with a segment for each kind of collective."""
    kinds = sorted({c.kind for c in report.collectives})
    colours = dict(zip(kinds, _COLOURS, strict=False))
    by_axes: dict[str, dict[str, float]] = {}
    for c in report.collectives:
        row = by_axes.setdefault("+".join(c.axes), {})
        row[c.kind] = row.get(c.kind, 0.0) + c.total_wire_bytes
    rows = []
    for axes, found in sorted(by_axes.items(), key=lambda item: -sum(item[1].values())):
        at, pieces = 0.0, []
        for kind, size in sorted(found.items()):
            pieces.append(Piece(at, size, colours[kind], f"{kind} over {axes}: {show_bytes(round(size))}"))
            at += size
        rows.append((axes, pieces, show_bytes(round(at))))
    most = max((sum(found.values()) for found in by_axes.values()), default=0.0)
    return legend([(kind, colours[kind]) for kind in kinds]) + bars(rows, most)


def overlap_picture(line: Roofline) -> str:
    """Returns the overlap of compute and transfers in a step, by the roofline; sorted, not in program order.

    First come the device's work and the transfers that it hides. The transfers that outlast their compute follow, while
    the device is stalled. The exposed transfers come last, one after the other.
    """
    work = max(line.compute, line.hbm)
    resource = "compute" if line.compute >= line.hbm else "HBM"
    rows = [("work", [Piece(0, work, _COLOURS[0], f"{resource}: {show_time(work)}")], show_time(work))]
    waits, at = max(work, line.overlapped - line.stalled), max(work + line.stalled, line.overlapped)
    for t in line.transfers:
        name = f"links over {'+'.join(t.axes)}"
        pieces = [
            Piece(0, t.hidden, _COLOURS[6], f"hidden under work: {show_time(t.hidden)}"),
            Piece(waits, t.stalled, _COLOURS[7], f"longer than the work beside it: {show_time(t.stalled)}"),
            Piece(at, t.exposed, _COLOURS[4], f"nothing beside it: {show_time(t.exposed)}"),
        ]
        at += t.exposed
        rows.append((name, [p for p in pieces if p.size], show_time(t.seconds)))
    words = ("work", "hidden under it", "outlasts the work beside it", "nothing beside it")
    marks = [(word, _COLOURS[i]) for word, i in zip(words, (0, 6, 7, 4), strict=True)]
    return legend(marks) + bars(rows, line.step, (line.step, f"step {show_time(line.step)}"))


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Returns the names next to their colours, as HTML.

    >>> legend([("work", "red")])
    '<p class="legend"><span><i style="background:red"></i>work</span></p>'
    """
    spans = "".join(f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>' for name, colour in entries)
    return f'<p class="legend">{spans}</p>'
