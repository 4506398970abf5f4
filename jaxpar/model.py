"""What a model is to jaxpar: arrays to train, arrays to carry, a logical name per dim, and a way back to the model.

``read`` takes whatever ``make_model`` returns (an NNX module, a Linen variable dict, a tagged pytree) and gives
``Parts``: plain nested dicts of arrays, so that every optax transform, mask and label function sees ordinary pytrees.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxpar.errors import AnnotationError, ModelError, listing

Path = tuple[str, ...]
Names = tuple[str | None, ...]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["dims"])
@dataclass(frozen=True)
class Tagged:
    """An array with the logical names of its dims; made by :func:`tag`."""

    value: Any
    dims: Names


def tag(x: Any, *dims: str | None) -> Tagged:
    """An array (or ``ShapeDtypeStruct``) with logical dims, for models that are plain pytrees, and for batches.

    Raises:
      AnnotationError: a name is neither a string nor ``None``.

    >>> import jax
    >>> tag(jax.ShapeDtypeStruct((8, 128), "int32"), "batch", "seq").dims
    ('batch', 'seq')
    """
    return Tagged(x, check_names(dims, "tag()"))


class Kind(Protocol):
    """How the parts become the model again. Hashable: it is static in the training state."""

    def merge(self, params: Any, rest: Any) -> Any:
        """What ``loss_fn`` receives."""
        ...

    def carried(self, model: Any, rest: Any, updates: Any) -> Any:
        """The carried arrays after ``loss_fn`` ran on ``model``; ``updates`` is its third return value, if any."""
        ...


@dataclass(frozen=True)
class Parts:
    """A model taken apart. ``dims`` has the names of each annotated leaf, keyed by ("params" | "rest", *path)."""

    params: Any
    rest: Any
    dims: tuple[tuple[Path, Names], ...]
    kind: Kind


@dataclass(frozen=True)
class TreeKind:
    """A plain pytree, or a Linen variable dict of which only the collection ``params`` is trained."""

    collections: bool

    def merge(self, params: Any, rest: Any) -> Any:
        return {"params": params, **rest} if self.collections else params

    def carried(self, model: Any, rest: Any, updates: Any) -> Any:
        if updates is None:
            return rest
        if not isinstance(updates, Mapping) or not set(updates) <= set(rest):
            what = type(updates).__name__ if not isinstance(updates, Mapping) else f"a dict of {listing(updates)}"
            raise ModelError(
                f"the third value of loss_fn is {what}, but a dict of the carried collections ({listing(rest)}) is "
                f"wanted. Remedy: return what apply(..., mutable=[...]) gives beside the output."
            )
        return {**rest, **updates}


def read(model: Any) -> Parts:
    """Take a model apart.

    Args:
      model: an ``nnx.Module``; a mapping with the key ``params`` (Linen variables: other collections are carried, not
        trained); or any other pytree of arrays, with ``tag`` or Flax's ``nn.Partitioned`` boxes on annotated leaves.

    Raises:
      ModelError: no parameters, or a Linen module instead of its variables.
      AnnotationError: a malformed annotation.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(model, nnx.Module):
        from jaxpar import nnx as adapter

        return adapter.read(model)
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(model, linen.Module):
        raise ModelError(
            f"make_model returned the Linen module {type(model).__name__}, which holds no arrays. Remedy: return its "
            f"variables, as make_model = lambda key: module.init(key, example_input)."
        )
    collections = isinstance(model, Mapping) and "params" in model
    params = model["params"] if collections else model
    rest = {name: value for name, value in model.items() if name != "params"} if collections else {}
    names: list[tuple[Path, Names]] = []
    plain = {
        part: jax.tree_util.tree_map_with_path(
            lambda path, leaf, part=part: _unbox((part, *to_path(path)), leaf, names), tree, is_leaf=_is_box
        )
        for part, tree in (("params", params), ("rest", rest))
    }
    if not jax.tree.leaves(plain["params"]):
        raise ModelError(
            f"make_model returned {type(model).__name__} with no parameters. Remedy: return an nnx.Module, Linen "
            f"variables or a pytree of arrays."
        )
    return Parts(plain["params"], plain["rest"], tuple(names), TreeKind(collections))


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
        raise AnnotationError(f"{show(path)}: a tag goes around one array, not around {type(value).__name__}.")
    names.append((path, check_names(dims, show(path))))
    return value


def check_names(dims: Any, where: str) -> Names:
    """``dims`` as a tuple of strings and Nones, or an ``AnnotationError``."""
    if not isinstance(dims, tuple | list) or not all(d is None or isinstance(d, str) for d in dims):
        raise AnnotationError(
            f"{where}: the logical dims are {dims!r}, but a string or None for each dim is wanted, as ('embed', 'mlp')."
        )
    return tuple(dims)


def to_path(keys: tuple[Any, ...]) -> Path:
    """A jax key path as a tuple of strings."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def show(path: Path) -> str:
    """A path as people read it: ``params/blocks/attn/q/kernel``."""
    return "/".join(path)


MakeModel = Callable[[jax.Array], Any]
"""``make_model(key)`` builds the model: an NNX module, Linen variables or a pytree."""
