"""Runs the embedding and the head, each on all stages in parallel, as the rules may shard their weights over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.executor.carry import HeadGrad, TickCarry, TickInputs, store_weights
from jaxpar.parallel.pipeline.executor.primitives import over_stages, pick, put, reader
from jaxpar.parallel.pipeline.executor.program import Embedding, global_field
from jaxpar.parallel.pipeline.executor.stage import held
from jaxpar.parallel.pipeline.executor.tick_context import Split, TickContext

type AddSums = Callable[[Any, Any, jax.Array], Any]
"""``add(sums, found, microbatch) -> sums`` adds what the head returned for a microbatch to the sums of the ticks."""


def embed_microbatch(context: TickContext, embedding: Embedding, microbatch: Any) -> jax.Array:
    """Computes the input of the first layer for a microbatch, [devices, rows, ...]."""
    local = lambda microbatch, weights, batch: embedding.forward(weights, pick(batch, microbatch))
    ins = (Split.REPLICATED, Split.REPLICATED, Split.DEVICE)
    call = context.per_device(local, ins, Split.DEVICE, stages=False)
    return call(jnp.asarray(microbatch), context.non_layer_weights, context.batch)


def embed(context: TickContext, carry: TickCarry, global_row: jax.Array) -> TickCarry:
    """Embeds the microbatch that enters the pipeline in this tick, if the embedding runs in the ticks."""
    if (embedding := context.program.embedding) is None:
        return carry

    def one(run: jax.Array, x: jax.Array) -> jax.Array:
        return x.at[:, 0].set(embed_microbatch(context, embedding, held(global_field(global_row, "feed"), run)))

    with context.loop_scope("feeds"):
        return carry._replace(x=jax.lax.fori_loop(0, global_field(global_row, "feeds"), one, carry.x))


def embed_grad(context: TickContext, carry: TickCarry, global_row: jax.Array) -> TickCarry:
    """Runs the backward of the embedding for the microbatch that left in this tick, if it runs in the ticks."""
    if (embedding := context.program.embedding) is None:
        return carry

    def one(run: jax.Array, sums: Any) -> Any:
        return add_embed_grad(context, embedding, sums, carry.x, held(global_field(global_row, "drain"), run))

    with context.loop_scope("drains"):
        return carry._replace(sums=jax.lax.fori_loop(0, global_field(global_row, "drains"), one, carry.sums))


def add_embed_grad(context: TickContext, embedding: Embedding, sums: Any, x: jax.Array, microbatch: jax.Array) -> Any:
    """Adds the gradients of the embedding to the sums of the head."""

    def local(microbatch: jax.Array, weights: Any, x: jax.Array, batch: Any) -> Any:
        return embedding.grads(weights, pick(batch, microbatch), x[1])

    ins = (Split.REPLICATED, Split.REPLICATED, Split.DEVICE, Split.DEVICE)
    call = context.per_device(local, ins, Split.DEVICE, stages=False)
    return context.program.sums.add_grads(sums, call(microbatch, context.non_layer_weights, x, context.batch))


def run_head(
    context: TickContext,
    carry: TickCarry,
    y: jax.Array,
    stage_rows: jax.Array,
    global_row: jax.Array,
    add: AddSums | None,
) -> TickCarry:
    """Runs the head on the outputs ``y`` for the microbatch that passed the last layer in this tick, if any."""
    add = add or (lambda sums, found, microbatch: context.program.sums.add(sums, found))

    def one(run: jax.Array, found: tuple[Any, Any]) -> tuple[Any, HeadGrad]:
        microbatch = global_field(global_row, "head")
        more, head_grad = _head(context, stage_rows, microbatch, held(y, run))
        return add(found[0], more, microbatch), head_grad

    with context.loop_scope("heads"):
        first = carry.sums, carry.head_grad
        sums, head_grad = jax.lax.fori_loop(0, global_field(global_row, "heads"), one, first)
    return carry._replace(sums=sums, head_grad=head_grad)


def empty_head(context: TickContext, x: jax.Array) -> tuple[Any, HeadGrad]:
    """Returns zeros for the sums and the gradient that the head returns, if ``x`` is the input of the first layer."""
    y = jax.ShapeDtypeStruct((context.program.schedule.stages, x.shape[0], *x.shape[2:]), x.dtype)
    stage_rows = jnp.zeros(context.program.rows()[0].shape[1:], jnp.int32)
    sums, head_grad = jax.eval_shape(lambda *args: _head(context, *args), stage_rows, jnp.asarray(0), y)
    return context.program.sums.empty(sums), jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), head_grad)


def apply_head_grad(context: TickContext, tick: TickInputs) -> TickInputs:
    """Stores the cotangent of the last layer's output and the weight of its microbatch."""
    cotangents = put(tick.carry.cotangents, tick.head_grad.cotangent, tick.field("cot_head"))
    return store_microbatch_weight(context, tick.updated(cotangents=cotangents))


def store_microbatch_weight(context: TickContext, tick: TickInputs) -> TickInputs:
    """Stores the weight of the head's microbatch, which the layers' own losses need."""
    microbatch = global_field(tick.global_row, "head")
    return tick.updated(aux=store_weights(tick.carry.aux, tick.head_grad.weights, microbatch))


def _head(context: TickContext, stage_rows: jax.Array, microbatch: jax.Array, y: jax.Array) -> tuple[Any, HeadGrad]:
    """Returns what the head adds to the sums, and its gradient."""

    def last(stage_row: jax.Array, y: jax.Array) -> jax.Array:
        return over_stages(jnp.where(reader(stage_row)("f_last") == 1, y, 0))

    def local(microbatch: jax.Array, weights: Any, y: jax.Array, batch: Any) -> tuple[Any, Any]:
        sums, head_grad = context.program.head(weights, pick(batch, microbatch), y)
        return sums, HeadGrad(*head_grad)

    y = context.per_device(last, (Split.STAGE, Split.STAGE_DEVICE), Split.DEVICE)(stage_rows, y)
    ins = (Split.REPLICATED, Split.REPLICATED, Split.DEVICE, Split.DEVICE)
    call = context.per_device(local, ins, (Split.DEVICE, Split.DEVICE), stages=False)
    return call(microbatch, context.non_layer_weights, y, context.batch)
