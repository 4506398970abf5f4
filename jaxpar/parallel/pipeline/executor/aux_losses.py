"""Sums of what layers give beside ``x``, for each microbatch: what one counts is only known when it has come through all layers.

``aux`` of a stage is ``{"sums": {name: [microbatches + 1]}, "counts": [microbatches + 1, 2]}``, the last place for what nobody reads; or empty,
where layers give nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.executor.layer_inputs import LayerScalars
from jaxpar.parallel.pipeline.executor.primitives import pick, put


def empty_sums(extras: Any, microbatches: int) -> dict[str, Any]:
    """Of layers that give such scalars."""
    if not extras:
        return {}
    sums = {name: jnp.zeros(microbatches + 1, x.dtype) for name, x in extras.items()}
    return {"sums": sums, "counts": jnp.zeros((microbatches + 1, 2), jnp.float32)}


def nothing_of(aux: dict[str, Any]) -> LayerScalars:
    """What the layers of a stage begin with."""
    return {name: jnp.zeros((), x.dtype) for name, x in aux.get("sums", {}).items()}


def added(aux: dict[str, Any], extras: LayerScalars, on: jax.Array, microbatch: jax.Array) -> dict[str, Any]:
    """With those of a microbatch's forward, if there was one."""
    if not aux:
        return aux
    last = aux["counts"].shape[0] - 1
    at = jnp.where(on == 1, microbatch, last)
    return {**aux, "sums": {name: put(x, pick(x, at) + extras[name], at) for name, x in aux["sums"].items()}}


def counted(aux: dict[str, Any], counts: jax.Array, microbatch: jax.Array) -> dict[str, Any]:
    """With what a microbatch counts."""
    return {**aux, "counts": put(aux["counts"], counts, microbatch)} if aux else aux


def totals(aux: dict[str, Any]) -> LayerScalars:
    """The sums over microbatches as they count; what does not count adds 0, also where it is not finite."""
    counts = aux["counts"][:-1, 0]
    each = {name: x[:-1] * counts.astype(x.dtype) for name, x in aux["sums"].items()}
    return {name: jnp.sum(jnp.where(counts == 0, 0, x)) for name, x in each.items()}
