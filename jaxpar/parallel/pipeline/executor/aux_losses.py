"""Sums the scalars of layers per microbatch, as the weight of a microbatch is known only after the head.

``aux`` of a stage is ``{"sums": {name: [microbatches + 1]}, "counts": [microbatches + 1, 2]}``, or empty if layers
return no scalars. The last entry of each array is for values that nothing reads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.executor.layer_inputs import LayerScalars
from jaxpar.parallel.pipeline.executor.primitives import pick, put


def empty_sums(extras: Any, microbatches: int) -> dict[str, Any]:
    """Returns ``aux`` with zeros for the scalars ``extras`` of a layer."""
    if not extras:
        return {}
    sums = {name: jnp.zeros(microbatches + 1, x.dtype) for name, x in extras.items()}
    return {"sums": sums, "counts": jnp.zeros((microbatches + 1, 2), jnp.float32)}


def nothing_of(aux: dict[str, Any]) -> LayerScalars:
    """Returns zeros for the scalars of one microbatch, to which the layers of a stage add."""
    return {name: jnp.zeros((), x.dtype) for name, x in aux.get("sums", {}).items()}


def added(aux: dict[str, Any], extras: LayerScalars, on: jax.Array, microbatch: jax.Array) -> dict[str, Any]:
    """Adds the scalars ``extras`` of a microbatch's forward to ``aux``, if ``on`` is 1."""
    if not aux:
        return aux
    last = aux["counts"].shape[0] - 1
    at = jnp.where(on == 1, microbatch, last)
    return {**aux, "sums": {name: put(x, pick(x, at) + extras[name], at) for name, x in aux["sums"].items()}}


def counted(aux: dict[str, Any], counts: jax.Array, microbatch: jax.Array) -> dict[str, Any]:
    """Stores the weights ``counts`` [2] of a microbatch in ``aux``."""
    return {**aux, "counts": put(aux["counts"], counts, microbatch)} if aux else aux


def totals(aux: dict[str, Any]) -> LayerScalars:
    """Returns the weighted sums over microbatches; a microbatch of weight 0 adds 0, even if it is not finite."""
    counts = aux["counts"][:-1, 0]
    each = {name: x[:-1] * counts.astype(x.dtype) for name, x in aux["sums"].items()}
    return {name: jnp.sum(jnp.where(counts == 0, 0, x)) for name, x in each.items()}
