"""Which tensors fill the memory at a program's peak: a walk through the schedule that compiled programs print.

A model of the compiler's buffer assignment, not a copy of it: tiling pads more, and what the compiler packs into the hole of
a dead buffer counts here too. It tells *what* is there; how much there is in all, the executable says itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxpar.analysis.hlo.dataflow import Flow
from jaxpar.analysis.hlo.flops import target
from jaxpar.analysis.hlo.kept_weights import gathered_stacks
from jaxpar.analysis.hlo.parser import FUSIONS, Computation, Instruction, Location, Module

# Their result lies where their operands do.
_VIEWS = frozenset(("bitcast", "tuple", "opt-barrier", "add-dependency", "while", "domain"))
_FREE = frozenset(("constant", "partition-id", "replica-id", "after-all"))
# Frames of libraries, and of jaxpar outside of its models and kernels: they run every line, and explain none.
_OTHERS = re.compile(
    r"(?:^|[/\\])(?:(?:site|dist)-packages[/\\](?!jaxpar[/\\])|jaxpar[/\\](?:(?:analysis|app|checkpoint|data|sharding|training|utils)[/\\]"
    r"|parallel[/\\](?!attention[/\\]|pipeline[/\\])|\w+\.py))"
)


@dataclass(frozen=True)
class Buffer:
    """One tensor alive at the peak.

    Attributes:
      bytes: unpadded, on one device.
      shape: as HLO prints it, ``bf16[2,2048,32000]``.
      source: the innermost line of model code that makes it; empty for an argument of the program, and where only
        libraries or jaxpar itself are on the stack.
      op_name: jax's path of the operation; of an argument its name.
      scope: the loop in which it lives; empty outside of loops.
      argument: whether it is an argument of the program.
      number: of an argument, its place among them; else -1.
      opcode: of the instruction that makes it.
      gathered: whether a loop fills it with weights that it gathers.
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
        """Its shape in numbers.

        >>> Buffer(64, "bf16[4,8]", "", "", "", False).dims
        (4, 8)
        """
        return tuple(int(n) for n in self.shape.partition("[")[2].rstrip("]").split(",") if n)


@dataclass(frozen=True)
class Peak:
    """The moment at which most is alive: its buffers, largest first, and their sum in bytes."""

    bytes: int
    buffers: tuple[Buffer, ...]


def peak(module: Module) -> Peak:
    """The buffers alive when most bytes are, in the schedule of the program's entry computation."""
    buffers = tuple(sorted(_Scan(module).run(module.entry, ""), key=lambda b: -b.bytes))
    return Peak(sum(b.bytes for b in buffers), buffers)


@dataclass(frozen=True, slots=True)
class _Made:
    """An array in main memory: the instruction that makes it, and which of its arrays it is."""

    maker: str
    leaf: int
    bytes: int


_Held = tuple[tuple[_Made, ...], ...]
"""For each array of a result (a tuple flattened), what it holds in main memory: mostly one, or nothing."""


class _Scan:
    def __init__(self, module: Module):
        self.module = module
        self._flow = Flow(module)
        self._gathered: set[_Made] = set()
        self._done: dict[str, tuple[Buffer, ...]] = {}

    def run(self, name: str, scope: str) -> tuple[Buffer, ...]:
        """What a computation has alive at its worst moment; of one that is called, its own buffers alone."""
        if name in self._done:
            return self._done[name]
        where, entry = self.module[name], name == self.module.entry
        held = self._held(where, entry)
        if entry:
            held = _in_place(held, where, self.module.aliased)
        last = _last_uses(where, held, entry)
        # The program's arguments lie there from the start, wherever the schedule names them.
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
        """What the computations that an instruction runs add, at their worst."""
        if instruction.opcode == "while":
            return self.run(instruction.called("body")[0], instruction.name)
        if instruction.opcode == "call":
            return self.run(instruction.called("to_apply")[0], scope)
        if instruction.opcode == "conditional":
            arms = instruction.called("branch_computations", "true_computation", "false_computation")
            return max((self.run(arm, scope) for arm in arms), key=lambda arm: sum(b.bytes for b in arm), default=())
        return ()

    def _held(self, where: Computation, entry: bool) -> dict[str, _Held]:
        held: dict[str, _Held] = {}
        for instruction in where:
            given = [group for name in instruction.operands for group in held.get(name, ())]
            if instruction.opcode == "get-tuple-element":
                here: _Held = _element(given, where[instruction.operands[0]], instruction)
            elif instruction.opcode.endswith("-done"):
                here = _finished(given, where[instruction.operands[0]], instruction)
            elif instruction.opcode in _VIEWS:
                here = tuple(given)
                if instruction.opcode == "while" and len(given) == len(instruction.types):
                    self._gathered |= {made for i in gathered_stacks(instruction, self._flow) for made in given[i]}
            elif instruction.opcode in _FREE or (instruction.opcode == "parameter" and not entry):
                here = ((),) * len(instruction.types)
            else:
                here = self._new(instruction, where, held)
            held[instruction.name] = here
        return held

    def _new(self, instruction: Instruction, where: Computation, held: dict[str, _Held]) -> _Held:
        """The arrays of a result: in place of an operand where it is updated, else new in main memory."""
        target = _updated(instruction, self.module)
        if target is not None and len(instruction.types) == 1:
            return held[instruction.operands[target]]
        given = [t for name in instruction.operands for t in where[name].types]
        starts = instruction.opcode.endswith("-start") and len(instruction.types) > len(given)
        made: list[tuple[_Made, ...]] = []
        for leaf, array in enumerate(instruction.types):
            # A start's tuple names its operands again, which lie where they lay.
            again = starts and array in given and (instruction.opcode != "copy-start" or leaf > 0)
            made.append(() if array.space or again else (_Made(instruction.name, leaf, array.bytes),))
        return tuple(made)

    def _describe(self, made: _Made, where: Computation, scope: str) -> Buffer:
        maker = where[made.maker]
        shape, argument = str(maker.types[made.leaf]), maker.opcode == "parameter"
        if argument:
            return Buffer(made.bytes, shape, "", maker.op_name, scope, True, int(maker.arguments), maker.opcode)
        near = list(self._near(maker, where))
        lines = (own_line(self.module.frames(i)) for i in near)
        source = next((line for line in lines if line), "")
        # A name without a path is the compiler's own, and tells nothing; so is that of memory which only a loop will fill.
        telling = sorted((i for i in near if "/" in i.op_name), key=lambda i: target(i) == "AllocateBuffer")
        op_name = next((i.op_name for i in telling), "")
        return Buffer(
            made.bytes, shape, source, op_name, scope, False, opcode=maker.opcode, gathered=made in self._gathered
        )

    def _near(self, maker: Instruction, where: Computation) -> Iterator[Instruction]:
        """What can say where a value comes from: its maker, what that runs, what it is made of, and who reads it."""
        yield maker
        for name in maker.called("calls", "to_apply") if maker.opcode in FUSIONS else ():
            inner = self.module[name]
            yield inner.root
            yield from (i for i in reversed(inner.instructions.values()) if i.opcode != "parameter")
        yield from (i for i in where.inputs(maker) if i.opcode != "parameter")
        readers = [i for i in where if maker.name in i.operands]
        yield from readers
        carried = {i.name for i in readers if i.opcode == "tuple"}  # into a loop, mostly
        yield from (i for i in where if not carried.isdisjoint(i.operands))


