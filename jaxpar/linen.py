"""The Linen adapter: logical dims as Flax's own ``nn.LogicallyPartitioned`` boxes, and back.

A model already annotated with ``nn.with_logical_partitioning`` needs no change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import linen as nn

from jaxpar.errors import AnnotationError
from jaxpar.model import Names, check_names


def axes(init: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """Name the dims of what an initializer makes: ``kernel_init=axes(init)("embed", "mlp")``.

    The stacking dim of ``nn.scan`` and ``nn.vmap`` is named by ``metadata_params={nn.PARTITION_NAME: "layers"}``.

    >>> import jax
    >>> box = axes(nn.initializers.lecun_normal())("embed", "mlp")(jax.random.key(0), (4, 8))
    >>> box.names
    ('embed', 'mlp')
    """

    def named(*dims: str | None) -> Callable[..., Any]:
        return nn.with_logical_partitioning(init, check_names(dims, "axes()"))

    return named


def unbox(box: Any, where: str) -> tuple[Any, Names]:
    """The array and the names in a ``nn.Partitioned`` or ``nn.LogicallyPartitioned`` box."""
    if not isinstance(box, nn.Partitioned):
        raise AnnotationError(
            f"{where}: the metadata box {type(box).__name__} names no dims. Remedy: annotate with jaxpar.linen.axes or "
            f"nn.with_logical_partitioning."
        )
    return box.value, box.names
