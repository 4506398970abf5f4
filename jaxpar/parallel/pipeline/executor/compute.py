"""The compute of a stage in a tick: forward, backward, and the sums of gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.executor import communicate, recompute
from jaxpar.parallel.pipeline.executor.carry import StageCarry, TickCarry, TickInputs, add_scalars, zeros_of
from jaxpar.parallel.pipeline.executor.frozen import trained_part
from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.pipeline.executor.layer_slice import LayerSlice
from jaxpar.parallel.pipeline.executor.primitives import pick, put, reader
from jaxpar.parallel.pipeline.executor.program import PipelineProgram, global_field
from jaxpar.parallel.pipeline.executor.sequence_chunks import slots_of
from jaxpar.parallel.pipeline.executor.stage import Add, Chunk, held, read, write
from jaxpar.parallel.pipeline.executor.tick_context import Split, TickContext
from jaxpar.utils.arrays import accumulator, at_least_fp32


def forward(
    context: TickContext, carry: TickCarry, stage_rows: jax.Array, global_row: jax.Array
) -> tuple[TickCarry, jax.Array]:
    """Runs the forward of a chunk on every stage; returns the carry, and the outputs [stages, devices, rows, ...]."""
    program = context.program
    stores = program.activation_checkpointing == "none"
    changes = stores or program.carry is not None

    def local(
        stage_row: jax.Array, global_row: jax.Array, weights: Any, side_weights: Any, stage: StageCarry, batch: Any
    ) -> tuple[StageCarry, jax.Array]:
        field, residuals, inputs = reader(stage_row), stage.residuals, stage.layer_inputs
        side = program.side(pick(batch, field("f_microbatch")), side_weights)
        chunk = context.chunk(weights, field("f_chunk"), context.is_on("forward", field, global_row))
        with context.loop_scope("forward"):
            x = pick(stage.activations, field("f_input"))
            if inputs:
                y, residuals, inputs, scalars = recompute.forward(chunk, x, side, stage, program.slots(stage_row))
            else:
                slot = slots_of(field, "f", field("f_residuals") if stores else None, program.schedule.sequence_chunks)
                y, found, scalars = chunk.forward(x, side, residuals if changes else [], slot, zeros_of(stage.aux))
                residuals = found if changes else residuals
        aux = add_scalars(stage.aux, scalars, field("f_on"), field("f_microbatch"))
        return StageCarry(aux=aux, residuals=residuals, layer_inputs=inputs), context.constrained(y)

    own, stage = Split.STAGE_DEVICE, carry.stage
    ins = (Split.STAGE, Split.REPLICATED, context.weight_split, Split.REPLICATED, own, Split.DEVICE)
    call = context.per_device(local, ins, (own, own))
    # The program receives only what a forward reads.
    given = stage._replace(cotangents=(), split_residuals=(), sent=(), received=(), grads=(), buckets=(), completed=())
    found, y = call(stage_rows, global_row, context.weights, context.side_weights, given, context.batch)
    stage = stage._replace(aux=found.aux, residuals=found.residuals, layer_inputs=found.layer_inputs)
    return carry._replace(stage=stage), y


def backward(context: TickContext, tick: TickInputs) -> TickInputs:
    """Runs the backward of a chunk, or, if backwards are split, the B of one chunk and the W of another."""
    program, carry, field = context.program, tick.carry, tick.field
    sums = "grads" if program.buckets is None else "buckets"  # the array to which a backward adds gradients
    chunk = context.chunk(tick.weights, field("b_chunk"), context.is_on("backward", field, tick.global_row))
    side = _side_of_backward(context, tick, field("b_microbatch"))
    from_input = program.activation_checkpointing == "full"
    residuals, kept = carry.residuals, jnp.asarray(0) if from_input else field("b_residuals")
    slot = slots_of(field, "b", kept, program.schedule.sequence_chunks)
    if from_input:
        with context.loop_scope("backward"):
            _, residuals, _ = chunk.forward(pick(carry.activations, field("b_input")), side, residuals, slot)
    elif program.layer_slots is not None:
        slots = program.slots(tick.stage_row)
        slot = slots["b_residuals"]
        with context.loop_scope("recompute"):
            times = context.is_on("backward", field, tick.global_row) * _recomputed(program)
            residuals = recompute.restore_residuals(chunk, times, side, carry, slots)
    cotangent = pick(carry.cotangents, field("b_cotangent"))
    if not program.schedule.split:
        add = _grad_adder(context, tick, "b")
        if program.reduce_bucket is not None:
            return _backward_with_buckets(context, tick, chunk, (residuals, slot, side), cotangent, add)
        with context.loop_scope("backward"):
            found = chunk.backward(residuals, slot, side, cotangent, add, getattr(carry, sums))
        sent, total, residuals = found
        return tick.updated(**{sums: total}, residuals=residuals, sent=context.constrained(sent))
    with context.loop_scope("backward"):
        sent, stored = chunk.backward_of_inputs(residuals, slot, side, cotangent, carry.split_residuals, field("b_own"))
    late = context.chunk(tick.weights, field("w_chunk"), context.is_on("weights", field, tick.global_row))
    side = _side_of_backward(context, tick, field("w_microbatch"))
    halves = late.halves(side, [jnp.zeros(k.shape[2:], k.dtype) for k in residuals], jnp.zeros_like(cotangent))
    add = _grad_adder(context, tick, "w")
    with context.loop_scope("weights"):
        total = late.backward_of_weights(stored, field("w_own"), side, halves, add, getattr(carry, sums))
    sent = context.constrained(sent)
    return tick.updated(**{sums: total}, residuals=residuals, split_residuals=stored, sent=sent)


def _backward_with_buckets(
    context: TickContext,
    tick: TickInputs,
    chunk: Chunk,
    given: tuple[Any, jax.Array, Any],
    cotangent: jax.Array,
    add: Add,
) -> TickInputs:
    """Runs the backward of a chunk in one of two loops, of which one also scatters a bucket, layer by layer."""
    residuals, slot, side = given
    # XLA:TPU hides a permute behind the loop before its use, even one that seldom runs. The barriers leave it the loop
    # that runs in most ticks: what leaves the pipeline is stored before, and outputs arrive before the other loop.
    x, cotangent = jax.lax.optimization_barrier((tick.x, cotangent))
    tick = communicate.send_early(context, replace(tick, x=x))
    late = global_field(tick.global_row, "buckets_beside")
    alone, beside = (replace(chunk, times=chunk.times * runs) for runs in (1 - late, late))
    with context.loop_scope("backward_alone"):
        sent, buckets, residuals = alone.backward(residuals, slot, side, cotangent, add, tick.carry.buckets)

    sent, arrived = jax.lax.optimization_barrier((sent, tick.arrived))
    tick = replace(tick, arrived=arrived)

    reduce = context.program.reduce_beside
    assert reduce is not None

    def both(sums: Any, i: jax.Array, grads: Any, exists: jax.Array) -> Any:
        buckets, total = sums
        found = _scattered(reduce, tick, i)
        return add(buckets, i, grads, exists), _with_scattered(tick, total, found, i)

    with context.loop_scope("buckets_beside"):
        sums = buckets, tick.carry.grads
        sent, (buckets, grads), residuals = beside.backward(residuals, slot, side, sent, both, sums)
    return tick.updated(buckets=buckets, grads=grads, residuals=residuals, sent=context.constrained(sent))


def complete_bucket(context: TickContext, tick: TickInputs) -> TickInputs:
    """Moves a bucket that this tick completes to its slot, so that the next one can begin."""
    if not jax.tree.leaves(tick.carry.completed):
        return tick

    def one(run: jax.Array, completed: Any) -> Any:
        slot, moves = (held(tick.field(name), run) for name in ("completed_bucket", "bucket_ends"))
        # Always true, but XLA:TPU selects in place, and would copy a bucket a second time.
        moved = lambda bucket, have: jnp.where(moves == 1, bucket[0], have)
        return jax.tree.map(
            lambda slots, bucket: put(slots, moved(bucket, pick(slots, slot)), slot), completed, tick.carry.buckets
        )

    with context.loop_scope("bucket_ends"):
        completed = jax.lax.fori_loop(0, tick.field("bucket_ends"), one, tick.carry.completed)
    return tick.updated(completed=completed)


def flush_bucket(context: TickContext, tick: TickInputs) -> TickInputs:
    """Reduces a bucket that is complete, layer by layer, and adds it to the sums of its chunk."""
    if (reduce := context.program.reduce_bucket) is None:
        return tick
    one = lambda i, sums: _with_scattered(tick, sums, _scattered(reduce, tick, i), i)
    layers = jax.tree.leaves(tick.weights)[0].shape[1]
    with context.loop_scope("buckets"):
        times = global_field(tick.global_row, "buckets") * layers
        return tick.updated(grads=jax.lax.fori_loop(0, times, one, tick.carry.grads))


def _scattered(reduce: Callable[[Any], Any], tick: TickInputs, i: jax.Array) -> Any:
    """Returns a layer's gradients in the bucket that this tick scatters, reduced."""
    slot, carry = held(tick.field("scattered_bucket"), i), tick.carry
    sums = carry.completed if jax.tree.leaves(carry.completed) else carry.buckets
    return reduce(jax.tree.map(lambda total: LayerSlice(total, slot, i), sums))


