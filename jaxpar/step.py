"""The train step: an ordinary jitted function, donated, laid out; it adds nothing to what one would write by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.errors import LayoutError, ModelError, listing
from jaxpar.layout import Layout, lay_out, to_spec, tracing_under
from jaxpar.model import show, to_path
from jaxpar.state import TrainState, place

Metrics = dict[str, Any]


def train_step(
    layout: Layout,
    loss_fn: Callable[..., Any],
    *,
    clip_norm: float | None = None,
    donate: bool = True,
    keep_grads: bool = False,
) -> jax.stages.Wrapped:
    """A jitted ``step(state, batch) -> (state, metrics)``; ``.lower()`` and ``.trace()`` work as on any jitted function.

    Args:
      layout: the layout of the state that goes in and comes out. The step traces under it, inside or outside a ``with``.
      loss_fn: ``loss_fn(model, batch)`` with what ``make_model`` returned (an NNX module, Linen variables or a pytree).
        What it assigns to an NNX module's variables is carried; to its parameters, holds for that call only.
        It returns the scalar loss, ``(loss, aux)`` with a dict of metrics, or ``(loss, aux, updates)`` with the new
        values of mutable Linen collections. If it takes an argument named ``key`` it receives a PRNG key for this step.
      clip_norm: scale gradients down to this global norm.
      donate: give the old state's memory to the new one.
      keep_grads: also return the gradients (before clipping), as ``metrics["grads"]``. For verification.

    Returns:
      The step. ``metrics`` holds ``loss``, ``grad_norm`` (before clipping, L2, fp32) and what ``loss_fn`` returned beside.

    Raises (when traced):
      LayoutError: a tensor does not fit the rules, or another layout is ambient.
      ModelError: ``loss_fn`` returned no scalar, or a metric under a name that is taken; or the step would change the
        shape or dtype of a parameter or of a carried array.
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        with tracing_under(layout):
            value, grads = jax.value_and_grad(loss_of(loss_fn, state, batch), has_aux=True)(state.params)
            loss, (aux, rest) = value
            grads = place_gradients(layout, state, grads)
            norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads))
            kept = {"grads": grads} if keep_grads else {}
            if clip_norm is not None:
                scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
                grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
            params, opt_state = _update(state, grads, loss, lambda p: loss_of(loss_fn, state, batch)(p)[0])
            new = TrainState(state.step + 1, params, opt_state, rest, state.key, state.static)
            _check_same(state, new)
            return place_state(layout, new), {"loss": loss, "grad_norm": norm, **aux, **kept}

    return jax.jit(step, donate_argnums=(0,) if donate else ())


def eval_step(layout: Layout, loss_fn: Callable[..., Any]) -> jax.stages.Wrapped:
    """A jitted ``evaluate(state, batch) -> metrics`` of the same ``loss_fn``, without gradients; nothing is donated."""

    def evaluate(state: TrainState, batch: Any) -> Metrics:
        with tracing_under(layout):
            loss, (aux, _) = loss_of(loss_fn, state, batch)(state.params)
            return {"loss": loss, **aux}

    return jax.jit(evaluate)


def loss_of(loss_fn: Callable[..., Any], state: TrainState, batch: Any) -> Callable[[Any], tuple[jax.Array, Any]]:
    """``params -> (loss, (aux, carried))``, the form ``jax.value_and_grad`` differentiates."""
    kind = state.static.kind
    wants_key = "key" in inspect.signature(loss_fn).parameters
    extra = {"key": jax.random.fold_in(state.key, state.step)} if wants_key else {}

    def compute(params: Any) -> tuple[jax.Array, Any]:
        model = kind.merge(params, state.rest)
        loss, aux, updates = _unpack(loss_fn(model, batch, **extra))
        return loss, (aux, kind.carried(model, state.rest, updates))

    return compute


