"""Checks of arguments that are easily swapped, or taken from another library; each error says what belongs there."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from jaxpar.errors import LayoutError, ModelError, StateError, listing
from jaxpar.sharding.layout import Layout

_MADE = "Remedy: state = jp.init(layout, make_model, tx), then state, metrics = step(state, batch)."


_KEYS = ("rng", "rngs", "rng_key", "prng", "prng_key", "dropout_rng", "dropout_key")
"""Names that other libraries give the PRNG key of a loss."""


def check_layout(layout: Any, call: str) -> None:
    """Raise a ``LayoutError`` if the first argument of a call, such as ``init(layout, make_model, tx)``, is no layout.

    >>> from jaxpar.errors import LayoutError
    >>> try:
    ...     check_layout(print, "train_step(layout, loss_fn)")
    ... except LayoutError as error:
    ...     print(error)
    train_step: layout must be a jaxpar.Layout, got builtin_function_or_method. Remedy: train_step(layout, loss_fn).
    """
    if not isinstance(layout, Layout):
        name = call.partition("(")[0]
        raise LayoutError(f"{name}: layout must be a jaxpar.Layout, got {type(layout).__name__}. Remedy: {call}.")


def check_optimizer(tx: Any, make_model: Any = None) -> None:
    """Raise a ``ModelError`` if ``tx`` is no optax transform, such as Flax's ``nnx.Optimizer``, which contains one.

    Args:
      tx: the optimizer.
      make_model: the argument before it; if this is the transform, the two are swapped.
    """
    if _is_transform(tx):
        return
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(tx, nnx.Optimizer):
        raise ModelError(
            "tx is an nnx.Optimizer, but it must be the optax transform that this was made from. Remedy: pass the "
            "transform, such as optax.adam(1e-3); jp.init creates its state, and TrainState holds it."
        )
    remedy = "pass one, such as optax.adam(1e-3)"
    if _is_transform(make_model):
        remedy = "init(layout, make_model, tx); make_model is the transform here"
    raise ModelError(f"tx must be an optax transform, got {type(tx).__name__}. Remedy: {remedy}.")


def _is_transform(tx: Any) -> bool:
    return callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))


def check_loss(loss_fn: Any) -> None:
    """Raise a ``ModelError`` if ``loss_fn`` is no function of a model, a batch, and optionally ``key``."""
    if not callable(loss_fn):
        raise ModelError(
            f"loss_fn must be a function of a model and a batch, got {type(loss_fn).__name__}. Remedy: loss_fn = "
            "lambda model, batch: ...."
        )
    parameters = list(inspect.signature(loss_fn).parameters.values())
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    others = [name for name in needed[2:] if name != "key"]
    if others:
        raise ModelError(
            f"loss_fn needs the arguments {listing(others)}, but a step passes it a model, a batch, and the PRNG key "
            "if an argument is named 'key'. Remedy: name the PRNG key 'key'; put everything else into the batch."
        )
    unpassed = [p.name for p in parameters[2:] if p.name in _KEYS and p.default is None]
    if unpassed:
        raise ModelError(
            f"loss_fn takes {listing(unpassed)}, but a step passes the PRNG key as 'key', so {unpassed[0]} would stay "
            "None and nothing would be random. Remedy: name the PRNG key 'key'."
        )
    if len(by_position) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in by_position):
        raise ModelError(
            f"loss_fn must take a model and a batch, but it takes {len(by_position)} positional arguments. Remedy: "
            "loss_fn = lambda model, batch: ...."
        )


def check_state(state: Any) -> None:
    """Raise a ``StateError`` if ``state``, the first argument of a step, is not what ``init`` returns."""
    if hasattr(state, "metadata") and hasattr(state, "opt_state"):
        return
    kind = type(state)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    raise StateError(f"step: the first argument must be the TrainState that jp.init returned, got {name}. {_MADE}")
