"""Pooling of slices, inside a ``shard_map``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpar.parallel.spatial.halo import Window, exchange_halo
from jaxpar.sharding.rules import Axes

Padding = str | Sequence[tuple[int, int]]


def reduce_window_local(
    x: jax.Array,
    init_value: float,
    computation: Callable[[Any, Any], Any],
    windows: Sequence[Window],
    *,
    axes: Sequence[Axes],
) -> jax.Array:
    """Returns this device's slice of ``jax.lax.reduce_window`` over all dims between the first and the last.

    Args:
      x: the slice ``[batch, ..., channels]``.
      init_value: what padding contains, the identity of ``computation``.
      computation: such as ``jax.lax.max``.
      windows: the windows along each spatial dim of the whole.
      axes: for each spatial dim, the manual mesh axes that shard it; ``()`` for a whole dim.

    Raises:
      LayoutError: the windows do not line up with the slices, or read beyond a neighbour's slice.

    >>> import jax.numpy as jnp
    >>> x = jnp.arange(4.0).reshape(1, 4, 1)
    >>> reduce_window_local(x, 0.0, jax.lax.add, [Window(2, stride=2)], axes=[()])[0, :, 0].tolist()
    [1.0, 5.0]
    """
    paddings = [window.padding for window in windows]
    for i, (window, names) in enumerate(zip(windows, axes, strict=True)):
        if names:
            slices = jax.lax.axis_size(names)
            halo = window.halo(x.shape[i + 1] * slices, slices)
            x = exchange_halo(x, i + 1, names, halo.before, halo.after, fill=init_value)
            if min(halo.padding) < 0:
                x = jax.lax.slice_in_dim(
                    x, max(0, -halo.padding[0]), x.shape[i + 1] + min(0, halo.padding[1]), axis=i + 1
                )
            paddings[i] = (max(0, halo.padding[0]), max(0, halo.padding[1]))
    of_all = lambda per_dim, other: (other, *per_dim, other)
    result: jax.Array = jax.lax.reduce_window(
        x,
        init_value,
        computation,
        of_all([w.size for w in windows], 1),
        of_all([w.stride for w in windows], 1),
        of_all(paddings, (0, 0)),
        None,
        of_all([w.spread for w in windows], 1),
    )
    return result


def windows_of(
    sizes: Sequence[int], shape: Sequence[int], strides: Sequence[int] | None, padding: Padding
) -> tuple[Window, ...]:
    """Returns the windows of a pooling, with the arguments of Flax's.

    Args:
      sizes: of the spatial dims of the whole.
      shape: of a window.
      strides: between windows; 1 by default, as in Flax.
      padding: ``"SAME"``, ``"VALID"``, or a pair of numbers for each dim.

    >>> windows_of((8, 8), (3, 3), (2, 2), "SAME")[0]
    Window(size=3, stride=2, padding=(0, 1), spread=1, input_spread=1)
    """
    strides = strides or (1,) * len(shape)
    pairs = jax.lax.padtype_to_pads(sizes, shape, strides, padding) if isinstance(padding, str) else padding
    return tuple(
        Window(size, stride, (int(pair[0]), int(pair[1])))
        for size, stride, pair in zip(shape, strides, pairs, strict=True)
    )
