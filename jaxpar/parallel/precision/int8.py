"""``Int8``: an array in int8, with one scale for all numbers that a product sums over.

It is for weights and caches that only inference reads. A number x becomes round(x / s) with s = max|x| / 127 over the
summed dims, so no error exceeds max|x| / 254 (symmetric quantization, after Jacob et al. 2018, arXiv:1712.05877). All
summed numbers share the scale, so a product multiplies the integers first and scales the result, and the compiler can
cast the integers as it reads them. A value that is not finite makes its scale not finite.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError


class StoredIntegers(ABC):
    """What arrays in few bits have in common: integers ``values`` and ``scales``, which stand for another array."""

    values: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that this stands for."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """The number of dims of the array that this stands for."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of ``values``."""
        return self.values.dtype

    @abstractmethod
    def spread_scales(self) -> jax.Array:
        """Returns the scales in a shape that broadcasts to that of ``values``."""

    def astype(self, dtype: Any) -> jax.Array:
        """Returns the array that this stands for, computed in fp32 and cast to ``dtype``."""
        return (self.values.astype(jnp.float32) * self.spread_scales()).astype(dtype)

    def __getitem__(self, key: Any) -> Any:
        return self if key is Ellipsis else self.astype(self.scales.dtype)[key]

    def __jax_array__(self) -> jax.Array:
        return self.astype(self.scales.dtype)

    def __matmul__(self, other: Any) -> Any:
        return self.astype(other.dtype) @ other

    def __rmatmul__(self, other: Any) -> Any:
        return other @ self.astype(other.dtype)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["summed"])
@dataclass(frozen=True, eq=False)
class Int8(StoredIntegers):
    """An array in int8 that stands for ``values * scales``.

    It is a pytree, so parameters, caches and the operands of a scan may contain it. :func:`jaxpar.sharded_dot` and
    :func:`jaxpar.inference.cached_attention` compute with the integers. Other functions of jax, ``x @ w`` and
    ``w.astype(...)`` convert it to the array that it stands for.

    Attributes:
      values: int8, with the array's shape.
      scales: fp32, with the array's shape without the dims in ``summed``.
      summed: the dims that share a scale, counted from the end (-1 is the last), so that they are the same for one
        layer as for a stack of layers.

    >>> import jax.numpy as jnp
    >>> w = Int8.of(jnp.asarray([[1.0, 8.0], [-2.0, 4.0]]), [0])
    >>> w.values.tolist(), w.scales.shape
    ([[64, 127], [-127, 64]], (2,))
    >>> (jnp.ones((1, 2)) @ w).round(1).tolist()
    [[-1.0, 12.0]]
    """

    values: Any
    scales: Any
    summed: tuple[int, ...]

    @classmethod
    def of(cls, x: jax.Array, summed: Sequence[int]) -> Int8:
        """Returns ``x`` quantized, with one scale for all numbers along the dims ``summed``.

        Args:
          x: an array of floats.
          summed: the dims that a product sums over.

        Raises:
          ConfigError: ``summed`` is empty, repeats a dim, or has a dim that ``x`` lacks.
        """
        dims = tuple(sorted({dim % x.ndim - x.ndim for dim in summed if -x.ndim <= dim < x.ndim}))
        if not dims or len(dims) != len(summed):
            raise ConfigError(
                f"Int8.of(): the dims that share a scale must be one or more of the {x.ndim} dims of an array of shape "
                f"{tuple(x.shape)}, each once, got {list(summed)}. Remedy: pass the dims that the product sums over."
            )
        wide = x.astype(jnp.float32)
        scales = jnp.max(jnp.abs(wide), dims, keepdims=True) / 127
        values = jnp.round(wide / jnp.where(scales == 0, 1, scales)).astype(jnp.int8)
        return cls(values, jnp.squeeze(scales, dims), dims)

    @property
    def T(self) -> Int8:
        """The transpose of a matrix, as an :class:`Int8`."""
        return Int8(self.values.T, self.scales, tuple(-3 - dim for dim in self.summed))

    def of_scales[Name](self, dims: Sequence[Name]) -> tuple[Name, ...]:
        """Returns the entries of ``dims``, one per dim of the array, that belong to dims of the scales."""
        return tuple(name for at, name in enumerate(dims, -len(dims)) if at not in self.summed)

    def spread_scales(self) -> jax.Array:
        """Returns the scales in a shape that broadcasts to that of ``values``."""
        return jnp.expand_dims(self.scales, sorted(dim % self.ndim for dim in self.summed))


def is_int8(x: Any) -> bool:
    """Returns whether a leaf of a model's parameters is an :class:`Int8`."""
    return isinstance(x, Int8)
