"""The collectives of an HLO program: kind, device groups, mesh axes, bytes on the wire."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.analysis.hlo.parser import Instruction
from jaxpar.errors import AuditError

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_OPCODES = {opcode: kind for kind in KINDS for opcode in (kind, f"{kind}-start")}
_OPCODES |= {"ragged-all-to-all": "all-to-all", "ragged-all-to-all-start": "all-to-all"}


@dataclass(frozen=True)
class Collective:
    """A collective at one place of a program, with all its executions in one run.

    Attributes:
      kind: one of ``KINDS``.
      form: how the program implements it, if differently, such as ``ring of 3 permutes``; ``ragged`` if its rows
        depend on the routing of tokens; else empty.
      axes: the mesh axes that it runs over.
      group: devices in each group.
      dtype: the element type; several types are joined by ``+``.
      arrays: the number of arrays that it moves. ``source``, ``tensor`` and ``op_name`` describe the first.
      result_bytes: bytes of the result on one device, in one execution.
      wire_bytes: bytes that one device sends in one execution, by a ring algorithm; of the busiest device if they
        differ. A ragged exchange counts the audit's imbalance; see :mod:`jaxpar.analysis.hlo.ragged`.
      exposed_bytes: the part of ``wire_bytes`` that overlaps with no compute.
      beside_flops: FLOPs scheduled between its start and its end, in one execution. Other collectives may overlap with
        the same FLOPs.
      count: executions in one run, the product of the trip counts of the enclosing loops.
      conditional: whether it is in a branch that may not run.
      certain: whether ``count`` is exact, because the trip count of every enclosing loop is known.
      source: function, file and line of the model code that it comes from.
      module: the modules around that line, outermost first, as far as their ``__call__`` methods are on the stack.
      tensor: the name of the program's argument that it moves, in full or in slices; else empty.
      op_name: jax's path of the operation.
      between_slices: in a program for several TPU slices, whether it runs between slices, through their hosts, or
        inside each slice; ``None`` in all other programs.
      pairs: the (source, target) pairs of a permute, as positions along its axes.
      flight: a number that exposed permutes share if they are in flight at the same time; ``None`` for other
        collectives.
      worst_wire_bytes: ``wire_bytes`` of a ragged exchange in the worst routing that its buffers allow; ``None`` for
        other collectives.
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
    worst_wire_bytes: float | None = None

    @property
    def total_wire_bytes(self) -> float:
        """Bytes that one device sends in one run."""
        return self.wire_bytes * self.count

    @property
    def total_worst_wire_bytes(self) -> float:
        """Bytes that one device sends in one run in the worst routing."""
        return (self.wire_bytes if self.worst_wire_bytes is None else self.worst_wire_bytes) * self.count

    @property
    def overlapped(self) -> bool:
        """Whether all of it overlaps with compute."""
        return self.exposed_bytes == 0

    @property
    def place(self) -> str:
        """Where it comes from: the line of model code, and the program's argument that it moves."""
        tensor = self.tensor if self.source else self.tensor or self.op_name
        return ": ".join(text for text in (self.source, tensor) if text) or "the compiler"

    def __str__(self) -> str:
        kind = f"{self.kind} ({self.form})" if self.form else self.kind
        return f"{self.count} × {kind} over {'+'.join(self.axes)}, {self.dtype}, from {self.place}"


def kind_of(instruction: Instruction) -> str | None:
    """Returns the kind of the collective that an instruction starts, or ``None``."""
    return _OPCODES.get(instruction.opcode)


def groups_of(instruction: Instruction, devices: int) -> np.ndarray:
    """Returns the device groups of a collective, an array ``[groups, size]``, from any notation of ``replica_groups``.

    Args:
      instruction: the collective.
      devices: the number of devices of the program. They form one group if the instruction names no groups.

    Raises:
      AuditError: unknown notation.
    """
    text = instruction.attribute("replica_groups")
    if text is None or text.strip() == "{}":
        return np.arange(devices)[None]
    if text.startswith("{"):
        rows = [[int(n) for n in re.findall(r"\d+", row)] for row in re.findall(r"\{([\d,\s]+)\}", text)]
        width = max(map(len, rows), default=1)
        # Groups may differ in size. The widest decides the bytes sent; a short group repeats its first member.
        return np.array([row + row[:1] * (width - len(row)) for row in rows])
    if text.startswith("mesh["):
        return _mesh_groups(text, instruction.attribute("device_ids"))
    groups = _iota(text)
    if groups is None:
        raise AuditError(f"{instruction.name}: unsupported notation replica_groups={text[:80]}.")
    return groups


