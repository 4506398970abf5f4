"""What computes tiles: plain jax (:mod:`jaxpar.attn.blockwise`), or on TPUs a kernel (:mod:`jaxpar.attn.pallas`)."""

from __future__ import annotations

from typing import Any

from jaxpar.attn import blockwise
from jaxpar.attn.split import Way
from jaxpar.attn.tiles import Gradients, Sums


def forward(way: Way, *arguments: Any) -> Sums:
    """:func:`jaxpar.attn.blockwise.forward`, by the engine of ``way``."""
    if way.engine == "jax":
        return blockwise.forward(way.rules, *arguments)
    # Imported here: it costs a second, and only a TPU's program needs it.
    from jaxpar.attn import pallas

    return pallas.forward(way.rules, *arguments, mode=way.engine)


def backward(way: Way, *arguments: Any) -> Gradients:
    """:func:`jaxpar.attn.blockwise.backward`, by the engine of ``way``."""
    if way.engine == "jax":
        return blockwise.backward(way.rules, *arguments)
    from jaxpar.attn import pallas

    return pallas.backward(way.rules, *arguments, mode=way.engine)


def not_before[T](way: Way, x: T, results: Any) -> T:
    """:func:`jaxpar.attn.blockwise.not_before`; a compiler for TPUs orders instructions by the memory they take."""
    return blockwise.not_before(x, results) if way.engine == "jax" else x
