"""``Int8``: an array kept in 8-bit integers, with one scale for all numbers that a product sums over.

For weights that only inference reads, and for its caches. A number x becomes round(x / s) with s = max|x| / 127 over the dims that are summed,
so none is off by more than max|x| / 254 (after Jacob et al. 2018, arXiv:1712.05877, symmetric). As the scale is the same for all that is summed, a product with
the integers is scaled afterwards, and a compiler can cast them as it reads. What is not finite stays so: the scale carries it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["summed"])
@dataclass(frozen=True, eq=False)
class Int8:
    """An array in int8: ``values * scales``. A pytree, so it can stand in parameters, caches and what scans go over.

    :func:`jaxpar.sharded_dot` and :func:`jaxpar.cached_attention` compute with it as it is; all else of jax takes it as the array that it stands for
    (``x @ w``, ``w.astype(...)``), written out.

    Attributes:
      values: int8, of the array's shape.
      scales: fp32, of the array's shape without the dims ``summed``.
      summed: the dims that share a scale, counted from the end (-1 is the last), so that a layer of a stack has the same.

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
        """``x`` rounded, with a scale for all of the dims ``summed``; 0 where all are 0.

        Raises:
          ConfigError: there is no dim to share a scale, or no such dim.
        """
        dims = tuple(sorted({dim % x.ndim - x.ndim for dim in summed if -x.ndim <= dim < x.ndim}))
        if not dims or len(dims) != len(summed):
            raise ConfigError(
                f"Int8.of(): {list(summed)} of an array of shape {tuple(x.shape)} are to share a scale, but one or more of its {x.ndim} dims are "
                f"wanted, each once. Remedy: the dims that the product sums over."
            )
        wide = x.astype(jnp.float32)
        scales = jnp.max(jnp.abs(wide), dims, keepdims=True) / 127
        values = jnp.round(wide / jnp.where(scales == 0, 1, scales)).astype(jnp.int8)
        return cls(values, jnp.squeeze(scales, dims), dims)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @property
    def T(self) -> Int8:
        """A matrix turned over."""
        return Int8(self.values.T, self.scales, tuple(-3 - dim for dim in self.summed))

    def of_scales[Name](self, dims: Sequence[Name]) -> tuple[Name, ...]:
        """Of something for each dim of the array, as its logical dims, that for each dim of the scales."""
        return tuple(name for at, name in enumerate(dims, -len(dims)) if at not in self.summed)

    def astype(self, dtype: Any) -> jax.Array:
        """The array that this stands for."""
        at = sorted(dim % self.ndim for dim in self.summed)
        return (self.values.astype(jnp.float32) * jnp.expand_dims(self.scales, at)).astype(dtype)

    def __getitem__(self, key: Any) -> Any:
        return self if key is Ellipsis else self.astype(self.scales.dtype)[key]

    def __jax_array__(self) -> jax.Array:
        return self.astype(self.scales.dtype)

    def __matmul__(self, other: Any) -> Any:
        return self.astype(other.dtype) @ other

    def __rmatmul__(self, other: Any) -> Any:
        return other @ self.astype(other.dtype)


def is_int8(x: Any) -> bool:
    """Whether a leaf of a model's parameters is kept in 8-bit integers."""
    return isinstance(x, Int8)
