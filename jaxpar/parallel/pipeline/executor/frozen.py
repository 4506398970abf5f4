"""``FrozenWeight``: a weight without a gradient, and the adapter beside it that is trained."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax

type Labels = tuple[int, ...]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "adapter"], meta_fields=["labels", "scale"])
@dataclass(frozen=True)
class FrozenWeight:
    """A node of a tree of weights; the executor differentiates ``adapter`` only.

    Attributes:
      weight: the frozen weight; ``None`` in a tree of what is trained.
      adapter: the two arrays beside it, or ``()``.
      labels: the dims of each of the two, as :class:`jaxpar.training.lora.low_rank.LowRank` counts them.
      scale: the factor of their product.
    """

    weight: Any
    adapter: tuple[Any, ...] = ()
    labels: tuple[Labels, ...] = ()
    scale: float = 1.0


def is_frozen(x: Any) -> bool:
    """Whether a node of a tree of weights is a :class:`FrozenWeight`."""
    return isinstance(x, FrozenWeight)


def trained_part(weights: Any) -> Any:
    """Returns the tree that is differentiated, and that gradients have: the weights without those that are frozen.

    >>> trained_part({"w": FrozenWeight(1.0, (2.0, 3.0)), "b": 4.0})["w"].adapter
    (2.0, 3.0)
    """
    return jax.tree.map(lambda x: replace(x, weight=None) if is_frozen(x) else x, weights, is_leaf=is_frozen)


def with_trained(weights: Any, trained: Any) -> Any:
    """Returns the weights with another tree in place of :func:`trained_part`."""
    one = lambda x, new: replace(new, weight=x.weight) if is_frozen(x) else new
    return jax.tree.map(one, weights, trained, is_leaf=is_frozen)
