"""Float sums in a fixed order, so that initial values do not depend on the layout.

XLA chooses the order of a float sum by how the summed dim is sharded, and the order changes the last bits.
``w - w.mean(0)`` therefore differs in those bits between layouts. :func:`in_fixed_order` traces a function and
evaluates the trace with each such sum written as a binary tree of elementwise adds, which XLA does not reorder.

Only the size of the dim determines the tree. A dim of size ``2**k * m``, ``m`` odd, is ``2**k`` blocks of ``m``
elements: first each block is summed, then neighbouring blocks in pairs, ``k`` times. With ``2**j`` equal shards each
shard holds full blocks, so devices exchange only one partial sum per shard, and no device holds the full array.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxpar.utils.jaxprs import equations, follow, follow_loop, inner_jaxprs, needed_equations, opened, scan_counts

Causes = frozenset[str]
"""Names of the primitives that a value depends on whose float result depends on the order of their operands."""

_SUMS = frozenset(("reduce_sum", "reduce_prod", "cumsum", "cumprod"))
_MIXES = frozenset(
    ("reduce_max", "reduce_min", "cummax", "cummin", "sort", "rev", "slice", "dynamic_slice", "gather", "split")
)

FIXED = _SUMS | _MIXES
"""Primitives through which an element depends on other elements.

Sums are evaluated in a fixed order. The other primitives do not round, but XLA compiles the readers of their result by
the size of a shard: it turns a division by a broadcast array into a product with the reciprocal, unless the shard has
one element along the broadcast dims. In a program with any of these primitives, every division is therefore written as
that product.
"""

ONE_CODE = {"xla_cpu_use_new_xtile_lowering": False, "xla_cpu_enable_platform_dependent_math": False}
"""XLA:CPU options for a program with sums in a fixed order, in addition to ``xla_backend_optimization_level`` 0.

By default XLA has two implementations of ``exp``, ``log`` and ``rsqrt`` that differ in the last bit. It chooses by a
shard's size and memory order, which a collective may change.
"""

_OTHERS = frozenset((
    "dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "cumlogsumexp", "scatter-add",
    "scatter_add", "scatter-sub", "scatter_sub", "scatter-mul", "scatter_mul", "scatter-apply", "reduce",
    "reduce_window", "reduce_window_sum", "select_and_scatter", "select_and_scatter_add", "select_and_gather_add",
    "triangular_solve", "fft", "psum", "psum_invariant", "psum_scatter", "reduce_scatter", "ffi_call",
    "pallas_call",
))  # fmt: skip
_CALLS = frozenset((
    "jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "remat2", "checkpoint", "custom_jvp_call",
    "custom_vjp_call",
))  # fmt: skip
_LOOPS = frozenset(("scan", "while", "cond"))
_MOVES = frozenset((
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "slice", "dynamic_slice", "concatenate",
    "pad", "rev", "gather", "select_n", "copy", "stack", "unstack", "split", "stop_gradient", "neg", "max", "min",
    "sort", "optimization_barrier",
))  # fmt: skip
"""Primitives that do not round."""


def in_fixed_order[T, U](f: Callable[..., tuple[T, U]], *args: Any) -> tuple[tuple[T, U], list[Causes]]:
    """Returns ``f(*args)``, a pair of pytrees, with the float sums behind the first one in a fixed order.

    If the first pytree depends on no primitive of :data:`FIXED`, the operations are exactly those of ``f``. ``f`` is
    traced once.

    Args:
      f: the function.
      args: its arguments, pytrees of arrays.

    Returns:
      The pair, and for each leaf of the first pytree the order-dependent primitives that it depends on. Those of
      :data:`FIXED` have been evaluated in a fixed order.
    """
    traced, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    flat, count = jax.tree.leaves(args), len(jax.tree.leaves(shapes[0]))
    found = causes(traced.jaxpr, [frozenset()] * len(flat))[:count]
    if any(names & FIXED for names in found):
        leaves = _evaluate(traced.jaxpr, traced.consts, flat)
    else:
        leaves = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *flat)
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves), found


def causes(jaxpr: Jaxpr, given: Sequence[Causes]) -> list[Causes]:
    """Returns the causes of each result of ``jaxpr``, if ``given`` are those of its operands."""
    return follow(jaxpr, given, frozenset(), _causes_of)


def _causes_of(eqn: JaxprEqn, given: list[Causes]) -> list[Causes]:
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        return causes(opened(inner_jaxprs(eqn)[0]), given)
    if name == "cond":
        outs = [causes(branch.jaxpr, given[1:]) for branch in params["branches"]]
        return [given[0].union(*found) for found in zip(*outs, strict=True)]
    if name == "while":
        skipped, consts = params["cond_nconsts"], params["body_nconsts"]
        run = functools.partial(causes, params["body_jaxpr"].jaxpr)
        carried = follow_loop(run, given[skipped:], consts, len(given) - skipped - consts)
        (stops,) = causes(params["cond_jaxpr"].jaxpr, [*given[:skipped], *carried])
        return [found | stops for found in carried]
    if name == "scan":
        return follow_loop(functools.partial(causes, params["jaxpr"].jaxpr), given, *scan_counts(eqn))
    through: Causes = frozenset().union(*given)
    for inner in (inner for program in inner_jaxprs(eqn) for inner in equations(opened(program))):
        through = through.union(*(_own_cause(inner, var) for var in inner.outvars))
    return [through | _own_cause(eqn, var) for var in eqn.outvars]


def _own_cause(eqn: JaxprEqn, out: Any) -> Causes:
    """Returns the primitive's name if its float result depends on the order of its operands, else an empty set."""
    name, params = eqn.primitive.name, eqn.params
    if name not in FIXED | _OTHERS or not _is_float(out.aval):
        return frozenset()
    shape = getattr(eqn.invars[0].aval, "shape", ()) if eqn.invars else ()
    terms = 3
    if name in _MIXES:
        terms = 3 if math.prod(shape) > 1 else 1
    elif name.startswith("reduce_") and "axes" in params:
        terms = math.prod(shape[axis] for axis in params["axes"])
    elif name.startswith("cum"):
        terms = shape[params["axis"]]
    elif name == "dot_general":
        terms = 3 if math.prod(shape[dim] for dim in params["dimension_numbers"][0][0]) > 1 else 1
    elif params.get("unique_indices"):
        terms = 1
    # A sum of two terms commutes, but other values may be divided by it, so FIXED counts it too.
    return frozenset((name,)) if terms > (1 if name in FIXED else 2) else frozenset()


