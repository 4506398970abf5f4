"""FLOPs of single HLO instructions, and trip counts of HLO loops."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from jaxpar.inspect.hlo import ArrayType, Computation, Instruction, Module

_Value = tuple[str, int]
"""A scalar in a loop: ("constant", value), or ("counter", what was added to the loop's counter)."""


def matmul_flops(instruction: Instruction, where: Computation) -> int:
    """Multiply-adds × 2 of a ``dot`` or ``convolution``; 0 for anything else.

    A convolution counts the window positions that fall on data: TPU compilers print batched matmuls as convolutions whose
    windows lie mostly in the padding.
    """
    if instruction.opcode == "dot":
        lhs = where.instructions[instruction.operands[0]].types[0]
        contracted = [lhs.shape[i] for i in _dims(instruction.attribute("lhs_contracting_dims"))]
        return 2 * math.prod(instruction.types[0].shape) * math.prod(contracted)
    if instruction.opcode == "convolution":
        lhs, rhs = (where.instructions[name].types[0] for name in instruction.operands[:2])
        return _convolution(instruction, lhs, rhs)
    return 0


def _convolution(instruction: Instruction, lhs: ArrayType, rhs: ArrayType) -> int:
    labels = instruction.attribute("dim_labels") or ""
    found = re.fullmatch(r"(\w+)_(\w+)->(\w+)", labels)
    if found is None:
        return 0
    lhs_at, rhs_at, out_at = ({label: i for i, label in enumerate(text)} for text in found.groups())
    out = instruction.types[0]
    window = _window(instruction.attribute("window") or "")
    taps = 1
    for label in (label for label in lhs_at if label.isdigit()):
        i = int(label)
        one = {name: values[i] for name, values in window.items() if i < len(values)}
        taps *= _taps(lhs.shape[lhs_at[label]], out.shape[out_at[label]], rhs.shape[rhs_at[label]], one)
    return 2 * out.shape[out_at["b"]] * out.shape[out_at["f"]] * rhs.shape[rhs_at["i"]] * taps


def _window(text: str) -> dict[str, list[str]]:
    return {name: value.split("x") for name, value in re.findall(r"(\w+)=([\w\-]+)", text)}


def _taps(size: int, out: int, kernel: int, window: Mapping[str, str]) -> int:
    """How many (output position, kernel position) pairs of one spatial dim meet an input element."""
    low = int(window.get("pad", "0_0").split("_")[0])
    stride, lhs_dilate, rhs_dilate = (int(window.get(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    last = (size - 1) * lhs_dilate
    count = 0
    for k in range(kernel):
        offset = k * rhs_dilate - low
        if lhs_dilate == 1:
            # Output positions o with 0 <= o * stride + offset <= last, in closed form: `out` can be long.
            first, final = max(0, -(offset // stride)), min(out - 1, (last - offset) // stride)
            count += max(0, final - first + 1)
        else:
            spots = (o * stride + offset for o in range(out))
            count += sum(1 for spot in spots if 0 <= spot <= last and spot % lhs_dilate == 0)
    return count


def kernel_flops(instruction: Instruction) -> int | None:
    """FLOPs that a custom kernel states in its cost estimate, or ``None``."""
    config = instruction.attribute("backend_config")
    if instruction.opcode != "custom-call" or config is None:
        return None
    found = re.search(r'"cost_estimate"\s*:\s*\{[^}]*"flops"\s*:\s*"?(\d+)', config)
    return int(found[1]) if found else None


def trip_count(loop: Instruction, where: Computation, module: Module) -> int | None:
    """How often a ``while`` runs its body, or ``None`` when the program does not show it.

    The compiler's own ``known_trip_count`` is taken where it is printed; otherwise the counter's start, bound and step are
    traced through the loop's condition and body (a body unrolled by two steps by two).
    """
    config = loop.attribute("backend_config")
    if config is not None and "known_trip_count" in config:
        return int(json.loads(config)["known_trip_count"]["n"])
    (condition,), (body,) = loop.called("condition"), loop.called("body")
    compare, inside = _comparison(module.computations[condition], module)
    if compare is None or inside is None:
        return None
    direction = compare.attribute("direction")
    index, bound = inside
    start = _initial(loop, where, index)
    step = _step(module.computations[body], index, module)
    if start is None or not step:
        return None
    span = {"LT": bound - start, "LE": bound - start + 1, "GT": start - bound, "GE": start - bound + 1}.get(
        direction or ""
    )
    if direction == "NE":
        span = abs(bound - start)
    return None if span is None else max(0, -(-span // abs(step)))


def _comparison(condition: Computation, module: Module) -> tuple[Instruction | None, tuple[int, int] | None]:
    """The comparison that ends the loop, with the counter's place in the carry and the bound."""
    root, where, names = condition.root, condition, {}
    while root.opcode in ("fusion", "call", "copy", "bitcast"):
        if root.opcode in ("copy", "bitcast"):
            root = where.instructions[root.operands[0]]
            continue
        inner = module.computations[root.called("calls", "to_apply")[0]]
        names = {i.name: root.operands[int(i.arguments)] for i in inner if i.opcode == "parameter"}
        root, where = inner.root, inner
    if root.opcode != "compare":
        return None, None
    counter, bound = None, None
    for operand in root.operands:
        source = where.instructions[operand]
        if source.opcode == "parameter" and source.name in names:
            source = condition.instructions[names[source.name]]
        source = _through_copies(source, condition if source.name in condition.instructions else where)
        if source.opcode == "get-tuple-element":
            counter = int(source.attribute("index") or 0)
        elif source.opcode == "constant" and re.fullmatch(r"-?\d+", source.arguments):
            bound = int(source.arguments)
    return root, None if counter is None or bound is None else (counter, bound)


def _through_copies(instruction: Instruction, where: Computation) -> Instruction:
    while instruction.opcode in ("copy", "bitcast", "convert") and instruction.operands[0] in where.instructions:
        instruction = where.instructions[instruction.operands[0]]
    return instruction


def _initial(loop: Instruction, where: Computation, index: int) -> int | None:
    carry = _through_copies(where.instructions[loop.operands[0]], where)
    if carry.opcode != "tuple" or index >= len(carry.operands):
        return None
    value = _through_copies(where.instructions[carry.operands[index]], where)
    return int(value.arguments) if value.opcode == "constant" and re.fullmatch(r"-?\d+", value.arguments) else None


def _step(body: Computation, index: int, module: Module) -> int | None:
    """By how much one run of the body moves the counter."""
    root = _through_copies(body.root, body)
    if root.opcode != "tuple" or index >= len(root.operands):
        return None
    value = _trace(root.operands[index], body, index, module, {})
    return value[1] if value is not None and value[0] == "counter" else None


def _trace(
    name: str, where: Computation, index: int, module: Module, given: Mapping[str, _Value | None]
) -> _Value | None:
    """The value of a scalar in the body; ``given`` has those of a fusion's parameters."""
    if name in given:
        return given[name]
    instruction = where.instructions[name]
    if instruction.opcode == "constant":
        found = re.fullmatch(r"-?\d+", instruction.arguments)
        return ("constant", int(found[0])) if found else None
    if instruction.opcode == "get-tuple-element":
        source = where.instructions[instruction.operands[0]]
        at = int(instruction.attribute("index") or 0)
        return ("counter", 0) if source.opcode == "parameter" and at == index else None
    if instruction.opcode in ("copy", "bitcast", "convert"):
        return _trace(instruction.operands[0], where, index, module, given)
    if instruction.opcode in ("add", "subtract"):
        left, right = (_trace(operand, where, index, module, given) for operand in instruction.operands)
        return _add(left, right, 1 if instruction.opcode == "add" else -1)
    if instruction.opcode in ("fusion", "call"):
        inner = module.computations[instruction.called("calls", "to_apply")[0]]
        outer = [_trace(operand, where, index, module, given) for operand in instruction.operands]
        inside = {i.name: outer[int(i.arguments)] for i in inner if i.opcode == "parameter"}
        return _trace(inner.root.name, inner, index, module, inside)
    return None


def _add(left: _Value | None, right: _Value | None, sign: int) -> _Value | None:
    if left is None or right is None or (left[0] == right[0] == "counter") or (sign < 0 and right[0] == "counter"):
        return None
    kind = "counter" if "counter" in (left[0], right[0]) else "constant"
    return kind, left[1] + sign * right[1]


def _dims(text: str | None) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text or "")]