def _unpack(value: Any) -> tuple[Any, Metrics, Any]:
    if isinstance(value, tuple) and len(value) not in (2, 3):
        raise ModelError(
            f"loss_fn returned a tuple of {len(value)}, but loss, (loss, aux) or (loss, aux, updates) is wanted."
        )
    loss, aux, updates = (*value, None)[:3] if isinstance(value, tuple) else (value, None, None)
    if not isinstance(loss, jax.Array | np.ndarray | np.generic | float):
        raise ModelError(
            f"loss_fn returned a {type(loss).__name__} as the loss, but a floating scalar is wanted. Remedy: return loss, "
            f"(loss, aux) or (loss, aux, updates)."
        )
    dtype = jnp.result_type(loss)
    if jnp.shape(loss) != () or not jnp.issubdtype(dtype, jnp.floating):
        remedy = "take the mean" if jnp.shape(loss) else "compute it in floating point"
        raise ModelError(
            f"loss_fn returned a loss of shape {jnp.shape(loss)} and dtype {dtype}, but a floating scalar is wanted. "
            f"Remedy: {remedy}."
        )
    metrics = {} if aux is None else dict(aux) if isinstance(aux, Mapping) else {"aux": aux}
    taken = sorted({"loss", "grad_norm", "grads"} & set(metrics))
    if taken:
        raise ModelError(
            f"loss_fn returned metrics named {listing(taken)}, which the step itself reports. Remedy: rename them."
        )
    return loss, metrics, updates


def _update(
    state: TrainState, grads: Any, loss: jax.Array, value_fn: Callable[[Any], jax.Array]
) -> tuple[Any, optax.OptState]:
    """The optimizer's step, with whatever optax's line searches, Polyak steps, SAM and Sophia ask for beside gradients."""

    def again(params: Any, obj_fn: Any = None, grad_fn: Any = None) -> jax.Array:
        # A line search hands on to it what it does not know itself, and refuses what this does not take.
        del obj_fn, grad_fn
        return value_fn(params)

    gradient = jax.grad(again)
    offered = {
        "value": loss,
        "grad": grads,
        "value_fn": again,
        "obj_fn": again,
        "grad_fn": lambda params, *_: gradient(params),
    }
    tx = state.static.tx
    wanted = inspect.signature(tx.update).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
    extra = {name: value for name, value in offered.items() if takes_any or name in wanted}
    updates, opt_state = tx.update(grads, state.opt_state, state.params, **extra)
    return optax.apply_updates(state.params, updates), opt_state


def _check_same(old: TrainState, new: TrainState) -> None:
    """A step keeps the shape and dtype of all it trains and carries, or the next one would be another program."""
    for part, cause in (("params", "the optimizer"), ("rest", "loss_fn")):
        before, after = (
            {to_path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(getattr(state, part))}
            for state in (old, new)
        )
        for path in [*before, *(after.keys() - before.keys())]:
            was, now = (_describe(leaves.get(path)) for leaves in (before, after))
            if was != now:
                raise ModelError(
                    f"{cause} turned {show((part, *path))} from {was} into {now}, but a step keeps the shape and dtype of "
                    f"all it trains and carries."
                )


def _describe(leaf: Any) -> str:
    return "nothing" if leaf is None else f"{leaf.dtype}{list(jnp.shape(leaf))}"


def place_state(layout: Layout, state: TrainState) -> TrainState:
    """``state`` with every leaf constrained to its place."""
    leaves, treedef = jax.tree.flatten(state)
    tensors = place(layout, state)
    problems = [text for tensor in tensors for text in tensor.problems]
    if problems:
        raise LayoutError(problems)
    placed = [
        lay_out(layout.mesh, leaf, to_spec(tensor.resolved)) for leaf, tensor in zip(leaves, tensors, strict=True)
    ]
    return jax.tree.unflatten(treedef, placed)


def place_gradients(layout: Layout, state: TrainState, grads: Any) -> Any:
    """Gradients laid out by the rules of the role ``gradients``."""
    dims = dict(state.static.dims)

    def one(keys: Any, grad: jax.Array) -> jax.Array:
        path = ("params", *to_path(keys))
        names = dims.get(path, (None,) * grad.ndim)
        spec = layout.spec(names, grad.shape, role="gradients", dtype=grad.dtype, path=f"gradient of {show(path)}")
        return lay_out(layout.mesh, grad, spec)

    return jax.tree_util.tree_map_with_path(one, grads)
