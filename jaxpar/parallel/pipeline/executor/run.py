"""Runs a schedule's table: in every tick, each stage executes its row, and all other work is masked.

All stages run one program, the same for every tick and without conditionals. It has two forms.

Lockstep: if any stage has a forward (or a backward) in a tick, the loop over layers runs on all stages. Otherwise it
runs zero iterations on all stages. An idle stage computes values that nothing reads. This takes no longer than the
bubble, and it is safe with collectives over any other mesh axis.

Independent (``divergent``): each stage's loops follow its own row, so a stage waits only for its neighbours. Layers
must then contain no collective.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.executor.program import PipelineProgram
from jaxpar.parallel.pipeline.executor.tick import TickRunner


def run(
    program: PipelineProgram, weights: Any, after: Any, x: jax.Array | None, pieces: Any, read: Any = ()
) -> tuple[Any, Any, jax.Array | None]:
    """Runs all ticks of a training schedule and returns each device's own gradients and sums.

    Args:
      program: the schedule's table and the functions to call.
      weights: of the layers, [stages, chunks, layers, ...].
      after: the other weights, which ``head`` and ``before`` receive.
      x: the input of the first layer, [devices, microbatches, rows, ...], where devices are those along
        ``program.axes``; ``None`` if the program has a ``before``.
      pieces: the batch, [devices, microbatches, rows, ...].
      read: the weights that ``program.side`` receives.

    Returns:
      Gradients [stages, devices, chunks, layers, ...], sums over microbatches [devices, ...], and the cotangents of
      ``x`` in its shape, or ``None``.
    """
    tick = TickRunner(
        program, weights, after, pieces, x is not None and x.shape[-1] % program.schedule.stages == 0, read
    )
    rows, every = program.rows()

    def one(carry: Any, xs: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        return tick(carry, *xs), None

    carry, _ = jax.lax.scan(one, tick.start(x), (jnp.asarray(rows), jnp.asarray(every)))
    carry = tick.finish(carry, program.table.last, jnp.asarray(program.was_first()[-1]))
    return carry["grads"], carry["sums"], None if x is None else carry["x"][:, :-1]
