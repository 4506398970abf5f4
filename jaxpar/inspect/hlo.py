"""Reading XLA's HLO text into plain values: computations, instructions, types, attributes, source locations.

Only what an audit needs is understood; everything else is kept as text. The grammar is XLA's printed form after
optimisation, as CPU, TPU and GPU compilers give it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from jaxpar.errors import AuditError

_BITS = {"pred": 8, "token": 0, "opaque": 0, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "s1": 1, "u1": 1}


@dataclass(frozen=True)
class ArrayType:
    """One array: element type as HLO spells it, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of its elements, without padding."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            found = re.match(r"[a-z]+(\d+)", self.dtype)
            bits = int(found[1]) if found else 0
        return math.prod(self.shape) * bits // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. ``types`` are the arrays of its result, a tuple flattened; ``attributes`` is text."""

    name: str
    opcode: str
    types: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    attributes: str
    arguments: str
    root: bool

    def attribute(self, name: str) -> str | None:
        """The text of one attribute, braces and all, or ``None``."""
        found = re.search(rf"(?:^|[ ,]){name}=", self.attributes)
        return _value(self.attributes, found.end()) if found else None

    def called(self, *names: str) -> list[str]:
        """The computations that these attributes name, in order."""
        texts = [text for name in names if (text := self.attribute(name)) is not None]
        return [called for text in texts for called in re.findall(r"%?([\w.\-]+)", text)]

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.types)

    @cached_property
    def op_name(self) -> str:
        """jax's name of the operation: the path of transformations and module scopes that made it."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    @property
    def frame(self) -> int | None:
        found = re.search(r"stack_frame_id=(\d+)", self.attributes)
        return int(found[1]) if found else None


@dataclass(frozen=True)
class Computation:
    """A named sequence of instructions, in schedule order where the module is scheduled."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.root)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())


@dataclass(frozen=True)
class Location:
    """Where in the user's program: function, file and line."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{self.line})"


@dataclass(frozen=True)
class Module:
    """A parsed program."""

    name: str
    computations: dict[str, Computation]
    entry: str
    partitions: int
    scheduled: bool
    _tables: dict[str, dict[int, str]] = field(repr=False)

    def frames(self, instruction: Instruction) -> list[Location]:
        """The Python stack that made an instruction, innermost first; empty when the program does not say."""
        found: list[Location] = []
        number = instruction.frame
        if number is None:
            inner = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
            return [Location("", inner[1], int(inner[2]))] if inner else []
        seen: set[int] = set()
        while number is not None and number not in seen and number in self._tables["StackFrames"]:
            seen.add(number)
            frame = _numbers(self._tables["StackFrames"][number])
            place = _numbers(self._tables["FileLocations"].get(frame["file_location_id"], ""))
            if place:
                function = self._tables["FunctionNames"].get(place["function_name_id"], "").strip('"')
                file_name = self._tables["FileNames"].get(place["file_name_id"], "").strip('"')
                found.append(Location(function, file_name, place["line"]))
            number = frame.get("parent_frame_id")
        return found


def parse(text: str) -> Module:
    """Parse the HLO text of one module.

    Raises:
      AuditError: the text is not HLO, or is cut short.
    """
    if not text.lstrip().startswith("HloModule"):
        raise AuditError(
            f"this is not HLO text: it begins with {text[:40]!r}. Remedy: pass compiled.as_text(), the optimised program."
        )
    header, _, body = text.lstrip().partition("\n")
    tables = {name: _table(body, name) for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")}
    computations: dict[str, Computation] = {}
    entry, name = "", ""
    current: dict[str, Instruction] = {}
    for line in body.splitlines():
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
        raise AuditError(
            f"the HLO text is cut short: {f'the computation {name!r} has no end' if name else 'it has no ENTRY computation'}. "
            f"Remedy: pass the whole of compiled.as_text()."
        )
    partitions = re.search(r"num_partitions=(\d+)", header)
    replicas = re.search(r"replica_count=(\d+)", header)
    count = (int(partitions[1]) if partitions else 1) * (int(replicas[1]) if replicas else 1)
    module_name = re.match(r"HloModule ([\w.\-]+)", header)
    return Module(
        module_name[1] if module_name else "", computations, entry, count, "is_scheduled=true" in header, tables
    )


def types_of(text: str) -> tuple[ArrayType, ...]:
    """The arrays in a printed type, tuples flattened."""
    text = re.sub(r"/\*.*?\*/", "", text)
    found = re.findall(r"([a-z]\w*)\[([\d,<=\s]*)\]", text)
    return tuple(ArrayType(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n)) for dtype, dims in found)


def _instruction(line: str, where: str) -> Instruction:
    root = line.startswith("ROOT ")
    name, equals, rest = line.removeprefix("ROOT ").partition(" = ")
    if not equals:
        raise AuditError(f"the HLO text is broken in computation {where!r}: {line[:80]!r} is no instruction.")
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    stop = _closing(rest, len(opcode))
    if stop < 0 or end <= 0:
        raise AuditError(f"the HLO text is cut short in computation {where!r}: {line[:80]!r} has no end.")
    arguments = rest[len(opcode) + 1 : stop]
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments))
    return Instruction(
        name.lstrip("%"), opcode, types_of(kind), operands, rest[stop + 1 :].lstrip(", "), arguments, root
    )


def _closing(text: str, start: int) -> int:
    """The index of the bracket that closes the one at ``start``; -1 when there is none. Strings are skipped."""
    depth, quoted, i = 0, False, start
    while i < len(text):
        c = text[i]
        if quoted:
            i += c == "\\"
            quoted = c != '"'
        elif c == '"':
            quoted = True
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return -1


def _value(text: str, start: int) -> str:
    """An attribute's value from ``start`` up to the comma outside all brackets that ends it."""
    i = start
    while i < len(text) and text[i] not in ", ":
        if text[i] in "([{":
            i = _closing(text, i)
            if i < 0:
                return text[start:]
        i += 1
    # replica_groups=mesh['a'=4] {'a'}: the group axes follow a blank.
    if text[i : i + 2] == " {":
        i = _closing(text, i + 1) + 1
    return text[start:i]


def _table(body: str, name: str) -> dict[int, str]:
    found = re.search(rf"^{name}\n((?:\d+ .*\n)+)", body, re.MULTILINE)
    rows = (line.partition(" ") for line in found[1].splitlines()) if found else ()
    return {int(number): value for number, _, value in rows}


def _numbers(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}
