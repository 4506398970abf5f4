"""The function that a step differentiates: ``loss_fn`` as ``params -> (loss, (metrics, carried variables))``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import JaxparError, LayoutError, ModelError, listing
from jaxpar.parallel.offload.host_weights import waiting
from jaxpar.sharding.names import Names
from jaxpar.training.arguments import check_loss
from jaxpar.training.lora.program import with_adapters
from jaxpar.training.model import Kind, Path, leaves_with_paths, show
from jaxpar.training.model.lora import LoraKind
from jaxpar.training.state import TrainState

Metrics = dict[str, Any]
STEP_METRICS = frozenset({"loss", "grad_norm", "grads", "skipped", "loss_scale", "weights_changed"})
"""Names of the step's own metrics, which a loss cannot use."""
type LossFn = Callable[..., Any]
"""``loss_fn(model, batch)``, with an argument ``key`` if it draws random numbers; see :func:`jaxpar.train_step`."""

LossProgram = Callable[..., tuple[jax.Array, Any]]
"""``run(params, variables, batch, extra)`` returns the loss and (aux, carried variables); ``extra`` may have a key."""


def loss_of(loss_fn: LossFn, state: TrainState, batch: Any) -> Callable[[Any], tuple[jax.Array, Any]]:
    """Returns ``params -> (loss, (aux, carried))``, the form that ``jax.value_and_grad`` differentiates.

    Args:
      loss_fn: the user's loss, as for :func:`jaxpar.train_step`.
      state: supplies the model's structure, its carried variables and the step's key.
      batch: what ``loss_fn`` receives.

    Raises:
      ModelError: ``loss_fn`` needs other arguments.
    """
    check_loss(loss_fn)
    kind, dims = state.metadata.kind, state.metadata.dims
    adapted = kind if isinstance(kind, LoraKind) else None
    run = loss_program(loss_fn, adapted.kind if adapted else kind, dict(adapted.dims if adapted else dims))
    rewrite = getattr(loss_fn, "rewrite", None)  # an annotated loss adds constraints
    run = run if rewrite is None else rewrite(run)
    run = with_adapters(run, adapted) if adapted else run
    extra = {"key": key_of(state)} if wants_key(loss_fn) else {}
    return lambda params: run(params, state.variables, batch, extra)


def loss_program(loss_fn: LossFn, kind: Kind, dims: Mapping[Path, Names]) -> LossProgram:
    """Returns the loss as a function of arrays alone.

    Args:
      loss_fn: the user's loss.
      kind: how to rebuild the model from its arrays.
      dims: the names of its arrays, by path.
    """

    def run(params: Any, variables: Any, batch: Any, extra: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
        model = kind.merge(waiting(dict(dims), params), variables)
        with own_constraints_explained():
            value = loss_fn(model, batch, **extra)
        loss, aux, updates = unpack(value)
        return loss, (aux, kind.carried(model, variables, updates))

    return run


@contextmanager
def own_constraints_explained() -> Iterator[None]:
    """Explains why a model's own ``with_sharding_constraint`` fails where a step makes mesh axes manual.

    Raises:
      LayoutError: it names a manual axis.
    """
    try:
        yield
    except ValueError as error:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if isinstance(error, JaxparError) or not manual or "with_sharding_constraint" not in str(error):
            raise
        raise LayoutError(
            f"the model calls jax.lax.with_sharding_constraint with an axis that this step makes manual "
            f"({listing(manual)}), because each device computes the gradient of its own rows (a pipeline, "
            "grad_accum_steps, grad_reduction='per_step' or ZeRO stage 1). Remedy: call jp.hint(x, 'batch', ...) "
            "instead, which leaves manual axes out; or remove this axis from the PartitionSpec."
        ) from error


def wants_key(loss_fn: LossFn) -> bool:
    """Whether a loss draws random numbers: whether it has an argument ``key``."""
    return "key" in inspect.signature(loss_fn).parameters


def key_of(state: TrainState) -> jax.Array:
    """Returns the PRNG key of the step that ``state`` is at."""
    return jax.random.fold_in(state.key, state.step)


def unpack(value: Any) -> tuple[Any, Metrics, Any]:
    """Returns the loss, metrics and updates that a ``loss_fn`` returned in any of its forms.

    Raises:
      ModelError: ``value`` has no accepted form, the loss is no floating scalar, or a metric has a reserved name or is
        no array.
    """
    if isinstance(value, tuple) and len(value) not in (2, 3):
        raise ModelError(f"loss_fn must return loss, (loss, aux) or (loss, aux, updates), got a tuple of {len(value)}.")
    loss, aux, updates = (*value, None)[:3] if isinstance(value, tuple) else (value, None, None)
    if not isinstance(loss, jax.Array | np.ndarray | np.generic | float):
        raise ModelError(
            f"loss_fn must return a floating-point scalar as the loss, got {type(loss).__name__}. Remedy: return "
            "loss, (loss, aux) or (loss, aux, updates)."
        )
    dtype = jnp.result_type(loss)
    if jnp.shape(loss) != () or not jnp.issubdtype(dtype, jnp.floating):
        remedy = "take the mean" if jnp.shape(loss) else "compute it in floating point"
        raise ModelError(
            f"loss_fn must return a floating-point scalar as the loss, got shape {jnp.shape(loss)} and dtype {dtype}. "
            f"Remedy: {remedy}."
        )
    metrics = {} if aux is None else dict(aux) if isinstance(aux, Mapping) else {"aux": aux}
    check_names(metrics)
    for path, x in leaves_with_paths(metrics):
        if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            raise ModelError(
                f"loss_fn returned the metric {show(path)!r} as {type(x).__name__}. Remedy: return arrays and numbers "
                "only, and add texts where the metrics are logged."
            )
    return loss, metrics, updates


def check_names(metrics: Metrics) -> None:
    """Raises if ``loss_fn`` returned a metric under a name that the step reports itself.

    Raises:
      ModelError: a metric has a reserved name; the error lists all of them.
    """
    taken = sorted(STEP_METRICS & set(metrics))
    if taken:
        raise ModelError(
            f"loss_fn returned metrics named {listing(taken)}, which are reserved for the step's own metrics. Remedy: "
            "rename them."
        )
