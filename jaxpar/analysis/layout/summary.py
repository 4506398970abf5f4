"""The lines of a report in a terminal: tables of numbers, then one line for each parameter, then the reasons."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace

from jaxpar.analysis.layout.rows import FoldedRow, Row, fold
from jaxpar.analysis.units import GAP, aligned, show_bytes


def tensor_lines(rows: Sequence[Row], width: int) -> list[str]:
    """Returns a line for each parameter and what else a step is given, and why dims are not sharded.

    Moments of the optimizer that are sharded as their parameter have no lines of their own. Names are never cut: what
    belongs to a long name stands in a second line.

    Args:
      rows: of a report.
      width: the number of columns.
    """
    params = [row for row in rows if row.part == "params"]
    lines = _section("parameter", params, width)
    lines += _optimizer(params, [row for row in rows if row.part == "opt_state"], width)
    for part in ("variables", "batch", "cache"):
        lines += _section(part, [row for row in rows if row.part == part], width)
    if reasons := _reasons(rows):
        lines += ["", "dims that are not sharded:", *(line for text in reasons for line in wrap(text, width, "  "))]
    return lines


def _optimizer(params: Sequence[Row], state: Sequence[Row], width: int) -> list[str]:
    """Returns the lines of an optimizer's tensors.

    Those with the name and the shape of a parameter have only a line for all that are sharded as their parameter, such
    as ``mu`` and ``nu``, and one for each other sharding, such as ``mu, nu of blocks/q`` under ZeRO 1.
    """
    by_name = {_name(row): row for row in params}
    follow: dict[str, None] = {}
    differ: dict[tuple[str, tuple[tuple[str, ...], ...]], list[tuple[str, Row]]] = {}
    rest = []
    for row in state:
        parts = row.path.split("/")
        names = ("/".join(parts[i:]) for i in range(1, len(parts)))
        owner = next((by_name[name] for name in names if name in by_name), None)
        if owner is None or owner.shape != row.shape:
            rest.append(row)
            continue
        prefix = parts[1 : len(parts) - len(_name(owner).split("/"))]
        kind = next((part for part in reversed(prefix) if not part.isdigit()), "state")
        if row.spec == owner.spec and not row.problems:
            follow[kind] = None
        else:
            differ.setdefault((_name(owner), row.spec), []).append((kind, row))
    merged = [
        replace(found[0][1], path=f"{', '.join(dict.fromkeys(kind for kind, _ in found))} of {name}")
        for (name, _), found in differ.items()
    ]
    lines = ["", *wrap(f"optimizer: {', '.join(follow)} are sharded as their parameters", width)] if follow else []
    lines += _section("optimizer, other sharding", merged, width)
    return lines + _section("optimizer, other tensors", [row for row in rest if row.shape], width)


def _section(title: str, rows: Iterable[Row], width: int) -> list[str]:
    """Returns an empty line and a table of tensors; nothing if there are none."""
    folded = fold(rows)
    if not folded:
        return []
    cells: list[tuple[str, ...]] = [(title, "shape", "sharded", "bytes/device"), *(_cells(one) for one in folded)]
    if _widest(cells) > width:
        cells = [(name, spec, size) for name, _, spec, size in cells]
    if _widest(cells) > width:
        return ["", *_in_two_lines(cells)]
    return ["", *aligned(cells, right=(len(cells[0]) - 1,))]


def _cells(one: FoldedRow) -> tuple[str, ...]:
    row = one.row
    name = f"{_name(row)} ({one.count} x)" if one.count > 1 else _name(row)
    dims = [
        f"{dim or f'dim {i}'}={'+'.join(axes)}"
        for i, (dim, axes) in enumerate(zip(row.dims or [None] * len(row.spec), row.spec, strict=True))
        if axes
    ]
    sharded = "ERROR" if row.problems else " ".join(dims) or "replicated"
    return name, "×".join(map(str, row.shape)) or "scalar", sharded, show_bytes(row.device_bytes)


def _name(row: Row) -> str:
    return row.path.removeprefix(f"{row.part}/")


def _reasons(rows: Iterable[Row]) -> list[str]:
    """Returns each reason why a dim is not sharded, with the dims that it holds for."""
    dims: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.part in ("params", "opt_state", "variables", "batch"):
            for why in row.why:
                dim, _, reason = why.partition(": ")
                if reason and dim in row.dims:
                    dims.setdefault(reason, {})[dim] = None
    return [f"{', '.join(names)}: {reason}" for reason, names in dims.items()]


def number_lines(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Returns a table of numbers, whose first column may be cut into lines."""
    others = sum(max(map(len, column)) + len(GAP) for column in list(zip(*rows, strict=True))[1:])
    found: list[Sequence[str]] = []
    for first, *cells in rows:
        *before, last = textwrap.wrap(first, max(width - others, 10), subsequent_indent="  ") or [""]
        found += [*((text, *[""] * len(cells)) for text in before), (last, *cells)]
    return aligned(found, right=range(1, len(rows[0])))


def _widest(rows: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) for column in zip(*rows, strict=True)) + len(GAP) * (len(rows[0]) - 1)


def _in_two_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line with each name, and under it what the columns say of it."""
    details = aligned([row[1:] for row in rows], right=(1,))
    return [line for row, detail in zip(rows, details, strict=True) for line in (row[0], f"    {detail}")]


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Returns a text as lines of at most ``width`` columns, of which all but the first are indented by two more."""
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=f"{indent}  ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
