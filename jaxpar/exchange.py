"""``exchange_local``: all-to-all in rounds among few devices each.

The TPU compiler routes an all-to-all hop by hop. Of up to 64 devices that takes it a second; of 256 half a minute for each
one in the program, and more from there. Two rounds among 16 are routed at once, for twice the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpar.errors import LayoutError

MOST = 64
"""Devices of one round."""


def exchange_local(x: jax.Array, axes: str | Sequence[str], *, split_dim: int, concat_dim: int) -> jax.Array:
    """``jax.lax.all_to_all(..., tiled=True)`` inside a ``shard_map``, in rounds where many devices take part.

    Args:
      x: its dim ``split_dim`` is cut into as many pieces as there are devices, and each sent to its own.
      axes: the mesh axes to exchange over, major to minor.
      split_dim, concat_dim: the pieces that arrive are joined along ``concat_dim``, in the order of the devices.

    Raises:
      LayoutError: the devices do not divide ``split_dim``.

    >>> import jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> from jax.sharding import PartitionSpec as P
    >>> with jax.set_mesh(jp.MeshSpec(data=-1).build()):
    ...     swap = lambda x: exchange_local(x, "data", split_dim=1, concat_dim=0)
    ...     y = jax.jit(jax.shard_map(swap, in_specs=P("data", None), out_specs=P(None, "data")))(jnp.eye(16))
    >>> bool((y == jnp.eye(16)).all()), y.sharding.spec
    (True, P(None, 'data'))
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    devices = math.prod(jax.lax.axis_size(name) for name in names)
    if x.shape[split_dim] % devices:
        raise LayoutError(
            f"exchange_local(): dim {split_dim} of an array of shape {x.shape} cannot be cut into {devices} pieces, one for "
            f"each device over {', '.join(names)}. Remedy: pad it to a multiple of {devices}."
        )
    parts = rounds(devices, MOST)
    if len(parts) == 1:
        return jax.lax.all_to_all(x, names, split_dim, concat_dim, tiled=True)
    pieces = jnp.moveaxis(x, split_dim, 0)
    pieces = pieces.reshape(*parts, pieces.shape[0] // devices, *pieces.shape[1:])
    for dim, part in enumerate(parts):
        # A device's number in mixed radix: one round for each digit, among the devices that differ in it alone.
        outer, inner = math.prod(parts[:dim]), math.prod(parts[dim + 1 :])
        groups = [[(o * part + p) * inner + i for p in range(part)] for o in range(outer) for i in range(inner)]
        pieces = jax.lax.all_to_all(pieces, names, dim, dim, axis_index_groups=groups, tiled=True)
    pieces = jnp.moveaxis(pieces.reshape(devices, *pieces.shape[len(parts) :]), 1, split_dim + 1)
    joined = jnp.moveaxis(pieces, 0, concat_dim)
    return joined.reshape(*joined.shape[:concat_dim], -1, *joined.shape[concat_dim + 2 :])


def rounds(devices: int, most: int = MOST) -> tuple[int, ...]:
    """Devices of each round, as even as can be; their product is ``devices``.

    >>> rounds(64), rounds(256), rounds(8192), rounds(67)
    ((64,), (16, 16), (64, 8, 16), (67,))
    """
    small = max(n for n in range(1, math.isqrt(devices) + 1) if devices % n == 0)
    return (devices,) if devices <= most or small == 1 else (*rounds(small, most), *rounds(devices // small, most))
