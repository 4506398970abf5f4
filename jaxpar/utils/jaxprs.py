"""The equations of a jaxpr, also of the jaxprs inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType, NamedSharding


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr | ClosedJaxpr]:
    """Returns the jaxprs among an equation's parameters: those that it calls, loops over or chooses from."""
    values = [v for value in eqn.params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
    return [value for value in values if isinstance(value, Jaxpr | ClosedJaxpr)]


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields every equation of a jaxpr, each before those inside it.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(jax.jit(lambda x: jax.numpy.sin(x) + 1))(1.0).jaxpr
    >>> [eqn.primitive.name for eqn in equations(jaxpr)]
    ['jit', 'sin', 'add']
    """
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(opened(inner))


def sizes_of(atom: Any) -> tuple[int, ...]:
    """Returns the sizes of the dims of a variable or literal; none for what is no array."""
    return tuple(getattr(atom.aval, "shape", ()))


def opened(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Returns a jaxpr without its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def inlined(jaxpr: Jaxpr, *, remat: bool = False) -> Jaxpr:
    """Returns a jaxpr with the bodies of jitted functions in place of their calls, also inside loops and branches.

    Arrays that a jitted function captures become literals, as in a scan, which takes no constants. Functions with
    shardings or compiler options of their own remain calls; so do the bodies of custom derivatives.

    Args:
      jaxpr: the program.
      remat: whether functions that are recomputed are inlined too, so that they are no longer; not inside loops.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: jax.jit(jax.numpy.sin)(x) + 1)(1.0).jaxpr
    >>> [eqn.primitive.name for eqn in inlined(jaxpr).eqns]
    ['sin', 'add']
    """
    eqns: list[JaxprEqn] = []
    names: dict[Any, Any] = {}
    _inline(jaxpr, names, eqns, top=True, remat=remat)
    outvars = [names.get(atom, atom) if isinstance(atom, Var) else atom for atom in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, outvars=outvars)


def _inline(jaxpr: Jaxpr, names: dict[Any, Any], eqns: list[JaxprEqn], *, top: bool, remat: bool) -> None:
    """Add the equations of a jaxpr, whose variables are known by ``names``; those of calls are new."""
    for eqn in jaxpr.eqns:
        reads = [names.get(atom, atom) if isinstance(atom, Var) else atom for atom in eqn.invars]
        body = _inlinable(eqn, remat)
        if body is not None:
            inner = dict(zip(opened(body).invars, reads, strict=True)) | _literals(body)
            _inline(opened(body), inner, eqns, top=False, remat=remat)
            results = [inner[atom] if isinstance(atom, Var) else atom for atom in opened(body).outvars]
            names |= zip(eqn.outvars, results, strict=True)
            continue
        makes = eqn.outvars if top else [Var(var.aval) for var in eqn.outvars]
        names |= {} if top else dict(zip(eqn.outvars, makes, strict=True))
        eqns.append(eqn.replace(invars=reads, outvars=makes, params=_inlined_params(eqn)))


def _literals(body: Jaxpr | ClosedJaxpr) -> dict[Any, Any]:
    """The constants of a function as literals, by their variables."""
    pairs = zip(opened(body).constvars, getattr(body, "consts", ()), strict=True)
    return {var: Literal(x, var.aval) for var, x in pairs}


def _inlinable(eqn: JaxprEqn, remat: bool) -> Jaxpr | ClosedJaxpr | None:
    """The body of a call that means no more than its equations."""
    params = eqn.params
    if remat and eqn.primitive.name in ("remat2", "checkpoint"):
        return opened(params["jaxpr"])
    if eqn.primitive.name not in ("jit", "pjit", "closed_call", "core_call"):
        return None
    body = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    own = any(type(one).__name__ != "UnspecifiedValue" for one in shardings) or params.get("compiler_options_kvs")
    return None if own else body


def _inlined_params(eqn: JaxprEqn) -> dict[str, Any]:
    """The parameters of a loop, branch or recomputed function, with its bodies inlined."""
    if eqn.primitive.name not in ("scan", "while", "cond", "remat2", "checkpoint"):
        return dict(eqn.params)
    changed = {}
    for key, value in eqn.params.items():
        several = isinstance(value, tuple | list)
        bodies = [with_inlined(x) for x in (value if several else (value,))]
        changed[key] = (tuple(bodies) if isinstance(value, tuple) else bodies) if several else bodies[0]
    return changed


def with_inlined(x: Any, *, remat: bool = False) -> Any:
    """Returns a jaxpr, closed or not, as :func:`inlined` does, and anything else as it is."""
    # Before jax 0.12 a ClosedJaxpr contains a Jaxpr; since then both are one class.
    if isinstance(x, Jaxpr):
        return inlined(x, remat=remat)
    return ClosedJaxpr(inlined(x.jaxpr, remat=remat), x.consts) if isinstance(x, ClosedJaxpr) else x


def explicit_sharding(atom: Any) -> NamedSharding | None:
    """Returns the sharding in the type of a variable, or ``None`` if its mesh has no Explicit axes."""
    sharding: NamedSharding | None = getattr(atom.aval, "sharding", None)
    return sharding if sharding is not None and AxisType.Explicit in sharding.mesh.axis_types else None


def spliced(function: Callable[..., Any], reads: Sequence[Any], source: Any) -> tuple[list[JaxprEqn], list[Any]]:
    """Returns the equations that compute ``function`` of variables of another program, and those of its results.

    Args:
      function: a function of arrays that returns an array, or a sequence of them.
      reads: the variables, and literals, that it is called with.
      source: the source information of the new equations.
    """
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, sharding=explicit_sharding(x)) for x in reads]
    closed = jax.make_jaxpr(function)(*shapes)
    traced = opened(closed)
    inside: dict[Any, Any] = dict(zip(traced.invars, reads, strict=True))
    inside |= {var: Literal(x, var.aval) for var, x in zip(traced.constvars, closed.consts, strict=True)}
    read = lambda atom: inside.get(atom, atom) if isinstance(atom, Var) else atom
    eqns = [eqn.replace(invars=[*map(read, eqn.invars)], source_info=source) for eqn in traced.eqns]
    return eqns, [*map(read, traced.outvars)]


def has_checkpoint_name(jaxpr: Jaxpr, name: str) -> bool:
    """Whether the jaxpr gives a value this name, as :func:`jax.ad_checkpoint.checkpoint_name` does.

    >>> import jax
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> jaxpr = jax.make_jaxpr(jax.checkpoint(lambda x: checkpoint_name(x, "scores")))(1.0).jaxpr
    >>> has_checkpoint_name(jaxpr, "scores"), has_checkpoint_name(jaxpr, "score")
    (True, False)
    """
    return any(eqn.primitive.name == "name" and eqn.params["name"] == name for eqn in equations(jaxpr))


def needed_equations(
    jaxpr: Jaxpr,
    results: Iterable[Any],
    reads_of: Callable[[JaxprEqn], Iterable[Any]] = lambda eqn: eqn.invars,
    *,
    effects: bool = True,
) -> list[JaxprEqn]:
    """Returns the equations that these variables depend on, in order.

    Args:
      jaxpr: the program.
      results: the variables; constants among them are left out.
      reads_of: the operands of an equation.
      effects: whether equations with effects are needed too.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: (jax.numpy.sin(x), x + 1))(1.0).jaxpr
    >>> [eqn.primitive.name for eqn in needed_equations(jaxpr, jaxpr.outvars[1:])]
    ['add']
    """
    needed, kept = {atom for atom in results if isinstance(atom, Var)}, list[JaxprEqn]()
    for eqn in reversed(jaxpr.eqns):
        if (effects and eqn.effects) or needed.intersection(eqn.outvars):
            needed.update(atom for atom in reads_of(eqn) if isinstance(atom, Var))
            kept.append(eqn)
    return kept[::-1]


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns how many operands of a scan are the same in all its steps, and how many are carried to the next step.

    All others are stacked: they have one more leading dim outside of the scan than inside.
    """
    body = opened(eqn.params["jaxpr"])
    rank = lambda atom: len(sizes_of(atom))
    carries = sum(rank(a) == rank(b) for a, b in zip(eqn.outvars, body.outvars, strict=True))
    return sum(rank(a) == rank(b) for a, b in zip(eqn.invars, body.invars, strict=True)) - carries, carries


