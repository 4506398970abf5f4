"""A stage whose first layers keep their input alone, and make their residuals again in the backward; the others keep theirs.

Inputs and residuals lie in slots of one layer each, [slots, 1, ...], which microbatches and layers share: :mod:`jaxpar.parallel.pipeline.schedules.residual_slots`.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxpar.parallel.pipeline.executor.layer_inputs import LayerScalars
from jaxpar.parallel.pipeline.executor.stage import Buffers, Chunk, held, read, write


def forward(
    chunk: Chunk,
    x: jax.Array,
    side: Any,
    residuals: Buffers,
    inputs: Buffers,
    slots: dict[str, jax.Array],
    sums: LayerScalars,
) -> tuple[jax.Array, Buffers, Buffers, LayerScalars]:
    """The result, both buffers with what each layer keeps, and the sums with the layers' extras; what is not kept goes to the slot that nobody reads.

    Args:
      slots: [layers] for each of ``jaxpar.parallel.pipeline.schedules.residual_slots.LAYERED``.
    """
    type RecomputeCarry = tuple[jax.Array, Buffers, Buffers, LayerScalars]

    def one(i: jax.Array, carry: RecomputeCarry) -> RecomputeCarry:
        x, residuals, inputs, sums = carry
        inputs = [write(inputs[0], x, slots["f_inputs"][i], 0)]
        y, sums, kept = chunk.passed(x, side, i, sums)
        residuals = [write(b, leaf, slots["f_residuals"][i], 0) for b, leaf in zip(residuals, kept, strict=True)]
        return y, residuals, inputs, sums

    found: RecomputeCarry = jax.lax.fori_loop(0, chunk.times, one, (x, residuals, inputs, sums))
    return found


def again(
    chunk: Chunk, times: jax.Array, side: Any, residuals: Buffers, inputs: Buffers, slots: dict[str, jax.Array]
) -> Buffers:
    """The residuals of the first ``times`` layers, made again of their inputs, in the slots where the backward reads them.

    A stage that has fewer such layers than the loop has runs does the rest for the slot that nobody reads.
    """

    def one(i: jax.Array, residuals: Buffers) -> Buffers:
        # Of a single layer nothing here would change from run to run.
        (x,) = held(read(inputs, slots["b_inputs"][i], 0), i)
        _, kept = chunk.kept(x, side, i)
        return [write(b, leaf, slots["a_residuals"][i], 0) for b, leaf in zip(residuals, kept, strict=True)]

    found: Buffers = jax.lax.fori_loop(0, times, one, residuals)
    return found
