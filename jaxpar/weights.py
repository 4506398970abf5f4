"""``gather_weight``: a parameter as the compute uses it, and its gradient as the optimizer wants it.

Fully sharded parameters lie split over axes that the compute does not split them over. Left to itself the compiler may send
them around in pieces that overlap with the matmul, one piece at a time and more often than needed, or reduce whole gradients
where each device keeps a part. Said once per weight, it gathers them once, in the compute dtype, and scatters the gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.layout import hint

GATHERED = "gathered_weight"
"""The name of gathered weights for checkpoint policies: saved, they would undo the sharding of the parameters."""


def gather_weight(w: jax.Array, *dims: str | None, dtype: Any = None) -> jax.Array:
    """``w`` in ``dtype``, laid out by the activation rules; its gradient by the rules of the role ``gradients``.

    Axes that split ``w`` only in the role ``params`` are gathered here. The gradient is reduced in ``dtype`` too.

    Raises:
      LayoutError: as :func:`jaxpar.hint`.
    """
    w = w if dtype is None else w.astype(dtype)
    return checkpoint_name(_gather(tuple(dims), w), GATHERED)


def all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A checkpoint policy that keeps everything but gathered weights, neither under their name nor before they have it."""
    if primitive.name == "custom_vjp_call":  # of which a gather's is the only one that does nothing but constrain
        return [equation.primitive.name for equation in parameters["call_jaxpr"].eqns] != ["sharding_constraint"]
    return parameters.get("name") != GATHERED


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(dims: tuple[str | None, ...], w: jax.Array) -> jax.Array:
    return hint(w, *dims)


def _forward(dims: tuple[str | None, ...], w: jax.Array) -> tuple[jax.Array, None]:
    return _gather(dims, w), None


def _backward(dims: tuple[str | None, ...], _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (hint(grad, *dims, role="gradients"),)


_gather.defvjp(_forward, _backward)
