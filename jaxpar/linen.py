"""The Linen adapter: annotates parameters with logical dims as Flax's ``nn.LogicallyPartitioned`` and reads them back.

A model that already uses ``nn.with_logical_partitioning`` needs no change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flax import linen as nn

from jaxpar.errors import AnnotationError
from jaxpar.sharding.layout import current_layout
from jaxpar.sharding.names import Names, check_names
from jaxpar.sharding.rules import options


def axes(init: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """Returns an initializer whose arrays carry logical dims: ``kernel_init=axes(init)("embed", "mlp")``.

    ``nn.scan`` and ``nn.vmap`` name the dim that they add by ``metadata_params={nn.PARTITION_NAME: "layers"}``.

    Args:
      init: an initializer, called as ``init(key, shape, dtype)``.

    Returns:
      A function that takes one logical dim (or ``None``) per dim of the array, and returns the annotated initializer.

    Raises:
      AnnotationError: the returned function receives a dim that is neither a string nor ``None``.

    >>> import jax
    >>> box = axes(nn.initializers.lecun_normal())("embed", "mlp")(jax.random.key(0), (4, 8))
    >>> box.names
    ('embed', 'mlp')
    """

    def named(*dims: str | None) -> Callable[..., Any]:
        return nn.with_logical_partitioning(init, check_names(dims, "axes()"))

    return named


def unbox(box: Any, where: str) -> tuple[Any, Names]:
    """Returns the array and the names in an ``nn.Partitioned`` or ``nn.LogicallyPartitioned`` box.

    Flax allows fewer names than the array has dims. As in Flax, the remaining dims are then not sharded: they get the
    name ``None``, and ``explain`` lists each of them as a dim without a name.

    Args:
      box: the box, as Flax puts it around a parameter.
      where: the path of the parameter, for errors.

    Raises:
      AnnotationError: another kind of box; the text begins with ``where``.

    >>> import jax
    >>> unbox(nn.Partitioned(1.0, names=("embed",)), "params/bias")
    (1.0, ('embed',))
    >>> unbox(nn.Partitioned(jax.numpy.ones((4, 8)), names=("embed",)), "params/kernel")[1]
    ('embed', None)
    """
    if not isinstance(box, nn.Partitioned):
        raise AnnotationError(
            f"{where}: the metadata box {type(box).__name__} names no dims. Remedy: annotate with jaxpar.linen.axes or "
            f"nn.with_logical_partitioning."
        )
    missing = getattr(box.value, "ndim", 0) - len(box.names)
    return box.value, (*box.names, *(None,) * missing)


@contextmanager
def flax_rules() -> Iterator[None]:
    """Returns a context in which ``nn.with_logical_constraint`` reads the ambient layout's activation rules.

    It is for models that constrain their activations with Flax's own functions. Wrap the ``apply`` inside ``loss_fn``
    in it. jaxpar does not enter it by itself, because Flax also reads these rules when ``nn.DenseGeneral`` initialises
    a boxed kernel, and fails there. Flax replicates a dim whose name is unknown; :func:`jaxpar.hint` raises instead.

    Raises:
      NoLayoutError: no layout is ambient.

    >>> import jaxpar as jp
    >>> with jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data", embed=None)), flax_rules():
    ...     nn.logical_to_mesh_axes(("batch", "embed"))
    P('data', None)
    """
    layout = current_layout()
    table, _ = layout.rules.for_role("activations")
    rules = []
    for dim, (_, rule) in table.items():
        live = tuple(axis for axis in options(rule)[0] if layout.sizes.get(axis, 1) > 1)
        rules.append((dim, live or None))
    with nn.logical_axis_rules(rules):
        yield
