"""The tensors that fill the memory at a program's peak, by a walk through the schedule of the compiled program.

It models the compiler's buffer assignment but does not reproduce it: tiling adds padding, and a buffer that the
compiler packs into freed memory counts here too. Use it to find *which* tensors fill the memory; the executable reports
the exact total.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxpar.analysis.hlo.dataflow import Flow
from jaxpar.analysis.hlo.flops import target
from jaxpar.analysis.hlo.kept_weights import gathered_stacks
from jaxpar.analysis.hlo.parser import ARMS, FUSIONS, Computation, Instruction, Location, Module

# Their results share the memory of their operands.
_VIEWS = frozenset(("bitcast", "tuple", "opt-barrier", "add-dependency", "while", "domain"))
_FREE = frozenset(("constant", "partition-id", "replica-id", "after-all"))
# Frames of libraries, and of jaxpar except its models and kernels: they are on every stack and explain nothing.
_OTHERS = re.compile(
    r"(?:^|[/\\])(?:(?:site|dist)-packages[/\\](?!jaxpar[/\\])"
    r"|jaxpar[/\\](?:(?:analysis|app|checkpoint|data|sharding|training|utils)[/\\]"
    r"|parallel[/\\](?!attention[/\\]|pipeline[/\\])|\w+\.py))"
)


@dataclass(frozen=True)
class Buffer:
    """One tensor that is alive at the peak.

    Attributes:
      bytes: without padding, on one device.
      shape: in HLO's notation, ``bf16[2,2048,32000]``.
      source: the innermost line of model code that makes it; empty for an argument of the program, and if only
        libraries or jaxpar itself are on the stack.
      op_name: jax's path of the operation; the name of an argument.
      scope: the loop that it is in; empty outside of loops.
      argument: whether it is an argument of the program.
      number: the index of an argument; else -1.
      opcode: of the instruction that makes it.
      gathered: whether a loop fills it with gathered weights.
    """

    bytes: int
    shape: str
    source: str
    op_name: str
    scope: str
    argument: bool
    number: int = -1
    opcode: str = ""
    gathered: bool = False

    @property
    def dims(self) -> tuple[int, ...]:
        """Its shape as integers.

        >>> Buffer(64, "bf16[4,8]", "", "", "", False).dims
        (4, 8)
        """
        return tuple(int(n) for n in self.shape.partition("[")[2].rstrip("]").split(",") if n)


@dataclass(frozen=True)
class Peak:
    """The moment at which most bytes are alive in main memory.

    Attributes:
      bytes: the sum of the buffers.
      buffers: largest first.
      on_chip: the most bytes that are alive in the memory on the chip, where they are known.
    """

    bytes: int
    buffers: tuple[Buffer, ...]
    on_chip: int = 0


ON_CHIP = 1
"""The memory space of a TPU's own memory (VMEM) in HLO's layouts; that of main memory is 0."""


def peak(module: Module, space: int = 0) -> Peak:
    """Returns the buffers that are alive when most bytes are, in the schedule of the program's entry computation.

    Args:
      module: the program.
      space: the memory space whose buffers count.
    """
    # The scan keeps sets, whose order changes between processes; buffers of one size are therefore sorted by the rest.
    buffers = tuple(
        sorted(_Scan(module, space).run(module.entry, ""), key=lambda b: (-b.bytes, dataclasses.astuple(b)))
    )
    return Peak(sum(b.bytes for b in buffers), buffers)


@dataclass(frozen=True, slots=True)
class _Made:
    """An array in the scanned memory: the instruction that makes it, and the index of the array in its result."""

    maker: str
    leaf: int
    bytes: int


_Held = tuple[tuple[_Made, ...], ...]
"""For each array of a flattened result, the arrays in the scanned memory that it consists of: mostly one or none."""


class _Scan:
    def __init__(self, module: Module, space: int):
        self.module, self._space = module, space
        self._flow = Flow(module)
        self._gathered: set[_Made] = set()
        self._done: dict[str, tuple[Buffer, ...]] = {}

    def run(self, name: str, scope: str) -> tuple[Buffer, ...]:
        """Returns the buffers of a computation at its peak; a called computation counts only its own buffers."""
        if name in self._done:
            return self._done[name]
        where, entry = self.module[name], name == self.module.entry
        held = self._held(where, entry)
        if entry:
            held = _in_place(held, where, self.module.aliased)
        last = _last_uses(where, held, entry)
        # The program's arguments are in memory from the start, whatever the schedule says.
        alive = {made for p in where.parameters for group in held[p.name] for made in group} if entry else set()
        best: tuple[frozenset[_Made], tuple[Buffer, ...]] = (frozenset(), ())
        most = -1
        for i, instruction in enumerate(where):
            alive |= {made for group in held[instruction.name] for made in group if made.maker == instruction.name}
            inner = self._inner(instruction, scope)
            total = sum(made.bytes for made in alive) + sum(b.bytes for b in inner)
            if total > most:
                best, most = (frozenset(alive), inner), total
            alive = {made for made in alive if last[made] > i}
        self._done[name] = (*(self._describe(made, where, scope) for made in best[0]), *best[1])
        return self._done[name]

    def _inner(self, instruction: Instruction, scope: str) -> tuple[Buffer, ...]:
        """Returns the buffers that the computations run by an instruction add, at their peak."""
        if instruction.opcode == "while":
            return self.run(instruction.called("body")[0], instruction.name)
        if instruction.opcode == "call":
            return self.run(instruction.called("to_apply")[0], scope)
        if instruction.opcode == "conditional":
            arms = instruction.called(*ARMS)
            return max((self.run(arm, scope) for arm in arms), key=lambda arm: sum(b.bytes for b in arm), default=())
        return ()

    def _held(self, where: Computation, entry: bool) -> dict[str, _Held]:
        held: dict[str, _Held] = {}
        for instruction in where:
            given = [group for name in instruction.operands for group in held.get(name, ())]
            if instruction.opcode == "get-tuple-element":
                arrays: _Held = _element(given, where[instruction.operands[0]], instruction)
            elif instruction.opcode.endswith("-done"):
                arrays = _finished(given, where[instruction.operands[0]], instruction)
            elif instruction.opcode in _VIEWS:
                arrays = tuple(given)
                if instruction.opcode == "while" and len(given) == len(instruction.types):
                    self._gathered |= {made for i in gathered_stacks(instruction, self._flow) for made in given[i]}
            elif instruction.opcode in _FREE or (instruction.opcode == "parameter" and not entry):
                arrays = ((),) * len(instruction.types)
            else:
                arrays = self._new(instruction, where, held)
            held[instruction.name] = arrays
        return held

    def _new(self, instruction: Instruction, where: Computation, held: dict[str, _Held]) -> _Held:
        """Returns the arrays of a result: an operand if it is updated in place, else new arrays in the memory space."""
        target = _updated(instruction, self.module)
        if target is not None and len(instruction.types) == 1:
            return held[instruction.operands[target]]
        given = [t for name in instruction.operands for t in where[name].types]
        starts = instruction.opcode.endswith("-start") and len(instruction.types) > len(given)
        made: list[tuple[_Made, ...]] = []
        for leaf, array in enumerate(instruction.types):
            # The tuple of a start repeats its operands, which stay where they are.
            repeated = starts and array in given and (instruction.opcode != "copy-start" or leaf > 0)
            made.append(() if array.space != self._space or repeated else (_Made(instruction.name, leaf, array.bytes),))
        return tuple(made)

    def _describe(self, made: _Made, where: Computation, scope: str) -> Buffer:
        maker = where[made.maker]
        shape, argument = str(maker.types[made.leaf]), maker.opcode == "parameter"
        if argument:
            return Buffer(made.bytes, shape, "", maker.op_name, scope, True, int(maker.arguments), maker.opcode)
        nearby = list(self._nearby(maker, where))
        lines = (own_line(self.module.frames(i)) for i in nearby)
        source = next((line for line in lines if line), "")
        # A name without a path is the compiler's own and explains nothing. Neither does the name of memory that a loop
        # fills later.
        with_path = sorted((i for i in nearby if "/" in i.op_name), key=lambda i: target(i) == "AllocateBuffer")
        op_name = next((i.op_name for i in with_path), "")
        return Buffer(
            made.bytes, shape, source, op_name, scope, False, opcode=maker.opcode, gathered=made in self._gathered
        )

    def _nearby(self, maker: Instruction, where: Computation) -> Iterator[Instruction]:
        """Yield instructions that may have the source of a value: its maker, its operands and its readers."""
        yield maker
        for name in maker.called("calls", "to_apply") if maker.opcode in FUSIONS else ():
            inner = self.module[name]
            yield inner.root
            yield from (i for i in reversed(inner.instructions.values()) if i.opcode != "parameter")
        yield from (i for i in where.inputs(maker) if i.opcode != "parameter")
        readers = [i for i in where if maker.name in i.operands]
        yield from readers
        carried = {i.name for i in readers if i.opcode == "tuple"}  # mostly the initial values of a loop
        yield from (i for i in where if not carried.isdisjoint(i.operands))


def own_line(frames: Sequence[Location]) -> str:
    """Returns the innermost line of model or kernel code as text; empty if there is none.

    Lines of libraries and of other code of jaxpar do not count.

    >>> library = Location("scan", "/site-packages/jax/loops.py", 7)
    >>> own_line([library, Location("Block.__call__", "/home/me/model.py", 9)])
    'Block.__call__ (model.py:9)'
    """
    return next((str(f) for f in frames if f.file and f.file[0] != "<" and not _OTHERS.search(f.file)), "")


def _in_place(held: dict[str, _Held], where: Computation, aliased: frozenset[int]) -> dict[str, _Held]:
    """Returns ``held`` without the results that take the memory of a donated argument."""
    replaced = {made for i, group in enumerate(held[where.root.name]) if i in aliased for made in group}
    replaced -= {made for p in where.parameters for group in held[p.name] for made in group}
    return {
        name: tuple(tuple(made for made in group if made not in replaced) for group in groups)
        for name, groups in held.items()
    }


def _last_uses(where: Computation, held: dict[str, _Held], entry: bool) -> dict[_Made, int]:
    """Returns the last instruction that reads each array; results and the program's arguments stay to the end."""
    last: dict[_Made, int] = {}
    for i, instruction in enumerate(where):
        stays = instruction.root or (entry and instruction.opcode == "parameter")
        # Taking one element of a tuple reads only that element.
        read = () if instruction.opcode == "get-tuple-element" else instruction.operands
        for name in (instruction.name, *read):
            for group in held.get(name, ()):
                for made in group:
                    last[made] = max(last.get(made, 0), i)
        if stays:
            last |= {made: len(where.instructions) for group in held[instruction.name] for made in group}
    return last


