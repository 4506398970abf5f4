"""Resizing of slices, inside a ``shard_map``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError, LayoutError, listing
from jaxpar.parallel.spatial.halo import exchange_halo
from jaxpar.sharding.rules import Axes

Method = Literal["nearest", "linear", "cubic"]


def _linear(x: jax.Array) -> jax.Array:
    return jnp.maximum(0, 1 - x)


def _cubic(x: jax.Array) -> jax.Array:
    """Keys' cubic with a = -0.5 (Keys 1981, doi:10.1109/TASSP.1981.1163711)."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return jnp.where(x < 1, near, jnp.where(x < 2, far, 0))


@dataclass(frozen=True)
class _Kernel:
    weight: Callable[[jax.Array], jax.Array]
    radius: int


_KERNELS = {"linear": _Kernel(_linear, 1), "cubic": _Kernel(_cubic, 2)}


@dataclass(frozen=True)
class Resizing:
    """A resizing of one dim, as ``jax.image.resize`` computes it.

    Attributes:
      size, new_size: numbers along the whole dim, before and after.
      method: ``nearest``, ``linear`` or ``cubic``.
      antialias: whether a smaller image takes the mean of more numbers.

    Raises:
      ConfigError: an unknown method.
    """

    size: int
    new_size: int
    method: Method = "linear"
    antialias: bool = True

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ConfigError(
                f"resize: method must be one of {listing(get_args(Method))}, got {self.method!r}. Remedy: one of these."
            )

    @property
    def reach(self) -> int:
        """The most numbers before or after the place of a result that it reads."""
        if self.method == "nearest":
            return 1
        wide = max(1.0, self.size / self.new_size) if self.antialias else 1.0
        return math.ceil(_KERNELS[self.method].radius * wide)

    def weights(self, start: jax.Array, count: int, first: jax.Array, rows: int) -> jax.Array:
        """Returns what each number gives to each result, fp32 ``[rows, count]``.

        Args:
          start: the first result, of the whole.
          count: the number of results.
          first: the first number of the input, of the whole; it may lie outside.
          rows: the numbers of the input.
        """
        ratio = self.size / self.new_size
        place_C = (start + jnp.arange(count) + 0.5) * ratio
        number_R = first + jnp.arange(rows)
        inside_R1 = ((number_R >= 0) & (number_R < self.size))[:, None]
        if self.method == "nearest":
            return jnp.asarray(inside_R1 & (number_R[:, None] == jnp.floor(place_C)), jnp.float32)
        wide = max(1.0, ratio) if self.antialias else 1.0
        weights_RC = _KERNELS[self.method].weight(jnp.abs(place_C - 0.5 - number_R[:, None]) / wide)
        weights_RC = jnp.where(inside_R1, weights_RC, 0)
        return weights_RC / jnp.sum(weights_RC, axis=0, keepdims=True)


def resize_local(x: jax.Array, dim: int, resizing: Resizing, axes: Axes) -> jax.Array:
    """Returns this device's slice of an image whose dim ``dim`` is resized, inside a ``shard_map``.

    Args:
      x: the slice.
      dim: the dim.
      resizing: of the whole dim.
      axes: the manual mesh axes that shard the dim; ``()`` if it is whole.

    Raises:
      LayoutError: the slices do not divide the new size, or a result reads beyond a neighbour's slice.

    >>> resize_local(jnp.arange(4.0), 0, Resizing(4, 8, "nearest"), ()).tolist()
    [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    """
    slices = jax.lax.axis_size(axes) if axes else 1
    if resizing.new_size % slices:
        raise LayoutError(
            f"resize: {resizing.new_size} rows do not divide by the {slices} slices of the mesh axes {listing(axes)}. "
            f"Remedy: a size that is a multiple of {slices}, or do not shard this dim."
        )
    index, local, count = jax.lax.axis_index(axes) if axes else 0, x.shape[dim], resizing.new_size // slices
    reach = resizing.reach if axes else 0
    x = exchange_halo(x, dim, axes, reach, reach)
    weights = resizing.weights(jnp.asarray(index * count), count, jnp.asarray(index * local - reach), x.shape[dim])
    result = jnp.tensordot(x, weights.astype(x.dtype), ((dim,), (0,)), precision=jax.lax.Precision.HIGHEST)
    return jnp.moveaxis(result, -1, dim)
