"""The arrays that go from tick to tick, and those that one stage has in one tick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.executor.grad_buckets import BUCKET_FIELDS
from jaxpar.parallel.pipeline.executor.layer_inputs import LayerScalars
from jaxpar.parallel.pipeline.executor.primitives import pick, put
from jaxpar.parallel.pipeline.schedules.table import FIELDS


class AuxLosses(NamedTuple):
    """The scalars of a stage's layers, summed per microbatch: its weight is known only after the head.

    The last entry of each array is for values that nothing reads.

    Attributes:
      weights: [microbatches + 1, 2], the weight of a microbatch in the sums and in the differentiated loss.
      sums: for each scalar its sum over layers, [microbatches + 1].
    """

    weights: jax.Array
    sums: LayerScalars


class StageCarry(NamedTuple):
    """The arrays of a stage, [stages, devices, ...]; ``()`` stands for what a schedule does not need.

    Every buffer [slots, ...] ends with an extra slot for data that nothing reads.

    Attributes:
      activations: inputs of forwards, [slots, ...]: those to come, and those that a backward recomputes from.
      aux: the scalars of the layers; ``None`` if layers return none.
      received: the cotangents that arrived at the end of the previous tick, by direction, if stages are independent.
      cotangents: of the outputs of chunks, [slots, ...], for backwards.
      grads: the sums of gradients, [chunks, layers, ...], in at least fp32.
      layer_inputs: the inputs of layers that recompute, [slots, 1, ...].
      split_residuals: the data that the B of a split backward stores for its W, [slots, layers, ...].
      residuals: of layers, [slots, layers, ...], or [slots, 1, ...] if some layers recompute; or
        :class:`jaxpar.parallel.pipeline.executor.sequence_chunks.Pools`.
      sent: the input cotangent of the tick's backward, for the stage that runs the previous chunk.
      buckets: the gradient sums of the chunk whose gradients are not reduced yet, [1, layers, ...].
      completed: those of complete buckets that wait for other stages, [slots, layers, ...].
    """

    # The order decides which buffers XLA:CPU copies in a tick. Another order took 9 % more memory in one program.

    activations: Any = ()
    aux: AuxLosses | None = None
    received: Any = ()
    cotangents: Any = ()
    grads: Any = ()
    layer_inputs: Any = ()
    split_residuals: Any = ()
    residuals: Any = ()
    sent: Any = ()
    buckets: Any = ()
    completed: Any = ()


class HeadGrad(NamedTuple):
    """What the head returns for the backward of a microbatch.

    Attributes:
      cotangent: of the last layer's output.
      weights: [2], the microbatch's weight in the sums and in the differentiated loss.
    """

    cotangent: Any
    weights: jax.Array


class TickCarry(NamedTuple):
    """All arrays that go from tick to tick.

    Attributes:
      head_grad: of the microbatch that passed the head last, [devices, ...].
      stage: those of the stages.
      sums: what the head returned, summed over microbatches, [devices, ...].
      x: the input of the first layer, and then its cotangents, [devices, microbatches + 1, rows, ...]. If the embedding
        runs in the ticks: the input that enters and the cotangent that leaves, [devices, 2, rows, ...].
    """

    head_grad: Any
    stage: StageCarry
    sums: Any
    x: jax.Array


@dataclass(frozen=True)
class TickInputs:
    """The per-device arrays that a stage has in a tick.

    Attributes:
      stage_row: its row of the table.
      global_row: the row of all stages together.
      weights: its weights, [chunks, layers, ...].
      carry: its arrays from tick to tick.
      x: the input of the first layer; see :class:`TickCarry`.
      y: the output of its forward.
      head_grad: what the head returned for the backward of its microbatch.
      batch: [microbatches, rows, ...].
      side_weights: the weights that ``PipelineProgram.side`` receives.
      arrived: the outputs of other stages' forwards by direction, if they were sent before the end of the tick.
    """

    stage_row: jax.Array
    global_row: jax.Array
    weights: Any
    carry: StageCarry
    x: jax.Array
    y: jax.Array
    head_grad: Any
    batch: Any
    side_weights: Any
    arrived: Mapping[str, jax.Array] = MappingProxyType({})

    def field(self, name: str) -> jax.Array:
        """Returns a field of the stage's row."""
        return self.stage_row[(*FIELDS, "was_first", *BUCKET_FIELDS).index(name)]

    def updated(self, **arrays: Any) -> TickInputs:
        """Returns these inputs with other arrays in ``carry``."""
        return replace(self, carry=self.carry._replace(**arrays))


def empty_sums(scalars: LayerScalars, microbatches: int) -> AuxLosses | None:
    """Returns zeros for the scalars of a layer, or ``None`` if there are none."""
    if not scalars:
        return None
    sums = {name: jnp.zeros(microbatches + 1, x.dtype) for name, x in scalars.items()}
    return AuxLosses(jnp.zeros((microbatches + 1, 2), jnp.float32), sums)


def zeros_of(aux: AuxLosses | None) -> LayerScalars:
    """Returns zeros for the scalars of one microbatch, to which the layers of a stage add."""
    return {} if aux is None else {name: jnp.zeros((), x.dtype) for name, x in aux.sums.items()}


def add_scalars(aux: AuxLosses | None, scalars: LayerScalars, on: jax.Array, microbatch: jax.Array) -> AuxLosses | None:
    """Adds the scalars of a microbatch's forward, if ``on`` is 1."""
    if aux is None:
        return None
    at = jnp.where(on == 1, microbatch, aux.weights.shape[0] - 1)
    return aux._replace(sums={name: put(x, pick(x, at) + scalars[name], at) for name, x in aux.sums.items()})


def store_weights(aux: AuxLosses | None, weights: jax.Array, microbatch: jax.Array) -> AuxLosses | None:
    """Stores the weights [2] of a microbatch."""
    return None if aux is None else aux._replace(weights=put(aux.weights, weights, microbatch))


def totals(aux: AuxLosses) -> LayerScalars:
    """Returns the weighted sums over microbatches; a microbatch of weight 0 adds 0, even if it is not finite."""
    weights = aux.weights[:-1, 0]
    each = {name: x[:-1] * weights.astype(x.dtype) for name, x in aux.sums.items()}
    return {name: jnp.sum(jnp.where(weights == 0, 0, x)) for name, x in each.items()}
