"""Runs a schedule's table: in every tick, each stage executes its row, and all other work is masked.

All stages run one program, the same for every tick and without conditionals. It has two forms.

Lockstep: if any stage has a forward (or a backward) in a tick, the loop over layers runs on all stages. Otherwise it
runs zero iterations on all stages. An idle stage computes values that nothing reads. This takes no longer than the
bubble, and it is safe with collectives over any other mesh axis.

Independent: each stage's loops follow its own row, so a stage waits only for its neighbours. Layers must then contain
no collective.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.executor.carry import TickCarry
from jaxpar.parallel.pipeline.executor.tick import TickRunner
from jaxpar.parallel.pipeline.executor.tick_context import TickContext


def run(context: TickContext, x: jax.Array | None) -> tuple[Any, Any, jax.Array | None]:
    """Runs all ticks of a training schedule and returns each device's own gradients and sums.

    Args:
      context: the program and its arrays.
      x: the input of the first layer, [devices, microbatches, rows, ...], where devices are those along
        ``program.axes``; ``None`` if the program has an ``embedding``.

    Returns:
      Gradients [stages, devices, chunks, layers, ...], sums over microbatches [devices, ...], and the cotangents of
      ``x`` in its shape, or ``None``.
    """
    carry = _all_ticks(context, x)
    return carry.stage.grads, carry.sums, None if x is None else carry.x[:, :-1]


def run_forward(context: TickContext, x: jax.Array | None) -> Any:
    """Runs all ticks of a forward-only schedule, as in an evaluation, which stores nothing for backwards.

    Args:
      context, x: as for :func:`run`. The program's ``head`` returns no cotangent.

    Returns:
      Sums over microbatches, each device's own [devices, ...].
    """
    return _all_ticks(context, x).sums


def _all_ticks(context: TickContext, x: jax.Array | None) -> TickCarry:
    tick, program = TickRunner(context), context.program
    one = lambda carry, rows: (tick(carry, *rows), None)
    carry, _ = jax.lax.scan(one, tick.start(x), tuple(map(jnp.asarray, program.rows())))
    return tick.finish(carry, program.table.last, jnp.asarray(program.was_first()[-1]))
