"""Runs the ticks of a forward-only schedule, as in an evaluation, which stores nothing for backwards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.executor.aux_losses import empty_sums
from jaxpar.parallel.pipeline.executor.primitives import check_alike, pick, put
from jaxpar.parallel.pipeline.executor.program import PipelineProgram
from jaxpar.parallel.pipeline.executor.tick import TickRunner


def run_forward(
    program: PipelineProgram, weights: Any, after: Any, x: jax.Array | None, pieces: Any, read: Any = ()
) -> Any:
    """Returns sums over microbatches, each device's own [devices, ...].

    The schedule of the program has only forwards, and its ``head`` returns no cotangent.

    Args:
      program, weights, after, x, pieces, read: as for :func:`jaxpar.parallel.pipeline.executor.run.run`.
    """
    tick = _Forward(program, weights, after, pieces, x is not None and x.shape[-1] % program.schedule.stages == 0, read)
    rows, every = program.rows()

    def one(carry: Any, xs: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        return tick(carry, *xs), None

    carry, _ = jax.lax.scan(one, tick.start(x), (jnp.asarray(rows), jnp.asarray(every)))
    return tick.joined(carry)["sums"]


class _Forward(TickRunner):
    """One tick of all stages, in which each stage does at most one forward."""

    def start(self, x: jax.Array | None) -> dict[str, Any]:
        """Returns the carry before the first tick: empty buffers, and the first microbatch in its slot."""
        table = self.program.table
        slots, first = table.first
        x = self.given(first)[:, None] if x is None else x

        def local(x: jax.Array, slot: jax.Array, weights: Any, pieces: Any, read: Any) -> dict[str, Any]:
            fed, side = self._fed(x, first), self.program.side(pick(pieces, 0), read)
            chunk = self._chunk(weights, jnp.asarray(0), jnp.asarray(0))
            check_alike(fed, jax.eval_shape(lambda x, side: chunk.kept(x, side)[0], fed, side))
            extras = jax.eval_shape(chunk.extras, fed, side)
            act = jnp.zeros((table.sizes["act"] + 1, *fed.shape), fed.dtype)
            return {
                "act": put(self._hinted(act), fed, slot),
                "res": [],
                "ins": [],
                "x": x,
                "aux": empty_sums(extras, self.program.schedule.microbatches),
            }

        specs = {"act": "stage own", "res": "stage own", "ins": "stage own", "x": "columns", "aux": "stage own"}
        call = self._inside(local, ("columns", "stage", "stage", "own", "all"), specs)
        return self._with_sums(call(x, jnp.asarray(slots), self.weights, self.pieces, self.read), x)

    def __call__(self, carry: dict[str, Any], row: jax.Array, every: jax.Array) -> dict[str, Any]:
        carry, y = self._forward(carry, row, every)
        carry = self._given(self._heads(carry, y, row, every), every)
        return self._each_stage(carry, y, row, every, self._counted, self._sent)
