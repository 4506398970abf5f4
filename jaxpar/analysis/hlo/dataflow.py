"""Dataflow of an HLO program: the uses and the origins of values, across loops and fusions."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.analysis.hlo.parser import CALLS, Computation, Instruction, Module
from jaxpar.analysis.hlo.slices import rendezvous

MOVES = frozenset(
    ("copy", "convert", "bitcast", "bitcast-convert", "transpose", "reshape", "opt-barrier", "copy-start", "copy-done")
    + ("slice-done", "all-reduce-done", "collective-permute-done", "async-done", "fusion-done", "call-done")
)
SLICES = frozenset(("dynamic-slice", "slice", "slice-start"))
_ELEMENTWISE = frozenset(
    ("add", "subtract", "multiply", "divide", "maximum", "minimum", "negate", "abs", "select", "sqrt", "rsqrt", "power")
)
_TABLE = 4096
"""The most elements of an array that can be a device number or a table of offsets."""


class Flow:
    """The uses and callers in one module, each found once."""

    def __init__(self, module: Module):
        self.module = module
        self._users: dict[str, dict[str, list[Instruction]]] = {}
        self.callers: dict[str, list[tuple[Instruction, Computation]]] = {}
        for where in module.computations.values():
            for instruction in where:
                for name in instruction.called():
                    self.callers.setdefault(name, []).append((instruction, where))

    def users(self, name: str, where: Computation) -> list[Instruction]:
        """Returns the instructions of ``where`` that read this value."""
        if where.name not in self._users:
            found: dict[str, list[Instruction]] = {}
            for instruction in where:
                for operand in dict.fromkeys(instruction.operands):
                    found.setdefault(operand, []).append(instruction)
            self._users[where.name] = found
        return self._users[where.name].get(name, [])

    def readers(self, instruction: Instruction, where: Computation) -> Iterator[Instruction]:
        """Yield the instructions of one computation that finally read a value, through moves and tuples."""
        taken = self.received(instruction, where) if instruction.opcode == "send" else instruction
        for user in self.users(taken.name, where) if taken else ():
            if user.opcode in MOVES or user.opcode in ("get-tuple-element", "all-gather-done"):
                yield from self.readers(user, where)
            else:
                yield user

    def inner(self, instruction: Instruction) -> Computation | None:
        """Returns the computation that a fusion or a call runs, or ``None``."""
        names = instruction.called("calls", "to_apply") if instruction.opcode in CALLS else []
        return self.module[names[0]] if names else None

    def origin(self, name: str, where: Computation) -> tuple[Instruction, Computation]:
        """Returns the origin of a value, through copies, slices, tuples, loops and fusions that only move data.

        The search ends at an instruction that computes, at an argument of the program, or at a value that a loop
        changes.
        """
        while True:
            source = self._back(where[name], where)
            if source is None:
                return where[name], where
            name, where = source

    def _back(self, instruction: Instruction, where: Computation) -> tuple[str, Computation] | None:
        """Take one step of :meth:`origin`."""
        if instruction.opcode in MOVES or instruction.opcode in SLICES:
            return instruction.operands[0], where
        if instruction.opcode in ("collective-permute", "collective-permute-start"):
            return instruction.operands[0], where
        if instruction.opcode == "get-tuple-element":
            source = where[instruction.operands[0]]
            if source.opcode == "recv-done":
                return self._sent(source, where)
            return self._element(instruction.index, source, where)
        if instruction.opcode == "parameter":
            return self._argument(int(instruction.arguments), where)
        inner = self.inner(instruction)
        return self._through(inner.root, inner, instruction, where) if inner else None

    def _sent(self, done: Instruction, where: Computation) -> tuple[str, Computation] | None:
        """Returns the value that the other slices of a TPU program send: all slices run the same program."""
        name = rendezvous(where[done.operands[0]])
        sends = (i for i in where if i.opcode == "send" and rendezvous(i) == name)
        return next(((i.operands[0], where) for i in sends), None) if name else None

    def received(self, send: Instruction, where: Computation) -> Instruction | None:
        """Returns the array that a program receives from other slices in exchange for the array that it sends."""
        name = rendezvous(send)
        for done in where:
            if done.opcode == "recv-done" and rendezvous(where[done.operands[0]]) == name:
                return next((i for i in self.users(done.name, where) if i.index == 0), None)
        return None

    def _through(
        self, value: Instruction, inner: Computation, fusion: Instruction, where: Computation
    ) -> tuple[str, Computation] | None:
        """Returns the operand of a fusion that one of its results only copies or slices."""
        value = inner.behind(value, MOVES | SLICES)
        return (fusion.operands[int(value.arguments)], where) if value.opcode == "parameter" else None

    def _element(self, index: int, source: Instruction, where: Computation) -> tuple[str, Computation] | None:
        """Returns the origin of element ``index`` of a tuple-valued instruction."""
        if source.opcode in ("tuple", "opt-barrier") and index < len(source.operands):
            return source.operands[index], where
        if source.opcode == "while":
            body = self.module[source.called("body")[0]]
            return (source.name, where) if not self.invariant(index, body) else self._carried(index, source, where)
        if source.opcode == "parameter":
            loops = [c for c in self.callers.get(where.name, []) if c[0].opcode == "while"]
            if len(loops) == 1 and self.invariant(index, self.module[loops[0][0].called("body")[0]]):
                return self._carried(index, *loops[0])
        inner = self.inner(source)
        if inner and inner.root.opcode == "tuple":
            return self._through(inner[inner.root.operands[index]], inner, source, where)
        return None

    def _argument(self, number: int, where: Computation) -> tuple[str, Computation] | None:
        """Returns the operand that a parameter of a fusion or a call stands for."""
        callers = self.callers.get(where.name, [])
        if len(callers) != 1 or callers[0][0].opcode not in CALLS:
            return None
        instruction, outside = callers[0]
        # Computations that a TPU's SparseCore runs are called without operands: the arrays have fixed places.
        return (instruction.operands[number], outside) if number < len(instruction.operands) else None

    def _carried(self, index: int, loop: Instruction, where: Computation) -> tuple[str, Computation] | None:
        """Returns the initial value of element ``index`` of a loop's carry."""
        carry = where[loop.operands[0]]
        while carry.opcode in ("copy", "opt-barrier") and len(carry.operands) == 1:
            carry = where[carry.operands[0]]
        return (carry.operands[index], where) if carry.opcode == "tuple" else None

    def invariant(self, index: int, body: Computation) -> bool:
        """Whether a loop's body returns element ``index`` of its carry unchanged."""
        root = body.root
        if root.opcode != "tuple" or index >= len(root.operands):
            return False
        value = body.behind(body[root.operands[index]], ("copy", "bitcast", "copy-start", "copy-done"))
        if value.opcode != "get-tuple-element" or value.index != index:
            return False
        return body[value.operands[0]].opcode == "parameter"

    def by_device(self, name: str, where: Computation, seen: set[tuple[str, str]] | None = None) -> bool:
        """Whether a scalar, such as the offset of a slice, is computed from the device's number."""
        seen = set() if seen is None else seen
        instruction = where[name]
        if instruction.opcode in ("partition-id", "replica-id"):
            return True
        small = sum(array.size for array in instruction.types) <= _TABLE
        if (where.name, name) in seen or not small or instruction.opcode in ("while", "conditional"):
            return False
        seen.add((where.name, name))
        # The result of a slice depends on its offsets too, so the search follows all its operands.
        source = None if instruction.opcode in SLICES else self._back(instruction, where)
        source = source or self._computed(instruction, where)
        if source is not None:
            return self.by_device(*source, seen)
        return any(self.by_device(operand, where, seen) for operand in instruction.operands)

    def _computed(self, instruction: Instruction, where: Computation) -> tuple[str, Computation] | None:
        """Returns the instruction inside a fusion that computes this result."""
        element = instruction.opcode == "get-tuple-element"
        inner = self.inner(where[instruction.operands[0]] if element else instruction)
        if inner is None:
            return None
        return (inner.root.operands[instruction.index] if element else inner.root.name), inner

    def kept(self, name: str, where: Computation) -> int | None:
        """Returns the size of the largest slice taken of a value, if every use is a slice at the device's own offset.

        The size is a number of elements. Copies and elementwise arithmetic before the slice do not count as uses.
        Return ``None`` if an instruction uses the full value.
        """
        sizes = [self._kept_by(user, name, where) for user in self.users(name, where)]
        if where[name].root:
            callers = self.callers.get(where.name, [])
            fused = len(callers) == 1 and callers[0][0].opcode in CALLS
            sizes.append(self.kept(callers[0][0].name, callers[0][1]) if fused else None)
        return max((size for size in sizes if size), default=None) if all(sizes) else None

    def _kept_by(self, user: Instruction, name: str, where: Computation) -> int | None:
        if user.opcode == "dynamic-slice" and user.operands[0] == name:
            own = any(self.by_device(offset, where) for offset in user.operands[1:])
            return user.types[0].size if own else None
        if user.opcode in MOVES or user.opcode in _ELEMENTWISE:
            return self.kept(user.name, where)
        inner = self.inner(user)
        if inner is None:
            return None
        sizes = [
            self.kept(inner.parameters[i].name, inner) for i, operand in enumerate(user.operands) if operand == name
        ]
        return max((size for size in sizes if size), default=None) if all(sizes) else None
