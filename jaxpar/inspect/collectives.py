"""One HLO collective as what it does: kind, mesh axes, bytes on the wire, whatever way the compiler printed it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxpar.errors import AuditError
from jaxpar.inspect.hlo import Computation, Instruction, Module

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_OPCODES = {
    **{kind: kind for kind in KINDS},
    **{f"{kind}-start": kind for kind in KINDS},
    "ragged-all-to-all": "all-to-all",
    "collective-broadcast": "all-gather",
}


@dataclass(frozen=True)
class Collective:
    """A collective of a program, all its executions in one run together.

    Attributes:
      kind: one of ``KINDS``, normalised.
      form: how the program spells it, where that is not the kind itself.
      axes: the mesh axes it runs over; ``("?",)`` when its groups are no product of axes.
      group: devices in each group.
      dtype: element type, ``+``-joined where a bundle mixes them.
      result_bytes: bytes of the result on one device, once.
      wire_bytes: bytes that one device sends in one execution, by a ring (or direct) algorithm.
      count: executions in one run.
      overlapped: whether the schedule runs compute between its start and its end.
      conditional: whether it stands in a branch that may not run.
      certain: whether ``count`` is exact (every enclosing loop's trip count was found).
      source: function, file and line.
      op_name: jax's path of the operation.
    """

    kind: str
    form: str
    axes: tuple[str, ...]
    group: int
    dtype: str
    result_bytes: int
    wire_bytes: float
    count: int
    overlapped: bool
    conditional: bool
    certain: bool
    source: str
    op_name: str

    @property
    def total_wire_bytes(self) -> float:
        """Bytes that one device sends in one run."""
        return self.wire_bytes * self.count


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
        rows = [[int(n) for n in re.findall(r"\d+", row)] for row in re.findall(r"\{([\d,\s]*)\}", text)]
        width = max(map(len, rows))
        # Groups of unequal size are legal in HLO; the widest decide, and a short one is padded with its own members.
        return np.array([row + row[:1] * (width - len(row)) for row in rows])
    iota = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        shape, source, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        ids = np.arange(math.prod(source or [])).reshape(source or [])
        return (ids.transpose(order) if order else ids).reshape(shape or [])
    if text.startswith("mesh["):
        return _mesh_groups(text)
    raise AuditError(f"{instruction.name}: replica_groups={text[:80]} is a spelling the auditor does not know.")


def _mesh_groups(text: str) -> np.ndarray:
    """``mesh['a'=4,'b'=2] {'b'}``, where a group axis may be a part of a mesh axis: ``'a':(2)2`` (2 inside an outer 2)."""
    mesh_text, _, chosen_text = text.partition("]")
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", mesh_text)}
    chosen = re.findall(r"'([\w.\-]+)'(?::\((\d+)\)(\d+))?", chosen_text)
    shape, group_dims = [], []
    for name, size in sizes.items():
        cuts = sorted((int(pre or 1), int(part or size)) for axis, pre, part in chosen if axis == name)
        done = 1
        for pre, part in cuts:
            if pre > done:
                shape.append(pre // done)
            group_dims.append(len(shape))
            shape.append(part)
            done = pre * part
        if done < size or not cuts:
            shape.append(size // done)
    ids = np.arange(math.prod(shape)).reshape(shape)
    others = [i for i in range(len(shape)) if i not in group_dims]
    return ids.transpose(*others, *group_dims).reshape(-1, math.prod(shape[i] for i in group_dims))


def axes_of(groups: Iterable[Iterable[int]], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ; ``("?",)`` if the groups are not whole lines of axes."""
    names = list(sizes)
    shape = tuple(sizes.values())
    found: set[str] = set()
    width = 1
    for group in groups:
        members = sorted(set(group))
        width = max(width, len(members))
        coordinates = np.array(np.unravel_index(members, shape))
        found |= {name for name, line in zip(names, coordinates, strict=True) if len(set(line)) > 1}
    axes = tuple(name for name in names if name in found)
    return axes if math.prod(sizes[a] for a in axes) == width or width == 1 else ("?",) if not axes else axes


def wire_bytes(kind: str, size: int, group: int) -> float:
    """Bytes that one device sends, with ``size`` bytes of the whole (unscattered, gathered) array in each group.

    Ring algorithms: all-gather and reduce-scatter send (n − 1)/n of the whole, all-reduce twice that, all-to-all
    (n − 1)/n of what a device holds (Thakur et al. 2005).
    """
    part = (group - 1) / group if group else 0.0
    return {"all-gather": part, "reduce-scatter": part, "all-reduce": 2 * part, "all-to-all": part}[kind] * size


def pairs_of(instruction: Instruction) -> list[tuple[int, int]]:
    """The (source, target) pairs of a permute."""
    text = instruction.attribute("source_target_pairs") or ""
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text)]


def ring_role(instruction: Instruction, where: Computation, module: Module) -> str | None:
    """What a permute of a windowed einsum implements: the gather of an operand or the scatter of a result.

    XLA splits a large matmul and its gather (or scatter) into a ring of permutes that carries jax's name of the matmul.
    """
    if not re.search(r"dot_general|einsum", instruction.op_name):
        return None
    pairs = pairs_of(instruction)
    if len({b for _, b in pairs}) != len(pairs) or not all(a != b for a, b in pairs):
        return None
    return "reduce-scatter" if _made_by_matmul(instruction.operands[0], where, module) else "all-gather"


def _made_by_matmul(name: str, where: Computation, module: Module, depth: int = 3) -> bool:
    """Whether a value is a matmul's result, looking through a few fusions and copies."""
    source = where.instructions.get(name)
    if source is None or depth == 0 or source.opcode == "parameter":
        return False
    if source.opcode in ("dot", "convolution"):
        return True
    if source.opcode == "fusion":
        inner = module.computations[source.called("calls")[0]]
        return any(i.opcode in ("dot", "convolution") for i in inner) or any(
            _made_by_matmul(operand, where, module, depth - 1) for operand in source.operands
        )
    if source.opcode in ("add", "copy", "bitcast", "convert"):
        return any(_made_by_matmul(operand, where, module, depth - 1) for operand in source.operands)
    return False
