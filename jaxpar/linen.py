"""The Linen adapter: logical dims as Flax's own ``nn.LogicallyPartitioned`` boxes, and back.

A model already annotated with ``nn.with_logical_partitioning`` needs no change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flax import linen as nn

from jaxpar.errors import AnnotationError
from jaxpar.layout import current_layout
from jaxpar.model import Names, check_names
from jaxpar.rules import FirstOf


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


@contextmanager
def flax_rules() -> Iterator[None]:
    """Let ``nn.with_logical_constraint`` inside a model read the ambient layout's activation rules.

    For models that already constrain their activations in Flax's own way; wrap the ``apply`` inside ``loss_fn`` in it. It
    is not entered by itself, because Flax also reads the rules when ``nn.DenseGeneral`` initialises a boxed kernel, and
    fails there. Flax's lenience comes with it (an unknown name is replicated): ``jaxpar.hint`` is the strict way.
    """
    layout = current_layout()
    table, _ = layout.rules.for_role("activations")
    rules = []
    for dim, (_, value) in table.items():
        axes_ = value.options[0] if isinstance(value, FirstOf) else value
        live = tuple(axis for axis in axes_ if layout.sizes.get(axis, 1) > 1)
        rules.append((dim, live if len(live) > 1 else live[0] if live else None))
    with nn.logical_axis_rules(rules):
        yield
