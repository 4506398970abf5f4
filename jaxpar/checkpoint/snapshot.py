"""The tensors of a state by name, and a copy of them in the host's memory that the next step does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.checkpoint.manifest import Bounds
from jaxpar.errors import CheckpointError
from jaxpar.parallel.offload.placement import KIND
from jaxpar.sharding.names import Names
from jaxpar.training.model import show, to_path
from jaxpar.training.offload.disk_state import is_stored

_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


@dataclass(frozen=True)
class Leaf:
    """A tensor of a state: an array (of PRNG keys: their data), or a shape where only that is known."""

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
        """Over which axes it lies, for people."""
        sharding = getattr(self.value, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return ""
        axes = list(sharding.spec)
        while axes and axes[-1] is None:  # what comes out of a step may lack them, and lies as before
            axes.pop()
        return str(PartitionSpec(*axes))


def leaves_of(state: Any) -> list[Leaf]:
    """The tensors of a state (or of any pytree of arrays or ``ShapeDtypeStruct``), in the order of ``jax.tree.leaves``.

    Raises:
      CheckpointError: a leaf is no array, or two have one path.
    """
    found: dict[str, Leaf] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        path = show(to_path(keys)) or "value"
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{path} is a {type(leaf).__name__}, but a jax array is wanted. Remedy: jnp.asarray(...)."
            )
        if path in found:
            raise CheckpointError(f"two tensors have the path {path!r}. Remedy: keys without a slash.")
        key = None
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            key = str(jax.random.key_impl(leaf)) if isinstance(leaf, jax.Array) else _impl(leaf)
            leaf = jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else _data(leaf)
        found[path] = Leaf(path, leaf, key)
    return list(found.values())


def dims_of(state: Any) -> dict[str, Names]:
    """The logical dims of a training state's parameters and carried variables, by path; of another pytree none."""
    static = getattr(state, "metadata", None)
    return {show(path): names for path, names in getattr(static, "dims", ())}


def on_disk(state: Any) -> bool:
    """Whether some of a state's tensors lie in files of their own."""
    return any(is_stored(x) for x in jax.tree.leaves(state, is_leaf=is_stored))


def copied(values: Sequence[jax.Array]) -> list[jax.Array]:
    """The same arrays in the host's memory. Nothing waits: the originals may be donated at once."""
    homes = [x.sharding.with_memory_kind(_host(x)) for x in values]
    return list(jax.device_put(list(values), homes, may_alias=False))


def shards(x: jax.Array) -> list[tuple[Bounds, np.ndarray]]:
    """What this process is to vouch for of an array: each of its shards once over all processes, with its bounds."""
    return [(bounds(s.index, x.shape), np.asarray(s.data)) for s in x.addressable_shards if s.replica_id == 0]


def bounds(index: tuple[slice, ...], shape: Sequence[int]) -> Bounds:
    """An index as jax gives it, in numbers."""
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
    # Keys have one dim more as numbers, which stays whole: a spec may be shorter than its array.
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)
