"""Weights of tensor parallelism in several dimensions outside of ``sharded_dot``: output heads and embedding tables."""

from __future__ import annotations

from dataclasses import replace

import jax

from jaxpar.parallel.tensor.route import AxisPart, WeightDims, is_live, shardings_of
from jaxpar.sharding.layout import current_layout, hint, to_spec, with_sharding
from jaxpar.sharding.resolve import Resolved


def used_sharding(w: jax.Array, dims: WeightDims) -> Resolved:
    """Returns the sharding of a weight in the compute: by the activation rules, or as a local product uses it.

    In several dimensions, activations and weights are sharded over the same axes, so the activation rules of a weight's
    dims may claim an axis twice. Such a weight keeps the axes of the role ``params``, except those of the rows, over
    which it is gathered; it is taken to be multiplied along its first dim.
    """
    layout = current_layout()
    used = layout.resolve(dims, w.shape, dtype=w.dtype)
    if not used.problems or not is_live(layout.sizes) or w.ndim < 2:
        return used
    rows = jax.ShapeDtypeStruct((0, w.shape[0]), w.dtype)  # any batch is a multiple of its axes
    found = shardings_of(layout, rows, w, dims, 1, jax.sharding.get_abstract_mesh().manual_axes)
    if found.problems:
        return used
    parts, kept = found.parts(), (AxisPart.CONTRACTED, AxisPart.COLUMNS)
    inside = (replace(dim, axes=tuple(axis for axis in dim.axes if parts[axis] in kept)) for dim in found.w.dims)
    return replace(found.w, dims=tuple(inside))


def hint_weight(w: jax.Array, *dims: str | None) -> jax.Array:
    """Returns ``w`` sharded as :func:`used_sharding` says: ``hint(w, *dims)``, where the activation rules apply."""
    used = used_sharding(w, dims)
    context = jax.sharding.get_abstract_mesh()
    if used.problems or used == current_layout().resolve(dims, w.shape, dtype=w.dtype) or context.empty:
        return hint(w, *dims)
    return with_sharding(context if context.manual_axes else current_layout().mesh, w, to_spec(used))
