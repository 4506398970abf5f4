"""A step made for ``jax.pmap``, on the global batch: its collectives keep the meaning that they have there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxpar.errors import LayoutError, ModelError
from jaxpar.utils.jaxprs import equations, inner_jaxprs, opened

_OTHER = 1_000_003
"""A size of the axis that no number in a step is by chance."""


def over_one(run: Callable[..., Any], axis_name: str, size: int) -> Callable[..., Any]:
    """Returns a function that runs on the global batch inside of a mapped axis whose elements are all the same."""

    def over(out_axes: int | None, *arrays: Any) -> Any:
        return jax.vmap(lambda _: run(*arrays), None, out_axes, axis_name=axis_name, axis_size=size)(0)

    def one(*arrays: Any) -> Any:
        try:
            return over(None, *arrays)
        except ValueError:  # the results depend on axis_index
            return jax.tree.map(lambda x: x[0], over(0, *arrays))

    return one


def trace_local(run: Callable[..., Any], shapes: Sequence[Any], axis_name: str, size: int) -> ClosedJaxpr:
    """Returns the program of one of several devices, with its collectives."""
    return jax.make_jaxpr(run, axis_env=[(axis_name, size)])(*shapes)


def size_of_means(run: Callable[..., Any], shapes: Sequence[Any], axis_name: str) -> int | None:
    """Returns the size of the axis over which a step computes on the global batch what it computes under ``pmap``.

    It is one for means, which are then those of the global batch, beside which a step may read its index, to draw
    numbers of its own. For sums that are divided by ``jax.device_count()`` it is that number. There is none for others.
    """
    count = jax.device_count()
    traced = opened(trace_local(run, shapes, axis_name, count))
    if not _only_means(traced, axis_name, ()):
        return None
    other = opened(trace_local(run, shapes, axis_name, _OTHER))
    if _only_means(other, axis_name, (_OTHER,)):
        return 1
    reads_index = any(eqn.primitive.name == "axis_index" for eqn in equations(traced))
    return count if not reads_index and _only_means(other, axis_name, (_OTHER, count)) else None


def _only_means(jaxpr: Jaxpr, axis_name: str, divisors: tuple[int, ...]) -> bool:
    """Whether all collectives are sums that are divided by one of these numbers, if any, before or after.

    The derivative of a mean is divided before it is summed.
    """
    names = lambda eqn: (eqn.params.get("axes"), eqn.params.get("axis_name"))
    divided = {eqn.outvars[0] for eqn in jaxpr.eqns if _divides(eqn, divisors)}
    for eqn in jaxpr.eqns:
        if not all(_only_means(opened(body), axis_name, divisors) for body in inner_jaxprs(eqn)):
            return False
        mapped = any(axis_name in (axes if isinstance(axes, tuple) else (axes,)) for axes in names(eqn))
        if not mapped or eqn.primitive.name == "axis_index":
            continue
        if not eqn.primitive.name.startswith("psum"):
            return False
        for x, total in zip(eqn.invars, eqn.outvars, strict=True) if divisors else ():
            uses = [use for use in jaxpr.eqns if any(atom is total for atom in use.invars)]
            after = all(_divides(use, divisors) for use in uses) and not any(atom is total for atom in jaxpr.outvars)
            if not after and (isinstance(x, Literal) or x not in divided):
                return False
    return True


def _divides(eqn: JaxprEqn, divisors: tuple[int, ...]) -> bool:
    by = eqn.invars[-1] if eqn.primitive.name == "div" else None
    return isinstance(by, Literal) and by.val in divisors


def over_devices(
    run: Callable[..., Any], axis_name: str, split: Collection[int], state: Collection[int], paths: Sequence[str]
) -> Callable[..., Any]:
    """Returns a step that runs on an equal part of the batch for each device, as under ``jax.pmap``.

    Args:
      run: the step of one device, from arrays to arrays.
      axis_name: of the axis of all devices.
      split: the arguments that hold the batch.
      state: the results that are state, which must be equal on all devices.
      paths: the paths of the results.

    Returns:
      The step. Of other results that differ, floating-point scalars are averaged, and arrays are concatenated.

    Raises:
      LayoutError: the devices do not divide the batch.
      ModelError: state differs between devices.
    """
    count = jax.device_count()

    def step(*arrays: Any) -> list[Any]:
        rows = {i: arrays[i].shape[0] for i in split}
        if any(size % count for size in rows.values()):
            raise LayoutError(
                f"axis_name={axis_name!r}: the {count} devices do not divide a batch of {max(rows.values())} rows, "
                f"which a collective of the step needs. Remedy: pass batches of a multiple of {count} rows."
            )
        parts = [x.reshape(count, x.shape[0] // count, *x.shape[1:]) if i in split else x for i, x in enumerate(arrays)]
        in_axes = [0 if i in split else None for i in range(len(arrays))]
        differs: list[bool] = []

        def watched(*parts: Any) -> Any:
            results = run(*parts)
            differs[:] = [type(x).__name__ == "BatchTracer" for x in results]
            return results

        mapped = lambda run, out_axes: jax.vmap(run, in_axes, out_axes, axis_name=axis_name, axis_size=count)
        jax.eval_shape(mapped(watched, 0), *parts)
        apart = [paths[j] for j in state if differs[j]]
        if apart:
            raise ModelError(
                f"axis_name={axis_name!r}: {apart[0]} may differ between devices ({len(apart)} arrays of the state), "
                "as no collective outside of loops makes it one. Remedy: average the gradients and the statistics, as "
                f"in jax.lax.pmean(grads, {axis_name!r})."
            )
        results = mapped(run, [0 if one else None for one in differs])(*parts)
        return [_merged(x) if one else x for x, one in zip(results, differs, strict=True)]

    return step


def _merged(x: Any) -> Any:
    if x.ndim == 1:
        return x.mean(0) if jnp.issubdtype(x.dtype, jnp.inexact) else x
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
