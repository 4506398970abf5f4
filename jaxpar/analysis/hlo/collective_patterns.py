"""Collectives in disguise: an all-reduce that is really a reduce-scatter, a ring of permutes that is really a gather.

XLA splits a large matmul and the gather of its operand (or the scatter of its result) into a *windowed einsum*: a ring of
permutes, in a loop or unrolled, that multiplies one shard while the next one travels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.analysis.hlo.collectives import wire_bytes
from jaxpar.analysis.hlo.dataflow import Flow
from jaxpar.analysis.hlo.parser import FUSIONS, ArrayType, Computation, Instruction

_WINDOW = re.compile(r"windowed_dot_general_body_(ag|rs)")
_ROLES = {"ag": "all-gather", "rs": "reduce-scatter"}
_MATMULS = ("dot_general", "conv_general_dilated", "einsum")


@dataclass(frozen=True)
class Part:
    """The arrays of one instruction that one kind of collective moves."""

    kind: str
    form: str
    arrays: tuple[ArrayType, ...]
    result_bytes: int
    wire_bytes: float

    @property
    def dtype(self) -> str:
        return "+".join(dict.fromkeys(array.dtype for array in self.arrays))


def parts_of(
    kind: str, instruction: Instruction, where: Computation, flow: Flow, group: int, *, fused: bool
) -> list[Part]:
    """What a collective over groups of ``group`` devices moves.

    One part, unless an all-reduce bundles arrays that are used whole with arrays of which each device keeps its own slice.
    """
    arrays = tuple(array for source in where.inputs(instruction) for array in source.types)
    if kind != "all-reduce":
        return [_plain(kind, arrays, group)]
    kept = [_kept(k, instruction, where, flow) for k in range(len(arrays))]
    # A slice that is larger than a device's share is some other slice.
    scattered = [n is not None and n * group <= array.size for n, array in zip(kept, arrays, strict=True)]
    sliced = [(array, n or 0) for array, n, own in zip(arrays, kept, scattered, strict=True) if own]
    reduced = tuple(array for array, own in zip(arrays, scattered, strict=True) if not own)
    parts = [_scatter(sliced, group, fused=fused)] if sliced else []
    if reduced:
        parts.append(_plain(kind, reduced, group))
    return parts


def part_between(kind: str, send: Instruction, where: Computation, group: int) -> Part:
    """What a transfer between slices moves, among groups of ``group`` devices."""
    arrays = where[send.operands[0]].types
    if kind == "collective-permute":
        given = sum(array.bytes for array in arrays)
        return Part(kind, "", arrays, given, given)
    return _plain(kind, arrays, group)


def _plain(kind: str, arrays: tuple[ArrayType, ...], group: int) -> Part:
    """A collective that is what it says, given these arrays on each device."""
    given = sum(array.bytes for array in arrays)
    whole = given * group if kind == "all-gather" else given
    result = whole // group if kind == "reduce-scatter" else whole
    return Part(kind, "", arrays, result, wire_bytes(kind, whole, group))


def _scatter(sliced: Sequence[tuple[ArrayType, int]], group: int, *, fused: bool) -> Part:
    """An all-reduce whose result is sliced. In one fusion with the slice the compiler sends only what a scatter sends."""
    arrays = tuple(array for array, _ in sliced)
    given = sum(array.bytes for array in arrays)
    result = sum(array.bytes * kept // array.size for array, kept in sliced)
    form = "all-reduce in a scatter fusion" if fused else "all-reduce + slice"
    sent = wire_bytes("reduce-scatter" if fused else "all-reduce", given, group)
    return Part("reduce-scatter", form, arrays, result, sent)


def _kept(k: int, instruction: Instruction, where: Computation, flow: Flow) -> int | None:
    """Elements that each device keeps of result ``k`` of an all-reduce, if it keeps only its own slice."""
    done = [user for user in flow.users(instruction.name, where) if user.opcode == "all-reduce-done"]
    whole = done[0] if done else instruction
    if len(whole.types) == 1:
        return flow.kept(whole.name, where)
    if whole.root:
        return None
    users = flow.users(whole.name, where)
    if not all(user.opcode == "get-tuple-element" for user in users):
        return None
    sizes = [flow.kept(user.name, where) for user in users if user.index == k]
    return max((size for size in sizes if size), default=None) if all(sizes) else None


def loop_role(body: str) -> str | None:
    """What a windowed einsum's loop implements, by the name that the compiler gave its body."""
    found = _WINDOW.search(body)
    return _ROLES[found[1]] if found else None


def ring_role(
    instruction: Instruction, pairs: Sequence[tuple[int, int]], where: Computation, flow: Flow, window: str | None
) -> str | None:
    """What a permute implements: the gather or the scatter of a windowed einsum; ``None`` for any other permute.

    Args:
      window: what the enclosing windowed einsum's loop implements, if there is one.

    A permute of a windowed einsum was made by the partitioner, bears the name of a matmul and turns whole rings. A gather
    hands the same shard on; a scatter adds a partial product to what it hands on, beginning with zeros.
    """
    made = "is_spmd_generated" in (instruction.attribute("frontend_attributes") or "")
    matmul = any(name in instruction.op_name.rpartition("/")[2] for name in _MATMULS)
    if not made or not matmul or not _rings(pairs):
        return None
    if window is not None:
        return window
    source, home = flow.origin(instruction.operands[0], where)
    if source.opcode == "while":
        return loop_role(source.called("body")[0]) or "all-gather"
    if source.opcode in ("get-tuple-element", *FUSIONS):
        fusion = home[source.operands[0]] if source.opcode == "get-tuple-element" else source
        inner = flow.inner(fusion)
        return "reduce-scatter" if inner is not None and _accumulates(inner, instruction) else "all-gather"
    zeros = source.opcode == "broadcast" and home[source.operands[0]].opcode == "constant"
    adds = source.opcode in ("add", "dot", "convolution") and source.op_name == instruction.op_name
    return "reduce-scatter" if zeros or adds or source.opcode == "constant" else "all-gather"


def _rings(pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether the pairs turn rings of one length: every device sends to one and receives from one."""
    after = dict(pairs)
    if len(after) != len(pairs) or set(after) != set(after.values()):
        return False
    lengths, seen = set(), set[int]()
    for start in after:
        length, device = 0, start
        while device not in seen:
            seen.add(device)
            length, device = length + 1, after[device]
        lengths |= {length} if length else set()
    return len(lengths) == 1


def _accumulates(inner: Computation, permute: Instruction) -> bool:
    """Whether a fusion adds to, or multiplies, what the permute hands on, as part of the permute's own matmul."""
    size = permute.types[0].size
    return any(
        i.opcode in ("add", "dot", "convolution") and i.op_name == permute.op_name and i.types[0].size == size
        for i in inner
    )
