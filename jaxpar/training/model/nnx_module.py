"""Models that are NNX modules. Imported only when needed, so that other models do not depend on NNX."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpar.errors import ModelError, listing
from jaxpar.nnx import names_of
from jaxpar.parallel.offload.host_weights import is_waiting
from jaxpar.parallel.precision.quantized_array import is_quantized
from jaxpar.sharding.names import Names
from jaxpar.training.model.parts import ModelParts, Path, show


@dataclass(frozen=True)
class NNXKind:
    """The static part of an NNX module."""

    graphdef: Any
    params: Any
    variables: Any

    def merge(self, params: Any, variables: Any) -> Any:
        states = [
            jax.tree.unflatten(d, jax.tree.leaves(x, is_leaf=lambda leaf: is_waiting(leaf) or is_quantized(leaf)))
            for d, x in ((self.params, params), (self.variables, variables))
        ]
        return nnx.merge(self.graphdef, *states)

    def carried(self, model: Any, variables: Any, updates: Any) -> Any:
        if updates is not None:
            raise ModelError(
                "loss_fn returned a third value (updates), but an NNX module carries its own state. Remedy: return "
                "(loss, aux), and assign to the module's variables instead."
            )
        _, *now = nnx.split(model, nnx.Param, ...)
        before = _paths(jax.tree.unflatten(d, range(d.num_leaves)) for d in (self.params, self.variables))
        after = _paths(now)
        changes = {"added": after - before, "removed": before - after}
        if before != after:
            text = " and ".join(f"{verb} {listing(sorted(paths))}" for verb, paths in changes.items() if paths)
            raise ModelError(
                f"loss_fn {text}, but an NNX module must keep the variables that its constructor created. Remedy: "
                "create every variable in the constructor; return intermediate values from loss_fn."
            )
        return nnx.to_pure_dict(now[1])


def _paths(states: Iterable[Any]) -> set[str]:
    return {show(tuple(map(str, keys))) for state in states for keys, _ in nnx.to_flat_state(state)}


def read(module: Any) -> ModelParts:
    """Takes an NNX module apart: ``nnx.Param`` variables are trained, all others carried.

    Args:
      module: an ``nnx.Module``.

    Raises:
      ModelError: the module holds no ``nnx.Param``.
    """
    graphdef, params, variables = nnx.split(module, nnx.Param, ...)
    names: list[tuple[Path, Names]] = []
    for part, state in (("params", params), ("variables", variables)):
        for keys, variable in nnx.to_flat_state(state):
            path = (part, *map(str, keys))
            dims = names_of(variable.get_metadata(), show(path))
            if dims is not None:
                names.append((path, dims))
    kind = NNXKind(graphdef, jax.tree.structure(params), jax.tree.structure(variables))
    pure = nnx.to_pure_dict(params), nnx.to_pure_dict(variables)
    if not jax.tree.leaves(pure[0]):
        raise ModelError(
            f"make_model returned {type(module).__name__}, which holds no nnx.Param. Remedy: return the whole module."
        )
    return ModelParts(*pure, tuple(names), kind)
