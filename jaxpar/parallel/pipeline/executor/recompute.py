"""Runs a stage whose first layers store only their input and recompute their residuals in the backward.

Inputs and residuals are in slots of one layer each, [slots, 1, ...], which microbatches and layers share.
:mod:`jaxpar.parallel.pipeline.schedules.residual_slots` allocates them.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxpar.parallel.pipeline.executor.carry import StageCarry, zeros_of
from jaxpar.parallel.pipeline.executor.layer_inputs import LayerScalars
from jaxpar.parallel.pipeline.executor.stage import Buffers, Chunk, held, read_unchanged, write

type RecomputeCarry = tuple[jax.Array, Buffers, Buffers, LayerScalars]


def forward(chunk: Chunk, x: jax.Array, side: Any, stage: StageCarry, slots: dict[str, jax.Array]) -> RecomputeCarry:
    """Returns the output, both buffers with the data that each layer stores, and the sums with the layers' scalars.

    Layers write data that they do not store to the extra slot.

    Args:
      chunk: the layers.
      x: the input of the first layer.
      side: the layers' further inputs.
      stage: the arrays of the stage; ``residuals`` and ``layer_inputs`` are [slots, 1, ...].
      slots: [layers] for each name in ``jaxpar.parallel.pipeline.schedules.residual_slots.LAYERED``.
    """

    def one(i: jax.Array, carry: RecomputeCarry) -> RecomputeCarry:
        x, residuals, inputs, sums = carry
        inputs = [write(inputs[0], x, slots["f_inputs"][i], 0)]
        y, sums, kept = chunk.passed(x, side, i, sums)
        residuals = [write(b, leaf, slots["f_residuals"][i], 0) for b, leaf in zip(residuals, kept, strict=True)]
        return y, residuals, inputs, sums

    first = (x, stage.residuals, stage.layer_inputs, zeros_of(stage.aux))
    return jax.lax.fori_loop(0, chunk.times, one, first)


def restore_residuals(
    chunk: Chunk, times: jax.Array, side: Any, stage: StageCarry, slots: dict[str, jax.Array]
) -> Buffers:
    """Recomputes the residuals of the first ``times`` layers, and writes them to the slots that the backward reads.

    If the stage has fewer such layers than ``times``, the remaining iterations write to the extra slot.

    Args:
      chunk: the layers.
      times: the number of layers.
      side: the layers' further inputs.
      stage, slots: as for :func:`forward`.
    """

    def one(i: jax.Array, residuals: Buffers) -> Buffers:
        # A single layer is loop-invariant, and XLA would hoist its work out of the loop.
        (x,) = held(read_unchanged(stage.layer_inputs, slots["b_inputs"], i), i)
        _, kept = chunk.kept(x, side, i)
        return [write(b, leaf, slots["a_residuals"][i], 0) for b, leaf in zip(residuals, kept, strict=True)]

    return jax.lax.fori_loop(0, times, one, stage.residuals)
