"""The NNX adapter: logical dims as metadata of an ``nnx.Variable``, and back.

The names live under a key of our own, ``logical_dims``, because Flax reads its own key ``out_sharding`` as *mesh axes* as
soon as a mesh is active. A model that carries only Flax's key works as well: its names are then taken as logical dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxpar.errors import AnnotationError
from jaxpar.sharding import messages
from jaxpar.sharding.names import Names, check_names

DIMS = "logical_dims"
"""The metadata key of the names."""


def axes(init: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """Name the dims of what an initializer makes: ``kernel_init=axes(init)("embed", "mlp")``.

    >>> from flax import nnx
    >>> linear = nnx.Linear(4, 8, kernel_init=axes(nnx.initializers.lecun_normal())("embed", "mlp"), rngs=nnx.Rngs(0))
    >>> linear.kernel.get_metadata()["logical_dims"]
    ('embed', 'mlp')
    """

    def named(*dims: str | None) -> Callable[..., Any]:
        return nnx.with_metadata(init, **{DIMS: check_names(dims, "axes()")})

    return named


def stacked(dim: str = "layers") -> dict[str, str]:
    """The ``transform_metadata`` of ``nnx.vmap`` and ``nnx.scan`` that gives the stacking dim its name.

    >>> stacked("layers")
    {'partition_name': 'layers', 'logical_dims': 'layers'}
    """
    return {nnx.PARTITION_NAME: dim, DIMS: dim}


def names_of(metadata: dict[str, Any], where: str) -> Names | None:
    """The names in a variable's metadata: under our key if it is there, else under Flax's own."""
    if metadata.get(DIMS) is not None:
        return check_names(metadata[DIMS], where)
    sharding = metadata.get("out_sharding")
    if sharding is None:
        return None
    if not isinstance(sharding, tuple | list | jax.sharding.PartitionSpec):
        raise AnnotationError(f"{where}: {messages.not_dims(sharding)}")
    return check_names(tuple(sharding), where)
