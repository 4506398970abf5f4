"""Between the shards that the rules give an array and those of a local matmul, inside a ``shard_map``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpar.parallel.collectives.gather_reduce import as_rows, summable
from jaxpar.parallel.collectives.hierarchical import gather_local, scatter_local
from jaxpar.parallel.manual_axes import manual_shard_map
from jaxpar.parallel.tensor.route import MatmulOperand, MatmulRoute
from jaxpar.sharding.rules import Axes


def to_inside(x: jax.Array, operand: MatmulOperand) -> jax.Array:
    """Returns the part of an operand that a local product uses."""
    for move in operand.moves:
        x = as_rows(functools.partial(gather_local, axes=move.axes), x, move.dim)
    return x


def to_outside(x: jax.Array, operand: MatmulOperand) -> jax.Array:
    """Returns the shard of an operand, from what a local product computed of it; partial sums are added."""
    dtype, x = x.dtype, summable(x)
    for move in reversed(operand.moves):
        shard = functools.partial(scatter_local if move.summed else _slice, axes=move.axes)
        x = as_rows(shard, x, move.dim)
    x = jax.lax.psum(x, operand.summed) if operand.summed else x
    return x.astype(dtype)


def _slice(x: jax.Array, axes: Axes, *, dim: int) -> jax.Array:
    size = x.shape[dim] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, dim)


def run_manual(
    found: Sequence[MatmulRoute], f: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    return manual_shard_map(f, {axis for route in found for axis in route.axes}, in_specs, out_specs)
