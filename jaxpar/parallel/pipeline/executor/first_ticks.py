"""The first ticks of a schedule, beside whose forwards the weights of all chunks but the first are gathered.

A stage begins with its first chunk, and needs the weights of the next one only ticks later. Tick t gathers those of
chunk t + 1 for all stages, layer by layer, by permutes, which overlap with the forward.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.parallel.pipeline.executor import communicate, embed_head
from jaxpar.parallel.pipeline.executor.carry import StageCarry, TickCarry, TickInputs, add_scalars, zeros_of
from jaxpar.parallel.pipeline.executor.primitives import pick, reader
from jaxpar.parallel.pipeline.executor.program import global_field
from jaxpar.parallel.pipeline.executor.stage import read
from jaxpar.parallel.pipeline.executor.tick_context import Split, TickContext
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.parallel.pipeline.schedules.table import ALL, Table


def first_ticks(schedule: Schedule, table: Table) -> int:
    """Returns the number of ticks that gather weights: one for each chunk but the first, or none.

    There are none if one of them would have a backward or a head, or no forward, or if a stage would need a chunk's
    weights before.

    Args:
      schedule: the schedule.
      table: its table.
    """
    count = schedule.pieces.chunks - 1
    forward, chunks = table.column("f_on"), table.column("f_chunk")
    others = np.stack([table.column(f"{kind}_on").any(axis=1) for kind in "bw"], 1).any(axis=1)
    heads = (table.ticks < schedule.microbatches)[:, [ALL.index("head"), ALL.index("drain")]].any(axis=1)
    if (others | heads)[:count].any() or not forward[:count].any(axis=1).all():
        return 0
    begins = [np.flatnonzero(((chunks == number) & (forward == 1)).any(axis=1))[0] for number in range(1, count + 1)]
    return count if all(tick >= number for number, tick in enumerate(begins, 1)) else 0


def run_first_ticks(context: TickContext, carry: TickCarry) -> tuple[TickCarry, Any]:
    """Runs the first ticks.

    Args:
      context: its program has ``gather_layer``, and its ``weights`` those of the first chunk.
      carry: before the first tick.

    Returns:
      The carry after these ticks, and all weights.
    """
    count = context.program.first_ticks
    context = context.of_ticks(0, count)

    def one(found: tuple[TickCarry, Any], rows: Any) -> tuple[tuple[TickCarry, Any], None]:
        (carry, weights), (stage_rows, global_row, number) = found, rows
        carry, y, weights = _forward(context, carry, weights, stage_rows, global_row, number)
        carry = embed_head.embed(context, carry, global_row)
        return (_send(context, carry, y, stage_rows, global_row), weights), None

    rows = (*(jnp.asarray(rows[:count]) for rows in context.program.rows()), jnp.arange(1, count + 1))
    found, _ = jax.lax.scan(one, (carry, context.weights), rows)
    return found


def _forward(
    context: TickContext,
    carry: TickCarry,
    weights: Any,
    stage_rows: jax.Array,
    global_row: jax.Array,
    number: jax.Array,
) -> tuple[TickCarry, jax.Array, Any]:
    """Runs the forward of a chunk on every stage; returns the carry, the outputs, and the weights with a chunk more."""
    program = context.program
    stores, gather = program.activation_checkpointing == "none", program.gather_layer
    assert gather is not None

    def local(
        stage_row: jax.Array,
        global_row: jax.Array,
        number: jax.Array,
        shards: Any,
        weights: Any,
        side_weights: Any,
        stage: StageCarry,
        batch: Any,
    ) -> tuple[StageCarry, jax.Array, Any]:
        field = reader(stage_row)
        side = program.side(pick(batch, field("f_microbatch")), side_weights)
        chunk = context.chunk(weights, field("f_chunk"), global_field(global_row, "forward"))
        next_layer = lambda i: gather(jax.tree.map(lambda w: read([w], number, i)[0], shards))
        with context.loop_scope("forward"):
            x, slot = pick(stage.activations, field("f_input")), field("f_residuals") if stores else jnp.asarray(0)
            first = (x, stage.residuals if stores else [], zeros_of(stage.aux))
            (y, residuals, scalars), weights = chunk.forward_beside(first, side, slot, next_layer, number)
        aux = add_scalars(stage.aux, scalars, field("f_on"), field("f_microbatch"))
        return StageCarry(aux=aux, residuals=residuals), context.constrained(y), weights

    own, stage = Split.STAGE_DEVICE, carry.stage
    shared = (Split.STAGE, Split.REPLICATED, Split.REPLICATED)
    ins = (*shared, context.shard_split, context.weight_split, Split.REPLICATED, own, Split.DEVICE)
    call = context.per_device(local, ins, (own, own, context.weight_split))
    given = StageCarry(activations=stage.activations, aux=stage.aux, residuals=stage.residuals)
    arrays = (context.weight_shards, weights, context.side_weights, given, context.batch)
    found, y, weights = call(stage_rows, global_row, number, *arrays)
    residuals = found.residuals if stores else stage.residuals
    return carry._replace(stage=stage._replace(aux=found.aux, residuals=residuals)), y, weights


def _send(
    context: TickContext, carry: TickCarry, y: jax.Array, stage_rows: jax.Array, global_row: jax.Array
) -> TickCarry:
    """Sends the outputs to other stages, and passes the next microbatch to the first one."""

    def local(stage_row: jax.Array, global_row: jax.Array, stage: StageCarry, x: jax.Array, y: jax.Array) -> StageCarry:
        tick = TickInputs(stage_row, global_row, (), stage, x, y, (), (), ())
        return communicate.send(context, tick).carry

    own = Split.STAGE_DEVICE
    call = context.per_device(local, (Split.STAGE, Split.REPLICATED, own, Split.DEVICE_COLUMNS, own), own)
    return carry._replace(stage=call(stage_rows, global_row, carry.stage, carry.x, y))
