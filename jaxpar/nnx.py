"""The NNX adapter: logical dims as metadata of an ``nnx.Variable``, and back.

The names live under a key of our own, ``logical_dims``, because Flax reads its own key ``out_sharding`` as *mesh axes* as
soon as a mesh is active. A model that carries only Flax's key works as well: its names are then taken as logical dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpar.errors import AnnotationError, ModelError, listing
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
                "loss_fn returned a third value (updates), but an NNX module carries its own state. Remedy: return "
                "(loss, aux), and assign to the module's variables instead."
            )
        _, *now = nnx.split(model, nnx.Param, ...)
        before = _paths(jax.tree.unflatten(d, range(d.num_leaves)) for d in (self.params, self.rest))
        after = _paths(now)
        changes = {"added": after - before, "removed": before - after}
        if before != after:
            text = " and ".join(f"{verb} {listing(sorted(paths))}" for verb, paths in changes.items() if paths)
            raise ModelError(
                f"loss_fn {text}, but the variables of an NNX module stay those that its constructor made. Remedy: create "
                f"every variable there; return intermediate values from loss_fn."
            )
        return nnx.to_pure_dict(now[1])


def _paths(states: Iterable[Any]) -> set[str]:
    return {show(tuple(map(str, keys))) for state in states for keys, _ in nnx.to_flat_state(state)}


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
        raise ModelError(
            f"make_model returned {type(module).__name__}, which holds no nnx.Param. Remedy: return the whole module."
        )
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
            f"{where}: out_sharding is {sharding!r}, but a tuple of logical dims is wanted, as ('embed', 'mlp'). Remedy: "
            f"annotate with jaxpar.nnx.axes or nnx.with_partitioning."
        )
    return check_names(tuple(sharding), where)
