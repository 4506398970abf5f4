"""Parses XLA's HLO text: computations, instructions, types, attributes, source locations.

The parser interprets only what an audit needs, and keeps everything else as text. The grammar is that of optimized HLO,
as the compilers for CPU, TPU and GPU print it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from jaxpar.errors import AuditError

_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{}]')
FUSIONS = ("fusion", "fusion-start")
CALLS = (*FUSIONS, "call", "call-start", "async-start")
"""Opcodes that run another computation once. HLO prints asynchronous calls as a start and an end."""

ARMS = ("branch_computations", "true_computation", "false_computation")
"""The attributes that name the arms of a ``conditional``."""

_CALLING = ("calls", "to_apply", "condition", "body", *ARMS, "called_computations")


@dataclass(frozen=True)
class ArrayType:
    """One array: element type in HLO's notation, shape, and memory space (0 is the device's main memory).

    >>> ArrayType("bf16", (8, 128)).bytes
    2048
    """

    dtype: str
    shape: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of its elements, without padding; 0 for tokens."""
        found = re.match(r"[a-z]+(\d+)", self.dtype)
        bits = 8 if self.dtype == "pred" else int(found[1]) if found else 0
        return -(-self.size * bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique in its computation.
      opcode: such as ``dot``.
      types: the arrays of its result, with tuples flattened.
      operands: the names of its operands.
      attributes: the text after the operands.
      arguments: the text of the operands.
      root: whether the computation returns its value.
    """

    name: str
    opcode: str
    types: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    attributes: str
    arguments: str
    root: bool

    @cached_property
    def _values(self) -> dict[str, str]:
        """Attributes by name. Only commas outside of brackets and strings separate them."""
        parts, depth, start = [], 0, 0
        for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[()\[\]{}]|, ', self.attributes):
            if token[0] == ", " and depth == 0:
                parts.append(self.attributes[start : token.start()])
                start = token.end()
            depth += (token[0] in "([{") - (token[0] in ")]}")
        pairs = (part.partition("=") for part in [*parts, self.attributes[start:]])
        return {name.strip(): value for name, _, value in pairs}

    def attribute(self, name: str) -> str | None:
        """Returns the text of one attribute, including brackets, or ``None``."""
        return self._values.get(name)

    def called(self, *names: str) -> list[str]:
        """Returns the computations that these attributes name, in order; by default, those of all attributes."""
        texts = [text for name in names or _CALLING if (text := self.attribute(name)) is not None]
        return [called for text in texts for called in re.findall(r"%?([\w.\-]+)", text)]

    @property
    def bytes(self) -> int:
        """Bytes of its result, the sum over all arrays of a tuple."""
        return sum(array.bytes for array in self.types)

    @property
    def index(self) -> int:
        """The element that a ``get-tuple-element`` takes."""
        return int(self.attribute("index") or 0)

    @cached_property
    def op_name(self) -> str:
        """jax's name of the operation: the path of the transformations and module scopes that made it."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attribute("metadata") or "")
        return found[1].replace("\\", "") if found else ""


@dataclass(frozen=True)
class Computation:
    """A named sequence of instructions, in schedule order if the module is scheduled."""

    name: str
    instructions: dict[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        found = next((i for i in self.instructions.values() if i.root), None)
        if found is None:
            raise AuditError(f"the HLO text is malformed: the computation {self.name!r} has no ROOT.")
        return found

    @cached_property
    def places(self) -> dict[str, int]:
        """The position of each instruction."""
        return {name: n for n, name in enumerate(self.instructions)}

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Its parameters, ordered by number."""
        return tuple(sorted((i for i in self if i.opcode == "parameter"), key=lambda i: int(i.arguments)))

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def __getitem__(self, name: str) -> Instruction:
        if name not in self.instructions:
            raise AuditError(
                f"the HLO text is malformed: the computation {self.name!r} uses {name!r}, but does not define it."
            )
        return self.instructions[name]

    def behind(self, value: Instruction, through: Collection[str] = ("bitcast", "copy")) -> Instruction:
        """Returns the instruction that makes a value, through instructions with these opcodes."""
        while value.opcode in through:
            value = self[value.operands[0]]
        return value

    def inputs(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions whose results this one reads, in order."""
        return [self[name] for name in instruction.operands]


@dataclass(frozen=True)
class Location:
    """A place in the user's program: function, file and line."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        place = f"{self.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{self.line}"
        return f"{self.function} ({place})" if self.function else place


@dataclass(frozen=True)
class Module:
    """A parsed program.

    Attributes:
      name: of the program.
      computations: by name.
      entry: the name of the entry computation.
      partitions: the number of devices that the program runs on.
      aliased: the indices of the results that take the memory of a donated argument.
    """

    name: str
    computations: dict[str, Computation]
    entry: str
    partitions: int
    aliased: frozenset[int]
    _tables: dict[str, dict[int, str]] = field(repr=False)

    def __getitem__(self, name: str) -> Computation:
        if name not in self.computations:
            raise AuditError(f"the HLO text is malformed: it calls the computation {name!r}, but does not define it.")
        return self.computations[name]

    def frames(self, instruction: Instruction) -> list[Location]:
        """Returns the Python stack that made an instruction, innermost first; empty if the program does not have it."""
        metadata = instruction.attribute("metadata") or ""
        frame = re.search(r"stack_frame_id=(\d+)", metadata)
        if frame is None:
            inner = re.search(r'source_file="([^"]*)" source_line=(\d+)', metadata)
            return [Location("", inner[1], int(inner[2]))] if inner else []
        found: list[Location] = []
        number = int(frame[1])
        while number in self._tables["StackFrames"]:
            row = _numbers(self._tables["StackFrames"][number])
            place = _numbers(self._tables["FileLocations"].get(row.get("file_location_id", 0), ""))
            if place:
                function = self._tables["FunctionNames"].get(place["function_name_id"], "").strip('"')
                file_name = self._tables["FileNames"].get(place["file_name_id"], "").strip('"')
                found.append(Location(function, file_name, place["line"]))
            # XLA numbers parents from zero and frames from one; the outermost frame has the parent zero.
            parent = row.get("parent_frame_id", 1) - 1
            number = parent if parent < number else 0
        return found


def parse(text: str) -> Module:
    """Parse the HLO text of one module.

    Args:
      text: optimized HLO, complete.

    Raises:
      AuditError: the text is not HLO, or is cut short.
    """
    header, _, body = text.lstrip().partition("\n")
    if not header.startswith("HloModule"):
        raise AuditError(
            f"this is not HLO text: it begins with {text.strip()[:40]!r}. Remedy: pass the compiled program, "
            f"jitted.lower(...).compile(), or its as_text()."
        )
    computations: dict[str, Computation] = {}
    entry, name = "", ""
    current: dict[str, Instruction] = {}
    for line in _joined_lines(body):
        if not name:
            opening = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$", line)
            if opening and "->" in line:
                name, current = opening[2], {}
                entry = name if opening[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, current)
            name = ""
        elif line.strip():
            instruction = _instruction(line.strip(), name)
            current[instruction.name] = instruction
    if name or not entry:
        cause = f"the computation {name!r} has no end" if name else "it has no ENTRY computation"
        raise AuditError(f"the HLO text is truncated: {cause}. Remedy: pass the full compiled.as_text().")
    counts = [re.search(rf"{count}=(\d+)", header) for count in ("num_partitions", "replica_count")]
    partitions = math.prod(int(count[1]) for count in counts if count)
    tables = {name: _table(body, name) for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")}
    aliased = frozenset(int(n) for n in re.findall(r"\{(\d+)\}: \(\d+, \{\}", header))
    return Module(re.split(r"[\s,]", header)[1], computations, entry, partitions, aliased, tables)


def _joined_lines(body: str) -> Iterator[str]:
    """Yield the lines of a module; an attribute that a kernel's metadata spreads over several lines is one line."""
    lines = iter(body.splitlines())
    for line in lines:
        while line.startswith(" ") and line.endswith("={"):
            tail = next(lines, None)
            while tail and not tail.startswith("}"):
                line += tail
                tail = next(lines, None)
            if tail is None:  # cut short; the parser of the line reports it
                break
            line += tail
        yield line


def types_of(text: str) -> tuple[ArrayType, ...]:
    """Returns the arrays in a printed type, with tuples flattened.

    >>> types_of("(f32[2,3]{1,0}, bf16[8]{0:T(256)S(1)})")
    (ArrayType(dtype='f32', shape=(2, 3), space=0), ArrayType(dtype='bf16', shape=(8,), space=1))
    """
    arrays = []
    for dtype, dims, layout in re.findall(r"([a-z]\w*)\[([\d,<=\s]*)\](\{[^{}]*\})?", re.sub(r"/\*.*?\*/", "", text)):
        space = re.search(r"S\((\d+)\)", layout)
        shape = tuple(int(n.strip().lstrip("<=")) for n in dims.split(",") if n)
        arrays.append(ArrayType(dtype, shape, int(space[1]) if space else 0))
    return tuple(arrays)


def _instruction(line: str, where: str) -> Instruction:
    root = line.startswith("ROOT ")
    name, equals, rest = line.removeprefix("ROOT ").partition(" = ")
    if not equals:
        raise AuditError(f"the HLO text is malformed in computation {where!r}: {line[:80]!r} is not an instruction.")
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    kind, rest = rest[: max(end, 0)], rest[max(end, 0) :].lstrip()
    opcode, bracket, _ = rest.partition("(")
    stop = _closing(rest, len(opcode)) if bracket else -1
    if stop < 0 or end <= 0:
        raise AuditError(f"the HLO text is truncated in computation {where!r}: {line[:80]!r} has no end.")
    arguments = rest[len(opcode) + 1 : stop]
    operands = () if opcode == "constant" else tuple(re.findall(r"%([\w.\-]+)", arguments))
    attributes = rest[stop + 1 :].lstrip(", ")
    return Instruction(name.lstrip("%"), opcode, types_of(kind), operands, attributes, arguments, root)


def _closing(text: str, start: int) -> int:
    """Returns the index of the bracket that closes the one at ``start``, or -1. Strings are skipped."""
    depth = 0
    for token in _TOKENS.finditer(text, start):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0 and token[0][0] != '"':
            return token.start()
    return -1


def _table(body: str, name: str) -> dict[int, str]:
    found = re.search(rf"^{name}\n((?:\d+ .*\n)+)", body, re.MULTILINE)
    rows = (line.partition(" ") for line in found[1].splitlines()) if found else ()
    return {int(number): value for number, _, value in rows}


def _numbers(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}
