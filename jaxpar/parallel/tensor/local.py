"""Between the shards that the rules give an array and those of a local matmul, inside a ``shard_map``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpar.parallel.collectives.gather_reduce import as_rows, summable
from jaxpar.parallel.collectives.hierarchical import gather_local, scatter_local
from jaxpar.parallel.manual_axes import manual_shard_map
from jaxpar.parallel.tensor.route import MatmulOperand, MatmulRoute, Move
from jaxpar.sharding.rules import Axes

LANES = 128
"""The elements of the last dim that a TPU stores together."""


def to_inside(x: jax.Array, operand: MatmulOperand) -> jax.Array:
    """Returns the part of an operand that a local product uses."""
    for move in operand.moves:
        x = _in_whole_tiles(functools.partial(gather_local, axes=move.axes), x, move.dim)
    return x


def to_outside(x: jax.Array, operand: MatmulOperand) -> jax.Array:
    """Returns the shard of an operand, from what a local product computed of it; partial sums are added."""
    dtype, x = x.dtype, summable(x)
    for move in reversed(operand.moves):
        x = _scatter(x, move) if move.summed else _slice(x, move.axes, dim=move.dim)
    x = jax.lax.psum(x, operand.summed) if operand.summed else x
    return x.astype(dtype)


def _scatter(x: jax.Array, move: Move) -> jax.Array:
    """Returns this device's part of the sum of ``x`` along a dim."""
    scatter, last = functools.partial(scatter_local, axes=move.axes), x.ndim - 1
    shards, lead = jax.lax.axis_size(move.axes), x.shape[:-1]
    columns = x.shape[-1] // shards
    if move.dim != last or not _is_all_reduced(columns, x.dtype):
        return _in_whole_tiles(scatter, x, move.dim)
    # As blocks of columns, of which each device keeps one.
    return as_rows(scatter, x.reshape(*lead, shards, columns), last).reshape(*lead, columns)


def _is_all_reduced(columns: int, dtype: Any) -> bool:
    """Whether the TPU compiler makes an all-reduce and a slice, twice the bytes, of a scatter along the last dim.

    It does in 16 bits if a device keeps an odd number of tiles.
    """
    return dtype.itemsize < 4 and columns % LANES == 0 and columns // LANES % 2 == 1


def _in_whole_tiles(collective: Callable[..., jax.Array], x: jax.Array, dim: int) -> jax.Array:
    """Returns a collective along a dim of ``x``, in a shape in which a TPU need not take its tiles apart."""
    # The first dim is no part of a tile. As rows of all other dims it would be, and be padded, or summed in full.
    return collective(x, dim=dim) if dim == 0 else as_rows(collective, x, dim)


def _slice(x: jax.Array, axes: Axes, *, dim: int) -> jax.Array:
    size = x.shape[dim] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, dim)


def run_manual(
    found: Sequence[MatmulRoute], f: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    return manual_shard_map(f, {axis for route in found for axis in route.axes}, in_specs, out_specs)
