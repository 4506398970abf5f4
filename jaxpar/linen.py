"""The Linen adapter: logical dims as Flax's own ``nn.LogicallyPartitioned`` boxes, and back.

A model already annotated with ``nn.with_logical_partitioning`` needs no change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flax import linen as nn

from jaxpar.errors import AnnotationError
from jaxpar.sharding import messages
from jaxpar.sharding.layout import current_layout
from jaxpar.sharding.names import Names, check_names
from jaxpar.sharding.rules import options


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
        raise AnnotationError(f"{where}: {messages.nameless_box(box)}")
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
    for dim, (_, rule) in table.items():
        live = tuple(axis for axis in options(rule)[0] if layout.sizes.get(axis, 1) > 1)
        rules.append((dim, live or None))
    with nn.logical_axis_rules(rules):
        yield
