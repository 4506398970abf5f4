"""What computes tiles: plain jax (:mod:`jaxpar.parallel.attention.tiled.blockwise`), or on TPUs a kernel (:mod:`jaxpar.parallel.attention.tiled.tpu_pallas`)."""

from __future__ import annotations

from typing import Any

from jaxpar.parallel.attention.split.partition import AttentionPlan
from jaxpar.parallel.attention.tiled import blockwise
from jaxpar.parallel.attention.tiled.tile import Gradients, Sums


def forward(way: AttentionPlan, *arguments: Any) -> Sums:
    """:func:`jaxpar.parallel.attention.tiled.blockwise.forward`, by the engine of ``way``."""
    if way.engine == "jax":
        return blockwise.forward(way.rules, *arguments)
    # Imported here: it costs a second, and only a TPU's program needs it.
    from jaxpar.parallel.attention.tiled import tpu_pallas

    return tpu_pallas.forward(way.rules, *arguments, mode=way.engine)


def backward(way: AttentionPlan, *arguments: Any) -> Gradients:
    """:func:`jaxpar.parallel.attention.tiled.blockwise.backward`, by the engine of ``way``."""
    if way.engine == "jax":
        return blockwise.backward(way.rules, *arguments)
    from jaxpar.parallel.attention.tiled import tpu_pallas

    return tpu_pallas.backward(way.rules, *arguments, mode=way.engine)


def not_before[T](way: AttentionPlan, x: T, results: Any) -> T:
    """:func:`jaxpar.parallel.attention.tiled.blockwise.not_before`; a compiler for TPUs orders instructions by the memory they take."""
    return blockwise.not_before(x, results) if way.engine == "jax" else x