def _with_scattered(tick: TickInputs, sums: Any, parts: Any, i: jax.Array) -> Any:
    """Adds a layer's reduced gradients to the sums of their chunk."""
    chunk = held(tick.field("bucket_chunk"), i)
    return jax.tree.map(lambda total, part: write(total, read([total], chunk, i)[0] + part, chunk, i), sums, parts)


def empty_grads(program: PipelineProgram, weights: Any, chunks: int) -> Any:
    """Returns zeros for the sums of gradients [chunks, layers, ...], in fp32 or wider."""
    weights = trained_part(weights)
    layer = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[2:], w.dtype), weights)
    slices = lambda grads: jax.tree.map(lambda g: LayerSlice(g[None, None], jnp.int32(0), jnp.int32(0)), grads)
    reduce, of_slices = program.reduce or (lambda grads: grads), program.reduce_bucket
    found = jax.eval_shape(reduce if of_slices is None else lambda grads: of_slices(slices(grads)), layer)
    zeros = lambda w, g: jnp.zeros((chunks, w.shape[1], *g.shape), accumulator(g))
    return jax.tree.map(zeros, weights, found)


def empty_buckets(program: PipelineProgram, weights: Any, slots: int) -> Any:
    """Returns zeros for the sums [slots, layers, ...] of buckets, or an empty list if there are none."""
    if program.buckets is None or not slots:
        return []
    return jax.tree.map(lambda w: jnp.zeros((slots, *w.shape[1:]), accumulator(w)), trained_part(weights))


