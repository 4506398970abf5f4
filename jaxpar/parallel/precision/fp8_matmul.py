"""Products with weights, plain or in fp8, and their gradients.

fp8 follows Micikevicius et al. 2022 (arXiv:2209.05433) and uses Flax's operations: weights and activations are in e4m3,
gradients in e5m2, and each tensor is scaled by its current largest magnitude. The scale is that of the global tensor;
inside a ``shard_map`` it is that of the local shard.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpar.parallel.precision.policy import FP8, Precision
from jaxpar.sharding.hardware.topology import platform_of
from jaxpar.sharding.layout import current_layout

PRODUCT = "product"
"""The checkpoint name of products that are not a plain matmul."""
_TINY = 1e-30  # keeps the scale of an all-zero tensor positive

type _DotDims = tuple[tuple[int, ...], tuple[int, ...]]


def times(x: jax.Array, w: jax.Array, summed: int, precision: Precision) -> jax.Array:
    """Returns ``jnp.tensordot(x, w, summed)``, in fp8 if the precision has it.

    >>> y = times(jnp.ones((2, 4)), 3 * jnp.eye(4), 1, Precision(matmul="fp8"))
    >>> y.dtype, round(float(y[0, 0]), 3)
    (dtype('float32'), 3.0)
    """
    if precision.matmul == FP8:
        return checkpoint_name(_times(summed, x, w), PRODUCT)
    return jnp.tensordot(x, w, summed)


def input_grad(dy: jax.Array, w: jax.Array, summed: int, precision: Precision) -> jax.Array:
    """Returns the gradient of ``x`` in :func:`times`."""
    given = dy.ndim - w.ndim + summed
    dims = (tuple(range(given, dy.ndim)), tuple(range(summed, w.ndim)))
    return _in_fp8(dy, w, dims, "e5m2") if precision.matmul == FP8 else jnp.tensordot(dy, w, dims)


def weight_grad(x: jax.Array, dy: jax.Array, summed: int, precision: Precision, dtype: Any = None) -> jax.Array:
    """Returns the gradient of ``w`` in :func:`times`, computed and summed over devices in ``dtype`` if it is given."""
    rows = tuple(range(x.ndim - summed))
    if precision.matmul == FP8:
        return _in_fp8(x, dy, (rows, rows), "e4m3", "e5m2", dtype)
    return jnp.tensordot(*widened(x, dy, dtype), (rows, rows), preferred_element_type=dtype)


def widened(a: jax.Array, b: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns two factors of a product whose result has the wider ``dtype``, cast where the platform requires it."""
    if dtype is None or platform_of(current_layout().mesh) != "cpu":
        return a, b
    return a.astype(dtype), b.astype(dtype)  # XLA:CPU has no product of 16-bit factors with a 32-bit result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _times(summed: int, x: jax.Array, w: jax.Array) -> jax.Array:
    dims = (tuple(range(x.ndim - summed, x.ndim)), tuple(range(summed)))
    return _in_fp8(x, w, dims)


def _backward(summed: int, saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    (x, w), precision = saved, Precision(matmul=FP8)
    dx, dw = input_grad(dy, w, summed, precision), weight_grad(x, dy, summed, precision)
    return dx.astype(x.dtype), dw.astype(w.dtype)


# The residuals are not the fp8 copies: a policy that drops gathered weights by name would not recognize these.
_times.defvjp(lambda summed, x, w: (_times(summed, x, w), (x, w)), _backward)


def _in_fp8(
    a: jax.Array, b: jax.Array, dims: _DotDims, kind_a: str = "e4m3", kind_b: str = "e4m3", dtype: Any = None
) -> jax.Array:
    """Returns the product over ``dims``, in ``dtype`` or else in the common dtype of both factors."""
    from flax.linen import fp8_ops  # only fp8 needs it

    dtype = jnp.result_type(a, b) if dtype is None else dtype
    kinds = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
    quantised, scales = [], []
    for x, kind in ((a, kinds[kind_a]), (b, kinds[kind_b])):
        most = jnp.maximum(jnp.max(jnp.abs(x)).astype(jnp.float32), _TINY)
        scales.append(most / fp8_ops.get_fp8_max(kind, jnp.float32))
        quantised.append(fp8_ops.quantize(x, kind, scales[-1], jnp.float32))
    # Devices add their partial sums in this dtype; in fp32 they would send twice the bytes.
    y = jax.lax.dot_general(quantised[0], quantised[1], (dims, ((), ())), preferred_element_type=dtype)
    return fp8_ops.dequantize(y, jnp.float32, scales[0] * scales[1]).astype(dtype)
