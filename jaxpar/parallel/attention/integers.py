"""Converts the caller's positions and segment ids to int32: a value that does not fit raises instead of wrapping."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import LayoutError

LEAST, GREATEST = -(2**31), 2**31 - 1
"""The range of int32. ``LEAST`` equals :data:`jaxpar.parallel.attention.tiled.tile.PAD`."""


def exact_ids(name: str, ids: Any) -> jax.Array:
    """Returns segment ids as int32, or as int64 if they are traced in a wider dtype.

    Args:
      name: their name in an error message.
      ids: integers ``[batch, seq]``, a numpy or JAX array.

    Raises:
      LayoutError: an id exceeds int32, or traced ids have a dtype that the widest enabled signed dtype cannot
        represent.
    """
    if not _may_exceed(ids.dtype):
        return jnp.asarray(ids, jnp.int32)
    if _known(ids):
        values = np.asarray(ids)
        outside = np.argwhere((values < LEAST) | (values > GREATEST))
        if len(outside):
            row, token = outside[0]
            raise LayoutError(
                f"attention: {name}: token {token} of sequence {row} has the id {values[row, token]}, which does not "
                f"fit int32. Remedy: number the documents of each sequence from 0, with -1 for padding."
            )
        return jnp.asarray(values.astype(np.int32))
    if jax.dtypes.canonicalize_dtype(np.int64) != np.int64 or ids.dtype == np.uint64:
        raise LayoutError(
            f"attention: {name}: traced {ids.dtype.name} ids may not fit int32. Remedy: number the documents of each "
            f"sequence from 0, with -1 for padding, and cast them: segment_ids.astype(jnp.int32)."
        )
    return jnp.asarray(ids, jnp.int64)


def exact_offset(offset: Any, queries: int) -> Any:
    """Returns the first query's position: a plain integer or ``None`` unchanged, an array as int32.

    Args:
      offset: the position, an integer or a scalar array.
      queries: number of queries; all their positions must be int32 and greater than its minimum.

    Raises:
      LayoutError: a known position is out of that range, or ``offset`` is not an integer.
    """
    if offset is None:
        return None
    offset = int(offset) if isinstance(offset, np.integer) else offset
    is_integer = isinstance(offset, int) or (
        jnp.ndim(offset) == 0 and jnp.issubdtype(jnp.result_type(offset), jnp.integer)
    )
    if not is_integer:
        given = kind_of(offset) if hasattr(offset, "dtype") else repr(offset)
        raise LayoutError(f"attention: q_offset must be one integer, got {given}.")
    if isinstance(offset, int) or _known(offset):
        number = int(offset)
        if not LEAST < number <= GREATEST - queries + 1:
            raise LayoutError(
                f"attention: q_offset {number} gives {queries} queries the positions {number} to "
                f"{number + queries - 1}, but positions must fit int32 and exceed its minimum. Remedy: use a q_offset "
                f"from {LEAST + 1} to {GREATEST - queries + 1}."
            )
    if isinstance(offset, int):
        return offset
    return clipped(offset, LEAST + 1, GREATEST - queries + 1)


def exact_positions(name: str, positions: Any) -> jax.Array:
    """Returns positions ``[seq]`` as int32.

    Args:
      name: their name in an error message.
      positions: integers ``[seq]``.

    Raises:
      LayoutError: ``positions`` are not integers ``[seq]``, or a known position exceeds int32 or is its minimum.
    """
    given = positions if hasattr(positions, "dtype") else np.asarray(positions)
    if given.ndim != 1 or not jnp.issubdtype(given.dtype, jnp.integer):
        raise LayoutError(
            f"attention: {name} must be a name, or the position of each token as integers [seq], got {kind_of(given)}."
        )
    if _may_exceed(given.dtype) and _known(given):
        values = np.asarray(given)
        outside = np.flatnonzero((values <= LEAST) | (values > GREATEST))
        if len(outside):
            raise LayoutError(
                f"attention: {name}: token {outside[0]} has the position {values[outside[0]]}, but positions must fit "
                f"int32 and exceed its minimum. Remedy: use positions from 0."
            )
    return clipped(given, LEAST + 1, GREATEST)


def clipped(x: Any, least: int = LEAST, greatest: int = GREATEST) -> jax.Array:
    """Returns integers clipped to [least, greatest] as int32; exact for prefix lengths, since positions are int32."""
    x = x if hasattr(x, "dtype") else np.asarray(x)
    if _may_exceed(x.dtype):
        xp: Any = jnp if isinstance(x, jax.Array) else np
        x = xp.minimum(x, greatest)
        x = x if x.dtype.kind == "u" else xp.maximum(x, least)
    return jnp.asarray(x.astype(np.int32))


def kind_of(x: Any) -> str:
    """Returns the canonical dtype and the shape of an array as text, such as ``int32[2, 3]``."""
    dtype = x.dtype if x.dtype == object else jax.dtypes.canonicalize_dtype(x.dtype)
    return f"{dtype}{list(x.shape)}"


def _may_exceed(dtype: Any) -> bool:
    """Whether a dtype has values outside int32."""
    return dtype == np.uint32 or dtype.itemsize > 4


def _known(x: Any) -> bool:
    """Whether this process can read the values of an array: it is not traced, and it is addressable or replicated."""
    if not isinstance(x, jax.Array):
        return True
    return not isinstance(x, jax.core.Tracer) and (x.is_fully_addressable or x.is_fully_replicated)
