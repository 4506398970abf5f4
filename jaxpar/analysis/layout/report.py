"""``Report``: the result of ``explain``, a plain value that prints as text, HTML and JSON."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxpar.analysis.layout.rows import Row, fold
from jaxpar.analysis.layout.summary import number_lines, tensor_lines, wrap
from jaxpar.analysis.units import html_table, show_bytes
from jaxpar.errors import did_you_mean
from jaxpar.utils.terminal import shorten, terminal_width

if TYPE_CHECKING:
    from jaxpar.analysis.memory.estimate import Memory

PARTS = ("params", "opt_state", "variables", "batch", "activations", "other", "cache")
"""The groups of rows, in the order in which they are printed."""

_TOTALS = ("part", "tensors", "bytes", "bytes/device", "replicated", "copies")
_COLUMNS = ("tensor", "shape", "dtype", "logical dims", "spec", "bytes/device", "rule", "notes")


@dataclass(frozen=True)
class Total:
    """Sums over one or more parts of a report.

    Attributes:
      part: the names of the parts.
      tensors: the number of tensors.
      bytes: of one copy of all tensors.
      device_bytes: on each device.
      replicated: the fraction of ``bytes`` that is replicated on all devices.
      copies: bytes on all devices together, divided by ``bytes``.
    """

    part: str
    tensors: int
    bytes: int
    device_bytes: int
    replicated: float
    copies: float

    def cells(self) -> tuple[str, ...]:
        sizes = show_bytes(self.bytes), show_bytes(self.device_bytes)
        return self.part, str(self.tensors), *sizes, f"{self.replicated:.2%}", f"{self.copies:.2f}"


@dataclass(frozen=True, repr=False)
class Report:
    """How every tensor of a run is sharded, and why.

    Text and HTML show equal tensors of numbered layers as one row, such as ``params/blocks/*/attn/q (26 x)``, whose
    bytes are those of one of them (:func:`jaxpar.analysis.layout.rows.fold`). ``rows``, JSON and the totals hold every
    tensor.

    Attributes:
      mesh: mesh axis → size, without axes of size 1.
      devices: the number of devices.
      rows: one per tensor.
      unused: rules that no tensor uses.
      traced: whether the activations were traced. Only then is ``unused`` exact.
      problems: everything that is wrong, one text each.
      memory: the estimated peak memory of a step on each device; ``None`` without a batch and a loss.
      notes: further remarks, such as which arrays are on disk and which implementation attention ``auto`` selects.

    >>> import jax, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=8).abstract(), jp.Rules(embed="data", mlp=None))
    >>> report = jp.explain(layout, lambda key: {"w": jp.tag(jax.numpy.zeros((16, 4)), "embed", "mlp")}, optax.sgd(0.1))
    >>> report["params/w"].spec, report.total("params").device_bytes
    ((('data',), ()), 32)
    """

    mesh: dict[str, int]
    devices: int
    rows: tuple[Row, ...]
    unused: tuple[str, ...]
    traced: bool
    problems: tuple[str, ...]
    memory: Memory | None = None
    notes: tuple[str, ...] = ()

    def __getitem__(self, path: str) -> Row:
        """Returns the row of one tensor, as in ``report["params/blocks/attention/q"]``.

        Raises:
          KeyError: no tensor has this path; the message suggests a similar path.
        """
        for row in self.rows:
            if row.path == path:
                return row
        raise KeyError(f"no tensor {path!r}.{did_you_mean(path, (row.path for row in self.rows))}")

    def total(self, *parts: str) -> Total:
        """Returns the sums over ``parts``.

        The default is what stays in memory between steps: parameters, optimizer state and carried variables.
        """
        parts = parts or ("params", "opt_state", "variables")
        rows = [row for row in self.rows if row.part in parts]
        size, local = sum(row.bytes for row in rows), sum(row.device_bytes for row in rows)
        replicated = sum(row.bytes for row in rows if row.replicated) if self.devices > 1 else 0
        return Total(
            " + ".join(parts), len(rows), size, local, replicated / max(size, 1), local * self.devices / max(size, 1)
        )

    def totals(self) -> list[Total]:
        """Returns one :class:`Total` for each part that has rows."""
        return [self.total(part) for part in PARTS if any(row.part == part for row in self.rows)]

    def __str__(self) -> str:
        """Returns the tables, or in a terminal that is too narrow for them the summary."""
        text, width = self.to_text(), terminal_width()
        if width is None or max(map(len, text.splitlines())) <= width:
            return text
        return f"{self.summary(width)}\nto_text() lists dtypes, rules and reasons of every tensor.\n"

    def __repr__(self) -> str:
        """Returns one line, such as ``Report(mesh: data 8 = 8 devices; 12 tensors, 2.50 MiB a device)``."""
        problems = f", {len(self.problems)} problems" if self.problems else ""
        size = show_bytes(self.total().device_bytes)
        return f"Report({self.headline()}; {len(self.rows)} tensors, {size} a device{problems})"

    def summary(self, width: int = 80) -> str:
        """Returns the totals and one line for each parameter, in lines of at most ``width`` columns.

        Moments of the optimizer that are sharded as their parameter have no lines of their own, and activations only
        a total; :meth:`to_text` lists both. A name is never cut, so a line with a longer name is longer.
        """
        lines = [self.headline(), "", *number_lines(self.totals_table(), width)]
        if self.memory is not None:
            title, cells = self.memory_table()
            lines += ["", *wrap(title, width), *number_lines([("part", "bytes/device"), *cells], width)]
            lines += [line for text in self._why_no_memory() for line in wrap(text, width)]
        lines += tensor_lines(self.rows, width)
        if remarks := self.remarks():
            lines += ["", *(line for text in remarks for line in wrap(text, width))]
        return "\n".join(lines) + "\n"

    def to_text(self, width: int = 230) -> str:
        """Returns the tables as plain text, in lines of at most ``width`` columns."""
        from rich.console import Console

        out = io.StringIO()
        console = Console(file=out, width=width, no_color=True, highlight=False)
        console.print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        from rich.markup import escape
        from rich.table import Table

        yield f"[bold]{self.headline()}"
        for title, columns, rows in self._tables():
            yield f"[italic]{title}"  # rich would wrap a table's title to the width of the table
            table = Table(box=None, padding=(0, 2, 0, 0))
            # rich would cut the ends of the names, in which they differ
            names = shorten([cells[0] for cells in rows], max(options.max_width // 4, 16))
            for i, column in enumerate(columns):
                least = None if i else max(map(len, names), default=0)
                justify: Literal["left", "right"] = "right" if i and columns is not _COLUMNS else "left"
                table.add_column(column, justify=justify, no_wrap=not i, min_width=least)
            for name, cells in zip(names, rows, strict=True):
                table.add_row(*map(escape, (name, *cells[1:])), style="red" if cells[-1].startswith("ERROR ") else None)
            yield table
        yield from map(escape, [*self._why_no_memory(), *self.remarks()])

    def _tables(self) -> Iterator[tuple[str, Sequence[str], Sequence[tuple[str, ...]]]]:
        """Yields the title, the columns and the rows of each table."""
        for part in PARTS:
            if rows := [row.cells() for row in fold(row for row in self.rows if row.part == part)]:
                yield part, _COLUMNS, rows
        columns, *totals = self.totals_table()
        yield "totals", columns, totals
        if self.memory is not None:
            title, cells = self.memory_table()
            yield title, ("part", "bytes/device"), cells

    def totals_table(self) -> list[tuple[str, ...]]:
        """Returns the rows of the table of totals, its head first."""
        return [_TOTALS, *(total.cells() for total in self.totals())]

    def memory_table(self) -> tuple[str, list[tuple[str, str]]]:
        """Returns the title and the rows of the table of estimated memory, without its head."""
        assert self.memory is not None, "a report without an estimate of memory"
        target = f" on a {self.memory.target}" if self.memory.target else ""
        return f"memory at the peak of a step{target}, estimated", self.memory.cells(show_bytes)

    def _why_no_memory(self) -> list[str]:
        """Why there is no estimate of memory, as a line below its table."""
        return [self.memory.reason] if self.memory is not None and self.memory.reason else []

    def headline(self) -> str:
        """Returns the mesh in one line."""
        axes = " × ".join(f"{axis} {size}" for axis, size in self.mesh.items()) or "one device"
        return f"mesh: {axes} = {self.devices} device{'s' if self.devices > 1 else ''}"

    def remarks(self) -> list[str]:
        """Returns the notes, the unused rules and the problems, one line each."""
        lines = list(self.notes)
        if self.unused:
            scope = "" if self.traced else " by parameters, optimizer or batch (activations were not traced)"
            lines.append(f"rules not used{scope}: {', '.join(self.unused)}")
        return lines + [f"problem: {text}" for text in self.problems]

    def _repr_html_(self) -> str:
        first = sorted(self._tables(), key=lambda table: table[1] is _COLUMNS)  # totals and memory, then tensors
        tables = (f"<h4>{html.escape(title)}</h4>{html_table(rows, columns)}" for title, columns, rows in first)
        notes = "".join(f"<p>{html.escape(line)}</p>" for line in (*self._why_no_memory(), *self.remarks()))
        return f"<div><b>{html.escape(self.headline())}</b>{''.join(tables)}{notes}</div>"

    def to_json(self) -> str:
        """Returns the report as JSON: every row (none folded), totals, unused rules, problems, memory."""
        data = {**asdict(self), "totals": [asdict(t) for t in self.totals()]}
        if self.memory is not None:
            data["memory"]["total"] = self.memory.total
        return json.dumps(data, indent=1)
