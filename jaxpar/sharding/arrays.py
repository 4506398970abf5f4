"""``shard_array``: build a global array from the data that each process loaded."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from jaxpar.errors import LayoutError
from jaxpar.sharding.layout import Layout, to_spec
from jaxpar.sharding.resolve import num_shards_over


def shard_array(layout: Layout, x: Any, *dims: str | None, path: str = "batch") -> jax.Array:
    """Returns a global array built from this process's part of it, sharded by the activation rules.

    Args:
      layout: the mesh and rules that place the array.
      x: the data that this process loaded. Dims that are sharded across processes hold only this process's part; with
        one process, ``x`` is the full array.
      *dims: the logical dim, or ``None``, of each dim of ``x``.
      path: the tensor's name in errors.

    Returns:
      A ``jax.Array`` with the dtype of ``x`` and the global shape.

    Raises:
      LayoutError: ``layout`` is no layout, the mesh is abstract, or the rules cannot place the array: an unknown dim, a
        rank other than the number of names, mesh axes that do not divide a global size, or an axis that two dims claim.

    >>> import numpy as np, jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data", seq=None))
    >>> shard_array(layout, np.zeros((16, 4)), "batch", "seq").sharding.spec
    P('data', None)
    """
    if not isinstance(layout, Layout):
        raise LayoutError(f"layout must be a Layout, got {type(layout).__name__}. Remedy: shard_array(layout, x, ...).")
    if isinstance(layout.mesh, AbstractMesh):
        raise LayoutError(f"{path}: shard_array() needs devices, but the mesh is abstract. Remedy: MeshSpec.build().")
    local = np.asarray(x)
    resolved = layout.resolve(dims, path=path)
    shards = tuple(num_shards_over(dim.axes, layout.sizes) for dim in resolved.dims)
    shape: tuple[int, ...] = local.shape
    if jax.process_count() > 1 and not resolved.problems and len(shards) == local.ndim:
        index_map = NamedSharding(layout.mesh, to_spec(resolved)).addressable_devices_indices_map(shards).values()
        mine = (len({index[i].start for index in index_map if index is not None}) for i in range(len(shards)))
        shape = tuple(size * parts // own for size, parts, own in zip(shape, shards, mine, strict=True))
    sharding = layout.sharding(dims, shape, dtype=local.dtype, path=path)
    return jax.make_array_from_process_local_data(sharding, local, shape)