def _iota(text: str) -> np.ndarray | None:
    """Parse ``[2,4]<=[4,2]T(1,0)``: the numbers from 0, reshaped to [4,2], transposed, then reshaped to [2,4]."""
    found = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if found is None:
        return None
    shape, source, order = ([int(n) for n in part.split(",")] if part else None for part in found.groups())
    ids = np.arange(math.prod(source or [])).reshape(source or [])
    return (ids.transpose(order) if order else ids).reshape(shape or [])


def _mesh_groups(text: str, ids: str | None) -> np.ndarray:
    """Parse ``mesh['a'=4,'b'=2] {'b'}``: one group for each line of the mesh along the axes in braces.

    An axis in braces may be part of a mesh axis: ``'a':(2)2`` is the 2 inside an outer 2. If the devices of the mesh
    are not in order, the text lists them: ``mesh[…], device_ids=([4,2]<=[2,4]T(1,0)) {'b'}``.
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
    if iota is not None:
        return iota.reshape(-1)
    return np.array([int(n) for n in re.findall(r"\d+", inside.rpartition("]")[2])])


def pairs_of(instruction: Instruction) -> list[tuple[int, int]]:
    """Returns the (source, target) pairs of a permute, without pairs of a device with itself."""
    text = instruction.attribute("source_target_pairs") or ""
    pairs = [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text)]
    return [(a, b) for a, b in pairs if a != b]


def axes_of(groups: np.ndarray | Sequence[Sequence[int]], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the members of a group differ; none for groups of one device.

    Args:
      groups: device numbers ``[groups, size]``.
      sizes: mesh axis → size.

    >>> axes_of([[0, 2], [1, 3]], {"data": 2, "model": 2})
    ('data',)
    """
    coordinates = np.unravel_index(np.asarray(groups), tuple(sizes.values()))
    lines = zip(sizes, coordinates, strict=True)
    return tuple(name for name, line in lines if (line != line[:, :1]).any())


def along(
    pairs: Sequence[tuple[int, int]], axes: Sequence[str], sizes: Mapping[str, int]
) -> tuple[tuple[int, int], ...]:
    """Returns pairs of devices as positions along ``axes``, each pair of positions once.

    Args:
      pairs: (source, target) device numbers.
      axes: the mesh axes to count positions along.
      sizes: mesh axis → size.

    >>> along([(0, 2), (1, 3), (2, 0), (3, 1)], ("data",), {"data": 2, "model": 2})
    ((0, 1), (1, 0))
    """
    coordinates = dict(zip(sizes, np.unravel_index(np.asarray(pairs), tuple(sizes.values())), strict=True))
    places = np.ravel_multi_index([coordinates[axis] for axis in axes], [sizes[axis] for axis in axes])
    return tuple(sorted({(int(a), int(b)) for a, b in places}))


def wire_bytes(kind: str, size: int, group: int) -> float:
    """Returns the bytes that one device sends in a collective, by a ring algorithm.

    With n devices in a group, all-gather and reduce-scatter send (n − 1)/n of the full array and all-reduce sends twice
    that. All-to-all sends (n − 1)/n of the device's data (Thakur et al. 2005). In a broadcast every device except the
    last passes the array on. A permute sends the array once.

    Args:
      kind: one of ``KINDS``.
      size: bytes of the full array of one group, before a reduce-scatter or after an all-gather.
      group: n, the devices in a group.

    >>> wire_bytes("all-reduce", 1024, 4)
    1536.0
    """
    if kind == "collective-permute":
        return size
    return (2 if kind == "all-reduce" else 1) * (group - 1) * size / group
