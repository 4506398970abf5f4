"""Accumulation dtypes, sizes, descriptions and placeholders of arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def accumulator(x: Any) -> Any:
    """Returns the dtype of sums of ``x``, an array or a dtype: fp32, or its dtype if that is wider."""
    return jnp.promote_types(getattr(x, "dtype", x), jnp.float32)


def at_least_fp32(x: jax.typing.ArrayLike) -> jax.Array:
    """Returns ``x`` in fp32 or wider."""
    x = jnp.asarray(x)
    return x.astype(accumulator(x))


def strong(tree: Any) -> Any:
    """Returns arrays without weak types, such as that of ``jnp.full(8, 2.0)``: an update returns none.

    A step would compile again in its second call, and a pipeline that keeps arrays from call to call would fail.
    """
    return jax.tree.map(
        lambda x: jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x, tree
    )


def describe(x: Any) -> str:
    """Returns the dtype and the shape of an array as text: ``float32[8, 16]``."""
    return f"{x.dtype}{list(x.shape)}"


def itemsize(dtype: Any) -> int:
    """Returns the bytes of one element, also of a PRNG key's dtype and of a scalar type such as ``np.float32``."""
    size = getattr(dtype, "itemsize", None)  # an int of a PRNG key's dtype, a descriptor of the class np.float32
    return size if isinstance(size, int) else np.dtype(dtype).itemsize


def item_bytes(dtype: Any) -> float:
    """Returns the bytes of one element on a device: :func:`itemsize`, or a half for integers of 4 bits."""
    return 0.5 if str(dtype) in ("int4", "uint4") else itemsize(dtype)


def placeholder(x: Any) -> jax.Array:
    """Returns an array with the dtype and the number of dims of ``x``, and one element."""
    return jnp.zeros((1,) * x.ndim, x.dtype)
