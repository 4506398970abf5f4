"""The costs of a program's instructions on one device, without the network: FLOPs and bytes of main memory."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from dataclasses import dataclass

from jaxpar.analysis.hlo.dataflow import Flow
from jaxpar.analysis.hlo.flops import kernel_flops, matmul_flops, target
from jaxpar.analysis.hlo.parser import ARMS, CALLS, FUSIONS, ArrayType, Computation, Instruction
from jaxpar.analysis.hlo.ragged import RaggedOperations
from jaxpar.analysis.hlo.trip_counts import trip_count

# Instructions that only name or group values, or whose work is counted in the computations that they call.
_FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "partition-id", "replica-id")
    + ("after-all", "add-dependency", "while", "conditional", "call", "call-start", "call-update", "async-start")
)


# Inside a fusion, these compute only the elements that are read of their result.
_VIEWS = frozenset(("bitcast", "copy", "convert", "reduce-precision"))


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of matmuls, FLOPs that kernels state, and bytes moved to and from main memory.

    ``grouped_flops`` is the part of ``matmul_flops`` that grouped matmuls have; ``worst_grouped_flops`` is what they
    have if their buffers are full.
    """

    matmul_flops: int = 0
    kernel_flops: int = 0
    hbm_bytes: int = 0
    grouped_flops: int = 0
    worst_grouped_flops: int = 0

    @property
    def figures(self) -> tuple[int, ...]:
        return self.matmul_flops, self.kernel_flops, self.hbm_bytes, self.grouped_flops, self.worst_grouped_flops

    def __add__(self, other: Work) -> Work:
        return Work(*map(operator.add, self.figures, other.figures))

    def __mul__(self, times: float) -> Work:
        return Work(*(round(figure * times) for figure in self.figures))

    def worst(self, other: Work) -> Work:
        """Returns the larger of each figure."""
        return Work(*map(max, self.figures, other.figures))


class Costs:
    """The work of instructions and computations, weighted by trip counts; each computation is analyzed once.

    Ragged operations count the load of the busiest device, ``imbalance`` times the balanced load.
    """

    def __init__(self, flow: Flow, imbalance: float = 1.0):
        self.flow, self.module, self.imbalance = flow, flow.module, imbalance
        self.ragged = RaggedOperations(flow.module)
        self._done: dict[str, Work] = {}

    def computation(self, name: str) -> Work:
        """Returns the work of one run of a computation."""
        if name not in self._done:
            where = self.module[name]
            self._done[name] = sum((self.of(i, where) for i in where), Work())
        return self._done[name]

    def of(self, instruction: Instruction, where: Computation) -> Work:
        """Returns the work of one instruction, including what it calls.

        A loop with an unknown trip count counts as one run.
        """
        opcode = instruction.opcode
        inner = [self.computation(name) for name in self._calls(instruction)]
        if opcode == "while":
            trips = trip_count(instruction, where, self.flow)
            return inner[0] * (1 if trips is None else float(trips))
        if opcode == "conditional":
            return functools.reduce(Work.worst, inner, Work())
        if opcode in FUSIONS:
            # Values inside a fusion stay in registers; only its operands and results are in memory.
            work = sum(inner, Work())
            return dataclasses.replace(work, hbm_bytes=self._fusion_bytes(instruction, where))
        if (grouped := self.ragged.matmul(instruction, where)) is not None:
            flops, traffic = grouped.flops(self.imbalance), grouped.hbm_bytes(self.imbalance)
            return Work(flops, 0, traffic, flops, grouped.flops(math.inf))
        own = Work(matmul_flops(instruction, where), kernel_flops(instruction) or 0, self._bytes(instruction, where))
        return sum(inner, own)

    @staticmethod
    def _calls(instruction: Instruction) -> list[str]:
        """Returns the computations whose work is the instruction's own, without the tiny ones of a reduce or a sort."""
        if instruction.opcode == "while":
            return instruction.called("body")
        if instruction.opcode == "conditional":
            return instruction.called(*ARMS)
        return instruction.called("calls", "to_apply") if instruction.opcode in CALLS else []

    def _bytes(self, instruction: Instruction, where: Computation) -> int:
        """Returns the bytes that an unfused instruction reads and writes.

        A slice touches only what it takes, an update only what it changes.
        """
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith("-done") or target(instruction) in ("AllocateBuffer", "ConcatBitcast"):
            return 0
        if (exchange := self.ragged.exchange(instruction, where)) is not None:
            return exchange.hbm_bytes(self.imbalance)
        operands = [source.types for source in where.inputs(instruction)]
        if opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * _main(instruction.types)
        if opcode == "dynamic-update-slice":
            return 2 * _main(operands[1])
        read, written = sum(map(_main, operands)), _main(instruction.types)
        # The result of an asynchronous start repeats its operands.
        return max(read, written) if opcode.endswith("-start") else read + written

    def _fusion_bytes(self, fusion: Instruction, where: Computation) -> int:
        inner = self.module[fusion.called("calls")[0]]
        read = sum(
            self._read(parameter, inner)
            for parameter, source in zip(inner.parameters, where.inputs(fusion), strict=False)
            if _main(source.types)
        )
        results = [inner[name] for name in inner.root.operands] if inner.root.opcode == "tuple" else [inner.root]
        outside = fusion.types if len(fusion.types) == len(results) else None
        written = sum(
            _written(result, inner)
            for i, result in enumerate(results)
            if result.opcode != "parameter" and (outside is None or outside[i].space == 0)
        )
        return read + written

    def _read(self, value: Instruction, inner: Computation) -> int:
        """Returns the bytes that a fusion reads of one of its parameters, or of a view of it."""
        return min(value.bytes, sum(self._read_by(user, value, inner) for user in self.flow.users(value.name, inner)))

    def _read_by(self, user: Instruction, value: Instruction, inner: Computation) -> int:
        first = bool(user.operands) and user.operands[0] == value.name
        if user.opcode in ("dynamic-slice", "slice", "gather") and first:
            return user.bytes
        if user.opcode == "dynamic-update-slice" and first:
            return 0  # updated in place
        if user.opcode in _VIEWS and not user.root:
            return self._read(user, inner) * value.bytes // max(user.bytes, 1)
        if user.opcode in FUSIONS:  # a nested fusion may read only a tile
            within = self.module[user.called("calls")[0]]
            if all(i.opcode in _VIEWS or i.opcode == "parameter" for i in within):
                return self._read(user, inner) * value.bytes // max(user.bytes, 1)
            taken = zip(user.operands, within.parameters, strict=False)
            return sum(self._read(parameter, within) for name, parameter in taken if name == value.name)
        return 0 if user.opcode == "tuple" and user.root else value.bytes


def _main(types: tuple[ArrayType, ...]) -> int:
    """Returns the bytes of the arrays in main memory; TPU programs keep others in on-chip memory."""
    return sum(array.bytes for array in types if array.space == 0)


def _written(result: Instruction, inner: Computation) -> int:
    """Returns the bytes that a fusion writes for one result."""
    result = inner.behind(result)
    return inner[result.operands[1]].bytes if result.opcode == "dynamic-update-slice" else result.bytes
