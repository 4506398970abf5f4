"""Splits a backward in two: cotangents of inputs now, gradients of weights later (Qi et al. 2023, arXiv:2401.10241).

The jaxpr of a layer's backward is split by equations. The first half has the equations that the cotangent of the input
needs, the second half the remaining products. The values that the second half reads from the first are stored in
between; :mod:`jaxpar.parallel.pipeline.executor.min_cut` minimizes their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxpar.parallel.pipeline.executor.frozen import trained_part
from jaxpar.parallel.pipeline.executor.layer_inputs import bits, keys_again
from jaxpar.parallel.pipeline.executor.min_cut import least_kept

_OPENED = frozenset(("remat2", "checkpoint", "pjit", "jit", "closed_call", "core_call", "custom_jvp_call"))
"""Primitives that only wrap a jaxpr, which is inlined."""


@dataclass(frozen=True)
class Halves:
    """The two halves of ``pull(weights, kept, side, cotangent) -> (gradients, cotangent)``.

    Attributes:
      closed: the jaxpr of ``pull``, inlined.
      first, second: the equations of each half.
      between: the variables to store between the halves.
      sizes: the number of leaves in ``weights``, ``kept`` and ``side``.
      structure: the pytree structure of the gradients.
    """

    closed: ClosedJaxpr
    first: tuple[JaxprEqn, ...]
    second: tuple[JaxprEqn, ...]
    between: tuple[Var, ...]
    sizes: tuple[int, int, int]
    structure: Any

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the values to store between the halves."""
        avals: list[Any] = [v.aval for v in self.between]
        return [jax.eval_shape(bits, jax.ShapeDtypeStruct(aval.shape, aval.dtype)) for aval in avals]

    def inputs(
        self, weights: Any, kept: Sequence[Any], side: Any, cotangent: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Runs the first half; returns the cotangent of the input and the values to store."""
        jaxpr = self.closed.jaxpr
        env = self._env(jaxpr.invars, [*jax.tree.leaves(weights), *kept, *jax.tree.leaves(side), cotangent])
        _run(self.first, env)
        return _value(jaxpr.outvars[-1], env), [bits(env[v]) for v in self.between]

    def weights(self, weights: Any, side: Any, found: Sequence[jax.Array]) -> Any:
        """Runs the second half on the stored values ``found``; returns the gradients."""
        jaxpr, (n_weights, n_kept, n_side) = self.closed.jaxpr, self.sizes
        stored = [keys_again(x, v.aval) for v, x in zip(self.between, found, strict=True)]
        sides = jaxpr.invars[n_weights + n_kept : n_weights + n_kept + n_side]
        known = [*jaxpr.invars[:n_weights], *sides, *self.between]
        env = self._env(known, [*jax.tree.leaves(weights), *jax.tree.leaves(side), *stored])
        _run(self.second, env)
        return jax.tree.unflatten(self.structure, [_value(v, env) for v in jaxpr.outvars[:-1]])

    def _env(self, variables: Sequence[Var], values: Sequence[Any]) -> dict[Var, Any]:
        """Returns the values of variables, with those of the constants."""
        closed = self.closed
        return dict(zip([*closed.jaxpr.constvars, *variables], [*closed.consts, *values], strict=True))


def halves(
    pull: Callable[..., tuple[Any, jax.Array]], weights: Any, kept: Sequence[Any], side: Any, cotangent: Any
) -> Halves:
    """Traces ``pull(weights, kept, side, cotangent)`` and splits it into two halves.

    Args:
      pull: returns the gradients of the weights and the cotangent of the input.
      weights, kept, side, cotangent: its arguments, or their shapes.
    """
    ws, sides, structure = jax.tree.leaves(weights), jax.tree.leaves(side), jax.tree.structure(weights)
    side_structure = jax.tree.structure(side)

    def flat(*leaves: Any) -> list[Any]:
        weight_leaves, rest = leaves[: len(ws)], leaves[len(ws) :]
        side_tree = jax.tree.unflatten(side_structure, rest[len(kept) : len(kept) + len(sides)])
        grads, before = pull(jax.tree.unflatten(structure, weight_leaves), list(rest[: len(kept)]), side_tree, rest[-1])
        return [*jax.tree.leaves(grads), before]

    closed = jax.make_jaxpr(flat)(*ws, *kept, *sides, cotangent)
    closed = jax.make_jaxpr(lambda *args: _opened(closed.jaxpr, closed.consts, args))(*ws, *kept, *sides, cotangent)
    jaxpr = closed.jaxpr
    sides_from = len(ws) + len(kept)
    free = {*jaxpr.constvars, *jaxpr.invars[: len(ws)], *jaxpr.invars[sides_from : sides_from + len(sides)]}
    gradients, before = jaxpr.outvars[:-1], jaxpr.outvars[-1]
    saved = least_kept(jaxpr, free, gradients, _needed(jaxpr.eqns, [before], set()))
    first = _needed(jaxpr.eqns, [before, *saved], set())
    second = _needed(jaxpr.eqns, gradients, set(saved))
    read = {v for e in second for v in e.invars if isinstance(v, Var)} | {v for v in gradients if isinstance(v, Var)}
    between = tuple(v for v in saved if v in read)
    sizes, of_grads = (len(ws), len(kept), len(sides)), jax.tree.structure(trained_part(weights))
    return Halves(closed, tuple(first), tuple(second), between, sizes, of_grads)


def _needed(equations: Sequence[JaxprEqn], results: Sequence[Any], known: AbstractSet[Var]) -> list[JaxprEqn]:
    """Returns the equations on which the ``results`` depend, in order, if some values are ``known``."""
    needed = {v for v in results if isinstance(v, Var)} - known
    found = []
    for equation in reversed(equations):
        if any(v in needed for v in equation.outvars):
            found.append(equation)
            needed |= {v for v in equation.invars if isinstance(v, Var)} - known
    return found[::-1]


def _opened(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr, with wrapped jaxprs inlined."""
    env: dict[Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if equation.primitive.name in _OPENED and inner is not None:
            body, given = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, [])
            values = _opened(body, given, [_value(v, env) for v in equation.invars])
            env.update(zip(equation.outvars, values, strict=True))
        else:
            _run([equation], env)
    return [_value(v, env) for v in jaxpr.outvars]


def _run(equations: Sequence[JaxprEqn], env: dict[Var, Any]) -> None:
    for equation in equations:
        parameters = equation.primitive.get_bind_params(equation.params)
        functions, parameters = parameters if isinstance(parameters, tuple) else ((), parameters)
        values = equation.primitive.bind(*functions, *(_value(v, env) for v in equation.invars), **parameters)
        env.update(zip(equation.outvars, values if equation.primitive.multiple_results else [values], strict=True))


def _value(v: Any, env: dict[Var, Any]) -> Any:
    return v.val if isinstance(v, Literal) else env[v]
