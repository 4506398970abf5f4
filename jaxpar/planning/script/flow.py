"""Which arguments a result carries on: those that reach it element by element, and not through a matmul or a sum."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxpar.planning.names.constrain import MATMULS
from jaxpar.utils.jaxprs import follow, follow_loop, inner_jaxprs, opened, scan_counts

_Reach = tuple[int, bool]
"""The index of an argument, and whether the value is linear in it, with coefficients that no array determines."""
_ARRAY: _Reach = (-1, False)
"""Marks a value that an array of more than one element determines."""
_STOPS = ("reduce", "arg", "random_bits", "broadcast_in_dim")
_LINEAR = frozenset((
    "add", "add_any", "clamp", "convert_element_type", "copy", "copy_p", "max", "min", "name", "neg",
    "optimization_barrier", "reduce_precision", "select_n", "stop_gradient", "sub",
))  # fmt: skip
_MOVES = frozenset((
    "concatenate", "dynamic_slice", "dynamic_update_slice", "expand_dims", "pad", "random_fold_in", "random_split",
    "random_unwrap", "random_wrap", "reshape", "rev", "roll", "scatter", "scatter_add", "scatter-add", "slice", "split",
    "squeeze", "transpose",
))  # fmt: skip
"""They keep elements, or make keys of keys, whatever the shape of their result."""
_CALLS = frozenset((
    "jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "custom_lin",
))  # fmt: skip


def carried(program: ClosedJaxpr) -> list[Mapping[int, bool]]:
    """Returns for each result of a program the arguments that it carries on, by their index.

    The new weights ``p - lr * g`` carry the weights on, and the gradients ``g`` do not. A result may carry arguments
    that it does not replace: the weights of a teacher, which are a moving mean, carry on those of the student.

    Returns:
      For each argument whether the result is linear in it, with coefficients that are numbers, as a moving mean is.

    >>> import jax
    >>> step = lambda w, mean, x: (w - 0.1 * x.T @ x, 0.9 * mean + 0.1 * w, x.T @ (x @ w))
    >>> carried(jax.make_jaxpr(step)(*jax.numpy.ones((3, 4, 4))))
    [{0: True}, {0: True, 1: True}, {}]
    """
    jaxpr = opened(program)
    start = [
        frozenset(((i, True), *([_ARRAY] if getattr(var.aval, "size", 2) > 1 else ())))
        for i, var in enumerate(jaxpr.invars)
    ]
    return [
        {i: (i, True) in reaches for i in sorted({i for i, _ in reaches if i >= 0})}
        for reaches in _follow(jaxpr, start)
    ]


def _follow(jaxpr: Jaxpr, operands: Sequence[frozenset[_Reach]]) -> list[frozenset[_Reach]]:
    return follow(jaxpr, operands, frozenset(), _rule)


def _rule(eqn: JaxprEqn, operands: list[frozenset[_Reach]]) -> list[frozenset[_Reach]]:
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        branches = [_follow(opened(branch), operands[1:]) for branch in params["branches"]]
        return [frozenset[_Reach]().union(*outs) for outs in zip(*branches, strict=True)]
    if name == "while":
        inside = operands[params["cond_nconsts"] :]
        run = functools.partial(_follow, opened(params["body_jaxpr"]))
        return follow_loop(run, inside, params["body_nconsts"], len(inside) - params["body_nconsts"])
    if name == "scan":
        return follow_loop(functools.partial(_follow, opened(params["jaxpr"])), operands, *scan_counts(eqn))
    bodies = inner_jaxprs(eqn) if name in _CALLS else []
    if bodies and len(opened(bodies[0]).invars) == len(operands):
        return _follow(opened(bodies[0]), operands)
    arrays = frozenset((_ARRAY,)) & frozenset[_Reach]().union(*operands)
    stops = name in MATMULS or name.startswith(_STOPS)
    return [arrays if stops else arrays.union(*_through(eqn, operands, out.aval)) for out in eqn.outvars]


def _through(eqn: JaxprEqn, operands: list[frozenset[_Reach]], aval: object) -> list[frozenset[_Reach]]:
    """What each operand gives to a result of its shape."""
    name, reached = eqn.primitive.name, []
    for k, (atom, reaches) in enumerate(zip(eqn.invars, operands, strict=True)):
        if name not in _MOVES and getattr(atom.aval, "shape", None) != getattr(aval, "shape", None):
            continue
        others = [other for n, other in enumerate(operands) if n != k]
        scaled = (name == "mul" or (name == "div" and k == 0)) and not any(_ARRAY in other for other in others)
        linear = scaled or name in _LINEAR or name in _MOVES
        reached.append(frozenset((i, known and linear) for i, known in reaches))
    return reached