def _is_float(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates ``jaxpr`` with float sums in a fixed order.

    A barrier follows each operation that rounds. Without it, a compiler fuses a product with the sum that reads it,
    which rounds once instead of twice, and the layout determines which operations it fuses.
    """
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    get = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
    for eqn in needed_equations(jaxpr, jaxpr.outvars):  # Linen's init also runs the model
        with eqn.ctx.manager:
            made = _apply(eqn, [get(atom) for atom in eqn.invars])
        rounds = eqn.primitive.name not in _MOVES
        for var, value in zip(eqn.outvars, made, strict=True):
            values[var] = jax.lax.optimization_barrier(value) if rounds and _is_float(var.aval) else value
    return [get(atom) for atom in jaxpr.outvars]


def _apply(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name in _SUMS and _own_cause(eqn, eqn.outvars[0]):
        return [_fixed(name, params, args[0])]
    if _divides(eqn):  # initializers have no divisors whose reciprocal overflows (1e-39, 1e39)
        return [args[0] * jax.lax.optimization_barrier(1 / args[1])]
    programs = inner_jaxprs(eqn)
    if any(_changes(opened(program)) for program in programs):
        if name in _CALLS:
            program = programs[0]
            return _evaluate(opened(program), getattr(program, "consts", ()), args)
        if name in _LOOPS:
            rewritten = {key: _rewritten(value) for key, value in params.items()}
            return eqn.primitive.bind(*args, **rewritten)
    made = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return list(made) if eqn.primitive.multiple_results else [made]


def _divides(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "div" and _is_float(eqn.outvars[0].aval) and not isinstance(eqn.invars[1], Literal)


def _changes(jaxpr: Jaxpr) -> bool:
    """Whether :func:`_evaluate` evaluates any operation of ``jaxpr`` differently."""
    return any(_divides(eqn) or any(_own_cause(eqn, var) & FIXED for var in eqn.outvars) for eqn in equations(jaxpr))


def _rewritten(value: Any) -> Any:
    """Returns a loop's parameter with its programs in a fixed order."""
    if isinstance(value, tuple) and value and all(isinstance(program, ClosedJaxpr) for program in value):
        return tuple(map(_rewritten, value))
    if not isinstance(value, ClosedJaxpr):
        return value
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in value.in_avals]
    return jax.make_jaxpr(lambda *args: _evaluate(value.jaxpr, value.consts, args))(*shapes)


def _fixed(name: str, params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Returns a sum or product in a fixed order; 16-bit floats are summed in fp32."""
    f = jnp.add if name in ("reduce_sum", "cumsum") else jnp.multiply
    y = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    if name.startswith("cum"):
        y = jax.lax.associative_scan(f, y, reverse=params["reverse"], axis=params["axis"])
    for axis in sorted(params.get("axes", ()), reverse=True):
        y = combine(f, y, axis)
    return y.astype(x.dtype)


def combine(f: Callable[[Any, Any], jax.Array], x: jax.Array, axis: int) -> jax.Array:
    """Reduces ``x`` over ``axis`` by ``f`` in the order that the module's docstring defines; ``axis`` is dropped.

    >>> combine(jnp.add, jnp.arange(12.0).reshape(6, 2), 0)
    Array([30., 36.], dtype=float32)
    """
    size = x.shape[axis]
    if not size:
        return jnp.full(x.shape[:axis] + x.shape[axis + 1 :], 0 if f is jnp.add else 1, x.dtype)
    blocks = size & -size
    x = jnp.moveaxis(x.reshape(*x.shape[:axis], blocks, size // blocks, *x.shape[axis + 1 :]), axis + 1, 0)
    whole = 1 << (len(x).bit_length() - 1)
    if whole < len(x):  # add the elements beyond a power of 2 to the first ones
        more = len(x) - whole
        x = jnp.concatenate([_rounded(f(x[:more], x[whole:])), x[more:whole]])
    while len(x) > 1:
        x = _rounded(f(x[: len(x) // 2], x[len(x) // 2 :]))
    x = jnp.moveaxis(x[0], axis, 0)
    while len(x) > 1:
        pairs = x.reshape(len(x) // 2, 2, *x.shape[1:])
        x = _rounded(f(pairs[:, 0], pairs[:, 1]))
    return x[0]


def _rounded(x: jax.Array) -> jax.Array:
    """Returns ``x`` behind a barrier; XLA would fuse a tree's levels into one expression with a term per element."""
    return jax.lax.optimization_barrier(x)
