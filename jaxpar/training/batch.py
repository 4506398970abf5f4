"""A batch of any structure with logical dims by path: placed on a layout, or tagged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.data.lazy_rows import LazyRows
from jaxpar.errors import DataError, LayoutError
from jaxpar.sharding.arrays import shard_array
from jaxpar.sharding.layout import Layout
from jaxpar.sharding.resolve import num_shards_over
from jaxpar.training.model import Tagged, leaves_with_paths, map_with_paths, show, tag

type BatchDims = Mapping[str, Sequence[str | None]]
"""Path of an array in a batch, such as ``image`` or ``views/0``, to its logical dims."""


@dataclass(frozen=True)
class RowShare:
    """The rows of each global batch that a process reads: those that its devices hold.

    Processes whose devices hold the same rows, because they shard other dims of the batch or the model, read the same
    share.

    Attributes:
      index: the number of the share, from 0.
      count: the number of different shares.
      shards: the shards of the rows that the share consists of, in order.
      total: the number of shards of all rows.
    """

    index: int = 0
    count: int = 1
    shards: tuple[int, ...] = (0,)
    total: int = 1


def row_share(layout: Layout, dims: BatchDims) -> RowShare:
    """Returns the share of the rows that this process reads.

    Args:
      layout: places the batch.
      dims: the logical dims of each array, by path; the first dim of the first array stands for the rows.

    Raises:
      LayoutError: the rows of two processes overlap without being the same.

    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data"))
    >>> share = row_share(layout, {"x": ("batch", None)})
    >>> share.index, share.count
    (0, 1)
    """
    names = next(iter(dims.values()), (None,))
    axes = layout.resolve(names).dims[0].axes if names else ()
    total = num_shards_over(axes, layout.sizes)
    held: dict[int, set[int]] = {}
    devices: Any = NamedSharding(layout.mesh, PartitionSpec(axes)).devices_indices_map((total,))
    for device, (rows,) in devices.items():
        held.setdefault(device.process_index, set()).add(rows.indices(total)[0])
    return share_of(held, jax.process_index(), axes)


def share_of(held: Mapping[int, Collection[int]], process: int, axes: Sequence[str]) -> RowShare:
    """Returns a process's share, from the shards of the rows that the devices of each process hold.

    Args:
      held: process → numbers of the shards.
      process: the number of the process.
      axes: the mesh axes of the rows, for the error.

    Raises:
      LayoutError: the shards of two processes overlap without being the same.

    >>> share_of({0: {0, 1}, 1: {0, 1}, 2: {2, 3}, 3: {2, 3}}, 3, ("data",))
    RowShare(index=1, count=2, shards=(2, 3), total=4)
    """
    total = len({shard for shards in held.values() for shard in shards})
    shares = sorted({tuple(sorted(shards)) for shards in held.values()})
    if sum(map(len, shares)) != total or len({len(shards) for shards in shares}) != 1:
        raise LayoutError(
            f"the rows of a batch are in {total} shards over {' × '.join(axes)}, and processes hold some of the same "
            f"shards but not all: {', '.join(f'{rank}: {sorted(shards)}' for rank, shards in sorted(held.items()))}. "
            f"Remedy: a number of processes that divides {total} or is a multiple of it."
        )
    own = tuple(sorted(held[process]))
    return RowShare(shares.index(own), len(shares), own, total)


def shard_batch(layout: Layout, batch: Any, dims: BatchDims, share: RowShare | None = None) -> Any:
    """Returns the batch on the layout's devices.

    Args:
      layout: where to place it.
      batch: a pytree of the arrays that this process loaded; see :func:`jaxpar.shard_array`.
      dims: the logical dims of each array, by path.
      share: the share of the rows that the arrays hold. Their other dims are whole, also where processes shard them.
        Of arrays outside of memory only the slices of this process's devices are read.

    Raises:
      LayoutError: the rules cannot place an array.

    >>> import numpy as np, jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data"))
    >>> batch = shard_batch(layout, {"views": [np.zeros((16, 4))]}, {"views/0": ("batch", None)})
    >>> batch["views"][0].sharding.spec
    P('data', None)
    """
    place = shard_array if share is None else _place_share(share)
    return map_with_paths(lambda path, x: place(layout, x, *dims[show(path)], path=show(("batch", *path))), batch)


def _place_share(share: RowShare) -> Any:
    def place(layout: Layout, x: Any, *dims: str | None, path: str) -> jax.Array:
        local = x if isinstance(x, LazyRows) else np.asarray(x)
        shape = (local.shape[0] * share.count, *local.shape[1:])
        sharding = layout.sharding(dims, shape, dtype=local.dtype, path=path)
        if share.count == 1:
            whole: Any = local
            return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])
        rows = shape[0] // share.total
        if sharding.shard_shape(shape)[0] != rows:
            raise LayoutError(
                f"{path} {list(shape)}: its rows are in {shape[0] // sharding.shard_shape(shape)[0]} shards, but those "
                f"of the batch's first array in {share.total}. Remedy: give the first dims of all arrays of the batch "
                "one name."
            )

        def shard(index: Any) -> Any:
            begin = share.shards.index(index[0].indices(shape[0])[0] // rows) * rows
            return local[(slice(begin, begin + rows), *index[1:])]

        return jax.make_array_from_callback(shape, sharding, shard)

    return place


def shapes_of_batch(batch: Any) -> Any:
    """Returns the shapes of a batch, of whose arrays some may be tagged.

    >>> shapes_of_batch({"x": tag(np.zeros((8, 2), "float32"), "batch", None)})
    {'x': ShapeDtypeStruct(shape=(8, 2), dtype=float32)}

    Raises:
      DataError: a leaf is no array and no number, or numbers are in lists.
    """
    is_tag = lambda x: isinstance(x, Tagged)
    plain = jax.tree.map(lambda x: x.value if is_tag(x) else x, batch, is_leaf=is_tag)
    check_batch(plain)
    shape = lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype if hasattr(x, "dtype") else jnp.result_type(x))
    return jax.tree.map(shape, plain)


def check_batch(batch: Any, where: str = "batch") -> None:
    """Raises an error for what is no array and no number, and for numbers in a list.

    Raises:
      DataError: the batch has such a leaf.
    """
    is_list = lambda x: isinstance(x, list) and len(x) > 1 and all(isinstance(one, list | int | float) for one in x)
    for path, x in leaves_with_paths(batch, is_leaf=is_list):
        kind = getattr(getattr(x, "dtype", None), "kind", "")
        if is_list(x) and jax.tree.leaves(x):
            problem, remedy = f"a list of {len(x)} is no array", "pass np.asarray(it)"
        elif isinstance(x, str | bytes) or (kind and kind in "OSTU"):
            what = type(x).__name__ if not kind else f"{type(x).__name__} of {x.dtype}"
            problem, remedy = f"a step computes with numbers, got {what}", "leave it out of the batch, or pass numbers"
        elif not hasattr(x, "dtype") and not isinstance(x, bool | int | float | complex):
            problem, remedy = f"{type(x).__name__} is no array", "pass np.asarray(it), or leave it out of the batch"
        else:
            continue
        raise DataError(f"{show((where, *path))}: {problem}. Remedy: {remedy}.")


def tag_batch(batch: Any, dims: BatchDims) -> Any:
    """Returns the batch with each array that ``dims`` names as a tagged leaf; see :func:`jaxpar.tag`.

    >>> tag_batch({"x": jax.ShapeDtypeStruct((8, 2), "float32")}, {"x": ("batch", None)})["x"].dims
    ('batch', None)
    """
    return map_with_paths(lambda path, x: tag(x, *dims[show(path)]) if show(path) in dims else x, batch)
