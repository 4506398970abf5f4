"""Finds the arrays that a compiled loop fills with gathered weights, one slice per iteration, for the backward pass.

The origin of the slices identifies them, not their shapes: a stack of gathered weights may have the shape of a stack of
activations.
"""

from __future__ import annotations

from jaxpar.analysis.hlo.collectives import kind_of
from jaxpar.analysis.hlo.dataflow import MOVES, SLICES, Flow
from jaxpar.analysis.hlo.parser import Computation, Instruction

_PASSES_ON = MOVES | SLICES | {"reduce-precision", "all-gather-done"}
_Place = tuple[Instruction, Computation]


def gathered_stacks(loop: Instruction, flow: Flow) -> frozenset[int]:
    """Returns the elements of a ``while``'s carry that its body fills by gathering arrays that it does not change.

    A gather of anything that changes between iterations, such as activations, does not count.
    """
    body = flow.module[loop.called("body")[0]]
    if body.root.opcode != "tuple":
        return frozenset()
    slices = ((i, _slice(body[name], body, flow)) for i, name in enumerate(body.root.operands))
    found = ((i, None if place is None else _gather(*place, flow)) for i, place in slices)
    return frozenset(i for i, place in found if place is not None and _unchanging(*place, body, flow))


def _slice(value: Instruction, where: Computation, flow: Flow) -> _Place | None:
    """Returns the value that an in-place update writes."""
    value = where.behind(value)
    if value.opcode == "dynamic-update-slice":
        return where[value.operands[1]], where
    inner = flow.inner(value)
    return None if inner is None else _slice(inner.root, inner, flow)


def _gather(value: Instruction, where: Computation, flow: Flow) -> _Place | None:
    """Returns the all-gather that a value is a copy of, in this iteration of a loop or in the previous one."""
    seen: set[tuple[str, str]] = set()
    while (where.name, value.name) not in seen:
        seen.add((where.name, value.name))
        if kind_of(value) == "all-gather":
            return value, where
        back = _back(value, where, flow)
        if back is None:
            return None
        value, where = back
    return None


def _back(value: Instruction, where: Computation, flow: Flow) -> _Place | None:
    if value.opcode in _PASSES_ON:
        return where[value.operands[0]], where
    if value.opcode == "parameter":
        callers = flow.callers.get(where.name, [])
        if len(callers) != 1 or callers[0][0].opcode == "while":
            return None
        caller, outside = callers[0]
        number = int(value.arguments)
        return (outside[caller.operands[number]], outside) if number < len(caller.operands) else None
    if value.opcode == "custom-call":  # inside a fusion, this ends an all-gather that a TPU overlaps with other work
        gather = next((i for i in where.inputs(value) if kind_of(i) == "all-gather"), None)
        return None if gather is None else (gather, where)
    if value.opcode == "get-tuple-element":
        return _element(value.index, where[value.operands[0]], where, flow)
    inner = flow.inner(value)
    return None if inner is None else (inner.root, inner)


def _element(index: int, source: Instruction, where: Computation, flow: Flow) -> _Place | None:
    """Returns element ``index`` of a tuple; of a loop's carry, the value from the previous iteration."""
    if source.opcode.endswith("-done") and source.operands:
        source = where[source.operands[0]]
    if kind_of(source) == "all-gather":
        return source, where
    root, home = source, where
    if source.opcode == "parameter":
        root = where.root
    elif (inner := flow.inner(source)) is not None:
        root, home = inner.root, inner
    return (home[root.operands[index]], home) if root.opcode == "tuple" and index < len(root.operands) else None


def _unchanging(value: Instruction, where: Computation, body: Computation, flow: Flow) -> bool:
    """Whether an instruction's operands depend on nothing that the loop changes, except for scalars."""
    todo = [(where[name], where) for name in value.operands]
    seen: set[tuple[str, str]] = set()
    while todo:
        value, where = todo.pop()
        if (where.name, value.name) in seen:
            continue
        seen.add((where.name, value.name))
        carried = value.opcode == "get-tuple-element" and where[value.operands[0]].opcode == "parameter"
        if carried and where.name == body.name:
            if max((array.size for array in value.types), default=0) > 1 and not flow.invariant(value.index, body):
                return False
            continue
        back = _back(value, where, flow) if value.opcode in ("parameter", "get-tuple-element") else None
        inner = flow.inner(value)
        todo += (
            [back] if back else [(inner.root, inner)] if inner else [(where[name], where) for name in value.operands]
        )
    return True
