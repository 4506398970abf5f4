"""A state's parameters, as the stack of layers that a pipeline runs and all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError
from jaxpar.parallel.pipeline.staged_loss import PipelineLoss, stacked_part
from jaxpar.parallel.precision.policy import Precision
from jaxpar.sharding.layout import hint
from jaxpar.training.exact_weights import computing
from jaxpar.training.loss import key_of
from jaxpar.training.model import Path, to_path
from jaxpar.training.model.lora import LoraKind
from jaxpar.training.model.quantized import RoundedKind
from jaxpar.training.state import TrainState


def check_synchronous(state: TrainState) -> None:
    """Raises if the parameters are not those that stages hold: only a pipeline that is flushed prepares them so."""
    if isinstance(state.metadata.kind, RoundedKind):
        raise ConfigError(
            "asynchronous pipeline: weights are rounded once a step (jaxpar.compression.quantize_aware), but this "
            "pipeline keeps several versions of them. Remedy: jp.train_step with jp.pipeline.schedule('1f1b')."
        )
    if isinstance(state.metadata.kind, LoraKind):
        raise ConfigError(
            "asynchronous pipeline: the model has adapters (jaxpar.lora.adapt), but this pipeline keeps several "
            "versions of all weights, also of those that are frozen. Remedy: jp.train_step with "
            "jp.pipeline.schedule('1f1b')."
        )


class ModelSplit:
    """A state's parameters, as the stack of layers and all others, and the loss that reads them.

    Those of a model with adapters are nodes; see :func:`jaxpar.training.pipeline.adapters.stage_state`.
    """

    def __init__(self, state: TrainState, loss_fn: PipelineLoss):
        check_synchronous(state)
        self.state, self.loss_fn, self.path = state, loss_fn, loss_fn.path
        self.shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), state.params)
        self.model = lambda params: state.metadata.kind.merge(params, state.variables)
        _, self.block = stacked_part(self.model(self.shapes), self.path)
        self.names = dict(state.metadata.dims)
        self.read: dict[str, frozenset[Path]] = {}
        """What each part of the loss reads; see :func:`jaxpar.training.pipeline.stage_functions.read_by`."""

    def prepare(self, params: Any, batch: Any, precision: Precision) -> Any:
        """Returns the batch as ``PipelineLoss.prepare`` makes it."""
        return self.loss_fn.prepare(self.model(computing(params, self.state, precision)), batch)

    def loss(self, params: Any, batch: Any) -> Any:
        """Returns the loss without a pipeline, on a batch that :meth:`prepare` returned."""
        keys = self.loss_fn.rows(batch, key_of(self.state))
        return self.loss_fn.of_prepared(self.model(params), batch, keys)

    def stack(self, params: Any) -> Any:
        for name in self.path:
            params = params[name]
        return params

    def others(self, params: Any) -> Any:
        """Returns the parameters outside the layers."""
        return _replaced(params, self.path, None)

    def constrained(self, others: Any) -> Any:
        """Constrains gradients of the parameters outside the layers to their rules."""

        def one(keys: Any, grad: jax.Array) -> jax.Array:
            names = self.names.get(("params", *to_path(keys)))
            return grad if names is None else hint(grad, *names, role="gradients")

        return jax.tree_util.tree_map_with_path(one, others)

    def join(self, stack: Any, others: Any) -> Any:
        return _replaced(others, self.path, stack)

    def model_of(self, others: Any) -> Any:
        """Returns the model with shapes instead of arrays for its layers."""
        return self.model(self.join(self.stack(self.shapes), others))

    def map_parts(
        self, tree: Any, other: Any, f: Callable[[Any, Any], Any], of_stack: Callable[[Any, Any], Any]
    ) -> Any:
        """Maps ``f(x, y)`` over the parameters outside the layers and ``of_stack(x, y)`` over those of the layers.

        ``y`` is the leaf of ``other`` at the same path.
        """
        others = jax.tree.map(f, self.others(tree), self.others(other))
        return self.join(jax.tree.map(of_stack, self.stack(tree), self.stack(other)), others)

    def add(self, grads: Any, others: Any) -> Any:
        """Adds ``others`` to the gradients of the parameters outside the layers."""
        summed = jax.tree.map(jnp.add, self.others(grads), others)
        return self.join(self.stack(grads), summed)


def _replaced(tree: Any, path: tuple[str, ...], value: Any) -> Any:
    if not path:
        return value
    inner = tree[path[0]] if tree.get(path[0]) is not None else {}
    return {**tree, path[0]: _replaced(inner, path[1:], value)}
