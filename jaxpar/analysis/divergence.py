"""Finds the first activation of a step that differs from one device's, or that is not finite."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.parallel.precision.policy import Precision
from jaxpar.sharding.layout import Layout
from jaxpar.training.loss import loss_of
from jaxpar.training.model import leaves_with_paths, show
from jaxpar.utils.contexts import hint_observer


def first_divergence(
    layouts: Sequence[Layout], states: Sequence[Any], batches: Sequence[Any], loss_fn: Callable[..., Any], bound: float
) -> str | None:
    """Returns the first activation of the forward pass that differs between two layouts, as text; ``None`` if all
    agree.

    The model's ``constrain`` and ``hint`` calls are the probes. The forward pass runs without jit, so a scan runs its
    body once per layer and the calls come in program order.

    Args:
      layouts, states, batches: those of the reference, then those of the other layout.
      loss_fn: as for :func:`jaxpar.train_step`.
      bound: the largest difference allowed, relative to the largest entry of an activation.
    """
    traces: list[list[tuple[str, Sequence[str | None], np.ndarray]]] = []
    for layout, state, batch in zip(layouts, states, batches, strict=True):
        trace: list[tuple[str, Sequence[str | None], np.ndarray]] = []
        keep = lambda site, dims, x, trace=trace: trace.append((site, dims, np.asarray(jax.device_get(x))))
        _probe(layout, lambda: loss_of(loss_fn, state, batch)(state.params), keep)  # noqa: B023
        traces.append(trace)
    # A layout may run other code than one device in places, so only calls that both make are compared.
    keys = [[(place, tuple(dims), x.shape) for place, dims, x in trace] for trace in traces]
    same = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks()
    pairs = [(m.a + i, m.b + i) for m in same for i in range(m.size)]
    # Rounding changes an integer or a choice by more than the bound.
    is_float = lambda x: bool(jnp.issubdtype(x.dtype, jnp.inexact))
    for i, j in sorted(pairs, key=lambda pair: not is_float(traces[0][pair[0]][2])):
        (place, dims, a), b = traces[0][i], traces[1][j][2]
        gap = difference(a, b, nan_equal=True) / max(size(a), 1e-30)
        if not gap <= bound:  # true for NaN
            called = sum(earlier == place for earlier, _, _ in traces[0][: i + 1])
            named = ", ".join(map(str, dims))
            return f"{place} ({named}), call {called}: its activation differs by {gap:.2e}"
    return None


def difference(a: np.ndarray, b: np.ndarray, *, nan_equal: bool = False) -> float:
    """Returns the largest difference of two arrays of numbers; equal infinities do not differ.

    Args:
      a, b: the arrays, of one shape and any dtype.
      nan_equal: whether two NaN do not differ either; otherwise the result is NaN.
    """
    a, b = (x.astype(np.promote_types(x.dtype, np.float64) if x.dtype.kind in "biufc" else np.float64) for x in (a, b))
    same = (a == b) | (nan_equal & np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        return float(np.abs(np.where(same, 0, a - b)).max(initial=0))


def size(x: np.ndarray) -> float:
    """Returns the largest finite entry of an array of numbers, without its sign."""
    x = np.abs(x if x.dtype.kind in "iufc" else x.astype(np.float64))
    return float(x.max(initial=0, where=np.isfinite(x)))


def _probe[T](layout: Layout, run: Callable[[], T], visit: Callable[[str, Sequence[str | None], Any], None]) -> T:
    """Runs a function without jit, and calls ``visit(place, dims, x)`` for the values of its hints, in their order.

    A loss whose names were found is traced before its operations run one by one, so its hints see tracers, and become
    operations that call back.
    """

    def note(site: str, dims: Sequence[str | None], x: Any, _: Any) -> None:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return
        if not isinstance(x, jax.core.Tracer):
            visit(site, dims, x)
        elif jax.process_count() == 1:  # a callback gets no arrays whose shards other processes hold
            jax.debug.callback(lambda value: visit(site, dims, value), x)

    with layout, jax.disable_jit(), hint_observer(note):
        result = run()
        jax.effects_barrier()
    return result


def first_nonfinite(
    layout: Layout, state: Any, batch: Any, loss_fn: Callable[..., Any], precision: Precision | None = None
) -> str:
    """Returns the first place at which a step's numbers are not finite, as text.

    The places are, in order: parameters, activations, loss, gradients, the norm of the gradients. The probes are the
    model's ``constrain`` and ``hint`` calls, as for :func:`first_divergence`.

    Args:
      layout, state, batch: of the step.
      loss_fn: as for :func:`jaxpar.train_step`.
      precision: that of the step.
    """
    for path, leaf in leaves_with_paths(state.params):
        if not _finite(leaf):
            return f"the parameter {show(path)} is not finite before the step"
    precision = precision or Precision()
    places: list[str] = []
    calls: dict[str, int] = {}

    def note(site: str, dims: Sequence[str | None], x: Any) -> None:
        calls[site] = calls.get(site, 0) + 1
        if not places and not _finite(x):
            places.append(f"{site} ({', '.join(map(str, dims))}), call {calls[site]}")

    compute = lambda params: loss_of(loss_fn, state, batch)(jax.tree.map(precision.computing, params))[0]
    loss = _probe(layout, lambda: compute(state.params), note)
    if places:
        return places[0]
    seen = "every activation" if calls else "the parameters"
    if not _finite(loss):
        return f"the loss; {seen} {'is' if calls else 'are'} finite"
    with layout:
        grads = jax.jit(jax.grad(compute))(state.params)
    bad = [show(path) for path, leaf in leaves_with_paths(grads) if not _finite(leaf)]
    if bad:
        more = f" and of {len(bad) - 1} more" if len(bad) > 1 else ""
        return f"the gradient of {bad[0]}{more}; {f'{seen} and the loss are' if calls else 'the loss is'} finite"
    return "the norm of the gradients, which overflows; each of them is finite"


def _finite(x: Any) -> bool:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return bool(jnp.isfinite(x).all())  # the other processes hold the other shards and call this too
    return bool(np.all(np.isfinite(np.asarray(jax.device_get(x)).astype(np.float32))))
