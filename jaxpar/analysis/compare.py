"""Compares the same train steps in a reference layout and in another layout, tensor by tensor.

The reference, usually one device, trains. The layout takes each step from the reference's state. Trajectories are never
compared, because Adam and Lion make a full-length step from any gradient, however small, and so amplify rounding. If a
step differs, both sides run its forward pass again, operation by operation. The first activation that differs is
reported with the module that made it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.analysis.divergence import difference, first_divergence, first_nonfinite, size
from jaxpar.errors import LayoutError, listing
from jaxpar.sharding.layout import Layout
from jaxpar.training.batch import shard_batch
from jaxpar.training.model import MakeModel, leaves_with_paths, show
from jaxpar.training.state import TrainState, init
from jaxpar.training.step import train_step, updated
from jaxpar.utils.checks import Range, check_number

FLOOR = 1e-3
"""A tensor's differences are relative to its own largest entry, but at least to this fraction of the model's largest
gradient. A gradient that is mathematically zero, such as that of a key bias under softmax, is only rounding noise."""

SAMPLES = 3
SPREAD = 10
"""A gradient tensor may differ by ``SPREAD`` times its change when the last bit of parameters and inputs changes,
the largest over ``SAMPLES`` random changes. Where large terms cancel, their rounding error exceeds the bound on
what is left."""


@dataclass(frozen=True)
class Verdict:
    """The largest relative differences over all steps, their places, and the first one beyond the bound.

    Attributes:
      loss: of the loss.
      gradients: of any gradient tensor.
      worst: that tensor and its step.
      updates: of any parameter, optimizer state or carried variable after a step.
      bound: the largest difference allowed.
      parameters_equal: whether the initial parameters are bitwise equal.
      first: the place of the first difference beyond the bound; ``None`` if there is none.
    """

    loss: float
    gradients: float
    worst: str
    updates: float
    bound: float
    parameters_equal: bool
    first: str | None

    @property
    def passed(self) -> bool:
        """Whether no difference exceeds the bound and the initial parameters are equal."""
        return self.first is None


def _check_data(data: Any, dims: Mapping[str, Any]) -> None:
    """Raise a ``LayoutError`` unless ``data`` is a non-empty list of batches whose arrays are all in ``dims``."""
    if isinstance(data, Mapping) or not len(data):
        raise LayoutError(
            "data must be a list with a batch for each step, got "
            f"{'one batch' if isinstance(data, Mapping) else 'no batch'}. Remedy: data=[batch]."
        )
    for name, x in ((show(path), x) for batch in data for path, x in leaves_with_paths(batch)):
        if name not in dims:
            raise LayoutError(
                f"batch/{name} {list(np.shape(x))} has no logical dims, because dims names {listing(dims)}. Remedy: "
                f"add {name!r} to dims, with a name or None for each of its {np.ndim(x)} dims."
            )


def compare(
    reference: Layout,
    layout: Layout,
    make_model: MakeModel,
    tx: optax.GradientTransformation,
    loss_fn: Callable[..., Any],
    data: Sequence[Any],
    dims: Mapping[str, Sequence[str | None]],
    *,
    bound: float,
    seed: int = 0,
    clip_norm: float | None = None,
    **options: Any,
) -> Verdict:
    """Train on ``data`` in the reference layout, and compare each step with the layout's step from the same state.

    Each step compares the loss, the gradients, the carried variables, and the updated parameters and optimizer state.
    The update is compared with the reference's update from the layout's own gradients.

    Args:
      reference, layout: the two layouts; ``reference`` counts as correct.
      make_model, tx, loss_fn, seed, clip_norm: as for :func:`jaxpar.init` and :func:`jaxpar.train_step`.
      data: one batch per step, a pytree of global arrays.
      dims: path in the batch → logical dims of that array.
      bound: the largest relative difference allowed.
      options: other keyword arguments of :func:`jaxpar.train_step`, for ``layout`` only; the reference takes each batch
        in one piece.

    Returns:
      The verdict over all steps.

    Raises:
      ConfigError: no difference could exceed ``bound``, or every one would.
    """
    check_number("bound", bound, Range(0, 1.0, above=True))
    _check_data(data, dims)
    sides: tuple[tuple[Layout, dict[str, Any]], ...] = ((reference, {}), (layout, options))
    with jax.default_matmul_precision("highest"):
        right, own = (init(place, make_model, tx, seed=seed, precision=more.get("precision")) for place, more in sides)
        ours, theirs = (
            train_step(place, loss_fn, clip_norm=clip_norm, donate=False, return_grads=True, **more)
            for place, more in sides
        )
        update = jax.jit(functools.partial(updated, reference, loss_fn, clip_norm=clip_norm))
        comparison = _Comparison((reference, layout), ours, theirs, update, loss_fn, bound)
        pairs = zip(*(jax.tree.leaves(jax.device_get(state.params)) for state in (right, own)), strict=True)
        equal = all(np.array_equal(a, b) for a, b in pairs)
        found, first = [], None if equal else "the initial parameters already differ"
        for number, batch in enumerate(data, 1):
            inputs = [shard_batch(place, batch, dims) for place in (reference, layout)]
            differences, right = comparison.step(right, _copied(right, own), inputs, search=first is None)
            found.append((differences, number))
            if differences.where is not None:
                first = first or f"{differences.where}, step {number}"
    worst, number = max(found, key=lambda one: one[0].gradients)
    return Verdict(
        loss=max(one.loss for one, _ in found),
        gradients=worst.gradients,
        worst=f"{worst.gradient}, step {number}" if worst.gradients else "none",
        updates=max(one.updates for one, _ in found),
        bound=bound,
        parameters_equal=equal,
        first=first,
    )


@dataclass(frozen=True)
class _Differences:
    """The largest differences of one step; ``where`` is the first one beyond the bound, if the step searched for it."""

    loss: float
    gradients: float
    gradient: str
    updates: float
    where: str | None


@dataclass(frozen=True)
class _Comparison:
    """Two layouts, their steps, and the reference's update from given gradients."""

    layouts: tuple[Layout, Layout]
    reference: Callable[..., Any]
    other: Callable[..., Any]
    update: Callable[..., Any]
    loss_fn: Callable[..., Any]
    bound: float

    def step(
        self, right: TrainState, own: TrainState, batches: Sequence[Any], *, search: bool
    ) -> tuple[_Differences, TrainState]:
        """Returns the differences of one step from the same state, and the reference's state after it."""
        after, metrics = self.reference(right, batches[0])
        other, others = self.other(own, batches[1])
        want, got = jax.device_get((metrics["grads"], others["grads"]))
        loss = _number(abs(float(others["loss"]) - float(metrics["loss"])) / max(abs(float(metrics["loss"])), 1e-30))
        updated = self.update(right, batches[0], got, np.asarray(others["loss"]))
        state = {"params": other.params, "opt_state": other.opt_state}
        updates = _gaps({"params": updated[0], "opt_state": updated[1]}, state)

        def gaps(least: Mapping[str, float] | None = None) -> tuple[dict[str, float], dict[str, float]]:
            variables = _gaps({"variables": after.variables}, {"variables": other.variables}, least)
            return gradient_gaps(want, got, least), variables

        grads, carried = gaps()
        if max((*grads.values(), *carried.values())) > self.bound:
            changes = self._last_bit(right, batches[0], want, after.variables)
            grads, carried = gaps({path: SPREAD * change / self.bound for path, change in changes.items()})
        updates |= carried
        gradient, leaf = (max(gaps, key=lambda path: gaps[path]) for gaps in (grads, updates))
        where = None
        if search and not math.isfinite(float(metrics["loss"])):
            place = first_nonfinite(self.layouts[0], right, batches[0], self.loss_fn)
            where = f"one device's step is not finite: {place}"
        elif search and max(loss, grads[gradient]) > self.bound:
            where = first_divergence(self.layouts, (right, own), batches, self.loss_fn, self.bound)
            where = where or f"the gradient of {gradient}; every activation agrees"
        elif search and updates[leaf] > self.bound:
            where = f"{leaf} after the step; the gradients agree"
        return _Differences(loss, grads[gradient], gradient, updates[leaf], where), after

    def _last_bit(self, state: TrainState, batch: Any, grads: Any, rest: Any) -> dict[str, float]:
        """Returns path → largest change of a gradient or variable when parameters and inputs change by one fp32 bit."""
        most: dict[str, float] = {}
        for sample in range(SAMPLES):
            near = functools.partial(_one_bit_off, np.random.default_rng(sample))
            moved = replace(state, params=jax.tree.map(near, state.params))
            after, metrics = self.reference(moved, jax.tree.map(near, batch))
            for want, got in ((grads, metrics["grads"]), ({"variables": rest}, {"variables": after.variables})):
                for path, a, b in _numbers(want, got):
                    most[path] = max(most.get(path, 0.0), difference(a, b))
        return most


