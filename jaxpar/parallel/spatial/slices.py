"""Convolutions, pooling and resizing of whole images, computed slice by slice as the ambient layout shards them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxpar.errors import LayoutError
from jaxpar.parallel.spatial.conv import conv_local
from jaxpar.parallel.spatial.pool import Padding, reduce_window_local, windows_of
from jaxpar.parallel.spatial.resize import Method, Resizing, resize_local
from jaxpar.parallel.spatial.transpose import Transposed
from jaxpar.sharding.layout import current_layout, manual_axes
from jaxpar.sharding.resolve import resolve
from jaxpar.sharding.rules import Axes
from jaxpar.utils.arrays import at_least_fp32

SPATIAL_DIMS = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}
"""The logical dims of an image with so many spatial dims."""


def conv(
    lhs: jax.Array, rhs: jax.Array, *arguments: Any, dims: Sequence[str | None] | None = None, **options: Any
) -> jax.Array:
    """Returns ``jax.lax.conv_general_dilated``, computed slice by slice.

    It sends the halo, and nothing else but the sum of the kernel's gradients. A Flax layer takes it as
    ``nnx.Conv(..., conv_general_dilated=jp.spatial.conv)``, in NNX and in Linen.

    Args:
      lhs: the images.
      rhs: the kernel, which no mesh axis of the spatial dims shards.
      *arguments: the further arguments of ``jax.lax.conv_general_dilated``.
      dims: the logical dims of the spatial dims; by default ``height`` and ``width``, with ``depth`` before them for
        volumes, and ``width`` alone for one dim.
      **options: further arguments by name.

    Returns:
      The result, sharded as the input.

    Raises:
      NoLayoutError: no layout is ambient.
      LayoutError: the slices do not divide the image or its windows, or windows read beyond a neighbour's slice.

    >>> import jaxpar as jp
    >>> rules = jp.Rules(batch="data", height="context", width=None, channels=None)
    >>> x, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 5))
    >>> with jp.Layout(jp.MeshSpec(data=-1, context=4).build(), rules):
    ...     conv(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")).shape
    (2, 8, 8, 5)
    """
    numbers = jax.lax.conv_dimension_numbers(
        lhs.shape, rhs.shape, arguments[4] if len(arguments) > 4 else options.get("dimension_numbers")
    )
    local = lambda x, kernel, axes: conv_local(x, kernel, *arguments, axes=axes, **options)
    return _convolved("conv", local, lhs, rhs, numbers, dims)


def conv_transpose(
    lhs: jax.Array, rhs: jax.Array, *arguments: Any, dims: Sequence[str | None] | None = None, **options: Any
) -> jax.Array:
    """Returns ``jax.lax.conv_transpose``, computed slice by slice.

    It sends the halo, which windows that do not overlap do not have, and the sum of the kernel's gradients. The layer
    :class:`jaxpar.spatial.ConvTranspose` calls it in NNX, and
    :func:`jaxpar.spatial.intercept_conv_transpose` in Linen.

    Args:
      lhs: the images.
      rhs: the kernel, which no mesh axis of the spatial dims shards.
      *arguments: the further arguments of ``jax.lax.conv_transpose``: strides, padding and so on. The padding may also
        be ``"CIRCULAR"``, as in Flax.
      dims: as for :func:`conv`.
      **options: further arguments by name.

    Returns:
      The result, sharded as the input.

    Raises:
      NoLayoutError: no layout is ambient.
      ConfigError: an unknown padding.
      LayoutError: as :func:`conv`; slices that have more rows than ``stride`` for each row of the input, as ``"VALID"``
        gives with a kernel larger than its stride, do not divide.

    >>> import jaxpar as jp
    >>> rules = jp.Rules(batch="data", height="context", width=None, channels=None)
    >>> x, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((2, 2, 3, 5))
    >>> with jp.Layout(jp.MeshSpec(data=-1, context=4).build(), rules):
    ...     conv_transpose(x, kernel, (2, 2), "SAME").shape
    (2, 16, 16, 5)
    """
    how = Transposed.of(lhs, rhs, *arguments, **options)
    local = functools.partial(conv_local, circular=how.circular, **how.arguments)
    return _convolved("conv_transpose", local, lhs, how.kernel(rhs), how.numbers, dims)


def max_pool(
    x: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    *,
    dims: Sequence[str | None] | None = None,
) -> jax.Array:
    """Returns Flax's ``max_pool`` of ``x`` ``[batch, ..., channels]``, computed slice by slice.

    Args:
      x: the images.
      window_shape, strides, padding: as in Flax.
      dims: as for :func:`conv`.

    Raises:
      NoLayoutError: no layout is ambient.
      LayoutError: as :func:`conv`.

    >>> import jaxpar as jp
    >>> with jp.Layout(jp.MeshSpec(context=-1).build(), jp.Rules(height="context", width=None)):
    ...     max_pool(jnp.ones((1, 16, 8, 3)), (2, 2), (2, 2)).shape
    (1, 8, 4, 3)
    """
    least = -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else int(jnp.iinfo(x.dtype).min)
    windows = windows_of(x.shape[1:-1], window_shape, strides, padding)
    local = lambda x, axes: reduce_window_local(x, least, jax.lax.max, windows, axes=axes)
    return _sliced("max_pool", local, x, range(1, x.ndim - 1), dims)


def avg_pool(
    x: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    *,
    count_include_pad: bool = True,
    dims: Sequence[str | None] | None = None,
) -> jax.Array:
    """Returns Flax's ``avg_pool`` of ``x`` ``[batch, ..., channels]``, computed slice by slice.

    Args:
      x: the images.
      window_shape, strides, padding, count_include_pad: as in Flax.
      dims: as for :func:`conv`.

    Raises:
      NoLayoutError: no layout is ambient.
      LayoutError: as :func:`conv`.

    >>> import jaxpar as jp
    >>> with jp.Layout(jp.MeshSpec(context=-1).build(), jp.Rules(height="context", width=None)):
    ...     avg_pool(jnp.ones((1, 16, 8, 3)), (3, 3), (1, 1), "SAME", count_include_pad=False).shape
    (1, 16, 8, 3)
    """
    windows = windows_of(x.shape[1:-1], window_shape, strides, padding)

    def local(x: jax.Array, axes: Sequence[Axes]) -> jax.Array:
        total = reduce_window_local(x, 0.0, jax.lax.add, windows, axes=axes)
        if count_include_pad:
            return total / math.prod(window_shape)
        ones = jnp.ones((1, *x.shape[1:-1], 1), x.dtype)
        return total / reduce_window_local(ones, 0.0, jax.lax.add, windows, axes=axes)

    return _sliced("avg_pool", local, x, range(1, x.ndim - 1), dims)


def resize(
    x: jax.Array,
    shape: Sequence[int],
    method: Method = "linear",
    *,
    antialias: bool = True,
    dims: Sequence[str | None] | None = None,
) -> jax.Array:
    """Returns ``jax.image.resize`` of ``x`` ``[batch, ..., channels]``, computed slice by slice.

    The compiler alone would gather the image on each device.

    Args:
      x: the images.
      shape: the new sizes of the spatial dims, ``x.shape[1:-1]`` before.
      method: ``nearest``, ``linear`` or ``cubic``.
      antialias: as in ``jax.image.resize``.
      dims: as for :func:`conv`.

    Raises:
      NoLayoutError: no layout is ambient.
      ConfigError: an unknown method.
      LayoutError: as :func:`conv`.

    >>> import jaxpar as jp
    >>> with jp.Layout(jp.MeshSpec(context=-1).build(), jp.Rules(height="context", width=None)):
    ...     jax.jit(lambda x: resize(x, (32, 16)))(jnp.ones((1, 16, 8, 3))).shape
    (1, 32, 16, 3)
    """
    changes = [
        (dim, Resizing(size, new, method, antialias))
        for dim, (size, new) in enumerate(zip(x.shape[1:-1], shape, strict=True), 1)
        if size != new
    ]

    def local(x: jax.Array, axes: Sequence[Axes]) -> jax.Array:
        for dim, resizing in changes:
            x = resize_local(x, dim, resizing, axes[dim - 1])
        return x

    return _sliced("resize", local, x, range(1, x.ndim - 1), dims)


def _convolved(
    name: str,
    convolve: Callable[..., jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    numbers: jax.lax.ConvDimensionNumbers,
    dims: Sequence[str | None] | None,
) -> jax.Array:
    """Returns ``convolve(lhs, rhs, axes)`` of each slice."""
    dtype = rhs.dtype
    local = lambda x, kernel, axes: convolve(x, kernel.astype(dtype), axes=axes)
    # The kernel enters in fp32, so that its gradient is summed over slices in fp32.
    return _sliced(name, local, lhs, numbers.lhs_spec[2:], dims, at_least_fp32(rhs), out=numbers.out_spec[2:])


def _sliced(
    name: str,
    local: Callable[..., jax.Array],
    x: jax.Array,
    spatial: Sequence[int],
    dims: Sequence[str | None] | None,
    *whole: jax.Array,
    out: Sequence[int] | None = None,
) -> jax.Array:
    """Returns ``local(x, *whole, axes)`` of each device's slice of ``x``.

    Args:
      name: of the operation, for errors.
      local: computes a slice; ``axes`` are those of each spatial dim.
      x: the images.
      spatial: the spatial dims of ``x``.
      dims: their logical dims, or ``None`` for the usual ones.
      *whole: arrays that all slices use.
      out: the spatial dims of the result, if they differ.
    """
    layout, context = current_layout(), jax.sharding.get_abstract_mesh()
    dims = tuple(SPATIAL_DIMS.get(len(spatial), ()) if dims is None else dims)
    if len(dims) != len(spatial):
        raise LayoutError(
            f"{name}: dims must name the {len(spatial)} spatial dims of x {list(x.shape)}, got {list(dims)}. Remedy: a "
            f"logical dim, or None, for each."
        )
    if context.empty:  # jp.unsharded()
        return local(x, *whole, axes=((),) * len(dims))
    names: list[str | None] = [None] * x.ndim
    for dim, logical in zip(spatial, dims, strict=True):
        names[dim] = logical
    free = {axis: size for axis, size in layout.sizes.items() if axis not in context.manual_axes}
    resolved = resolve(layout.rules, free, names, x.shape, itemsize=x.dtype.itemsize, path=f"{name}()")
    if resolved.problems:
        raise LayoutError(resolved.problems)
    axes = tuple(layout.resolve((logical,)).axes[0] for logical in dims)
    run = functools.partial(local, axes=axes)
    used = [axis for dim in resolved.axes for axis in dim]
    if not used:
        return run(x, *whole)
    result: list[Axes] = [()] * x.ndim
    for dim, before in zip(out or spatial, spatial, strict=True):
        result[dim] = resolved.axes[before]
    sliced = jax.shard_map(
        run,
        in_specs=(PartitionSpec(*resolved.axes), *(PartitionSpec() for _ in whole)),
        out_specs=PartitionSpec(*result),
        axis_names=manual_axes(layout, used, but=context.manual_axes),
        check_vma=False,
    )
    return sliced(x, *whole)
