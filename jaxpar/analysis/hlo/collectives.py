"""HLO collectives as what they are: kind, device groups, mesh axes, bytes on the wire."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.analysis.hlo.parser import Instruction
from jaxpar.errors import AuditError

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_OPCODES = {
    **{kind: kind for kind in KINDS},
    **{f"{kind}-start": kind for kind in KINDS},
    "ragged-all-to-all": "all-to-all",
}


@dataclass(frozen=True)
class Collective:
    """A collective at one place of a program, all its executions in one run together.

    Attributes:
      kind: one of ``KINDS``, normalised.
      form: how the program spells it, where that is not the kind itself.
      axes: the mesh axes it runs over.
      group: devices in each group.
      dtype: element type, ``+``-joined where a bundle mixes them.
      arrays: how many arrays it moves at once; ``source``, ``tensor`` and ``op_name`` tell of the first.
      result_bytes: bytes of the result on one device, once.
      wire_bytes: bytes that one device (the busiest, if they differ) sends in one execution, by a ring algorithm.
      exposed_bytes: those of ``wire_bytes`` that no compute is scheduled beside.
      beside_flops: FLOPs scheduled between its start and its end, in one execution; other collectives may share them.
      count: executions in one run, the product of the trip counts of the loops around it.
      conditional: whether it stands in a branch that may not run.
      certain: whether ``count`` is exact (every enclosing loop's trip count was found).
      source: function, file and line of the model code that made it.
      module: the modules around that line, outermost first, where their ``__call__`` methods show.
      tensor: the program's argument that it moves, when it moves one whole or in slices.
      op_name: jax's path of the operation.
      between_slices: in a program for several TPU slices, whether it runs between slices, through their hosts, or inside of
        each; ``None`` in all other programs.
      pairs: of a permute, who sends to whom: (from, to), counted along its axes.
      flight: of an exposed permute, a number that it shares with those that are on their way at the same time.
    """

    kind: str
    form: str
    axes: tuple[str, ...]
    group: int
    dtype: str
    arrays: int
    result_bytes: int
    wire_bytes: float
    exposed_bytes: float
    beside_flops: int
    count: int
    conditional: bool
    certain: bool
    source: str
    module: str
    tensor: str
    op_name: str
    between_slices: bool | None = None
    pairs: tuple[tuple[int, int], ...] = ()
    flight: int | None = None

    @property
    def total_wire_bytes(self) -> float:
        """Bytes that one device sends in one run."""
        return self.wire_bytes * self.count

    @property
    def overlapped(self) -> bool:
        """Whether the schedule runs compute beside all of it."""
        return self.exposed_bytes == 0

    @property
    def place(self) -> str:
        """Where it comes from, for a reader: the line of the model code, and the program's argument that it moves."""
        tensor = self.tensor if self.source else self.tensor or self.op_name
        return ": ".join(text for text in (self.source, tensor) if text) or "the compiler"

    def __str__(self) -> str:
        kind = f"{self.kind} ({self.form})" if self.form else self.kind
        return f"{self.count} × {kind} over {'+'.join(self.axes)}, {self.dtype}, from {self.place}"


def kind_of(instruction: Instruction) -> str | None:
    """The collective that an instruction starts, or ``None``."""
    return _OPCODES.get(instruction.opcode)


def groups_of(instruction: Instruction, devices: int) -> np.ndarray:
    """The device groups [groups, size] of a collective, from any of the spellings of ``replica_groups``.

    Raises:
      AuditError: a spelling this reader does not know.
    """
    text = instruction.attribute("replica_groups")
    if text is None or text.strip() == "{}":
        return np.arange(devices)[None]
    if text.startswith("{"):
        rows = [[int(n) for n in re.findall(r"\d+", row)] for row in re.findall(r"\{([\d,\s]+)\}", text)]
        width = max(map(len, rows), default=1)
        # Groups of unequal size are legal: the widest decides what a device sends, a short one repeats its first member.
        return np.array([row + row[:1] * (width - len(row)) for row in rows])
    if text.startswith("mesh["):
        return _mesh_groups(text, instruction.attribute("device_ids"))
    groups = _iota(text)
    if groups is None:
        raise AuditError(f"{instruction.name}: replica_groups={text[:80]} is a spelling the auditor does not know.")
    return groups


def _iota(text: str) -> np.ndarray | None:
    """``[2,4]<=[4,2]T(1,0)``: the numbers from 0 in the shape [4,2], transposed, in the shape [2,4]."""
    found = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if found is None:
        return None
    shape, source, order = ([int(n) for n in part.split(",")] if part else None for part in found.groups())
    ids = np.arange(math.prod(source or [])).reshape(source or [])
    return (ids.transpose(order) if order else ids).reshape(shape or [])


def _mesh_groups(text: str, ids: str | None) -> np.ndarray:
    """``mesh['a'=4,'b'=2] {'b'}``: a group for each line of the mesh along the axes in braces.

    Such an axis may be a part of a mesh axis: ``'a':(2)2`` is the 2 inside an outer 2. A mesh whose devices are not in
    order says so: ``mesh[…], device_ids=([4,2]<=[2,4]T(1,0)) {'b'}``.
    """
    mesh_text, _, chosen_text = text.partition("]")
    chosen_text = chosen_text if ids is None else ids[ids.rindex(")") + 1 :]
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", mesh_text)}
    chosen = re.findall(r"'?([A-Za-z_][\w.\-]*)'?(?::\((\d+)\)(\d+))?", chosen_text)
    shape: list[int] = []
    group_dims: list[int] = []
    for name, size in sizes.items():
        cuts = sorted((int(pre or 1), int(part or size)) for axis, pre, part in chosen if axis == name)
        done = 1
        for pre, part in cuts:
            shape.append(pre // done)
            group_dims.append(len(shape))
            shape.append(part)
            done = pre * part
        shape.append(size // done)
    order = np.arange(math.prod(shape)) if ids is None else _device_ids(ids)
    others = [i for i in range(len(shape)) if i not in group_dims]
    width = math.prod(shape[i] for i in group_dims)
    return order.reshape(shape).transpose(*others, *group_dims).reshape(-1, width)


def _device_ids(text: str) -> np.ndarray:
    inside = text[text.index("(") + 1 : text.rindex(")")]
    iota = _iota(inside)
    return (
        np.array([int(n) for n in re.findall(r"\d+", inside.rpartition("]")[2])]) if iota is None else iota.reshape(-1)
    )


def pairs_of(instruction: Instruction) -> list[tuple[int, int]]:
    """The (source, target) pairs of a permute, without those that stay on a device."""
    text = instruction.attribute("source_target_pairs") or ""
    pairs = [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text)]
    return [(a, b) for a, b in pairs if a != b]


def axes_of(groups: np.ndarray | Sequence[Sequence[int]], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ; none for groups of one device.

    >>> axes_of([[0, 2], [1, 3]], {"data": 2, "model": 2})
    ('data',)
    """
    coordinates = np.unravel_index(np.asarray(groups), tuple(sizes.values()))
    lines = zip(sizes, coordinates, strict=True)
    return tuple(name for name, line in lines if (line != line[:, :1]).any())


def along(
    pairs: Sequence[tuple[int, int]], axes: Sequence[str], sizes: Mapping[str, int]
) -> tuple[tuple[int, int], ...]:
    """Pairs of devices as places along some axes, each pair of places once.

    >>> along([(0, 2), (1, 3), (2, 0), (3, 1)], ("data",), {"data": 2, "model": 2})
    ((0, 1), (1, 0))
    """
    coordinates = dict(zip(sizes, np.unravel_index(np.asarray(pairs), tuple(sizes.values())), strict=True))
    places = np.ravel_multi_index([coordinates[axis] for axis in axes], [sizes[axis] for axis in axes])
    return tuple(sorted({(int(a), int(b)) for a, b in places}))


def wire_bytes(kind: str, size: int, group: int) -> float:
    """Bytes that one device sends, with ``size`` bytes of the whole (unscattered, gathered) array in each group.

    Ring algorithms: all-gather and reduce-scatter send (n − 1)/n of the whole, all-reduce twice that, all-to-all
    (n − 1)/n of what a device holds (Thakur et al. 2005); a broadcast passes the array on, but for the last device.

    >>> wire_bytes("all-reduce", 1024, 4)
    1536.0
    """
    return (2 if kind == "all-reduce" else 1) * (group - 1) * size / group
