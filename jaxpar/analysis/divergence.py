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

        def note(site: str, dims: Sequence[str | None], x: Any, _: Any, trace: list[Any] = trace) -> None:
            trace.append((site, dims, np.asarray(jax.device_get(x))))

        with layout, jax.disable_jit(), hint_observer(note):
            loss_of(loss_fn, state, batch)(state.params)
        traces.append(trace)
    # A layout may run other code than one device in places, so only calls that both make are compared.
    keys = [[(place, tuple(dims), x.shape) for place, dims, x in trace] for trace in traces]
    same = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks()
    pairs = [(m.a + i, m.b + i) for m in same for i in range(m.size)]
    for number, ((place, dims, a), b) in ((i + 1, (traces[0][i], traces[1][j][2])) for i, j in pairs):
        gap = float(np.abs(a - b).max(initial=0)) / max(float(np.abs(a).max(initial=0)), 1e-30)
        if not gap <= bound:  # true for NaN
            called = sum(earlier == place for earlier, _, _ in traces[0][:number])
            named = ", ".join(map(str, dims))
            return f"{place} ({named}), call {called}: its activation differs by {gap:.2e}"
    return None


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
    found: list[str] = []
    calls: dict[str, int] = {}
    unseen: list[str] = []

    def note(site: str, dims: Sequence[str | None], x: Any, _: Any) -> None:
        calls[site] = calls.get(site, 0) + 1
        if isinstance(x, jax.core.Tracer):  # an annotated loss is traced, and then run by its operations
            unseen.append(site)
        elif not found and not _finite(x):
            found.append(f"{site} ({', '.join(map(str, dims))}), call {calls[site]}")

    compute = lambda params: loss_of(loss_fn, state, batch)(jax.tree.map(precision.computing, params))[0]
    with layout, jax.disable_jit(), hint_observer(note):
        loss = compute(state.params)
    if found:
        return found[0]
    if not _finite(loss):
        return f"the loss; {'the parameters are' if unseen else 'every activation is'} finite"
    with layout:
        grads = jax.jit(jax.grad(compute))(state.params)
    bad = [show(path) for path, leaf in leaves_with_paths(grads) if not _finite(leaf)]
    if bad:
        more = f" and of {len(bad) - 1} more" if len(bad) > 1 else ""
        return (
            f"the gradient of {bad[0]}{more}; {'the loss is' if unseen else 'every activation and the loss are'} finite"
        )
    return "the norm of the gradients, which overflows; each of them is finite"


def _finite(x: Any) -> bool:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return bool(jnp.isfinite(x).all())  # the other processes hold the other shards and call this too
    return bool(np.all(np.isfinite(np.asarray(jax.device_get(x)).astype(np.float32))))
