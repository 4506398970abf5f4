"""The rows of a report, and ``fold``, which shows equal rows of numbered layers as one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from jaxpar.analysis.units import show_bytes

_MOST = 4
"""The largest number of ranges of layers that a path lists."""


@dataclass(frozen=True)
class Row:
    """One tensor of a report.

    Attributes:
      part: one of :data:`jaxpar.analysis.layout.report.PARTS`.
      path: such as ``params/blocks/attention/q``.
      shape: the global shape.
      dtype: the element type.
      dims: the logical dims; ``None`` where a dim has no name.
      spec: the mesh axes of each dim.
      bytes: of one full copy.
      device_bytes: in the memory of each device; 0 if the tensor is in host memory or on disk.
      rules: the rules that shard it.
      why: the resolver's reasons why a dim is not sharded further, and notes.
      problems: one text each.
      disk_bytes: on disk for each device, in each of two generations.
    """

    part: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[str | None, ...]
    spec: tuple[tuple[str, ...], ...]
    bytes: int
    device_bytes: int
    rules: tuple[str, ...]
    why: tuple[str, ...]
    problems: tuple[str, ...]
    disk_bytes: int = 0

    @property
    def replicated(self) -> bool:
        """Whether the tensor is replicated on all devices, because no axis shards it."""
        return not any(self.spec)

    def cells(self) -> tuple[str, ...]:
        spec = ", ".join("+".join(axes) or "·" for axes in self.spec)
        dims = ", ".join(str(dim) if dim is not None else "·" for dim in self.dims)
        shape = " × ".join(map(str, self.shape)) or "scalar"
        # remarks() prints the remedies once, below the tables.
        why = "; ".join([*(f"ERROR {p.partition(' Remedy: ')[0]}" for p in self.problems), *self.why])
        return self.path, shape, self.dtype, dims, spec, show_bytes(self.device_bytes), "; ".join(self.rules), why


@dataclass(frozen=True)
class FoldedRow:
    """Rows that differ only in the numbers of their layers.

    Attributes:
      row: the first of them; its path has ``*``, or the numbers, in place of each number that differs.
      count: the number of rows.
    """

    row: Row
    count: int = 1

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of the row; the count follows the path, and the bytes are those of one tensor."""
        path, *others = self.row.cells()
        return (f"{path} ({self.count} x)" if self.count > 1 else path), *others


def fold(rows: Iterable[Row]) -> list[FoldedRow]:
    """Returns the rows of one part of a report, with equal layers folded.

    A layer is numbered by a part of the path that is a number (``blocks/3/attn/q``, an ``nnx.List``), or that ends with
    one and is not the last (``block_3/attn/q``, Linen blocks). Rows are equal if nothing but the path differs.

    Returns:
      The rows in their order; a folded row stands where the first of its rows stood.

    >>> row = Row("params", "", (8,), "float32", ("embed",), ((),), 32, 32, (), (), ())
    >>> paths = ["params/embed", *(f"params/blocks/{i}/norm" for i in range(26)), "params/blocks/26/extra"]
    >>> [folded.cells()[0] for folded in fold(replace(row, path=path) for path in paths)]
    ['params/embed', 'params/blocks/0-25/norm (26 x)', 'params/blocks/26/extra']
    """
    found = [FoldedRow(row) for row in rows]
    for depth in range(max((one.row.path.count("/") + 1 for one in found), default=0)):
        found = _fold_at(found, depth)
    return found


def _fold_at(rows: Sequence[FoldedRow], depth: int) -> list[FoldedRow]:
    """Fold the rows that differ only in the number at part ``depth`` of their paths."""
    groups: dict[Hashable, list[tuple[FoldedRow, int]]] = {}
    siblings: dict[Hashable, set[int]] = {}
    for one in rows:
        before, stem, number, after = _split(one.row.path, depth)
        siblings.setdefault((before, stem), set()).add(number)
        key = before, stem, after, one.count, _without_path(one.row), number < 0 and one.row.path
        groups.setdefault(key, []).append((one, number))
    found = []
    for group in groups.values():
        first = group[0][0]
        if len(group) > 1:
            before, stem, _, after = _split(first.row.path, depth)
            numbers = {number for _, number in group}
            shown = "*" if numbers == siblings[before, stem] else _ranges(sorted(numbers))
            path = "/".join((*before, f"{stem}{shown}", *after))
            problems = tuple(text.replace(first.row.path, path) for text in first.row.problems)
            row = replace(first.row, path=path, problems=problems)
            first = FoldedRow(row, sum(one.count for one, _ in group))
        found.append(first)
    return found


def _split(path: str, depth: int) -> tuple[tuple[str, ...], str, int, tuple[str, ...]]:
    """Returns the parts before ``depth``, this part without its number, the number (-1: none), and the parts after.

    >>> _split("params/block_3/q", 1), _split("params/mlp/w1", 2)
    ((('params',), 'block_', 3, ('q',)), (('params', 'mlp'), 'w1', -1, ()))
    """
    parts = tuple(path.split("/"))
    part, after = (parts[depth] if depth < len(parts) else ""), parts[depth + 1 :]
    match = re.fullmatch(r"(.*?)(\d+)" if after else r"()(\d+)", part)
    stem, number = (match[1], int(match[2])) if match else (part, -1)
    return parts[:depth], stem, number, after


def _without_path(row: Row) -> Row:
    return replace(row, path="", problems=tuple(text.replace(row.path, "") for text in row.problems))


def _ranges(numbers: Sequence[int]) -> str:
    """Returns numbers as ranges; of many ranges, the first few.

    >>> _ranges([0, 1, 2, 5]), _ranges([0, 2, 4, 6, 8, 10])
    ('0-2,5', '0,2,4,6,…')
    """
    runs = [
        [n for _, n in run]
        for _, run in itertools.groupby(enumerate(numbers), key=lambda indexed: indexed[1] - indexed[0])
    ]
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:_MOST]]
    return ",".join([*shown, "…"] if len(runs) > _MOST else shown)
