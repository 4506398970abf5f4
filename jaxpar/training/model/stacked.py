"""Separate layers of a model as one stack, so that a pipeline can place them; the model itself stays as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import AnnotationError, ModelError
from jaxpar.parallel.offload.host_weights import is_waiting
from jaxpar.parallel.pipeline.separate_layers import layer_keys, stacked_arrays
from jaxpar.sharding.names import LAYERS, Names
from jaxpar.training.model.parts import Kind, MakeModel, ModelParts, Path, leaves_with_paths, show


@dataclass(frozen=True)
class StackLayers:
    """The function of a PRNG key that :func:`stack` returns."""

    make_model: MakeModel
    path: Path

    def __call__(self, key: jax.Array) -> StackedModel:
        return StackedModel(self.make_model(key), self.path)


@dataclass(frozen=True)
class StackedModel:
    """A model, and the path of the layers that are to be stacked."""

    model: Any
    path: Path


def stack(make_model: MakeModel, layers: str) -> StackLayers:
    """Returns a ``make_model`` of the same model, whose separate layers are one stack in the training state.

    The stack's parameters are [layers, ...], under the logical dim ``layers``, so that the rule ``layers: pipeline``
    gives each stage its own layers. Initial values, the names of the other dims and the model that ``loss_fn`` and
    ``state.model`` give are those of the model itself, with separate layers. A checkpoint of one form restores into the
    other.

    Args:
      make_model: as for :func:`jaxpar.init`.
      layers: the path of the layers: of an ``nnx.List``, a list, or a dict with numbered keys, such as
        ``decoder/blocks``; or the part of numbered names before the number, such as ``Block`` for ``Block_0``,
        ``Block_1``, ... The stack has this path, and so has ``PipelineLoss(layers=...)``.

    Raises (when the model is built):
      ModelError: the model has no separate layers at the path, or they differ in structure.
      AnnotationError: layers give the same dim different names.

    >>> import jax, optax
    >>> import jaxpar as jp
    >>> block = lambda key: {"w": jp.tag(jax.random.normal(key, (4, 8)), "embed", "mlp")}
    >>> make_model = lambda key: {"blocks": [block(k) for k in jax.random.split(key, 6)]}
    >>> layout = jp.Layout(jp.MeshSpec(pipeline=2).abstract(), jp.Rules(layers="pipeline", embed=None, mlp=None))
    >>> state = jp.abstract_state(layout, stack(make_model, "blocks"), optax.sgd(0.1))
    >>> state.params["blocks"]["w"].shape, state.params["blocks"]["w"].sharding.spec
    ((6, 4, 8), P('pipeline', None, None))
    """
    return StackLayers(make_model, tuple(layers.split("/")))


@dataclass(frozen=True)
class StackedKind:
    """A model whose layers at ``path`` are one stack in the parameters, and separate in the model.

    Attributes:
      kind: of the model itself.
      path: of the stack.
      inside: whether the layers are inside of the container at ``path``, or else beside each other in its parent.
      keys: of the layers, in order.
      listed: whether the container is a list.
    """

    kind: Kind
    path: Path
    inside: bool
    keys: tuple[Any, ...]
    listed: bool

    def merge(self, params: Any, variables: Any) -> Any:
        return self.kind.merge(_edited(params, self.path[:-1], self._split), variables)

    def carried(self, model: Any, variables: Any, updates: Any) -> Any:
        return self.kind.carried(model, variables, updates)

    def _split(self, parent: Mapping[Any, Any]) -> dict[Any, Any]:
        leaves, structure = jax.tree.flatten(parent[self.path[-1]], is_leaf=is_waiting)
        rows = zip(*(_rows(leaf, len(self.keys)) for leaf in leaves), strict=True)
        layers = [jax.tree.unflatten(structure, row) for row in rows]
        others = {key: value for key, value in parent.items() if key != self.path[-1]}
        if not self.inside:
            return others | dict(zip(self.keys, layers, strict=True))
        return others | {self.path[-1]: layers if self.listed else dict(zip(self.keys, layers, strict=True))}


def stack_parts(parts: ModelParts, path: Path) -> ModelParts:
    """Returns the parts of a model with its layers as one stack; see :func:`stack`.

    Raises:
      ModelError, AnnotationError: as for :func:`stack`.
    """
    if hasattr(parts.kind, "tiles"):
        raise ModelError(
            f"stack(make_model, {show(path)!r}): the model's weights are rounded. Remedy: jp.compression.quantize_aware"
            f"(jp.pipeline.stack(make_model, {show(path)!r}), config)."
        )
    parent = parts.params
    for name in path[:-1]:
        parent = parent.get(name) if isinstance(parent, Mapping) else None
    inside, keys = layer_keys(parent, path[-1]) if isinstance(parent, Mapping) else (False, ())
    if not keys:
        have = ", ".join(sorted(map(str, parent))) if isinstance(parent, Mapping) else "nothing there"
        raise ModelError(
            f"stack(make_model, {show(path)!r}): the model has no separate layers of this name. Remedy: give the path "
            "of a list of layers, or the name of numbered layers without the number, such as 'Block' for 'Block_0'; "
            f"{show(('params', *path[:-1]))} has {have}. A stack of layers needs no stack()."
        )
    container = parent[path[-1]] if inside else parent
    layers = [container[key] for key in keys]
    stacked = stacked_arrays(layers, show(("params", *path)))
    starts = [("params", *path[:-1], *((path[-1],) if inside else ()), str(key)) for key in keys]
    removed = () if inside else keys

    def edit(parent: Mapping[Any, Any]) -> dict[Any, Any]:
        others = {key: value for key, value in parent.items() if key not in removed}
        return others | {path[-1]: stacked}

    params = _edited(parts.params, path[:-1], edit)
    kind = StackedKind(parts.kind, path, inside, keys, isinstance(container, list | tuple))
    return replace(parts, params=params, dims=_stacked_dims(parts, path, starts, layers[0]), kind=kind)


def _stacked_dims(parts: ModelParts, path: Path, starts: Sequence[Path], layer: Any) -> tuple[tuple[Path, Names], ...]:
    """Returns the names of the dims, with those of the layers' parameters once, after the dim ``layers``."""
    dims, stacked = dict(parts.dims), dict[Path, Names]()
    for rest, leaf in leaves_with_paths(layer):
        found = [dims.pop((*start, *rest), None) for start in starts]
        if different := next((names for names in found if names != found[0]), None):
            where = show((*starts[found.index(different)], *rest))
            raise AnnotationError(
                f"{where} has the dims {different}, but {show((*starts[0], *rest))} has {found[0]}. Remedy: give equal "
                "layers equal names, so that they can be stacked."
            )
        stacked["params", *path, *rest] = (LAYERS, *(found[0] or (None,) * leaf.ndim))
    return tuple((dims | stacked).items())


def _edited(tree: Any, path: Path, edit: Any) -> Any:
    return edit(tree) if not path else {**tree, path[0]: _edited(tree[path[0]], path[1:], edit)}


def _rows(leaf: Any, count: int) -> list[Any]:
    """Returns one leaf for each layer of a stack; of a shape, shapes."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)] * count
    return list(jnp.unstack(leaf)) if isinstance(leaf, jax.Array) else [leaf[i] for i in range(count)]
