"""Dispatches tiles to plain JAX or to the TPU kernel.

Plain JAX is :mod:`jaxpar.parallel.attention.tiled.blockwise`, the kernel
:mod:`jaxpar.parallel.attention.tiled.tpu_pallas`.
"""

from __future__ import annotations

from typing import Any

from jaxpar.parallel.attention.split.partition import AttentionPlan
from jaxpar.parallel.attention.tiled import blockwise
from jaxpar.parallel.attention.tiled.tile import Gradients, Sums


def forward(plan: AttentionPlan, *arguments: Any) -> Sums:
    """Calls :func:`jaxpar.parallel.attention.tiled.blockwise.forward`, or its TPU kernel, by ``plan.engine``."""
    if plan.engine == "jax":
        return blockwise.forward(plan.rules, *arguments)
    # Imported lazily: the import takes a second, and only TPU programs need it.
    from jaxpar.parallel.attention.tiled import tpu_pallas

    return tpu_pallas.forward(plan.rules, *arguments, mode=plan.engine)


def backward(plan: AttentionPlan, *arguments: Any) -> Gradients:
    """Calls :func:`jaxpar.parallel.attention.tiled.blockwise.backward`, or its TPU kernel, by ``plan.engine``."""
    if plan.engine == "jax":
        return blockwise.backward(plan.rules, *arguments)
    from jaxpar.parallel.attention.tiled import tpu_pallas

    return tpu_pallas.backward(plan.rules, *arguments, mode=plan.engine)


def not_before[T](plan: AttentionPlan, x: T, results: Any) -> T:
    """Delays ``x`` until ``results`` exist, in plain JAX only: the TPU compiler already schedules by memory."""
    return blockwise.not_before(x, results) if plan.engine == "jax" else x
