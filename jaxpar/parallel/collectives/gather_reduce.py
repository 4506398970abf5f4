"""How weights and gradients cross the mesh inside a ``shard_map``: the dtype they are sent in, and what is gathered, scattered or summed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import LayoutError
from jaxpar.parallel.collectives import hierarchical, quantized
from jaxpar.parallel.precision.policy import INT8, Precision
from jaxpar.sharding.hardware.topology import platform_of
from jaxpar.sharding.layout import Layout, current_layout
from jaxpar.sharding.resolve import Resolved
from jaxpar.sharding.rules import Axes
from jaxpar.utils.contexts import step_precision

SMALL = 64 * 1024
"""Tensors of fewer bytes that are summed whole cross as they are, whatever was asked for: their time is not the bytes'."""


def asking(precision: Precision) -> AbstractContextManager[None]:
    """While active, :func:`jaxpar.sharded_dot` crosses the mesh as ``precision`` asks for."""
    return step_precision(precision)


def asked() -> Precision:
    """What :func:`asking` was given, or nothing in particular."""
    found: Precision | None = step_precision.value
    return Precision() if found is None else found


def summing(dtype: Any, *, inside: bool = False) -> Any:
    """The dtype, if a wider one than ``dtype``, in which a gradient is to be summed by whoever makes it; nothing within a ``shard_map``, if not ``inside``.

    Nor outside of a step: who takes gradients by themselves has asked for no dtype.
    """
    aside = step_precision.value is None or (jax.sharding.get_abstract_mesh().manual_axes and not inside)
    return None if aside else asked().summing(dtype)


def batch_axes(layout: Layout) -> Axes:
    """The mesh axes, larger than 1, that the rules split the dim ``batch`` over.

    Raises:
      LayoutError: the rules do not know ``batch``.
    """
    resolved = layout.resolve(("batch",))
    if resolved.problems:
        raise LayoutError(
            "microbatches and grad_reduction='per_step' go by the rule of the logical dim 'batch', which the rules do not have. Remedy: "
            "add it, as batch='data'."
        )
    return resolved.axes[0]


@dataclass(frozen=True)
class Parts:
    """For each dim of a tensor the manual axes among its axes. A class of its own, so that it is a leaf."""

    dims: tuple[Axes, ...]


def parts_of(resolved: Resolved, axes: Axes) -> Parts:
    """Which of ``axes`` a resolved tensor is split over.

    Raises:
      LayoutError: it could not be resolved.
    """
    if resolved.problems:
        raise LayoutError(resolved.problems)
    return Parts(tuple(tuple(axis for axis in dim if axis in axes) for dim in resolved.axes))


def gather(w: jax.Array, parts: Parts, precision: Precision) -> jax.Array:
    """The whole of a weight from its parts, in the dtype of the compute."""
    split = [(dim, axes) for dim, axes in enumerate(parts.dims) if axes]
    if split and precision.gather == INT8:
        dtype = precision.computing(w).dtype
        for dim, axes in split:
            w = as_rows(functools.partial(quantized.gather_packed, axes=axes, dtype=dtype), w, dim)
        return w
    if split:
        # Behind a barrier, or the cast moves behind the gather, which then sends the wider dtype.
        w = jax.lax.optimization_barrier(precision.crossing(w))
    for dim, axes in split:
        w = as_rows(functools.partial(hierarchical.gather_local, axes=axes), w, dim)
    return precision.computing(w)


def reduce(grad: jax.Array, parts: Parts, axes: Axes, precision: Precision) -> jax.Array:
    """A gradient summed over ``axes``, in fp32 or wider: scattered over those in ``parts``, whole over the others."""
    small = grad.size * grad.dtype.itemsize < SMALL
    packs = precision.reduce == INT8
    grad = precision.reducing(grad)
    mesh = jax.sharding.get_abstract_mesh()
    if set(mesh.axis_names) - set(mesh.manual_axes) and platform_of(current_layout().mesh) == "cpu":
        # XLA:CPU aborts on a sum of 16 bits where some axes are manual and others not.
        grad = wide(grad)
    scatter = quantized.scatter_packed if packs else hierarchical.scatter_local
    for dim, split in enumerate(parts.dims):
        if split:
            grad = as_rows(functools.partial(scatter, axes=split), grad, dim)
    left = tuple(axis for axis in axes if not any(axis in dim for dim in parts.dims))
    if left and packs and not small:
        grad = quantized.sum_packed(grad, left)
    elif left:
        # Behind a barrier, or the TPU's compiler sums in the dtype that the gradient was cast from.
        grad = jax.lax.psum(jax.lax.optimization_barrier(grad), left)
    return wide(grad)


def as_rows(f: Callable[..., jax.Array], x: jax.Array, dim: int) -> jax.Array:
    """``f(x, dim=dim)`` of ``x`` as [before, dim, after]: of heads, the TPU's compiler would split or join its tiles.

    Not where the layout has axes left that may split what would become one dim.
    """
    used = {axis for axis, size in current_layout().sizes.items() if size > 1}
    if x.ndim <= 3 or used - set(jax.sharding.get_abstract_mesh().manual_axes):
        return f(x, dim=dim)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    y = f(x.reshape(math.prod(before), x.shape[dim], math.prod(after)), dim=1)
    return y.reshape(*before, -1, *after)


def wide(x: jax.typing.ArrayLike) -> jax.Array:
    """In fp32 or wider."""
    return jnp.asarray(x).astype(jnp.promote_types(jnp.result_type(x), jnp.float32))