def _one_bit_off(rng: np.random.Generator, x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    scale = 1 + rng.choice([-1, 1], x.shape) * float(jnp.finfo(jnp.float32).eps)
    return jax.device_put((np.asarray(x) * scale).astype(x.dtype), x.sharding)


def _copied(state: TrainState, own: TrainState) -> TrainState:
    """Returns ``state`` with the shardings of ``own``.

    The loss scale, and arrays of another shape in ``own`` (one per device), remain those of ``own``.
    """

    def move(x: Any, mine: Any) -> Any:
        return jax.device_put(jax.device_get(x), mine.sharding) if x.shape == mine.shape else mine

    parts = ("step", "params", "opt_state", "variables", "key")
    return replace(own, **{name: jax.tree.map(move, getattr(state, name), getattr(own, name)) for name in parts})


def _numbers(want: Any, got: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield the path and both arrays of each leaf, in fp64.

    PRNG keys are converted to integers. Arrays of different shapes (one per device) are skipped.
    """
    for (path, a), b in zip(leaves_with_paths(want), jax.tree.leaves(got), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = (jax.random.key_data(x) for x in (a, b))
        if a.shape == b.shape:
            a, b = (np.asarray(jax.device_get(x)).astype(np.float64) for x in (a, b))
            yield show(path), a, b


def _gaps(want: Any, got: Any, least: Mapping[str, float] | None = None) -> dict[str, float]:
    """Returns path → the largest difference of each array, relative to its largest entry or to ``least``."""
    tiny = float(np.finfo(np.float32).tiny)
    return {
        path: _number(difference(a, b) / max(size(a), (least or {}).get(path, 0.0), tiny))
        for path, a, b in _numbers(want, got)
    }


def gradient_gaps(want: Any, got: Any, least: Mapping[str, float] | None = None) -> dict[str, float]:
    """Returns path → the largest difference of each gradient tensor, relative to its size (see ``FLOOR``).

    A difference that is not finite counts as infinite.

    Args:
      want, got: pytrees of gradients, on the host.
      least: path → the least size to compare a tensor with.
    """
    scale = max(map(size, jax.tree.leaves(want)), default=0.0)
    floor = max(FLOOR * scale, float(np.finfo(np.float32).tiny))
    gaps = {}
    for (path, a), b in zip(leaves_with_paths(want), jax.tree.leaves(got), strict=True):
        largest = size(a)
        # The rounding noise of a zero gradient scales with the terms that cancel in it: with the largest gradient.
        noise = largest <= 8 * min(float(jnp.finfo(jnp.float32).eps), float(jnp.finfo(a.dtype).eps)) * scale
        relative_to = max(scale if noise else largest, floor, (least or {}).get(show(path), 0.0))
        gaps[show(path)] = _number(difference(a, b) / relative_to)
    return gaps


def _number(x: float) -> float:
    """Returns infinity for NaN, so that NaN never passes a comparison."""
    return math.inf if math.isnan(x) else x
