"""Arrays on meshes, and whether two trees of arrays are equal bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

TX = optax.adam(1e-2)


def mesh(**axes: int) -> Mesh:
    count = int(np.prod(list(axes.values())))
    return Mesh(
        np.array(jax.devices()[:count]).reshape(tuple(axes.values())),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
    )


def put(x: Any, where: Mesh, *spec: Any, kind: str = "device") -> jax.Array:
    return jax.device_put(x, NamedSharding(where, PartitionSpec(*spec), memory_kind=kind))


def like(x: Any, where: Mesh, *spec: Any, kind: str = "device") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(where, PartitionSpec(*spec), memory_kind=kind))


def numbers(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal bit for bit, dtypes included."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and numbers(x).tobytes() == numbers(y).tobytes() for x, y in pairs)
