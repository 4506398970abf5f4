"""The parts of a model: arrays with the names of their dims, paths, and the way back to the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxpar.sharding.names import Names, check_names

Path = tuple[str, ...]

FROZEN = "frozen_params"
"""The entry of the carried variables that holds weights without gradients, which are sharded as parameters are."""

MakeModel = Callable[[jax.Array], Any]
"""``make_model(key)`` builds the model: an NNX module, Linen variables or a pytree."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["dims"])
@dataclass(frozen=True)
class Tagged:
    """An array with the logical names of its dims; made by :func:`tag`."""

    value: Any
    dims: Names


def tag(x: Any, *dims: str | None) -> Tagged:
    """Returns an array (or ``ShapeDtypeStruct``) with its logical dims, for batches and models that are plain pytrees.

    Args:
      x: the array.
      dims: a logical name, or ``None``, for each dim.

    Raises:
      AnnotationError: a name is neither a string nor ``None``.

    >>> import jax
    >>> tag(jax.ShapeDtypeStruct((8, 128), "int32"), "batch", "seq").dims
    ('batch', 'seq')
    """
    return Tagged(x, check_names(dims, "tag()"))


class Kind(Protocol):
    """How to rebuild the model from its parts. Hashable, because it is static in the training state."""

    def merge(self, params: Any, variables: Any) -> Any:
        """Returns the model that ``loss_fn`` receives."""

    def carried(self, model: Any, variables: Any, updates: Any) -> Any:
        """Returns the carried arrays after ``loss_fn(model, batch)``, whose third value, if any, is ``updates``."""


@dataclass(frozen=True)
class ModelParts:
    """A model taken apart.

    Attributes:
      params: nested dict of the arrays to train.
      variables: nested dict of the arrays to carry.
      dims: the names of each annotated leaf, keyed by ("params" | "variables", *path).
      kind: how to rebuild the model.
    """

    params: Any
    variables: Any
    dims: tuple[tuple[Path, Names], ...]
    kind: Kind


class FoundNames(tuple[str | None, ...]):
    """Names of dims that :func:`jaxpar.annotate` found and nobody wrote."""

    def doubt(self, path: str) -> str:
        """Returns what an error about the array at ``path``, such as ``params/up/kernel``, says of its names."""
        written = f"({', '.join(map(repr, self))}{',' * (len(self) == 1)})"
        return (
            "jp.annotate found these names, and one may be wrong: print(jp.annotate(make_model, loss_fn, batch)) gives "
            f"the reason for each. Names in the model, or names={{{path.partition('/')[2]!r}: {written}}} with other "
            "ones, correct them."
        )


@dataclass(frozen=True)
class NamedModel:
    """A model whose dims are named beside it, by path from ``params`` or ``variables``; its own names come second."""

    model: Any
    dims: tuple[tuple[Path, Names], ...]


def to_path(keys: tuple[Any, ...]) -> Path:
    """Returns a JAX key path as a tuple of strings."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def leaves_with_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[Path, Any]]:
    """Returns (path, leaf) pairs, in the order of ``jax.tree.leaves``."""
    return [(to_path(keys), leaf) for keys, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)]


def map_with_paths(f: Callable[[Path, Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Returns a tree with ``f(path, leaf)`` in place of each leaf."""
    return jax.tree_util.tree_map_with_path(lambda keys, leaf: f(to_path(keys), leaf), tree, is_leaf=is_leaf)


def show(path: Path) -> str:
    """Returns a path in readable form: ``params/blocks/attn/q/kernel``."""
    return "/".join(path)


def part_of(path: str) -> str:
    """Returns the first part of a path that :func:`show` made, such as ``params`` or ``batch``."""
    return path.partition("/")[0]
