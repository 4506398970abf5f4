"""The weights of a quantization-aware model as a step computes with them: rounded once, in their shards."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxpar.errors import ConfigError
from jaxpar.parallel.offload.placement import on_host
from jaxpar.parallel.precision.quantized_array import Tile, round_sharded
from jaxpar.sharding.layout import Layout
from jaxpar.training.model import Path, show
from jaxpar.training.model.quantized import RoundedKind
from jaxpar.training.state import TrainState


def with_rounded_weights(layout: Layout, state: TrainState) -> TrainState:
    """Returns a state of the same model with rounded weights and without the rounding; any other state as it is.

    The gradient of a loss with respect to the weights is that with respect to the rounded weights, because it passes
    straight through. So a step rounds once, before microbatches, gathers and pipeline stages, and none of them knows
    of it. Each device rounds its own shards; where groups lie across shards, largest magnitudes are reduced.

    Args:
      layout: the ambient layout.
      state: the state that the step received.

    Raises:
      ConfigError: weights are in host memory.
    """
    kind = state.metadata.kind
    if not isinstance(kind, RoundedKind):
        return state
    if any(map(on_host, jax.tree.leaves(state.params))):
        raise ConfigError(
            "quantize: weights are rounded on the device, but parameters are in host memory. Remedy: leave "
            "parallel.offload.parameters out."
        )
    dims = dict(state.metadata.dims)

    def one(path: Path, w: jax.Array, tile: Tile, **how: Any) -> jax.Array:
        names = dims.get(("params", *path), (None,) * w.ndim)
        resolved = layout.resolve(names, w.shape, role="params", dtype=w.dtype, path=show(("params", *path)))
        return round_sharded(w, tile, resolved.axes, **how)

    metadata = dataclasses.replace(state.metadata, kind=kind.kind)
    return dataclasses.replace(state, params=kind.rounded(state.params, one), metadata=metadata)
