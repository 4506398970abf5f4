"""Gathers of weights and reductions of gradients inside a ``shard_map``, in the dtypes of the step's precision."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpar.errors import LayoutError, listing
from jaxpar.parallel.collectives import hierarchical, quantized
from jaxpar.parallel.precision.policy import INT8, Exact, Precision
from jaxpar.sharding.hardware.topology import platform_of
from jaxpar.sharding.layout import Layout, current_layout
from jaxpar.sharding.names import LAYERS
from jaxpar.sharding.resolve import Resolved
from jaxpar.sharding.rules import Axes
from jaxpar.utils.arrays import at_least_fp32
from jaxpar.utils.contexts import step_precision

EXPERTS = "experts"
"""The logical dim of the experts of a layer: the compute exchanges tokens over its axes instead of gathering it."""
_STACKED = (LAYERS, "dense_layers")
"""Logical dims along which layers are stacked."""
SMALL = 64 * 1024
"""All-reduced gradients with fewer bytes are never sent in int8: their time does not depend on the bytes."""


def precision_scope(precision: Precision) -> AbstractContextManager[None]:
    """Returns a context in which :func:`jaxpar.sharded_dot` uses ``precision``."""
    return step_precision(precision)


def current_precision() -> Precision:
    """Returns the precision given to :func:`precision_scope`, or the default precision outside of it."""
    found: Precision | None = step_precision.value
    return Precision() if found is None else found


def summing(dtype: Any, *, inside: bool = False) -> Any:
    """Returns the dtype in which a gradient computed in ``dtype`` is summed, if it is wider; else ``None``.

    It is ``None`` outside of a step, which sets no precision. It is also ``None`` inside a ``shard_map`` unless
    ``inside`` is true, because the code around the ``shard_map`` reduces the gradients.
    """
    aside = step_precision.value is None or (jax.sharding.get_abstract_mesh().manual_axes and not inside)
    return None if aside else current_precision().summing(dtype)


def batch_axes(layout: Layout) -> Axes:
    """Returns the mesh axes, of a size above 1, that shard the dim ``batch``.

    Raises:
      LayoutError: the rules do not know ``batch``.
    """
    resolved = layout.resolve(("batch",))
    if resolved.problems:
        raise LayoutError(
            "microbatches and grad_reduction='per_step' require a rule for the logical dim 'batch', but the rules have "
            "none. Remedy: add it, such as batch='data'."
        )
    return resolved.axes[0]


def axes_of(layout: Layout, dim: str) -> Axes:
    """Returns the mesh axes, of a size above 1, that shard a logical dim; none if the rules do not know it."""
    resolved = layout.resolve((dim,))
    return () if resolved.problems else resolved.axes[0]


def seq_axes(layout: Layout) -> Axes:
    """Returns the mesh axes, of a size above 1, that shard ``seq`` but not ``heads``; none if no rule names ``seq``."""
    heads = axes_of(layout, "heads")
    return tuple(axis for axis in axes_of(layout, "seq") if axis not in heads)


@dataclass(frozen=True)
class Parts:
    """The manual axes that shard each dim of a tensor. It is a class, so that jax treats it as a leaf.

    Attributes:
      dims: the axes of each dim, major to minor.
      kept: those of them over which the compute uses the shards as they are, as a layer uses its experts: they are
        neither gathered nor summed over. In each dim they come first.
      exact: how exactly the weight is gathered, and its gradient reduced.
    """

    dims: tuple[Axes, ...]
    kept: Axes = ()
    exact: Exact = False

    @property
    def crossed(self) -> tuple[tuple[int, Axes], ...]:
        """The dims that are gathered or scattered, and the axes of each."""
        found = ((dim, tuple(axis for axis in axes if axis not in self.kept)) for dim, axes in enumerate(self.dims))
        return tuple((dim, axes) for dim, axes in found if axes)

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*self.dims)


def scores_experts(dims: Sequence[str | None]) -> bool:
    """Returns whether a weight with these logical dims gives one number per expert, as that of a router does.

    >>> scores_experts(("layers", "embed", "experts")), scores_experts(("layers", "experts", "embed", "expert_mlp"))
    (True, False)
    """
    return len(dims) > 1 and dims[-1] == EXPERTS and any(name not in _STACKED for name in dims[:-1])


def is_exact(dims: Sequence[str | None], precision: Precision) -> bool:
    """Returns whether a weight with these logical dims is gathered in the compute dtype.

    It is if ``precision.exact`` names one of its dims, or if its products choose experts.
    """
    return scores_experts(dims) or any(name in precision.exact for name in dims)


def parts_of(resolved: Resolved, axes: Axes, *, exact: Exact = False) -> Parts:
    """Returns the axes among ``axes`` that shard each dim of a resolved tensor.

    Args:
      resolved: the tensor.
      axes: mesh axes.
      exact: how exactly it is gathered, and its gradient reduced.

    Raises:
      LayoutError: the tensor has problems, or its experts are sharded over other axes before those of the compute.
    """
    if resolved.problems:
        raise LayoutError(resolved.problems)
    dims = tuple(tuple(axis for axis in dim if axis in axes) for dim in resolved.axes)
    kept: Axes = ()
    scores = scores_experts([dim.name for dim in resolved.dims])
    for dim, found in zip(resolved.dims, dims, strict=True):
        if dim.name == EXPERTS and not scores:
            kept = tuple(axis for axis in axes_of(current_layout(), EXPERTS) if axis in axes)
            if found[: len(kept)] != kept:
                raise LayoutError(
                    f"the rules shard the dim {EXPERTS!r} of a parameter over {listing(found)}, but the layers use "
                    f"it sharded over {listing(kept)}, which must come first. Remedy: give params the same rule, or "
                    "one that begins with it."
                )
    return Parts(dims, kept, exact)


def gather(
    w: jax.Array,
    parts: Parts,
    precision: Precision,
    one: Callable[..., jax.Array] = hierarchical.gather_local,
) -> jax.Array:
    """Returns the full weight from its shards, in the compute dtype.

    It is gathered by ``one(x, axes=..., dim=...)``, unless the precision gathers in int8.
    """
    split, precision = parts.crossed, precision.for_weight(parts.exact)
    if split and precision.gather == INT8:
        dtype = precision.computing(w).dtype
        for dim, axes in split:
            w = as_rows(functools.partial(quantized.gather_packed, axes=axes, dtype=dtype), w, dim)
        return w
    if split:
        # Without the barrier XLA moves the cast behind the gather, which then sends the wider dtype.
        w = jax.lax.optimization_barrier(precision.crossing(w))
    for dim, axes in split:
        w = as_rows(functools.partial(one, axes=axes), w, dim)
    return precision.computing(w)


def reduce(
    grad: jax.Array,
    parts: Parts,
    axes: Axes,
    precision: Precision,
    scatter: Callable[..., jax.Array] = hierarchical.scatter_local,
) -> jax.Array:
    """Returns a gradient summed over ``axes``, in fp32 or wider.

    It is reduce-scattered over the axes in ``parts``, by ``scatter(x, axes=..., dim=...)`` unless the precision reduces
    in int8, and all-reduced over the others.
    """
    small, precision = grad.size * grad.dtype.itemsize < SMALL, precision.for_weight(parts.exact)
    packs = precision.reduce == INT8
    grad = summable(precision.reducing(grad))
    scatter = quantized.scatter_packed if packs else scatter
    for dim, split in parts.crossed:
        grad = as_rows(functools.partial(scatter, axes=split), grad, dim)
    left = tuple(axis for axis in axes if not any(axis in dim for dim in parts.dims))
    if left and packs and not small:
        grad = quantized.sum_packed(grad, left)
    elif left:
        # Without the barrier the TPU compiler sums in the dtype from which the gradient was cast.
        grad = jax.lax.psum(jax.lax.optimization_barrier(grad), left)
    return at_least_fp32(grad)


def summable(x: jax.Array) -> jax.Array:
    """Returns ``x`` in a dtype in which its platform can sum it over manual axes."""
    mesh = jax.sharding.get_abstract_mesh()
    some_automatic = bool(set(mesh.axis_names) - set(mesh.manual_axes))
    # XLA:CPU aborts on a 16-bit sum in a shard_map with some automatic axes.
    return at_least_fp32(x) if some_automatic and platform_of(current_layout().mesh) == "cpu" else x


def as_rows(f: Callable[..., jax.Array], x: jax.Array, dim: int) -> jax.Array:
    """Returns ``f(x, dim=dim)``, computed on ``x`` as ``[before, dim, after]``.

    With more dims, as those of heads, the TPU compiler would split or join tiles. ``x`` keeps its shape where the
    layout has automatic axes, which may shard the dims that would be joined.
    """
    used = {axis for axis, size in current_layout().sizes.items() if size > 1}
    if x.ndim <= 3 or used - set(jax.sharding.get_abstract_mesh().manual_axes):
        return f(x, dim=dim)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    y = f(x.reshape(math.prod(before), x.shape[dim], math.prod(after)), dim=1)
    return y.reshape(*before, -1, *after)
