"""Sums the scalars of layers per microbatch, as the weight of a microbatch is known only after the head."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.executor.layer_inputs import LayerScalars
from jaxpar.parallel.pipeline.executor.primitives import pick, put


class AuxLosses(NamedTuple):
    """The scalars of a stage's layers. The last entry of each array is for values that nothing reads.

    Attributes:
      weights: [microbatches + 1, 2], the weight of a microbatch in the sums and in the differentiated loss.
      sums: for each scalar its sum over layers, [microbatches + 1].
    """

    weights: jax.Array
    sums: LayerScalars


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
