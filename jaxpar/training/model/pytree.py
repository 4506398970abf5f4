"""Models that are pytrees: Linen variables, and trees of arrays, annotated with ``tag``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.errors import AnnotationError, ModelError, listing
from jaxpar.sharding.names import Names, check_names
from jaxpar.training.model.parts import ModelParts, Path, Tagged, show, to_path


@dataclass(frozen=True)
class TreeKind:
    """A plain pytree, or (``collections``) Linen variables, of which only the collection ``params`` is trained."""

    collections: bool

    def merge(self, params: Any, variables: Any) -> Any:
        return {"params": params, **variables} if self.collections else params

    def carried(self, model: Any, variables: Any, updates: Any) -> Any:
        if updates is None:
            return variables
        if not isinstance(updates, Mapping) or not set(updates) <= set(variables):
            given = type(updates).__name__ if not isinstance(updates, Mapping) else f"a dict of {listing(updates)}"
            raise ModelError(
                "the third value that loss_fn returns must be a dict of the carried collections "
                f"({listing(variables)}), got {given}. Remedy: return the collections that apply(..., mutable=[...]) "
                "returns in addition to the output."
            )
        return {**variables, **updates}


def read(model: Any) -> ModelParts:
    """Takes a pytree apart; of a mapping with the key ``params``, only that entry is trained.

    Args:
      model: Linen variables or any other pytree of arrays.

    Raises:
      ModelError: the pytree holds no parameters.
      AnnotationError: a malformed annotation.
    """
    collections = isinstance(model, Mapping) and "params" in model
    params = model["params"] if collections else model
    variables = {name: value for name, value in model.items() if name != "params"} if collections else {}
    names: list[tuple[Path, Names]] = []
    plain = {
        part: jax.tree_util.tree_map_with_path(
            lambda path, leaf, part=part: _unbox((part, *to_path(path)), leaf, names), tree, is_leaf=_is_box
        )
        for part, tree in (("params", params), ("variables", variables))
    }
    if not jax.tree.leaves(plain["params"]):
        raise ModelError(
            f"make_model returned {type(model).__name__} with no parameters. Remedy: return an nnx.Module, Linen "
            f"variables or a pytree of arrays."
        )
    return ModelParts(plain["params"], plain["variables"], tuple(names), TreeKind(collections))


def _is_box(x: Any) -> bool:
    linen = sys.modules.get("flax.linen")
    return isinstance(x, Tagged) or (linen is not None and isinstance(x, linen.meta.AxisMetadata))


def _unbox(path: Path, leaf: Any, names: list[tuple[Path, Names]]) -> Any:
    if isinstance(leaf, Tagged):
        value, dims = leaf.value, leaf.dims
    elif _is_box(leaf):
        from jaxpar import linen as adapter

        value, dims = adapter.unbox(leaf, show(path))
    else:
        return leaf
    if not jax.tree_util.all_leaves([value]):
        raise AnnotationError(f"{show(path)}: a tag must contain one array, got {type(value).__name__}.")
    names.append((path, check_names(dims, show(path))))
    return value
