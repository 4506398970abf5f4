"""Computes traced programs, whole or in part, with the bodies of jitted functions inlined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxpar.utils.jaxprs import opened

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}


def inlined_program(run: Callable[..., Any], shapes: Sequence[Any]) -> ClosedJaxpr:
    """Returns the program of a function of arrays of these shapes, with the bodies of jitted functions inlined."""
    traced = jax.make_jaxpr(run)(*shapes)
    return jax.make_jaxpr(lambda *args: evaluate(traced, args))(*shapes)


def evaluate(
    program: ClosedJaxpr | Jaxpr,
    args: Sequence[Any],
    *,
    eqns: Sequence[JaxprEqn] | None = None,
    results: Sequence[Any] | None = None,
) -> list[Any]:
    """Computes a program, with the bodies of jitted functions inlined.

    Args:
      program: the program.
      args: its arguments.
      eqns: the equations to compute, by default all.
      results: the variables to return, by default its results.
    """
    jaxpr, consts = opened(program), getattr(program, "consts", ())
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    get = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
    for eqn in jaxpr.eqns if eqns is None else eqns:
        reads = [get(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        with eqn.ctx.manager:
            if name in _CALLS:
                made = evaluate(eqn.params[_CALLS[name]], reads)
            else:
                made = eqn.primitive.bind(*reads, **eqn.primitive.get_bind_params(eqn.params))
                made = list(made) if eqn.primitive.multiple_results else [made]
        values |= zip(eqn.outvars, made, strict=True)
    return [get(atom) for atom in (jaxpr.outvars if results is None else results)]
