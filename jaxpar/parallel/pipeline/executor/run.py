"""A schedule's table carried out: every tick each stage does what its row says, and what a row does not say is masked.

All stages run one program, the same for every tick, and there is no conditional in it, in either of two lowerings.
**Uniform**: a tick whose stages do forwards and backwards has both; where none does either, the loop over layers runs zero times, on all
stages alike. A stage that stands still in a tick computes what nobody reads: that is the time a bubble takes anyway, and it is safe whatever
the other axes of the mesh do. **Divergent**: each stage's loops run as its own row says, so a stage waits for its neighbours only; there must
be no collective in a layer.
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
    """Sums of gradients of the weights, sums over microbatches, and the cotangents of ``x``: each device's own.

    Args:
      weights: of the layers, [stages, chunks, layers, ...].
      after: weights that ``head`` is given, and ``before``.
      x: what the first layer is given: [devices, microbatches, rows, ...], the devices being those along ``axes``; ``None`` if the program has a ``before``.
      pieces: of the batch, [devices, microbatches, rows, ...].
      read: weights that the program's ``side`` is given.

    Returns:
      Gradients [stages, devices, chunks, layers, ...], sums [devices, ...], and what ``x`` is.
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
