"""Ragged operations: exchanges and grouped matmuls that use only a part of their buffers.

A compiled program shows the size of the buffers. How many of their rows are in use depends on the routing of tokens:

- balanced: every device has the same load. The code that builds the operation states its rows in a scope
  (:func:`jaxpar.utils.scope_facts.expected_rows`). Without such a scope, an exchange fills the smaller of its two
  buffers, and a grouped matmul fills its buffer.
- imbalance f: the busiest device has f times the balanced rows, but no more than its buffers hold.
- worst: the buffers are full, and every row goes to another device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jaxpar.analysis.hlo.flops import is_grouped_matmul
from jaxpar.analysis.hlo.parser import CALLS, ArrayType, Computation, Instruction, Module
from jaxpar.utils.scope_facts import expected_rows_in

_EXCHANGES = ("ragged-all-to-all", "ragged-all-to-all-start")
# The path inside of the innermost scope that states rows, of a matmul or of a loop.
_MATMUL = re.compile(r"expected_rows_\d+\b(?!.*expected_rows_).*(?:dot|while)")


@dataclass(frozen=True)
class RaggedExchange:
    """A ragged all-to-all, per device and execution.

    Attributes:
      sent: the buffer that rows are read from.
      received: the buffer that rows are written to.
      rows: the balanced number of rows that a device sends, including those that it keeps.

    >>> exchange = RaggedExchange(ArrayType("bf16", (8, 64)), ArrayType("bf16", (32, 64)), 8)
    >>> exchange.wire_bytes(4), exchange.wire_bytes(4, imbalance=2), exchange.worst_wire_bytes(4)
    (768.0, 1536.0, 3072.0)
    """

    sent: ArrayType
    received: ArrayType
    rows: int

    @property
    def row_bytes(self) -> int:
        return self.sent.bytes // max(self.sent.shape[0], 1)

    def wire_bytes(self, group: int, imbalance: float = 1.0) -> float:
        """Returns the bytes that the busiest of ``group`` devices sends or receives."""
        balanced = self.rows * self.row_bytes * (group - 1) / group
        return _scaled(balanced, imbalance, self.worst_wire_bytes(group))

    def worst_wire_bytes(self, group: int) -> float:
        """Returns the bytes of a device that sends its whole buffer away, or that receives a full one."""
        sent, received, others = self.sent.shape[0], self.received.shape[0], group - 1
        return float(max(min(sent, others * received), min(received, others * sent)) * self.row_bytes)

    def hbm_bytes(self, imbalance: float = 1.0) -> int:
        """Returns the bytes that one device reads and writes."""
        rows = (_scaled(self.rows, imbalance, buffer.shape[0]) for buffer in (self.sent, self.received))
        return round(sum(rows) * self.row_bytes)


@dataclass(frozen=True)
class RaggedMatmul:
    """A grouped matmul (``jax.lax.ragged_dot``) or one of its gradients, per device and execution.

    Attributes:
      buffer_rows: the rows of the ragged dim.
      rows: the balanced number of rows in use.
      row_flops: FLOPs for each row in use.
      row_bytes: bytes read and written for each row in use.
      weight_bytes: bytes of the weights, or of their gradient, of all groups.

    >>> RaggedMatmul(512, 256, row_flops=100, row_bytes=8, weight_bytes=64).flops(imbalance=3)
    51200
    """

    buffer_rows: int
    rows: int
    row_flops: int
    row_bytes: int
    weight_bytes: int

    def flops(self, imbalance: float = 1.0) -> int:
        """Returns the FLOPs of the busiest device; with an infinite imbalance, those of a full buffer."""
        return round(_scaled(self.rows, imbalance, self.buffer_rows) * self.row_flops)

    def hbm_bytes(self, imbalance: float = 1.0) -> int:
        """Returns the bytes that one device reads and writes; the weights of every group count once."""
        return self.weight_bytes + round(_scaled(self.rows, imbalance, self.buffer_rows) * self.row_bytes)


class RaggedOperations:
    """The ragged operations of one module, with their balanced rows."""

    def __init__(self, module: Module):
        self._module = module
        self._in_computation: dict[str, frozenset[tuple[int, bool]]] = {}

    def exchange(self, instruction: Instruction, where: Computation) -> RaggedExchange | None:
        """Returns the ragged all-to-all that an instruction starts, or ``None``."""
        if instruction.opcode not in _EXCHANGES:
            return None
        sent, received = (source.types[0] for source in where.inputs(instruction)[:2])
        most = min(sent.shape[0], received.shape[0])
        stated = expected_rows_in(instruction.op_name)
        if stated is None:  # the compiler for GPUs gives an exchange no name
            stated = self._stated_nearby(where, exchange=True)
        return RaggedExchange(sent, received, most if stated is None else min(stated, most))

    def matmul(self, instruction: Instruction, where: Computation) -> RaggedMatmul | None:
        """Returns the grouped matmul that a kernel of the TPU's compiler computes, or ``None``.

        The kernel multiplies rows ``[M, K]`` with weights ``[G, K, N]`` or ``[G, N, K]``, or, for the gradient of the
        weights, rows ``[M, K]`` with rows ``[M, N]``.
        """
        found = _buffers(instruction, where)
        if found is None:
            return None
        rows, weights = found
        buffer_rows = rows[0].shape[0]
        stated = expected_rows_in(instruction.op_name)
        if stated is None:  # the compiler drops the name of the gradient for the rows
            stated = _only(self._stated_by_matmuls(buffer_rows, where))
        if stated is None:
            stated = self._stated_nearby(where, exchange=False)
        return RaggedMatmul(
            buffer_rows,
            buffer_rows if stated is None else min(stated, buffer_rows),
            row_flops=2 * math.prod(weights.shape[1:]),
            row_bytes=sum(array.bytes for array in rows if array.space == 0) // buffer_rows,
            weight_bytes=weights.bytes if weights.space == 0 else 0,
        )

    def _stated_by_matmuls(self, buffer_rows: int, where: Computation) -> Iterator[int | None]:
        """Yield the rows that other grouped matmuls of a computation state for buffers of the same size."""
        for instruction in where:
            found = _buffers(instruction, where)
            if found is not None and found[0][0].shape[0] == buffer_rows:
                yield expected_rows_in(instruction.op_name)

    def _stated_nearby(self, where: Computation, *, exchange: bool) -> int | None:
        """Returns the number of rows that the scopes of a computation or, if it has none, of the program state.

        If there are several numbers, the only one of an exchange, or the only one of a matmul, is returned.
        """
        program = self._module.computations.values()
        stated = self._stated_in(where) or frozenset().union(*map(self._stated_in, program))
        by_matmuls = {rows for rows, is_matmul in stated if is_matmul}
        rows = {rows for rows, _ in stated}
        return _only(rows) or _only(rows - by_matmuls if exchange else by_matmuls)

    def _stated_in(self, where: Computation) -> frozenset[tuple[int, bool]]:
        """Returns the stated numbers of rows, and whether a matmul or a loop, which may contain one, states them."""
        if where.name not in self._in_computation:
            names = (instruction.op_name for instruction in where)
            found = {
                (rows, bool(_MATMUL.search(name))) for name in names if (rows := expected_rows_in(name)) is not None
            }
            inner = (name for i in where if i.opcode in CALLS for name in i.called("calls", "to_apply"))
            called = (self._stated_in(self._module[name]) for name in inner)
            self._in_computation[where.name] = frozenset(found).union(*called)
        return self._in_computation[where.name]


def _buffers(instruction: Instruction, where: Computation) -> tuple[tuple[ArrayType, ArrayType], ArrayType] | None:
    """Returns the two arrays with the ragged dim and the one with the groups, or ``None``."""
    if not is_grouped_matmul(instruction):
        return None
    arrays = [source.types[0] for source in where.inputs(instruction)] + [instruction.types[0]]
    rows = [array for array in arrays if len(array.shape) == 2]
    weights = [array for array in arrays if len(array.shape) == 3]
    if len(rows) != 2 or len(weights) != 1 or not rows[0].shape[0] == rows[1].shape[0] > 0:
        return None
    return (rows[0], rows[1]), weights[0]


def _scaled(balanced: float, imbalance: float, most: float) -> float:
    return most if math.isinf(imbalance) else min(balanced * imbalance, most)


def _only(numbers: Iterable[int | None]) -> int | None:
    distinct = set(numbers) - {None}
    return distinct.pop() if len(distinct) == 1 else None
