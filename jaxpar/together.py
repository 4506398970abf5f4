"""Weights that lie side by side as one matrix, while a layer still knows each by its name.

A pipeline joins them once a step, before its ticks, so that a layer multiplies once where it would several times: each product is a program of its own
for the compiler, forward, again and twice backward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import LayoutError


@functools.partial(jax.tree_util.register_dataclass, data_fields=["whole"], meta_fields=["place", "shapes"])
@dataclass(frozen=True)
class Part:
    """One of several weights [rows, ...] that lie side by side; stands where the layer looks for it.

    Attributes:
      whole: [rows, columns of all], with the first of them; the others have none.
      place: which of them it is.
      shapes: of all of them.
    """

    whole: jax.Array | None
    place: int
    shapes: tuple[tuple[int, ...], ...]

    def __getitem__(self, _: Any) -> Part:
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[self.place]


def parts(whole: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[Part]:
    """The weights of these shapes that lie in ``whole``."""
    return [Part(None if place else whole, place, tuple(shapes)) for place in range(len(shapes))]


def whole_of(weights: Sequence[Any]) -> jax.Array | None:
    """The matrix of which these weights are all the parts, in order; ``None`` where none is a part.

    Raises:
      LayoutError: some are, but not all of one matrix.

    >>> gate, up = parts(jnp.ones((4, 6)), [(4, 3), (4, 3)])
    >>> whole_of([gate, up]).shape, whole_of([jnp.ones((4, 3))])
    ((4, 6), None)
    """
    if not any(isinstance(w, Part) for w in weights):
        return None
    places = [(w.place, w.shapes) if isinstance(w, Part) else None for w in weights]
    shapes = next(w.shapes for w in weights if isinstance(w, Part))
    if places != [(place, shapes) for place in range(len(shapes))]:
        raise LayoutError(
            f"project(): {len(weights)} weights of shapes {', '.join(str(list(w.shape)) for w in weights)} are asked for, but those of shapes "
            f"{', '.join(map(str, map(list, shapes)))} lie side by side as one matrix (Staged(together=...)), and are multiplied at once. Remedy: all "
            f"of them in this order in one call of project, or leave them out of together."
        )
    whole: jax.Array = weights[0].whole
    return whole


def joined(weights: Sequence[jax.Array], lead: int) -> jax.Array:
    """Weights [..., rows, columns or more dims] side by side, the first ``lead`` dims and the rows being those of all."""
    return jnp.concatenate([w.reshape(*w.shape[: lead + 1], -1) for w in weights], -1)


def parted(whole: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """What lies side by side in the last dim of ``whole``, as ``[..., *shape]`` of each, its rows counted among the dots."""
    sizes = [math.prod(shape) for shape in shapes]
    each = jax.lax.split(whole, sizes, whole.ndim - 1)
    return [x.reshape(*whole.shape[:-1], *shape) for x, shape in zip(each, shapes, strict=True)]
