"""Small operations of a tick: fields of a row, slots of buffers, permutes and sums over stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxpar.errors import ModelError
from jaxpar.parallel.collectives.gather_reduce import summable
from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.pipeline.schedules.table import FIELDS
from jaxpar.utils.arrays import describe


def check_alike(x: Any, y: Any) -> None:
    """Checks that a layer keeps the shape and dtype of its input.

    Raises:
      ModelError: they differ.
    """
    was, now = describe(x), describe(y)
    if was != now:
        raise ModelError(
            f"pipeline: a layer changed x from {was} to {now} (one device's microbatch), but layers must keep its "
            "shape and dtype. Remedy: use a PipelineLoss(layer=...) that returns x in the shape and dtype that it "
            f"received, or an embed that returns {now}."
        )


def reader(stage_row: jax.Array) -> Callable[[str], jax.Array]:
    """Returns a function that reads a field of a stage's row by name."""
    return lambda name: stage_row[FIELDS.index(name)]


def pick(tree: Any, i: Any) -> Any:
    """Returns index ``i`` of the first dim of every array."""
    one = lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False, allow_negative_indices=False)
    return jax.tree.map(one, tree)


def put(buffer: jax.Array, x: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns ``buffer`` [slots, ...] with ``x`` written to a slot."""
    return jax.lax.dynamic_update_index_in_dim(buffer, x.astype(buffer.dtype), slot, 0, allow_negative_indices=False)


def from_neighbour(x: jax.Array, direction: str) -> jax.Array:
    """Returns ``x`` of the previous stage (``down``) or of the next stage (``up``)."""
    stages = jax.lax.axis_size(AXIS)
    step = 1 if direction == "down" else -1
    return jax.lax.ppermute(x, AXIS, [(i, (i + step) % stages) for i in range(stages)])


def over_stages(x: jax.Array, *, scatter: bool = False) -> jax.Array:
    """Returns the sum over stages; with ``scatter``, each stage keeps a part of the last dim."""
    dtype, x = x.dtype, summable(x)
    x = jax.lax.psum_scatter(x, AXIS, scatter_dimension=x.ndim - 1, tiled=True) if scatter else jax.lax.psum(x, AXIS)
    return x.astype(dtype)
