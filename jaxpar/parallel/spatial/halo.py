"""Halos: the edge of a neighbour's slice of an image, which windows at the edge of a device's own slice also read."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpar.errors import LayoutError
from jaxpar.sharding.rules import Axes


def exchange_halo(
    x: jax.Array, dim: int, axes: Axes, before: int, after: int, *, fill: float = 0.0, circular: bool = False
) -> jax.Array:
    """Returns this device's slice with rows of its two neighbours before and after it, inside a ``shard_map``.

    Each device sends ``before + after`` rows, and receives as many in the backward pass, in which a row's gradient
    returns to the device that holds the row.

    Args:
      x: the slice; device i of ``axes`` holds slice i of the whole.
      dim: the sharded dim.
      axes: the manual mesh axes that shard it, major to minor.
      before: rows of the device before.
      after: rows of the device after.
      fill: what lies beyond the edge of the whole.
      circular: the first and the last device are neighbours, so that nothing lies beyond the edge.

    Returns:
      An array whose dim ``dim`` has ``before + after`` more rows.

    Raises:
      LayoutError: a halo is wider than a slice.

    >>> import jax.numpy as jnp
    >>> mesh = jax.make_mesh((4,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> spec = jax.sharding.PartitionSpec("context")
    >>> two = lambda x: exchange_halo(x, 0, ("context",), 1, 0, fill=-1.0)
    >>> jax.shard_map(two, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.arange(4.0)).tolist()
    [-1.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0]
    """
    size = x.shape[dim]
    if not axes and circular:
        return jnp.pad(x, [(before, after) if i == dim else (0, 0) for i in range(x.ndim)], mode="wrap")
    if max(before, after) > size:
        raise LayoutError(
            f"a window at the edge of a slice reads {max(before, after)} rows of the neighbour's slice, but dim {dim} "
            f"of each slice has only {size}, sharded over {'+'.join(axes)}. Remedy: fewer slices, or smaller windows."
        )
    if not axes or before == after == 0:
        return x
    count, index = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    pairs = [(i, (i + 1) % count) for i in range(count if circular else count - 1)]
    fill, parts = 0.0 if circular else fill, [x]
    if before > 0:
        last = jax.lax.slice_in_dim(x, size - before, size, axis=dim)
        moved = jax.lax.ppermute(last, axes, pairs)
        parts.insert(0, _filled(moved, index == 0, fill))
    if after > 0:
        first = jax.lax.slice_in_dim(x, 0, after, axis=dim)
        moved = jax.lax.ppermute(first, axes, [(j, i) for i, j in pairs])
        parts.append(_filled(moved, index == count - 1, fill))
    return jnp.concatenate(parts, axis=dim)


def _filled(halo: jax.Array, outside: jax.Array, fill: float) -> jax.Array:
    """A device without a neighbour receives zeros."""
    return halo if fill == 0 else jnp.where(outside, jnp.asarray(fill, halo.dtype), halo)


@dataclass(frozen=True)
class Window:
    """The windows that an operation moves along a dim, as in ``jax.lax.conv_general_dilated``.

    Attributes:
      size: numbers that a window reads.
      stride: the distance between windows.
      padding: padding before and after the whole.
      spread: the distance between the numbers that a window reads (``rhs_dilation``).
      input_spread: the distance between the numbers of the input, with zeros between (``lhs_dilation``).
    """

    size: int
    stride: int = 1
    padding: tuple[int, int] = (0, 0)
    spread: int = 1
    input_spread: int = 1

    def length(self, size: int) -> int:
        """Returns the number of windows along a dim of this size.

        >>> Window(3, stride=2, padding=(1, 1)).length(8)
        4
        """
        padded = (size - 1) * self.input_spread + 1 + sum(self.padding)
        return max(0, (padded - (self.size - 1) * self.spread - 1) // self.stride + 1)

    def halo(self, size: int, slices: int) -> Halo:
        """Returns what a slice of a dim reads of its neighbours.

        Args:
          size: numbers along the whole dim, before slicing.
          slices: the number of slices, which divides ``size``.

        Raises:
          LayoutError: the windows do not divide by the slices, or do not begin where slices begin.

        >>> Window(3, padding=(1, 1)).halo(32, 4)
        Halo(before=1, after=1, padding=(0, 0))
        >>> Window(4, stride=2, padding=(1, 1)).halo(32, 4)
        Halo(before=1, after=1, padding=(0, 0))
        """
        local, windows = size // slices, self.length(size)
        own = windows // slices
        if windows % slices or own * self.stride != local * self.input_spread:
            raise LayoutError(
                f"{windows} windows of {self.size} with stride {self.stride} and padding {list(self.padding)} over "
                f"{size} rows do not line up with {slices} slices of {local} rows. Remedy: padding and a stride with "
                f"which each slice has the same number of windows, such as padding='SAME' and a stride that divides "
                f"{local}; or do not shard this dim."
            )
        # In rows of the spread input, counted from the first row of the slice.
        first, last = -self.padding[0], (own - 1) * self.stride - self.padding[0] + (self.size - 1) * self.spread
        before = max(0, -first // self.input_spread)
        after = max(0, (last - (local - 1) * self.input_spread) // self.input_spread)
        held = (-before * self.input_spread, (local - 1 + after) * self.input_spread)
        return Halo(before, after, (held[0] - first, last - held[1]))

    def halo_of_parts(self, size: int, slices: int) -> Halo:
        """Returns what a slice reads of its neighbours if each device holds a part of the window, and not windows.

        This is the gradient of a kernel: the window is the gradient of the result, as large as the image, and each
        device sums over its part of it.

        Args:
          size: numbers along the whole dim.
          slices: the number of slices, which divides ``size``.

        Raises:
          LayoutError: the parts of the window do not begin where slices begin.

        >>> Window(32, padding=(1, 1)).halo_of_parts(32, 4)  # of a kernel of 3
        Halo(before=1, after=1, padding=(0, 0))
        """
        local, part = size // slices, self.size // slices
        if self.size % slices or part * self.spread != local or self.input_spread != 1:
            raise LayoutError(
                f"{self.size} numbers of a window, {self.spread} apart, do not line up with {slices} slices of {local} "
                "rows. Remedy: do not shard this dim."
            )
        first, last = -self.padding[0], (part - 1) * self.spread + self._reach(size) - self.padding[0]
        before, after = max(0, -first), max(0, last - (local - 1))
        return Halo(before, after, (-before - first, last - (local - 1 + after)))

    def _reach(self, size: int) -> int:
        """The distance from the first to the last position of the window."""
        return (self.length(size) - 1) * self.stride


@dataclass(frozen=True)
class Halo:
    """What the windows of a slice need.

    Attributes:
      before, after: rows of the neighbours.
      padding: padding that the slice with its halo then needs; negative where it has too many rows.
    """

    before: int
    after: int
    padding: tuple[int, int]
