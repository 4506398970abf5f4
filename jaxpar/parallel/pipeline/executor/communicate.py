"""Sends and receives between the stages: outputs of forwards, cotangents of backwards, and the first layer's input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.executor.carry import TickInputs
from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.pipeline.executor.primitives import from_neighbour, over_stages, pick, put
from jaxpar.parallel.pipeline.executor.program import PipelineProgram, global_field
from jaxpar.parallel.pipeline.executor.stage import held
from jaxpar.parallel.pipeline.executor.tick_context import TickContext

_DIRECTIONS = ("down", "up")


def cotangent_directions(program: PipelineProgram) -> list[str]:
    """Returns the directions in which the schedule sends cotangents."""
    return [direction for direction in _DIRECTIONS if f"cot_{direction}" in program.table.channels]


def receive(context: TickContext, tick: TickInputs) -> TickInputs:
    """Receives the cotangents of the previous tick, and stores the one that leaves the pipeline."""
    cotangents, sent, received = tick.carry.cotangents, tick.carry.sent, tick.carry.received
    for direction in cotangent_directions(context.program):
        cotangent = received[direction] if context.program.independent else from_neighbour(sent, direction)
        cotangents = put(cotangents, cotangent, tick.field(f"cot_{direction}"))
    was_first = tick.field("was_first")

    def drain(run: jax.Array, x: jax.Array) -> jax.Array:
        return store_input_grad(context, x, held(sent, run), was_first, global_field(tick.global_row, "drain"))

    with context.loop_scope("drains"):
        x = jax.lax.fori_loop(0, global_field(tick.global_row, "drains"), drain, tick.x)
    return replace(tick.updated(cotangents=cotangents), x=x)


def send_early(context: TickContext, tick: TickInputs) -> TickInputs:
    """Sends the outputs of forwards before the end of the tick."""
    directions = [direction for direction in _DIRECTIONS if f"act_{direction}" in context.program.table.channels]
    return replace(tick, arrived={direction: from_neighbour(tick.y, direction) for direction in directions})


def send(context: TickContext, tick: TickInputs) -> TickInputs:
    """Sends the results of the tick to other stages, and passes the next microbatch to the first stage."""
    carry, channels = tick.carry, context.program.table.channels
    y, activations = tick.y, carry.activations
    if "cot_self" in channels:
        tick = tick.updated(cotangents=put(carry.cotangents, carry.sent, tick.field("cot_self")))
    if context.program.independent:
        # Send after all compute of the tick, so that a stage waits for its neighbours only once.
        y, sent = jax.lax.optimization_barrier((y, carry.sent))
        tick = tick.updated(received={way: from_neighbour(sent, way) for way in cotangent_directions(context.program)})
    for direction in (*_DIRECTIONS, "self"):
        if f"act_{direction}" in channels:
            arrived = y if direction == "self" else tick.arrived.get(direction)
            if arrived is None:
                arrived = from_neighbour(y, direction)
            activations = put(activations, arrived, tick.field(f"act_{direction}"))

    def feed(run: jax.Array, activations: jax.Array) -> jax.Array:
        x = first_input(context, tick.x, held(global_field(tick.global_row, "feed"), run))
        return put(activations, x, tick.field("act_feed"))

    with context.loop_scope("feeds"):
        activations = jax.lax.fori_loop(0, global_field(tick.global_row, "feeds"), feed, activations)
    return tick.updated(activations=activations)


def store_input_grad(
    context: TickContext, x: jax.Array, sent: jax.Array, was_first: jax.Array, microbatch: jax.Array
) -> jax.Array:
    """Replaces a microbatch's input by the cotangent that left the pipeline."""
    grad = over_stages(jnp.where(was_first == 1, sent, 0), scatter=context.sharded_input)
    at = microbatch if context.program.embedding is None else jnp.asarray(1)
    return context.constrained(put(x, context.constrained(grad), at))


def first_input(context: TickContext, x: jax.Array, microbatch: Any) -> jax.Array:
    """Returns the input of a microbatch, gathered if each stage holds some of its columns."""
    x = context.constrained(pick(x, microbatch if context.program.embedding is None else 0))
    return jax.lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True) if context.sharded_input else x
