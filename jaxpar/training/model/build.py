"""Builds a model with ``make_model(key)`` and takes it apart; its initial parameters are equal in every layout."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.errors import ModelError
from jaxpar.training.model import MakeModel, ModelParts, leaves_with_paths, read, show
from jaxpar.training.model.fixed_order import Causes, in_fixed_order


def build(make_model: MakeModel, key: jax.Array) -> tuple[ModelParts, dict[str, Causes]]:
    """Returns the model's parts, and the order-dependent primitives of each parameter that has any, by path.

    Args:
      make_model: returns the model.
      key: the PRNG key that ``make_model`` receives.

    Raises:
      ModelError: ``make_model`` is not a function, or the model has a parameter that has no gradient.
    """
    static: list[tuple[Any, Any]] = []

    def arrays(key: jax.Array) -> tuple[Any, Any]:
        parts = read(_call(make_model, key))
        _check_trainable(parts.params)
        static.append((parts.dims, parts.kind))
        return parts.params, parts.variables

    (params, variables), found = in_fixed_order(arrays, key)
    paths = [show(("params", *path)) for path, _ in leaves_with_paths(params)]
    causes = {path: names for path, names in zip(paths, found, strict=True) if names}
    return ModelParts(params, variables, *static[0]), causes


def _call(make_model: MakeModel, key: jax.Array) -> Any:
    linen = sys.modules.get("flax.linen")
    if (
        not callable(make_model)
        or isinstance(make_model, nnx.Module)
        or (linen and isinstance(make_model, linen.Module))
    ):
        raise ModelError(
            "make_model must be a function of a PRNG key, so that the model can be built in place, got "
            f"{type(make_model).__name__}. Remedy: make_model = lambda key: Model(rngs=nnx.Rngs(key))."
        )
    return make_model(key)


def _check_trainable(params: Any) -> None:
    for keys, leaf in leaves_with_paths({"params": params}):
        path = show(keys)
        try:
            dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        except TypeError:
            raise ModelError(f"{path} must be an array, got {type(leaf).__name__}.") from None
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ModelError(
                f"{path} has dtype {dtype}, which has no gradient. Remedy: keep it out of the parameters (another "
                f"nnx.Variable type, another Linen collection, or a closure)."
            )
