"""The NNX adapter: annotates an ``nnx.Variable`` with logical dims and reads them back.

The names are stored under the metadata key ``logical_dims``, because Flax reads its own key ``out_sharding`` as *mesh
axes* as soon as a mesh is active. A model that has only Flax's key works too: its names are taken as logical dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxpar.errors import AnnotationError
from jaxpar.sharding.names import Names, check_names

DIMS = "logical_dims"
"""The metadata key that holds the logical dims."""


def axes(init: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """Returns an initializer whose arrays carry logical dims: ``kernel_init=axes(init)("embed", "mlp")``.

    Args:
      init: an initializer, called as ``init(key, shape, dtype)``.

    Returns:
      A function that takes one logical dim (or ``None``) per dim of the array, and returns the annotated initializer.

    Raises:
      AnnotationError: the returned function receives a dim that is neither a string nor ``None``.

    >>> from flax import nnx
    >>> linear = nnx.Linear(4, 8, kernel_init=axes(nnx.initializers.lecun_normal())("embed", "mlp"), rngs=nnx.Rngs(0))
    >>> linear.kernel.get_metadata()["logical_dims"]
    ('embed', 'mlp')
    """

    def named(*dims: str | None) -> Callable[..., Any]:
        return nnx.with_metadata(init, **{DIMS: check_names(dims, "axes()")})

    return named


def stacked(dim: str = "layers") -> dict[str, str]:
    """Returns the ``transform_metadata`` with which ``nnx.vmap`` and ``nnx.scan`` name the dim that they add.

    >>> stacked("layers")
    {'partition_name': 'layers', 'logical_dims': 'layers'}
    """
    return {nnx.PARTITION_NAME: dim, DIMS: dim}


def names_of(metadata: dict[str, Any], where: str) -> Names | None:
    """Returns the logical dims in a variable's metadata: those of jaxpar's key, else those of Flax's, else ``None``.

    Args:
      metadata: as ``variable.get_metadata()`` returns it.
      where: the path of the variable, for errors.

    Raises:
      AnnotationError: the value is not a tuple of strings and ``None``; the text begins with ``where``.

    >>> names_of({"logical_dims": ("embed", None)}, "kernel"), names_of({}, "bias")
    (('embed', None), None)
    """
    if metadata.get(DIMS) is not None:
        return check_names(metadata[DIMS], where)
    sharding = metadata.get("out_sharding")
    if sharding is None:
        return None
    if not isinstance(sharding, tuple | list | jax.sharding.PartitionSpec):
        raise AnnotationError(
            f"{where}: out_sharding must be a tuple of logical dims such as ('embed', 'mlp'), got {sharding!r}. "
            f"Remedy: annotate with jaxpar.nnx.axes or nnx.with_partitioning."
        )
    return check_names(tuple(sharding), where)
