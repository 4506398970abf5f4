"""The trip count of an HLO loop: from the compiler's annotation, or from the counter's start, bound and step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from jaxpar.analysis.hlo.dataflow import Flow
from jaxpar.analysis.hlo.parser import Computation, Instruction
from jaxpar.utils.scope_facts import trip_count_in

_Scalar = tuple[int | None, int]
"""A scalar inside a loop: (element of the carry, the sum of what was added to it), or (None, constant)."""

_MIRROR = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}
_SAME = frozenset(("copy", "bitcast", "convert", "reshape", "opt-barrier"))


def trip_count(loop: Instruction, where: Computation, flow: Flow) -> int | Fraction | None:
    """Returns how often a ``while`` runs its body, or ``None`` if the program does not show it.

    The compiler's ``known_trip_count`` is used if it is printed. Otherwise the loop's condition must compare a counter
    with a bound. Each run of the body must change the counter by the same step and leave the bound unchanged; a body
    unrolled by two changes the counter by two. The counter's start and the bound must be constants, here or outside of
    enclosing loops.

    If the length of a loop depends on the device or on the iteration of an enclosing loop, the name of its scope may
    state the mean; see :mod:`jaxpar.utils.scope_facts`.

    Args:
      loop: the ``while``.
      where: the computation that contains it.
      flow: of the module.
    """
    counted = _counted(loop, where, flow)
    return trip_count_in(loop.op_name) if counted is None else counted


def _counted(loop: Instruction, where: Computation, flow: Flow) -> int | None:
    noted = re.search(r'"known_trip_count":\s*\{"n":\s*"?(\d+)', loop.attribute("backend_config") or "")
    if noted:
        return int(noted[1])
    comparison = _comparison(flow.module[loop.called("condition")[0]], flow)
    if comparison is None:
        return None
    direction, left, right = comparison
    body = flow.module[loop.called("body")[0]]
    if not _step(left, body, flow):
        direction, left, right = _MIRROR[direction], right, left
    step = _step(left, body, flow)
    start, bound = _start(left, loop, where, flow), _start(right, loop, where, flow)
    if not step or _step(right, body, flow) != 0 or start is None or bound is None:
        return None
    return _runs(direction, start, bound, step)


def _runs(direction: str, start: int, bound: int, step: int) -> int | None:
    """Returns the runs of a loop with counter start, start + step, … while ``counter direction bound`` holds."""
    if direction in ("GT", "GE"):
        direction, start, bound, step = _MIRROR[direction], -start, -bound, -step
    if direction == "NE":
        return (bound - start) // step if (bound - start) % step == 0 and (bound - start) // step >= 0 else None
    if direction == "EQ":
        return int(start == bound)
    distance = bound - start + (direction == "LE")
    if distance <= 0:
        return 0
    return -(-distance // step) if step > 0 else None


def _comparison(condition: Computation, flow: Flow) -> tuple[str, _Scalar, _Scalar] | None:
    """Returns the direction and the two sides of the comparison in a loop's condition."""
    root, where = condition.root, condition
    known: Mapping[str, _Scalar | None] = {}
    while root.opcode in _SAME or flow.inner(root) is not None:
        inner = flow.inner(root)
        if inner is None:
            root = where[root.operands[0]]
        else:
            known = _arguments(root, inner, where, flow, known)
            root, where = inner.root, inner
    if root.opcode != "compare":
        return None
    left, right = (_scalar(operand, where, flow, known) for operand in root.operands)
    direction = root.attribute("direction") or ""
    return (direction, left, right) if left and right and direction in _MIRROR else None


def _step(value: _Scalar, body: Computation, flow: Flow) -> int | None:
    """Returns by how much one run of the body changes this value; ``None`` if the change is not a constant."""
    element, _ = value
    if element is None:
        return 0
    root = body.root
    if root.opcode != "tuple" or element >= len(root.operands):
        return None
    after = _scalar(root.operands[element], body, flow, {})
    return after[1] if after is not None and after[0] == element else None


def _start(value: _Scalar, loop: Instruction, where: Computation, flow: Flow) -> int | None:
    """Returns the value before the first run, if it is a constant."""
    element, added = value
    if element is None:
        return added
    carry = where.behind(where[loop.operands[0]], _SAME)
    if carry.opcode != "tuple" or element >= len(carry.operands):
        return None
    before = _scalar(carry.operands[element], where, flow, {})
    if before is None:
        return None
    if before[0] is None:
        return before[1] + added
    # Inside another loop's body, a value that the body leaves unchanged is as constant as its initial value.
    outer = [(c, w) for c, w in flow.callers.get(where.name, []) if c.opcode == "while"]
    if len(outer) != 1 or not flow.invariant(before[0], where):
        return None
    base = _start(before, *outer[0], flow)
    return None if base is None else base + added


def _scalar(name: str, where: Computation, flow: Flow, known: Mapping[str, _Scalar | None]) -> _Scalar | None:
    """Returns a scalar as a constant, or as an element of the enclosing loop's carry plus a constant.

    ``known`` has the values of a fusion's parameters.
    """
    if name in known:
        return known[name]
    instruction = where[name]
    if sum(array.size for array in instruction.types) != 1:
        return None
    if instruction.opcode == "constant":
        return (None, int(instruction.arguments)) if re.fullmatch(r"-?\d+", instruction.arguments) else None
    if instruction.opcode in _SAME:
        return _scalar(instruction.operands[0], where, flow, known)
    if instruction.opcode in ("add", "subtract"):
        left, right = (_scalar(operand, where, flow, known) for operand in instruction.operands)
        return _sum(left, right, 1 if instruction.opcode == "add" else -1)
    if instruction.opcode == "get-tuple-element":
        return _element(instruction.index, where[instruction.operands[0]], where, flow, known)
    inner = flow.inner(instruction)
    if inner is None:
        return None
    return _scalar(inner.root.name, inner, flow, _arguments(instruction, inner, where, flow, known))


def _element(
    index: int, source: Instruction, where: Computation, flow: Flow, known: Mapping[str, _Scalar | None]
) -> _Scalar | None:
    """Returns element ``index`` of a tuple-valued instruction."""
    if source.opcode == "opt-barrier":
        source = where[source.operands[0]]
    if source.opcode == "parameter":
        return index, 0
    if source.opcode == "tuple":
        return _scalar(source.operands[index], where, flow, known)
    if source.opcode == "while" and flow.invariant(index, flow.module[source.called("body")[0]]):
        return _element(index, where[source.operands[0]], where, flow, known)
    inner = flow.inner(source)
    if inner is None or inner.root.opcode != "tuple":
        return None
    return _scalar(inner.root.operands[index], inner, flow, _arguments(source, inner, where, flow, known))


def _arguments(
    fusion: Instruction, inner: Computation, where: Computation, flow: Flow, known: Mapping[str, _Scalar | None]
) -> dict[str, _Scalar | None]:
    """Returns the values of a fusion's parameters."""
    outer = [_scalar(operand, where, flow, known) for operand in fusion.operands]
    return {parameter.name: outer[i] for i, parameter in enumerate(inner.parameters)}


def _sum(left: _Scalar | None, right: _Scalar | None, sign: int) -> _Scalar | None:
    if left is None or right is None or (left[0] is not None and right[0] is not None):
        return None
    if sign < 0 and right[0] is not None:
        return None
    return (left[0] if right[0] is None else right[0]), left[1] + sign * right[1]
