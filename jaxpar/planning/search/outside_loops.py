"""Which activations XLA keeps for the backward pass of what runs outside of loops.

A loop stores each array that its backward pass reads, in a row for each iteration. Outside of loops both passes are in
one computation, and XLA fuses elementwise operations into their readers: of the five arrays that the derivative of GELU
reads, it keeps the matmul's result. The rule is that of :mod:`jaxpar.analysis.memory.walk`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from jaxpar.analysis.memory.jaxpr import JaxprOp, TracedProgram, Value
from jaxpar.analysis.memory.walk import MemoryWalk
from jaxpar.planning.names.primitive_rules import TracedValue
from jaxpar.planning.names.propagate import Visited
from jaxpar.utils.arrays import itemsize

_CREATES = "custom_call"
"""Stands for the batch, loops and branches: what they make are arrays in memory, and so is what they read."""
_BODIES = ("scan", "while", "cond")


@dataclass(frozen=True)
class FusedResiduals:
    """What a program keeps of the values that its backward pass reads.

    Attributes:
      kept: the arrays from which elementwise operations and reductions compute all of these values, and the bytes of
        one element.
      again: the largest of the values that are not kept themselves, in the same form; empty if all are.
    """

    kept: tuple[tuple[TracedValue, int], ...]
    again: tuple[tuple[TracedValue, int], ...]

    @classmethod
    def of(cls, visited: Iterable[Visited], residuals: Sequence[TracedValue]) -> Self:
        """Returns what a program keeps.

        Args:
          visited: its equations, in order.
          residuals: the values that its backward pass reads, which depend on the batch.
        """
        values, ops = dict[TracedValue, Value](), list[JaxprOp]()
        for step in opened_calls(visited):
            if not any(made.data for made in step.makes):
                continue  # what does not depend on the batch, such as a mask, is computed again or not at all
            for value, atom in zip((*step.reads, *step.makes), (*step.eqn.invars, *step.eqn.outvars), strict=True):
                if value not in values:
                    values[value] = _array(atom.aval)
            name = step.eqn.primitive.name
            reads, makes = ([values[value] for value in side] for side in (step.reads, step.makes))
            ops.append(JaxprOp(_CREATES if name in _BODIES else name, reads, makes))
        made = {value for op in ops for value in op.makes}
        batch = [JaxprOp(_CREATES, [], [own]) for value, own in values.items() if value.data and own not in made]
        inputs = [own for value, own in values.items() if not value.data]
        needed = [values[value] for value in residuals if value in values]
        parts = MemoryWalk(TracedProgram(inputs, [*batch, *ops], needed)).parts
        arrays = frozenset[Value]().union(*(parts[value] for value in needed))
        pair = lambda value: (value, int(values[value].itemsize))
        dropped = [value for value in residuals if value in values and values[value] not in arrays]
        most = max(dropped, key=lambda value: values[value].bytes, default=None)
        kept = tuple(pair(value) for value, own in values.items() if own in arrays)
        return cls(kept, () if most is None else (pair(most),))


def _array(aval: Any) -> Value:
    shape = tuple(getattr(aval, "shape", ()))
    return Value(shape, itemsize(aval.dtype) if hasattr(aval, "dtype") else 0, ((),) * len(shape), {})


def opened_calls(visited: Iterable[Visited]) -> Iterator[Visited]:
    """Yields the equations of a program in order, with those of its calls instead of the calls."""
    for step in visited:
        if step.inner and step.eqn.primitive.name not in _BODIES:
            for _, _, inner in step.inner:
                yield from opened_calls(inner)
        else:
            yield step
