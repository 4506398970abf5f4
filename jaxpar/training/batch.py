"""A batch of any structure with logical dims by path: placed on a layout, or tagged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxpar.sharding.arrays import shard_array
from jaxpar.sharding.layout import Layout
from jaxpar.training.model import leaves_with_paths, show, tag

type BatchDims = Mapping[str, Sequence[str | None]]
"""Path of an array in a batch, such as ``image`` or ``views/0``, to its logical dims."""


def shard_batch(layout: Layout, batch: Any, dims: BatchDims) -> Any:
    """Returns the batch on the layout's devices.

    Args:
      layout: where to place it.
      batch: a pytree of the arrays that this process loaded; see :func:`jaxpar.shard_array`.
      dims: the logical dims of each array, by path.

    Raises:
      LayoutError: the rules cannot place an array.

    >>> import numpy as np, jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data"))
    >>> batch = shard_batch(layout, {"views": [np.zeros((16, 4))]}, {"views/0": ("batch", None)})
    >>> batch["views"][0].sharding.spec
    P('data', None)
    """
    placed = [
        shard_array(layout, x, *dims[show(path)], path=show(("batch", *path))) for path, x in leaves_with_paths(batch)
    ]
    return jax.tree.unflatten(jax.tree.structure(batch), placed)


def tag_batch(batch: Any, dims: BatchDims) -> Any:
    """Returns the batch with each array that ``dims`` names as a tagged leaf; see :func:`jaxpar.tag`.

    >>> tag_batch({"x": jax.ShapeDtypeStruct((8, 2), "float32")}, {"x": ("batch", None)})["x"].dims
    ('batch', None)
    """
    named = [tag(x, *dims[show(path)]) if show(path) in dims else x for path, x in leaves_with_paths(batch)]
    return jax.tree.unflatten(jax.tree.structure(batch), named)
