"""The compute that the schedule overlaps with an asynchronous collective, between its start and its end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jaxpar.analysis.hlo.collectives import kind_of
from jaxpar.analysis.hlo.costs import Costs, Work
from jaxpar.analysis.hlo.flops import target
from jaxpar.analysis.hlo.parser import Computation, Instruction
from jaxpar.analysis.hlo.slices import crosses, rendezvous

_COMPUTE = frozenset(
    ("fusion", "fusion-start", "call", "call-start", "dot", "convolution", "custom-call", "while", "conditional")
    + ("reduce", "reduce-window", "sort", "scatter", "select-and-scatter")
)

_BEGINS = ("-start", "call-update")

_Mark = tuple[str, str | None, str | None]


class HloOrder:
    """The schedule of one module, and the overlap in it.

    TPU compilers fuse an asynchronous collective with the compute that overlaps with it. A fusion with the custom call
    ``AsyncCollectiveStart`` starts it, other fusions print it again, and one with ``AsyncCollectiveDone`` ends it. All
    of them have the same mark (:func:`_mark`). The channel alone is ambiguous, because unrelated collectives can share
    one.
    """

    def __init__(self, costs: Costs):
        self._costs, self._module = costs, costs.module
        inside = [(where, i) for where in self._module.computations.values() for i in where]
        starts = [(where, i) for where, i in inside if target(i) == "AsyncCollectiveStart"]
        self._started = {_mark(where[operand]) for where, i in starts for operand in i.operands[:1]}
        self._ends = {where.name for where, i in inside if target(i) == "AsyncCollectiveDone"}

    def reprint(self, instruction: Instruction, where: Computation) -> bool:
        """Whether a collective in a fusion was started by another fusion."""
        if _mark(instruction) not in self._started:
            return False
        fused = any(caller.opcode == "fusion" for caller, _ in self._costs.flow.callers.get(where.name, []))
        return fused and not any(target(i) == "AsyncCollectiveStart" and instruction.name in i.operands for i in where)

    def overlapping_work(self, start: Instruction, where: Computation) -> Work:
        """Returns the compute between the start of a collective and its end; none for a synchronous collective.

        A collective that ends in the loop's next iteration is in flight until the end of this one.
        """
        mark = self._fused_mark(start)
        if mark is None and not start.opcode.endswith("-start") and not crosses(start):
            return Work()
        work, start = Work(), _sent(start, where)
        for instruction in _after(start, where):
            if self._ends_it(instruction, start, mark, where):
                break
            if instruction.opcode in _COMPUTE and not self._only_sends(instruction):
                work += self._costs.of(instruction, where)
        return work

    def span(self, start: Instruction, where: Computation) -> tuple[int, int]:
        """Returns the places in a computation's schedule between which an asynchronous collective is in flight."""
        start = _sent(start, where)
        later = list(_after(start, where))
        steps = next((n for n, i in enumerate(later, 1) if self._ends_it(i, start, None, where)), len(later))
        begin = where.places[start.name]
        return begin, begin + (steps if start.opcode.endswith(_BEGINS) else 0)

    def _fused_mark(self, start: Instruction) -> _Mark | None:
        """Returns the mark of the collective that a fusion starts asynchronously."""
        if start.opcode != "fusion":
            return None
        inner = self._module[start.called("calls")[0]]
        started = (inner[i.operands[0]] for i in inner if target(i) == "AsyncCollectiveStart")
        return next((_mark(instruction) for instruction in started), None)

    def _ends_it(self, instruction: Instruction, start: Instruction, mark: _Mark | None, where: Computation) -> bool:
        if crosses(start):
            done = instruction.opcode == "recv-done"
            return done and rendezvous(where[instruction.operands[0]]) == rendezvous(start)
        if mark is None:
            return start.name in instruction.operands and instruction.opcode.endswith("-done")
        names = instruction.called("calls") if instruction.opcode == "fusion" else []
        inner = self._module[names[0]] if names and names[0] in self._ends else ()
        return any(_mark(i) == mark for i in inner)

    def _only_sends(self, instruction: Instruction) -> bool:
        """Whether a fusion has a collective and no matmul: another transfer, not compute."""
        inner = [i for name in instruction.called("calls", "to_apply") for i in self._module[name]]
        return any(kind_of(i) for i in inner) and not any(i.opcode in ("dot", "convolution", "fusion") for i in inner)


def _sent(start: Instruction, where: Computation) -> Instruction:
    """Returns the instruction that begins a transfer: on a SparseCore, the update that gives the start its operands."""
    if start.opcode != "call-start":
        return start
    updates = (i for i in _after(start, where) if i.opcode == "call-update" and start.name in i.operands)
    return next(updates, start)


def _mark(instruction: Instruction) -> _Mark:
    """Returns the attributes that all copies of one asynchronous collective have in common."""
    return (instruction.opcode, instruction.attribute("channel_id"), instruction.attribute("frontend_attributes"))


def _after(start: Instruction, where: Computation) -> Iterator[Instruction]:
    return itertools.islice(where, where.places[start.name] + 1, None)