def own_line(frames: Sequence[Location]) -> str:
    """The innermost line that is neither a library's nor jaxpar's own, models and kernels apart; empty if there is none.

    >>> own_line([Location("scan", "/site-packages/jax/loops.py", 7), Location("Block.__call__", "/home/me/model.py", 9)])
    'Block.__call__ (model.py:9)'
    """
    return next((str(f) for f in frames if f.file and f.file[0] != "<" and not _OTHERS.search(f.file)), "")


def _in_place(held: dict[str, _Held], where: Computation, aliased: frozenset[int]) -> dict[str, _Held]:
    """Results that take a donated argument's place need none of their own."""
    replaced = {made for i, group in enumerate(held[where.root.name]) if i in aliased for made in group}
    replaced -= {made for p in where.parameters for group in held[p.name] for made in group}
    return {
        name: tuple(tuple(made for made in group if made not in replaced) for group in groups)
        for name, groups in held.items()
    }


def _last_uses(where: Computation, held: dict[str, _Held], entry: bool) -> dict[_Made, int]:
    """The last instruction that reads each array; what is returned, and the program's arguments, stay to the end."""
    last: dict[_Made, int] = {}
    for i, instruction in enumerate(where):
        stays = instruction.root or (entry and instruction.opcode == "parameter")
        # Taking one element of a tuple reads that element alone.
        read = () if instruction.opcode == "get-tuple-element" else instruction.operands
        for name in (instruction.name, *read):
            for group in held.get(name, ()):
                for made in group:
                    last[made] = max(last.get(made, 0), i)
        if stays:
            last |= {made: len(where.instructions) for group in held[instruction.name] for made in group}
    return last


def _element(given: Sequence[tuple[_Made, ...]], source: Instruction, instruction: Instruction) -> _Held:
    """One element of a tuple; where tuples are nested and it cannot be told apart, all of it."""
    flat = len(given) == len(source.types) and instruction.index < len(given)
    if flat and (source.types[instruction.index],) == instruction.types:
        return (given[instruction.index],)
    return (tuple(made for group in given for made in group),) + ((),) * (len(instruction.types) - 1)


def _finished(given: Sequence[tuple[_Made, ...]], start: Instruction, instruction: Instruction) -> _Held:
    """What an asynchronous operation leaves when it is done: the arrays of its start that have its result's types."""
    wanted = list(instruction.types)
    if len(given) != len(start.types):
        return tuple(given)
    found: list[tuple[_Made, ...]] = []
    for array in wanted:
        fits = [group for group, t in zip(given, start.types, strict=True) if t == array]
        found.append(next((group for group in fits if group), ()))
    return tuple(found)


def _updated(instruction: Instruction, module: Module) -> int | None:
    """Which operand an update in place overwrites, or ``None``."""
    if instruction.opcode == "dynamic-update-slice":
        return 0
    if instruction.opcode not in FUSIONS:
        return None
    inner = module[instruction.called("calls")[0]]
    root = inner.root
    while root.opcode in ("bitcast", "copy") and root.operands:
        root = inner[root.operands[0]]
    if root.opcode != "dynamic-update-slice":
        return None
    base = inner[root.operands[0]]
    while base.opcode == "bitcast":
        base = inner[base.operands[0]]
    return int(base.arguments) if base.opcode == "parameter" else None
