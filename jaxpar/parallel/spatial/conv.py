"""Convolutions of slices, inside a ``shard_map``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.lax import ConvDimensionNumbers

from jaxpar.parallel.spatial.halo import Window, exchange_halo
from jaxpar.sharding.rules import Axes


@dataclass(frozen=True)
class Convolution:
    """A convolution on whole arrays, as the arguments of ``jax.lax.conv_general_dilated`` describe it.

    Attributes:
      numbers: which dims of input, kernel and result are batch, channels and space.
      windows: the windows of each spatial dim.
      options: arguments that slices do not change.
    """

    numbers: ConvDimensionNumbers
    windows: tuple[Window, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, lhs: Any, rhs: Any, *arguments: Any, **options: Any) -> Convolution:
        """Returns the convolution of arrays of these shapes, with the other arguments of ``conv_general_dilated``."""
        given = inspect.signature(jax.lax.conv_general_dilated).bind(lhs, rhs, *arguments, **options).arguments
        named = {name: x for name, x in given.items() if name not in ("lhs", "rhs")}
        numbers = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, named.pop("dimension_numbers", None))
        strides, padding = named.pop("window_strides"), named.pop("padding")
        input_spread, spread = (
            named.pop(name, None) or (1,) * len(strides) for name in ("lhs_dilation", "rhs_dilation")
        )
        kernel = [rhs.shape[dim] for dim in numbers.rhs_spec[2:]]
        if isinstance(padding, str):
            sizes = [lhs.shape[dim] for dim in numbers.lhs_spec[2:]]
            reach = [(k - 1) * d + 1 for k, d in zip(kernel, spread, strict=True)]
            padding = jax.lax.padtype_to_pads(sizes, reach, strides, padding)
        windows = tuple(
            Window(k, s, (int(p[0]), int(p[1])), d, i)
            for k, s, p, d, i in zip(kernel, strides, padding, spread, input_spread, strict=True)
        )
        return cls(numbers, windows, named)

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, paddings: Sequence[tuple[int, int]], **options: Any
    ) -> jax.Array:
        """Returns the result with the given padding in place of that of the windows, and these options."""
        result: jax.Array = jax.lax.conv_general_dilated(
            lhs,
            rhs,
            [w.stride for w in self.windows],
            list(paddings),
            [w.input_spread for w in self.windows],
            [w.spread for w in self.windows],
            self.numbers,
            **{**self.options, **options},
        )
        return result


def conv_local(
    lhs: jax.Array, rhs: jax.Array, *arguments: Any, axes: Sequence[Axes], circular: bool = False, **options: Any
) -> jax.Array:
    """Returns this device's slice of ``jax.lax.conv_general_dilated``, inside a ``shard_map``.

    Each device sends the rows at the edges of its slice to its neighbours, and computes its own windows.

    Args:
      lhs: the slice of the input.
      rhs: the whole kernel.
      *arguments: the further arguments of ``jax.lax.conv_general_dilated``, as for the whole input: ``"SAME"`` pads the
        whole image.
      axes: for each spatial dim, the manual mesh axes that shard it; ``()`` for a whole dim.
      circular: rows of the opposite edge of the image stand for its padding.
      **options: further arguments by name.

    Returns:
      The slice of the result.

    Raises:
      LayoutError: the windows do not line up with the slices, or read beyond a neighbour's slice.

    >>> import jax.numpy as jnp
    >>> mesh = jax.make_mesh((4,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> spec = jax.sharding.PartitionSpec(None, None, "context")
    >>> run = lambda x, w: conv_local(x, w, (1,), "SAME", axes=(("context",),))
    >>> whole, kernel = jnp.arange(8.0).reshape(1, 1, 8), jnp.ones((1, 1, 3))
    >>> jax.shard_map(run, mesh=mesh, in_specs=(spec, jax.P()), out_specs=spec)(whole, kernel)[0, 0].tolist()
    [1.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 13.0]
    """
    given = inspect.signature(jax.lax.conv_general_dilated).bind(lhs, rhs, *arguments, **options).arguments
    numbers = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, given.get("dimension_numbers"))
    shape, counts = list(lhs.shape), [jax.lax.axis_size(names) if names else 1 for names in axes]
    for dim, count in zip(numbers.lhs_spec[2:], counts, strict=True):
        shape[dim] *= count
    conv = Convolution.of(jax.ShapeDtypeStruct(shape, lhs.dtype), rhs, *arguments, **options)
    paddings = [window.padding for window in conv.windows]
    for i, (dim, names, count) in enumerate(zip(numbers.lhs_spec[2:], axes, counts, strict=True)):
        if names or circular:
            halo = conv.windows[i].halo(shape[dim], count)
            lhs = exchange_halo(lhs, dim, names, halo.before, halo.after, circular=circular)
            paddings[i] = halo.padding
    return conv(lhs, rhs, paddings)