def follow[T](
    jaxpr: Jaxpr,
    given: Sequence[T],
    nothing: T,
    rule: Callable[[JaxprEqn, list[T]], Iterable[T]],
    consts: T | None = None,
) -> list[T]:
    """Returns what is known of a jaxpr's results, from what is known of its arguments.

    Args:
      jaxpr: the program.
      given: what is known of its arguments.
      nothing: what is known of literals, and of constants without ``consts``.
      rule: ``rule(eqn, operands)``: what is known of an equation's results.
      consts: what is known of its constants.
    """
    known: dict[Any, T] = dict(zip(jaxpr.invars, given, strict=True))
    known |= dict.fromkeys(jaxpr.constvars, nothing if consts is None else consts)
    get = lambda atom: nothing if isinstance(atom, Literal) else known[atom]
    for eqn in jaxpr.eqns:
        known |= zip(eqn.outvars, rule(eqn, [get(atom) for atom in eqn.invars]), strict=True)
    return [get(atom) for atom in jaxpr.outvars]


def follow_loop[T](
    run: Callable[[list[frozenset[T]]], list[frozenset[T]]], operands: list[frozenset[T]], consts: int, carries: int
) -> list[frozenset[T]]:
    """Returns what is known of a loop's results: of its carry, which grows until it stays, and of all others.

    Args:
      run: what is known of the results of one step, from what is known of its operands.
      operands: what is known of the loop's operands: constants, then those that it carries, then those of each step.
      consts, carries: the numbers of the first two.
    """
    while True:
        results, carried = run(operands), operands[consts : consts + carries]
        grown = [old | new for old, new in zip(carried, results[:carries], strict=True)]
        if grown == carried:
            return [*grown, *results[carries:]]
        operands = [*operands[:consts], *grown, *operands[consts + carries :]]
