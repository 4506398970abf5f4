"""Transposed convolutions as convolutions of a spread input."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import ConvDimensionNumbers

from jaxpar.errors import ConfigError

CIRCULAR = "CIRCULAR"


@dataclass(frozen=True)
class Transposed:
    """A transposed convolution, as the arguments of ``jax.lax.conv_transpose`` describe it.

    Attributes:
      numbers: which dims of input, kernel and result are batch, channels and space.
      padding: padding before and after the spread input, for each spatial dim.
      strides: the distances between the rows of the spread input.
      dilation: the distances between the rows that a window reads.
      flipped: whether the kernel is that of the convolution whose gradient this is (``transpose_kernel``).
      circular: whether the image continues at its other edge.
      options: arguments that both functions take.
    """

    numbers: ConvDimensionNumbers
    padding: tuple[tuple[int, int], ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    flipped: bool
    circular: bool
    options: dict[str, Any]

    @classmethod
    def of(cls, lhs: Any, rhs: Any, *arguments: Any, **options: Any) -> Transposed:
        """Returns that of arrays of these shapes, with the other arguments of ``jax.lax.conv_transpose``."""
        given = inspect.signature(jax.lax.conv_transpose).bind(lhs, rhs, *arguments, **options).arguments
        given = {name: x for name, x in given.items() if name not in ("lhs", "rhs")}
        strides, padding = tuple(given.pop("strides")), given.pop("padding")
        dilation = tuple(given.pop("rhs_dilation", None) or (1,) * len(strides))
        flipped, consistent = (given.pop(name, False) for name in ("transpose_kernel", "use_consistent_padding"))
        space = "HWD"[: len(strides)]
        numbers = given.pop("dimension_numbers", None) or (f"N{space}C", f"{space}IO", f"N{space}C")
        numbers = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, numbers)
        named = isinstance(padding, str)
        sizes = [(rhs.shape[dim] - 1) * d + 1 for dim, d in zip(numbers.rhs_spec[2:], dilation, strict=True)]
        each = [padding] * len(strides) if named else padding
        if named or consistent:
            each = [_padding(size, s, p, flipped) for size, s, p in zip(sizes, strides, each, strict=True)]
        pads = tuple((int(before), int(after)) for before, after in each)
        return cls(numbers, pads, strides, dilation, bool(flipped), padding == CIRCULAR, given)

    def kernel(self, rhs: jax.Array) -> jax.Array:
        """Returns the kernel that the convolution takes."""
        if not self.flipped:
            return rhs
        out, into, *space = self.numbers.rhs_spec
        return jnp.swapaxes(jnp.flip(rhs, space), out, into)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``jax.lax.conv_general_dilated`` behind the arrays."""
        return {
            "window_strides": (1,) * len(self.strides),
            "padding": self.padding,
            "lhs_dilation": self.strides,
            "rhs_dilation": self.dilation,
            "dimension_numbers": self.numbers,
            **self.options,
        }


def _padding(size: int, stride: int, padding: str | tuple[int, int], flipped: bool) -> tuple[int, int]:
    """Returns the padding of a spread dim, for windows that read ``size`` rows.

    ``SAME`` and ``CIRCULAR`` give ``stride`` rows for each row of the input, ``VALID`` all rows that the input reaches.
    """
    rest = max(size - stride, 0)
    if padding == "SAME":
        before = size - 1 if stride > size - 1 else -(-(size + stride - 2) // 2)
        return before, size + stride - 2 - before
    if padding == "VALID":
        return size - 1, stride - 1 + rest
    if padding == CIRCULAR:  # as in Flax: of the rows beyond the image, half belong to each edge
        before = size - 1 - (rest + 1 if flipped else rest) // 2
        return before, size + stride - 2 - before
    if isinstance(padding, str):
        raise ConfigError(
            f"conv_transpose: padding must be one of 'SAME', 'VALID', 'CIRCULAR' or pairs of numbers, got {padding!r}. "
            f"Remedy: one of these."
        )
    return size - 1 - padding[0], size - 1 - padding[1]
