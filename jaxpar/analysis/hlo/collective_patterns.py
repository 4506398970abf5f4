"""Collectives in another form: all-reduces that act as reduce-scatters, rings of permutes that act as gathers.

XLA splits a large matmul and the gather of its operand (or the scatter of its result) into a *windowed einsum*: a ring
of permutes, in a loop or unrolled, that multiplies one shard while it sends the next one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.analysis.hlo.collectives import wire_bytes
from jaxpar.analysis.hlo.dataflow import Flow
from jaxpar.analysis.hlo.parser import FUSIONS, ArrayType, Computation, Instruction
from jaxpar.analysis.hlo.ragged import RaggedExchange

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
    worst_wire_bytes: float | None = None

    @property
    def dtype(self) -> str:
        return "+".join(dict.fromkeys(array.dtype for array in self.arrays))


def parts_of(
    kind: str, instruction: Instruction, where: Computation, flow: Flow, group: int, *, fused: bool
) -> list[Part]:
    """Returns the arrays that a collective moves, as one part for each kind.

    An all-reduce has two parts if some of its arrays are used in full, while each device keeps only its own slice of
    the others. Every other collective has one.

    Args:
      kind: of the instruction.
      instruction, where: the collective, and the computation that contains it.
      flow: of the module.
      group: the devices in each group.
      fused: whether the collective is inside a fusion.
    """
    arrays = tuple(array for source in where.inputs(instruction) for array in source.types)
    if kind != "all-reduce":
        return [plain(kind, arrays, group)]
    kept = [_kept(k, instruction, where, flow) for k in range(len(arrays))]
    # A slice larger than a device's share is another slice.
    scattered = [n is not None and n * group <= array.size for n, array in zip(kept, arrays, strict=True)]
    sliced = [(array, n or 0) for array, n, own in zip(arrays, kept, scattered, strict=True) if own]
    reduced = tuple(array for array, own in zip(arrays, scattered, strict=True) if not own)
    parts = [_scatter(sliced, group, fused=fused)] if sliced else []
    if reduced:
        parts.append(plain(kind, reduced, group))
    return parts


def plain(kind: str, arrays: tuple[ArrayType, ...], group: int) -> Part:
    """Returns a collective of the kind that the program states, for these operands on each device."""
    operand_bytes = sum(array.bytes for array in arrays)
    full_bytes = operand_bytes * group if kind == "all-gather" else operand_bytes
    result = full_bytes // group if kind == "reduce-scatter" else full_bytes
    return Part(kind, "", arrays, result, wire_bytes(kind, full_bytes, group))


def ragged(exchange: RaggedExchange, group: int, imbalance: float) -> Part:
    """Returns a ragged all-to-all. Only the exchanged rows count, not the arrays of sizes and offsets."""
    wire, worst = exchange.wire_bytes(group, imbalance), exchange.worst_wire_bytes(group)
    return Part("all-to-all", "ragged", (exchange.sent,), exchange.received.bytes, wire, worst)


def _scatter(sliced: Sequence[tuple[ArrayType, int]], group: int, *, fused: bool) -> Part:
    """Returns an all-reduce whose result is sliced; in one fusion, both send only the bytes of a reduce-scatter."""
    arrays = tuple(array for array, _ in sliced)
    operand_bytes = sum(array.bytes for array in arrays)
    result = sum(array.bytes * kept // array.size for array, kept in sliced)
    form = "all-reduce in a scatter fusion" if fused else "all-reduce + slice"
    sent = wire_bytes("reduce-scatter" if fused else "all-reduce", operand_bytes, group)
    return Part("reduce-scatter", form, arrays, result, sent)


def _kept(k: int, instruction: Instruction, where: Computation, flow: Flow) -> int | None:
    """Returns the elements that each device keeps of result ``k`` of an all-reduce, if it keeps only its own slice."""
    done = [user for user in flow.users(instruction.name, where) if user.opcode == "all-reduce-done"]
    finished = done[0] if done else instruction
    if len(finished.types) == 1:
        return flow.kept(finished.name, where)
    if finished.root:
        return None
    users = flow.users(finished.name, where)
    if not all(user.opcode == "get-tuple-element" for user in users):
        return None
    sizes = [flow.kept(user.name, where) for user in users if user.index == k]
    return max((size for size in sizes if size), default=None) if all(sizes) else None


def loop_role(body: str) -> str | None:
    """Returns the collective that a windowed einsum's loop implements, by the compiler's name of the loop's body."""
    found = _WINDOW.search(body)
    return _ROLES[found[1]] if found else None


def ring_role(
    instruction: Instruction, pairs: Sequence[tuple[int, int]], where: Computation, flow: Flow, window: str | None
) -> str | None:
    """Returns the collective that a permute of a windowed einsum implements; ``None`` for any other permute.

    A permute of a windowed einsum was made by the partitioner, has the name of a matmul, and moves data around complete
    rings. A gather passes the same shard on. A reduce-scatter starts with zeros and adds a partial product to what it
    passes on.

    Args:
      instruction, where: the permute, and the computation that contains it.
      pairs: its (source, target) devices.
      flow: of the module.
      window: the collective that the enclosing windowed einsum's loop implements; ``None`` outside of such loops.
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
    """Whether the pairs form rings of equal length: every device sends to one device and receives from one."""
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
    """Whether a fusion adds to the permuted array, or multiplies, as part of the permute's own matmul."""
    size = permute.types[0].size
    return any(
        i.opcode in ("add", "dot", "convolution") and i.op_name == permute.op_name and i.types[0].size == size
        for i in inner
    )
