"""Is a layout right? The same steps on one device and in the layout, compared tensor by tensor.

Loss and gradients of every step are compared. When they part, the forward pass of that step is run again on both sides,
operation by operation, and the first activation that differs is named with the module that made it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.arrays import put
from jaxpar.layout import Layout, observing
from jaxpar.model import MakeModel, show, to_path
from jaxpar.objective import loss_of
from jaxpar.precision import Precision
from jaxpar.state import TrainState, init
from jaxpar.step import train_step

FLOOR = 1e-3
"""A tensor's differences count against its own largest entry, but at least against this part of the model's largest
gradient: a gradient that is zero by mathematics (a key bias under softmax) holds nothing but rounding noise."""


NOISE = 100
"""An element whose gradients part by more than so many bounds of its own size is told apart by rounding alone."""


@dataclass(frozen=True)
class Verdict:
    """The largest relative differences over all steps, where they were, and where the first one beyond the bound is."""

    loss: float
    gradients: float
    worst: str
    bound: float
    parameters_equal: bool
    first: str | None

    @property
    def passed(self) -> bool:
        return self.first is None


def compare(
    reference: Layout,
    layout: Layout,
    make_model: MakeModel,
    tx: optax.GradientTransformation,
    loss_fn: Callable[..., Any],
    data: Sequence[Mapping[str, np.ndarray]],
    dims: Mapping[str, Sequence[str | None]],
    *,
    bound: float,
    seed: int = 0,
    clip_norm: float | None = None,
    **options: Any,
) -> Verdict:
    """Train on ``data`` under two layouts, each from its own initial state, and compare loss and gradients of every step.

    Adam and Lion make a step of full length of any gradient, however small: where an element's gradient is nothing but rounding, and
    within the bound of its tensor, its parameter goes on from the reference's.

    Args:
      reference, layout: the two layouts; the first is taken as right.
      make_model, tx, loss_fn, seed, clip_norm: as for :func:`jaxpar.init` and :func:`jaxpar.train_step`.
      data: one batch per step, name → global array.
      dims: name → logical dims of that array.
      bound: largest relative difference allowed.
      options: others of :func:`jaxpar.train_step`, for ``layout``; the reference takes each batch at once.
    """
    with jax.default_matmul_precision("highest"):
        states = [
            init(place, make_model, tx, seed=seed, precision=more.get("precision"))
            for place, more in ((reference, {}), (layout, options))
        ]
        steps = [
            train_step(place, loss_fn, clip_norm=clip_norm, donate=False, keep_grads=True, **more)
            for place, more in ((reference, {}), (layout, options))
        ]
        pairs = zip(*(jax.tree.leaves(jax.device_get(state.params)) for state in states), strict=True)
        equal = all(np.array_equal(a, b) for a, b in pairs)
        loss, worst, where = 0.0, 0.0, "none"
        first = None if equal else "the initial parameters already differ"
        for number, batch in enumerate(data, 1):
            before = states
            inputs = [
                {name: put(place, x, *dims[name], path=f"batch/{name}") for name, x in batch.items()}
                for place in (reference, layout)
            ]
            results = [step(state, x) for step, state, x in zip(steps, states, inputs, strict=True)]
            states = [state for state, _ in results]
            (want, got) = (jax.device_get(metrics) for _, metrics in results)
            gap = abs(float(got["loss"]) - float(want["loss"])) / max(abs(float(want["loss"])), 1e-30)
            apart = gradient_gaps(want["grads"], got["grads"])
            loss = max(loss, _number(gap))
            path = max(apart, key=lambda name: apart[name])
            if apart[path] > worst:
                worst, where = apart[path], f"{path}, step {number}"
            if first is None and max(_number(gap), apart[path]) > bound:
                found = first_divergence((reference, layout), before, inputs, loss_fn, bound)
                first = f"{found or f'the gradient of {path}; every activation agrees'}, step {number}"
            states[1] = _calmed(states, want["grads"], got["grads"], bound)
    return Verdict(loss, worst, where, bound, equal, first)


def _calmed(states: Sequence[TrainState], want: Any, got: Any, bound: float) -> TrainState:
    """The second state, with the first one's number in each parameter's elements whose gradient is noise (see ``NOISE``)."""
    share = min(1.0, NOISE * bound)

    def settle(a: np.ndarray, b: np.ndarray, right: jax.Array, own: jax.Array) -> jax.Array:
        noise = np.abs(a - b) > share * np.abs(a)
        return jax.device_put(np.where(noise, right, own), own.sharding) if noise.any() else own

    return replace(states[1], params=jax.tree.map(settle, want, got, *(state.params for state in states)))


def gradient_gaps(want: Any, got: Any) -> dict[str, float]:
    """Path → largest relative difference of each gradient tensor (see ``FLOOR``); infinite where one is not finite."""
    scale = max(float(np.abs(leaf).max(initial=0)) for leaf in jax.tree.leaves(want))
    least = max(FLOOR * scale, float(np.finfo(np.float32).tiny))
    gaps = {}
    for (keys, a), b in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        largest = float(np.abs(a).max(initial=0))
        # Of a gradient that is noise the noise may be as large as that of what cancels out in it: the largest gradient's.
        noise = largest <= 8 * min(float(jnp.finfo(jnp.float32).eps), float(jnp.finfo(a.dtype).eps)) * scale
        size = max(scale if noise else largest, least)
        gaps[show(to_path(keys))] = _number(float(np.abs(a - b).max(initial=0)) / size)
    return gaps


def first_divergence(
    layouts: Sequence[Layout],
    states: Sequence[Any],
    batches: Sequence[Any],
    loss_fn: Callable[..., Any],
    bound: float,
) -> str | None:
    """The first activation of the forward pass that differs, as text; ``None`` if all that the model constrains agree.

    The model's own ``constrain`` and ``hint`` calls are the probes. Without jit a scan runs its body once a layer, so the
    calls come in the order in which a reader would count them.
    """
    traces: list[list[tuple[str, Sequence[str | None], np.ndarray]]] = []
    for layout, state, batch in zip(layouts, states, batches, strict=True):
        trace: list[tuple[str, Sequence[str | None], np.ndarray]] = []

        def note(site: str, dims: Sequence[str | None], x: Any, _: Any, trace: list[Any] = trace) -> None:
            trace.append((site, dims, np.asarray(jax.device_get(x))))

        with layout, jax.disable_jit(), observing(note):
            loss_of(loss_fn, state, batch)(state.params)
        traces.append(trace)
    # A layout may take another way than one device in places: only calls that both make are compared.
    keys = [[(place, tuple(dims), x.shape) for place, dims, x in trace] for trace in traces]
    same = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks()
    pairs = [(m.a + i, m.b + i) for m in same for i in range(m.size)]
    for number, ((place, dims, a), b) in ((i + 1, (traces[0][i], traces[1][j][2])) for i, j in pairs):
        gap = _number(float(np.abs(a - b).max(initial=0)) / max(float(np.abs(a).max(initial=0)), 1e-30))
        if gap > bound:
            called = sum(earlier == place for earlier, _, _ in traces[0][:number])
            named = ", ".join(map(str, dims))
            return f"{place} ({named}), call {called}: its activation differs by {gap:.2e}"
    return None


def first_nonfinite(
    layout: Layout, state: Any, batch: Any, loss_fn: Callable[..., Any], precision: Precision | None = None
) -> str:
    """Where a step's numbers stop to be finite, as text: a parameter, else the first activation, else what comes after all.

    The model's own ``constrain`` and ``hint`` calls are the probes, as for :func:`first_divergence`.
    """
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        if not _finite(leaf):
            return f"the parameter {show(to_path(keys))} is not finite before the step"
    precision = precision or Precision()
    found: list[str] = []
    calls: dict[str, int] = {}

    def note(site: str, dims: Sequence[str | None], x: Any, _: Any) -> None:
        calls[site] = calls.get(site, 0) + 1
        if not found and not _finite(x):
            found.append(f"{site} ({', '.join(map(str, dims))}), call {calls[site]}")

    compute = lambda params: loss_of(loss_fn, state, batch)(jax.tree.map(precision.computing, params))[0]
    with layout, jax.disable_jit(), observing(note):
        loss = compute(state.params)
    if found:
        return found[0]
    if not _finite(loss):
        return "the loss; every activation is finite"
    with layout:
        grads = jax.jit(jax.grad(compute))(state.params)
    bad = [show(to_path(keys)) for keys, leaf in jax.tree_util.tree_leaves_with_path(grads) if not _finite(leaf)]
    if bad:
        more = f" and of {len(bad) - 1} more" if len(bad) > 1 else ""
        return f"the gradient of {bad[0]}{more}; every activation and the loss are finite"
    return "the norm of the gradients, which overflows; each of them is finite"


def _finite(x: Any) -> bool:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return bool(jnp.isfinite(x).all())  # the other processes hold parts of it, and ask the same
    return bool(np.all(np.isfinite(np.asarray(jax.device_get(x)).astype(np.float32))))


def _number(x: float) -> float:
    """NaN counts as infinitely far away: it must never pass a comparison."""
    return math.inf if math.isnan(x) else x
