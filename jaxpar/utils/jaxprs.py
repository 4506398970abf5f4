"""The equations of a jaxpr, also of the jaxprs inside it."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


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


def opened(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Returns a jaxpr without its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def has_checkpoint_name(jaxpr: Jaxpr, name: str) -> bool:
    """Whether the jaxpr gives a value this name, as :func:`jax.ad_checkpoint.checkpoint_name` does.

    >>> import jax
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> jaxpr = jax.make_jaxpr(jax.checkpoint(lambda x: checkpoint_name(x, "scores")))(1.0).jaxpr
    >>> has_checkpoint_name(jaxpr, "scores"), has_checkpoint_name(jaxpr, "score")
    (True, False)
    """
    return any(eqn.primitive.name == "name" and eqn.params["name"] == name for eqn in equations(jaxpr))
