"""``gather_weight``: a parameter as the compute uses it, and its gradient as the optimizer wants it.

Fully sharded parameters lie split over axes that the compute does not split them over. Left to itself the compiler may send
them around in pieces that overlap with the matmul, one piece at a time and more often than needed, or reduce whole gradients
where each device keeps a part. Said once per weight, it gathers them once, in the compute dtype, and scatters the gradient.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.layout import current_layout, hint

GATHERED = "gathered_weight"
"""The name of gathered weights for checkpoint policies: saved, they would undo the sharding of the parameters."""

type _Dims = tuple[str | None, ...]


def gather_weight(w: jax.Array, *dims: str | None, dtype: Any = None, rows: int | None = None) -> jax.Array:
    """``w`` in ``dtype``, laid out by the activation rules; its gradient by the rules of the role ``gradients``.

    Axes that split ``w`` only in the role ``params`` are gathered here. The gradient is reduced in ``dtype`` too.

    Args:
      w: the parameter.
      dims: its logical dims.
      dtype: of the compute; that of ``w`` if not given.
      rows: give ``w`` as a matrix, of which the first so many dims of ``w`` are the rows. A TPU holds matrices in tiles of
        their last two dims: to gather [embed, heads, head_dim] and multiply by it as a matrix would tile it anew.

    Raises:
      LayoutError: as :func:`jaxpar.hint`.

    >>> import jax.numpy as jnp
    >>> import jaxpar as jp
    >>> with jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(embed=None, heads=None, head_dim=None)):
    ...     gather_weight(jnp.ones((8, 4, 2)), "embed", "heads", "head_dim", dtype="bfloat16", rows=1).shape
    (8, 8)
    """
    w = w if dtype is None else w.astype(dtype)
    return checkpoint_name(_gather(dims, rows, w.shape, w), GATHERED)


def all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A checkpoint policy that keeps everything but gathered weights, neither under their name nor before they have it."""
    if primitive.name == "custom_vjp_call":  # of which a gather's is the only one that does nothing but lay out
        return not {equation.primitive.name for equation in parameters["call_jaxpr"].eqns} <= _OF_GATHER
    return parameters.get("name") != GATHERED


_OF_GATHER = {"sharding_constraint", "reshape"}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(dims: _Dims, rows: int | None, shape: tuple[int, ...], w: jax.Array) -> jax.Array:
    if rows is None:
        return hint(w, *dims)
    merged = _merged(dims, rows, w, "activations")
    return hint(w.reshape(_matrix(shape, rows)), *merged) if merged else hint(w, *dims).reshape(_matrix(shape, rows))


def _forward(dims: _Dims, rows: int | None, shape: tuple[int, ...], w: jax.Array) -> tuple[jax.Array, None]:
    return _gather(dims, rows, shape, w), None


def _backward(dims: _Dims, rows: int | None, shape: tuple[int, ...], _: None, grad: jax.Array) -> tuple[jax.Array]:
    w = jax.ShapeDtypeStruct(shape, grad.dtype)
    merged = _merged(dims, rows, w, "gradients") if rows else None
    if merged:
        return (hint(grad, *merged, role="gradients").reshape(shape),)
    return (hint(grad.reshape(shape), *dims, role="gradients"),)


_gather.defvjp(_forward, _backward)


def _merged(dims: _Dims, rows: int, w: Any, role: str) -> _Dims | None:
    """Dims that lay the matrix of ``w`` out as ``dims`` lay ``w``; ``None`` if there are none.

    Some whole heads are a part of [heads * head_dim] in one piece; a part of every head is not.
    """
    layout = current_layout()
    lies = layout.resolve(dims, w.shape, role=role, dtype=w.dtype)
    if lies.problems or any(axes for i, axes in enumerate(lies.axes) if i not in (0, rows)):
        return None
    merged = layout.resolve((dims[0], dims[rows]), _matrix(w.shape, rows), role=role, dtype=w.dtype)
    return (dims[0], dims[rows]) if merged.axes == (lies.axes[0], lies.axes[rows]) else None


def _matrix(shape: tuple[int, ...], rows: int) -> tuple[int, int]:
    return math.prod(shape[:rows]), math.prod(shape[rows:])