def _side_of_backward(context: TickContext, tick: TickInputs, microbatch: jax.Array) -> Any:
    """Returns the layers' further inputs for a microbatch in its backward, with the weight of its loss."""
    side, aux = context.program.side(pick(tick.batch, microbatch), tick.side_weights), tick.carry.aux
    return side if aux is None else side._replace(weight=pick(aux.weights, microbatch)[1])


def _grad_adder(context: TickContext, tick: TickInputs, kind: str) -> Add:
    """Returns a function that adds a layer's gradients to sums [chunks or 1, layers, ...], in at least fp32."""
    reduce, on = context.program.reduce, tick.field(f"{kind}_on")
    if context.program.buckets is None:
        number, begins = tick.field(f"{kind}_chunk"), None
    else:
        number, begins = jnp.asarray(0), tick.field("bucket_begins")

    def add(sums: Any, i: jax.Array, grads: Any, exists: jax.Array) -> Any:
        def one(total: jax.Array, grad: jax.Array) -> jax.Array:
            (have,) = read([total], number, i)
            have = have if begins is None else jnp.where(begins == 1, 0, have)
            return write(total, have + jnp.where((on == 1) & exists, at_least_fp32(grad), 0), number, i)

        return jax.tree.map(one, sums, grads if reduce is None else reduce(grads))

    return add


def _recomputed(program: PipelineProgram) -> jax.Array:
    """Returns how many layers a backward recomputes: the stage's own number if independent, else the largest one."""
    most = program.layer_slots.again if program.layer_slots is not None else 0
    each = [min(n, most) for n in program.recompute]
    return jnp.asarray(each)[jax.lax.axis_index(AXIS)] if program.independent else jnp.asarray(most)
