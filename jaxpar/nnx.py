"""The NNX adapter: logical dims as metadata of an ``nnx.Variable``, and back.

The names live under a key of our own, ``logical_dims``, because Flax reads its own key ``out_sharding`` as *mesh axes* as
soon as a mesh is active. A model that carries only Flax's key works as well: its names are then taken as logical dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpar.errors import AnnotationError, ModelError
from jaxpar.model import Names, Parts, Path, check_names, show

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


@dataclass(frozen=True)
class NNXKind:
    """The static half of an NNX module."""

    graphdef: Any
    params: Any
    rest: Any

    def merge(self, params: Any, rest: Any) -> Any:
        states = [jax.tree.unflatten(d, jax.tree.leaves(x)) for d, x in ((self.params, params), (self.rest, rest))]
        return nnx.merge(self.graphdef, *states)

    def carried(self, model: Any, rest: Any, updates: Any) -> Any:
        if updates is not None:
            raise ModelError(
                "loss_fn returned a third value (updates), but an NNX module carries its own state. Remedy: assign to the "
                "module's variables instead."
            )
        state = nnx.split(model, nnx.Param, ...)[2]
        if jax.tree.structure(state) != self.rest:
            raise ModelError(
                "loss_fn added or removed variables of the NNX module: the carried state had "
                f"{self.rest.num_leaves} arrays and now has {len(jax.tree.leaves(state))}. Remedy: create every variable "
                f"in the constructor; return intermediate values from loss_fn."
            )
        return nnx.to_pure_dict(state)


def read(module: Any) -> Parts:
    """An NNX module taken apart: ``nnx.Param`` variables are trained, all others carried."""
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    names: list[tuple[Path, Names]] = []
    for part, state in (("params", params), ("rest", rest)):
        for keys, variable in nnx.to_flat_state(state):
            path = (part, *map(str, keys))
            dims = _names(variable.get_metadata(), show(path))
            if dims is not None:
                names.append((path, dims))
    kind = NNXKind(graphdef, jax.tree.structure(params), jax.tree.structure(rest))
    pure = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)
    if not jax.tree.leaves(pure[0]):
        raise ModelError(f"{type(module).__name__} has no nnx.Param. Remedy: make_model must return the whole module.")
    return Parts(*pure, tuple(names), kind)


def _names(metadata: dict[str, Any], where: str) -> Names | None:
    """Our key if it is there, else Flax's own."""
    if metadata.get(DIMS) is not None:
        return check_names(metadata[DIMS], where)
    sharding = metadata.get("out_sharding")
    if sharding is None:
        return None
    if not isinstance(sharding, tuple | list | jax.sharding.PartitionSpec):
        raise AnnotationError(
            f"{where}: out_sharding is a {type(sharding).__name__}; jaxpar reads a tuple of logical dims. Remedy: annotate "
            f"with jaxpar.nnx.axes, or with nnx.with_partitioning(init, (names...))."
        )
    return check_names(tuple(sharding), where)
