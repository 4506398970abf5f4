"""A state with adapters as a pipeline holds it: each weight with its adapter, and only the adapters differentiated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpar.errors import ConfigError
from jaxpar.parallel.pipeline.executor.frozen import FrozenWeight, is_frozen
from jaxpar.parallel.pipeline.staged_loss import PipelineLoss
from jaxpar.training.lora.low_rank import RANK, LowRank, low_rank
from jaxpar.training.lora.program import run_with_low_rank
from jaxpar.training.model import Kind, Path, leaves_with_paths, show
from jaxpar.training.model.lora import CARRIED, A, B, LoraKind, adapter_of
from jaxpar.training.model.parts import FROZEN
from jaxpar.training.state import TrainState


@dataclass(frozen=True)
class StageKind:
    """A model whose parameters are :class:`FrozenWeight` nodes.

    Attributes:
      kind: of the model without adapters.
    """

    kind: Kind

    def merge(self, params: Any, variables: Any) -> Any:
        return self.kind.merge(jax.tree.map(_merged, params, is_leaf=is_frozen), variables)

    def carried(self, model: Any, variables: Any, updates: Any) -> Any:
        return self.kind.carried(model, variables, updates)


def stage_state(state: TrainState, loss_fn: Any) -> TrainState:
    """Returns the state whose parameters are the weights, with their adapters beside them; any other as it is.

    The stages of a pipeline then hold, gather and move frozen weights as they do parameters.

    Args:
      state: the state that the step received.
      loss_fn: the :class:`jaxpar.pipeline.PipelineLoss`, whose layers are stacked.

    Raises:
      ConfigError: an adapter is shared by all layers of a stack, which no stage has.
    """
    kind = state.metadata.kind
    if not isinstance(kind, LoraKind):
        return state
    frozen, dims = state.variables[FROZEN], dict(state.metadata.dims)
    adapters = {adapter.path: adapter for adapter in kind.adapters}
    nodes, names = [], dict[Path, Any]()
    for path, w in leaves_with_paths(frozen):
        adapter = adapters.get(path)
        found: dict[Path, Any] = {("weight",): dims.get(("variables", FROZEN, *path))}
        node = FrozenWeight(w)
        if adapter is not None:
            in_layers = isinstance(loss_fn, PipelineLoss) and path[: len(loss_fn.path)] == loss_fn.path
            if in_layers and not adapter.stacked:
                raise ConfigError(
                    f"pipeline: the weight {show(path)} {list(w.shape)} has one adapter for all layers, because its "
                    "first dim is not named 'layers', but each stage has only its own layers. Remedy: name the dim, as "
                    "metadata_params={nn.PARTITION_NAME: 'layers'}, jaxpar.nnx.stacked and jp.pipeline.stack do."
                )
            node = FrozenWeight(w, adapter_of(state.params, adapter), adapter.labels(RANK), kind.scale)
            found |= {("adapter", str(i)): dims.get(("params", *path, name)) for i, name in enumerate((A, B))}
        nodes.append(node)
        names |= {("params", *path, *end): own for end, own in found.items() if own is not None}
    params = jax.tree.unflatten(jax.tree.structure(frozen), nodes)
    metadata = replace(state.metadata, kind=StageKind(kind.kind), dims=tuple(names.items()))
    return replace(state, params=params, variables=state.variables[CARRIED], metadata=metadata)


def adapter_grads(state: TrainState, grads: Any) -> Any:
    """Returns the gradients of a pipeline in the structure of the state's own parameters.

    Args:
      state: the state that the step received.
      grads: gradients like the trained part of :func:`stage_state`'s parameters.
    """
    kind = state.metadata.kind
    if not isinstance(kind, LoraKind):
        return grads
    found: dict[str, Any] = {}
    for adapter in kind.adapters:
        node, table = grads, found
        for name in adapter.path:
            node, table = node[name], table.setdefault(name, {})
        table |= zip((A, B), node.adapter, strict=True)
    return found


def run_adapted(run: Callable[[Any], Any], weights: Any, *, layer: bool = False) -> Any:
    """Returns ``run(weights)`` for weights with adapters beside them, which ``run`` sees as arrays.

    Args:
      run: a function of the weights of a model without adapters.
      weights: a tree with :class:`FrozenWeight` nodes; without any, ``run`` is called as it is.
      layer: whether the weights are those of one layer, cut from stacks.
    """
    nodes = [x for x in jax.tree.leaves(weights, is_leaf=is_frozen) if is_frozen(x)]
    if not nodes:
        return run(weights)
    if not any(node.adapter for node in nodes) or jax.config.jax_disable_jit:
        return run(jax.tree.map(lambda x: _merged(x, layer), weights, is_leaf=is_frozen))
    return run_with_low_rank(run, jax.tree.map(lambda x: _value(x, layer), weights, is_leaf=is_frozen))


def _merged(x: Any, layer: bool = False) -> Any:
    """Returns the array, or shape, of a node of a tree of weights."""
    found = _value(x, layer)
    return found.merged() if isinstance(found, LowRank) else found


def _value(x: Any, layer: bool) -> Any:
    """Returns an array, or a ``LowRank`` value, for a node of a tree of weights."""
    if not is_frozen(x):
        return x
    if not x.adapter or isinstance(x.weight, jax.ShapeDtypeStruct):
        return x.weight
    less = lambda labels: tuple(label - 1 if label > 0 else label for label in labels if label) if layer else labels
    (a, b), (of_a, of_b) = x.adapter, map(less, x.labels)
    return low_rank(x.weight, a, b, of_a, of_b, x.scale)
