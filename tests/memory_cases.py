"""A layout, a batch and a model for the tests of the memory estimate."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

import jaxpar as jp
from jaxpar.analysis.memory.estimate import Memory

LAYOUT = jp.Layout(jp.MeshSpec(data=4).abstract(), jp.Rules(batch="data", embed=None, mlp=None))
MIB = 2**20


def explained(make: Any, loss: Any, batch: Any, layout: jp.Layout = LAYOUT) -> Memory:
    memory = jp.explain(layout, make, optax.sgd(0.1, momentum=0.9), batch=batch, loss_fn=loss).memory
    assert memory is not None
    return memory


def rows(n: int, width: int) -> Any:
    return jp.tag(jax.ShapeDtypeStruct((n, width), np.float32), "batch", None)


def square(key: jax.Array) -> dict[str, Any]:
    return {"w": jp.tag(jax.random.normal(key, (512, 512)), "embed", "mlp")}
