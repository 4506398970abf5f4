"""The tensors of a state by path, and a copy of them in host memory, so that the next step can start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.checkpoint.manifest import Bounds
from jaxpar.checkpoint.validate import path_problem
from jaxpar.errors import CheckpointError
from jaxpar.parallel.offload.placement import KIND
from jaxpar.sharding.names import Names
from jaxpar.training.model import leaves_with_paths, show
from jaxpar.training.offload.disk_state import is_stored

_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


@dataclass(frozen=True)
class Leaf:
    """A tensor of a state: an array (for PRNG keys, their data), or a ``ShapeDtypeStruct``.

    Attributes:
      path: its path in the state, such as ``params/blocks/w``.
      value: the array or ``ShapeDtypeStruct``.
      key: the PRNG implementation, if ``value`` is the data of keys.
    """

    path: str
    value: Any
    key: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.value.dtype)

    @property
    def spec(self) -> str:
        """The mesh axes that it is sharded over, for display; empty if it has no ``NamedSharding``."""
        sharding = getattr(self.value, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return ""
        axes = list(sharding.spec)
        while axes and axes[-1] is None:  # a step's output may omit trailing Nones of the same sharding
            axes.pop()
        return str(PartitionSpec(*axes))


def leaves_of(state: Any) -> list[Leaf]:
    """Returns the tensors of a state or other pytree of arrays or shapes, in the order of ``jax.tree.leaves``.

    Raises:
      CheckpointError: a leaf is neither a jax array nor a ``ShapeDtypeStruct``, its path cannot be stored, or two
        leaves have the same path.
    """
    found: dict[str, Leaf] = {}
    for keys, leaf in leaves_with_paths(state):
        path = show(keys) or "value"
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise CheckpointError(f"{path} must be a jax array, got {type(leaf).__name__}. Remedy: jnp.asarray(...).")
        if problem := path_problem(path):
            raise CheckpointError(f"{path[:200]!r}: {problem}. Remedy: rename it.")
        if path in found:
            raise CheckpointError(f"two tensors have the path {path!r}. Remedy: use keys without a slash.")
        key = None
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            key = str(jax.random.key_impl(leaf)) if isinstance(leaf, jax.Array) else _impl(leaf)
            leaf = jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else _data(leaf)
        found[path] = Leaf(path, leaf, key)
    return list(found.values())


def dims_of(state: Any) -> dict[str, Names]:
    """The logical dims of a training state's parameters and carried variables, by path; empty for any other pytree."""
    static = getattr(state, "metadata", None)
    return {show(path): names for path, names in getattr(static, "dims", ())}


def on_disk(state: Any) -> bool:
    """Whether some tensors of a state are stored in files of their own."""
    return any(is_stored(x) for x in jax.tree.leaves(state, is_leaf=is_stored))


def copied(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Copy arrays to host memory without blocking; the originals may be donated immediately."""
    homes = [x.sharding.with_memory_kind(_host(x)) for x in values]
    return list(jax.device_put(list(values), homes, may_alias=False))


def shards(x: jax.Array) -> list[tuple[Bounds, np.ndarray]]:
    """The shards of an array that this process saves, with their bounds; each shard is saved by exactly one process."""
    return [(bounds(s.index, x.shape), np.asarray(s.data)) for s in x.addressable_shards if s.replica_id == 0]


def bounds(index: tuple[slice, ...], shape: Sequence[int]) -> Bounds:
    """Convert an index of ``jax.Shard`` to (start, stop) pairs."""
    return tuple((s.indices(size)[0], s.indices(size)[1]) for s, size in zip(index, shape, strict=True))


def _host(x: jax.Array) -> str:
    device: Any = next(iter(x.sharding.device_set))
    kinds = {memory.kind for memory in device.addressable_memories()}
    return KIND if KIND in kinds else "unpinned_host"


def _impl(leaf: jax.ShapeDtypeStruct) -> str:
    known = {jax.eval_shape(lambda name=name: jax.random.key(0, impl=name)).dtype: name for name in _IMPLS}
    return known.get(leaf.dtype, str(leaf.dtype))


def _data(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    data = jax.eval_shape(jax.random.key_data, leaf)
    # Key data has one more dim than the keys. The spec is shorter than the array, so that dim is not sharded.
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)
