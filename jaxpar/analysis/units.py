"""Shards and their bytes, byte counts as text, and tables as text and HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

GAP = "  "
"""What stands between the columns of a table."""


def axes_of_dims(spec: Iterable[Any], rank: int) -> tuple[tuple[str, ...], ...]:
    """Returns a ``PartitionSpec`` as a tuple of mesh axes for each of ``rank`` dims.

    >>> axes_of_dims(("data", None, ("a", "b")), 4)
    (('data',), (), ('a', 'b'), ())
    """
    axes = [() if a is None else (a,) if isinstance(a, str) else tuple(a) if isinstance(a, tuple) else () for a in spec]
    return (*axes, *[()] * (rank - len(axes)))


def shard_count(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Returns the number of shards that these axes make; ``sizes`` is mesh axis → size, by default 1."""
    return math.prod(sizes.get(axis, 1) for axis in axes)


def device_bytes(shape: Sequence[int], itemsize: float, num_shards: Sequence[int]) -> int:
    """Returns the bytes of the largest shard of an array.

    Args:
      shape: the global shape.
      itemsize: bytes of one element; two int4 are one byte.
      num_shards: the number of shards along each dim. A dim that is not divisible is rounded up.
    """
    return math.ceil(itemsize * math.prod(-(-size // count) for size, count in zip(shape, num_shards, strict=True)))


def show_bytes(n: int) -> str:
    """Returns a byte count as text, in binary units.

    >>> show_bytes(1536), show_bytes(3 * 2**30)
    ('1.50 KiB', '3.00 GiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(n) // 10), len(units) - 1) if n else 0
    return f"{n} B" if power == 0 else f"{n / 2 ** (10 * power):.2f} {units[power]}"


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Returns the rows of a table as lines with aligned columns; ``right`` are the numbers of those aligned right.

    >>> aligned([("kind", "count"), ("all-gather", "2")])
    ['kind        count', 'all-gather  2']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    return [GAP.join(f(cell, n) for f, cell, n in zip(pad, row, widths, strict=True)).rstrip() for row in rows]


def table_lines(
    rows: Sequence[Sequence[str]], width: int | None = None, *, below: Sequence[int] = (-1,), labels: bool = False
) -> list[str]:
    """Returns the rows of a table as lines; where they are wider than ``width``, some cells stand below the others.

    Args:
      rows: the head first.
      width: the number of columns; ``None`` for any.
      below: the columns that stand below, if necessary.
      labels: whether their heads stand before them there.

    >>> table_lines([("kind", "count", "from"), ("all-gather", "2", "model.py:3")], 20)
    ['kind        count', 'all-gather  2', '    model.py:3']
    """
    lines = aligned(rows)
    if width is None or max(map(len, lines)) <= width:
        return lines
    head, *others = rows
    last = [i % len(head) for i in below]
    first, *narrow = aligned([[cell for i, cell in enumerate(row) if i not in last] for row in rows])
    found = [first]
    for line, row in zip(narrow, others, strict=True):
        cells = (f"{head[i]} {row[i]}" if labels else row[i] for i in last if row[i])
        found += [line, *([f"    {text}"] if (text := ", ".join(cells)) else [])]
    return found


def html_table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Returns an HTML table in a box that scrolls where the page is narrower; ``head`` is its first row.

    >>> html_table([("<1",)])
    '<div class="table" style="overflow-x:auto"><table><tr><td>&lt;1</td></tr></table></div>'
    """
    line = lambda cells, tag: f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
    lines = [line(head, "th") * bool(head), *(line(row, "td") for row in rows)]
    return f'<div class="table" style="overflow-x:auto"><table>{"".join(lines)}</table></div>'
