"""All-gathers and reduce-scatters as permutes, every piece on its own way from device to device.

As many bytes as the collectives that they stand for. But a compiler lets a permute run beside whatever does not wait for it; a TPU's lets no
reduce-scatter, and few all-gathers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def gather_moved(x: jax.Array, axes: Sequence[str], *, dim: int) -> jax.Array:
    """``jax.lax.all_gather(x, axes, axis=dim, tiled=True)`` inside a ``shard_map``; its gradient is :func:`scatter_moved`.

    >>> import jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> from jax.sharding import PartitionSpec as P
    >>> with jax.set_mesh(jp.MeshSpec(data=-1).build()):
    ...     gather = lambda x: gather_moved(x, ("data",), dim=0)
    ...     y = jax.jit(jax.shard_map(gather, in_specs=P("data"), out_specs=P(), check_vma=False))(jnp.arange(16))
    >>> bool((y == jnp.arange(16)).all())
    True
    """
    return _gather(tuple(axes), dim, x)


def scatter_moved(x: jax.Array, axes: Sequence[str], *, dim: int) -> jax.Array:
    """``jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)`` inside a ``shard_map``, summed in fp32; its gradient is
    :func:`gather_moved`.
    """
    return _scatter(tuple(axes), dim, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(axes: tuple[str, ...], dim: int, x: jax.Array) -> jax.Array:
    ways, here, size = _place(axes, x.shape[dim])
    # The pieces of the devices before this one come first: rolled, no piece is written twice.
    came = [x, *(_sent(x, axes, ways, far) for far in range(1, ways))]
    # came[far] is of the device ``far`` places before; from the last to the first they stand in the order of the devices, begun behind this one.
    row = jnp.concatenate(came[::-1], dim)
    return jnp.roll(row, (here + 1) * size, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scatter(axes: tuple[str, ...], dim: int, x: jax.Array) -> jax.Array:
    ways, here, size = _place(axes, x.shape[dim] // math.prod(jax.lax.axis_size(axis) for axis in axes))
    piece = lambda far: jax.lax.dynamic_slice_in_dim(x, (here + far) % ways * size, size, dim)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    total = piece(0).astype(wide)
    for far in range(1, ways):
        total += _sent(piece(far), axes, ways, far).astype(wide)
    return total.astype(x.dtype)


def _place(axes: tuple[str, ...], size: int) -> tuple[int, jax.Array, int]:
    """How many devices, which of them this is, and the size of a piece."""
    return math.prod(jax.lax.axis_size(axis) for axis in axes), jax.lax.axis_index(axes), size


def _sent(x: jax.Array, axes: tuple[str, ...], ways: int, far: int) -> jax.Array:
    """``x`` of the device ``far`` places before."""
    return jax.lax.ppermute(x, axes, [(i, (i + far) % ways) for i in range(ways)])


_gather.defvjp(
    lambda axes, dim, x: (_gather(axes, dim, x), None), lambda axes, dim, _, grad: (_scatter(axes, dim, grad),)
)
_scatter.defvjp(
    lambda axes, dim, x: (_scatter(axes, dim, x), None), lambda axes, dim, _, grad: (_gather(axes, dim, grad),)
)
