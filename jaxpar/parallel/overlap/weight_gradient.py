"""Gradients of weights that are scattered over the devices of a batch, in pieces beside the matmul that computes them.

The TPU compiler overlaps no reduce-scatter. In a ring, the matmul computes one piece of the gradient while sums of the
pieces before it are on their way, as in :mod:`jaxpar.parallel.overlap.sequence_dot`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.parallel.collectives.gather_reduce import axes_of
from jaxpar.parallel.manual_axes import manual_shard_map
from jaxpar.parallel.overlap.permute_collectives import Ring
from jaxpar.parallel.precision.fp8_matmul import weight_grad
from jaxpar.parallel.precision.policy import Precision
from jaxpar.parallel.tensor.route import WeightDims
from jaxpar.parallel.tensor.weights import used_sharding
from jaxpar.sharding.layout import current_layout, to_spec
from jaxpar.sharding.resolve import Resolved, num_shards_over
from jaxpar.sharding.rules import Axes

MOST_DEVICES = 4
"""The most devices of a ring. Over more, a smaller piece of a matmul has to hide each hop, and no program was compiled.
"""
_FIRST = 2
"""The dims of rows and sequence, which come first and over which a gradient sums."""


class GradRing(NamedTuple):
    """How the gradient of a matrix is scattered.

    Attributes:
      axes: the mesh axes of the batch, which shard the gradient along ``dim``.
      dim: the dim of the gradient.
      summed: the number of dims of the weight that the product sums over.
      used: the sharding of the matrix in the compute.
      kept: the sharding of its gradient.
    """

    axes: Axes
    dim: int
    summed: int
    used: Resolved
    kept: Resolved


def grad_ring(dims: WeightDims, x: jax.Array, dy: jax.Array, summed: int, dtype: Any) -> GradRing | None:
    """Returns how a ring scatters the gradient of a weight, or ``None`` where the compiler has to reduce it.

    It applies if the role ``gradients`` shards one more dim than the compute does, over exactly the axes of the batch,
    and the sequence is whole.

    Args:
      dims: the logical dims of the weight.
      x: the input of the product ``[batch, seq, ...]``.
      dy: the gradient of the result ``[batch, seq, ...]``.
      summed: the number of dims of the weight that the product sums over.
      dtype: the dtype in which the gradient is summed.
    """
    layout, shape = current_layout(), (*x.shape[_FIRST:], *dy.shape[_FIRST:])
    kept = layout.resolve(dims, shape, role="gradients", dtype=dtype)
    used = used_sharding(cast(Any, jax.ShapeDtypeStruct(shape, dtype)), dims)
    rows = layout.resolve(("batch",), x.shape[:1])
    if kept.problems or used.problems or rows.problems or axes_of(layout, "seq"):
        return None
    axes, pairs = rows.axes[0], list(zip(kept.axes, used.axes, strict=True))
    scattered = [dim for dim, (have, had) in enumerate(pairs) if have != had]
    fits = 1 < num_shards_over(axes, layout.sizes) <= MOST_DEVICES
    if not fits or len(scattered) != 1 or pairs[scattered[0]] != (axes, ()):
        return None
    return GradRing(axes, scattered[0], summed, used, kept)


def scattered_weight_grad(plan: GradRing, x: jax.Array, dy: jax.Array, wide: Any) -> jax.Array:
    """Returns the gradient of a weight, summed over the devices of the batch and scattered over them.

    Args:
      plan: as from :func:`grad_ring`.
      x: the input of the product.
      dy: the gradient of the result.
      wide: the dtype in which the gradient is summed and sent, if it is wider than that of ``x`` and ``dy``.
    """
    dim, summed, used = plan.dim, plan.summed, plan.used.axes
    manual = tuple(dict.fromkeys((*plan.axes, *(axis for axes in used for axis in axes))))

    def local(x: jax.Array, dy: jax.Array) -> jax.Array:
        ring = Ring.of(plan.axes)

        def piece(distance: int) -> jax.Array:
            a = ring.piece(x, distance, _FIRST + dim) if dim < summed else x
            b = dy if dim < summed else ring.piece(dy, distance, _FIRST + dim - summed)
            return product_in_ring(ring, distance, weight_grad(a, b, summed, Precision(), wide))

        return ring.summed(piece, dim)

    rows = (plan.axes, None)
    specs = (PartitionSpec(*rows, *used[:summed]), PartitionSpec(*rows, *used[summed:]))
    return manual_shard_map(local, manual, specs, to_spec(plan.kept))(x, dy).astype(jnp.result_type(x, dy))


def product_in_ring(ring: Ring, distance: int, product: jax.Array) -> jax.Array:
    """Returns a product that :meth:`jaxpar.parallel.overlap.permute_collectives.Ring.summed` adds.

    Args:
      ring: the ring.
      distance: the number of places that the owner of this piece is after this device.
      product: the piece.
    """
    # Without the barrier the compiler fuses the product with the addition of the half that is still arriving.
    return jax.lax.optimization_barrier(product) if distance == (ring.size - 1) // 2 else product