def _element(given: Sequence[tuple[_Made, ...]], source: Instruction, instruction: Instruction) -> _Held:
    """Returns one element of a tuple, or all of the tuple if it is nested and the element cannot be identified."""
    flat = len(given) == len(source.types) and instruction.index < len(given)
    if flat and (source.types[instruction.index],) == instruction.types:
        return (given[instruction.index],)
    return (tuple(made for group in given for made in group),) + ((),) * (len(instruction.types) - 1)


def _finished(given: Sequence[tuple[_Made, ...]], start: Instruction, instruction: Instruction) -> _Held:
    """Returns the arrays of a finished asynchronous operation: those of its start that have the types of its result."""
    if len(given) != len(start.types):
        return tuple(given)
    found: list[tuple[_Made, ...]] = []
    for array in instruction.types:
        fits = [group for group, t in zip(given, start.types, strict=True) if t == array]
        found.append(next((group for group in fits if group), ()))
    return tuple(found)


def _updated(instruction: Instruction, module: Module) -> int | None:
    """Returns the index of the operand that an in-place update overwrites, or ``None``."""
    if instruction.opcode == "dynamic-update-slice":
        return 0
    if instruction.opcode not in FUSIONS:
        return None
    inner = module[instruction.called("calls")[0]]
    root = inner.behind(inner.root)
    if root.opcode != "dynamic-update-slice":
        return None
    base = inner.behind(inner[root.operands[0]], ("bitcast",))
    return int(base.arguments) if base.opcode == "parameter" else None
