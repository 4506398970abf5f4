"""Finds the gradients that a traced step sums over devices in few bits, by tracing each one back to its summands.

A sum over devices is an operation whose operands are sharded over a mesh axis that does not shard its result. The
gradients of weights that a model passes to :func:`jaxpar.sharded_dot`, to the lookup or to the loss are summed in fp32.
If the model multiplies by a weight itself, in 16 bits, the compiler sums the gradient in 16 bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from jaxpar.analysis.memory.jaxpr import JaxprOp, TracedProgram, Value

_ONE = frozenset(
    ("convert_element_type", "sharding_constraint", "reshard", "reshape", "transpose", "squeeze", "broadcast_in_dim")
    + ("name", "local", "reduce_precision", "optimization_barrier", "split", "slice", "dynamic_slice", "copy")
    + ("unstack", "neg", "relayout", "expand_dims")
)
_MANY = frozenset(
    ("add", "add_any", "mul", "div", "sub", "select_n", "stack", "concatenate", "pad", "dynamic_update_slice")
)
_BY_HAND = frozenset(("psum", "psum_invariant", "psum_scatter", "reduce_scatter"))


def narrow_sums(program: TracedProgram, gradients: Sequence[Value], axes: Collection[str], most: int) -> list[int]:
    """Returns the indices of the gradients that are summed over some of ``axes`` in few bytes per element.

    Args:
      program: the traced step.
      gradients: values of ``program``.
      axes: mesh axes.
      most: the largest number of bytes per element that counts as few.
    """
    makers = dict(_makers(program))
    return [i for i, value in enumerate(gradients) if _summed(value, makers, frozenset(axes), most)]


def _makers(program: TracedProgram) -> Iterator[tuple[Value, JaxprOp]]:
    for op in program.ops:
        yield from ((value, op) for value in op.makes)
        for body in op.bodies:
            yield from _makers(body)


def _summed(value: Value, makers: dict[Value, JaxprOp], axes: frozenset[str], most: int) -> bool:
    """Whether the computation of a value sums parts of it over ``axes`` in at most ``most`` bytes per element."""
    todo, seen = [value], set[Value]()
    while todo:
        value = todo.pop()
        op = makers.get(value)
        if op is None or value in seen or not value.shape:  # a scalar scales gradients but is not one
            continue
        seen.add(value)
        if not op.followed:  # its results count as replicated, which is no evidence of a sum
            todo += op.reads
        elif op.name in _ONE:
            todo.append(op.reads[min(op.makes.index(value), len(op.reads) - 1)])
        elif op.name in _MANY:
            todo += op.reads
        elif op.name in ("scan", "while") and op.bodies:
            body = op.bodies[-1]
            todo.append(body.results[op.makes.index(value)])
        elif value.itemsize <= most and (op.name in _BY_HAND or (_axes(op.reads) - _axes(op.makes)) & axes):
            return True
    return False


def _axes(values: Iterable[Value]) -> frozenset[str]:
    return frozenset(axis for value in values for dim in value.spec or () for axis in dim)
