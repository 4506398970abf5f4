"""Runs a schedule's table: in every tick, each stage executes its row, and all other work is masked.

All stages run one program, the same for every tick and without conditionals. It has two forms.

Lockstep: if any stage has a forward (or a backward) in a tick, the loop over layers runs on all stages. Otherwise it
runs zero iterations on all stages. An idle stage computes values that nothing reads. This takes no longer than the
bubble, and it is safe with collectives over any other mesh axis.

Independent: each stage's loops follow its own row, so a stage waits only for its neighbours. Layers must then contain
no collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.executor import communicate, compute, embed_head
from jaxpar.parallel.pipeline.executor.carry import StageCarry, TickCarry, TickInputs, empty_sums, totals
from jaxpar.parallel.pipeline.executor.first_ticks import run_first_ticks
from jaxpar.parallel.pipeline.executor.primitives import check_alike, over_stages, pick, put
from jaxpar.parallel.pipeline.executor.sequence_chunks import Carried
from jaxpar.parallel.pipeline.executor.stage import Chunk
from jaxpar.parallel.pipeline.executor.tick_context import Split, TickContext

type Step = Callable[[TickContext, TickInputs], TickInputs]


@dataclass(frozen=True)
class TickRunner:
    """Runs one tick of all stages.

    Attributes:
      context: the program and its arrays.
      add_sums: adds what the head returned for a microbatch to the sums of the ticks; ``None``: as the program sums it.
      grad_chunks: the number of chunks in the sums of gradients; ``None``: all.
    """

    context: TickContext
    add_sums: embed_head.AddSums | None = None
    grad_chunks: int | None = None

    def start(self, x: jax.Array | None) -> TickCarry:
        """Returns the carry before the first tick: empty buffers, and the first microbatch in its slot.

        Args:
          x: the input of the first layer, [devices, microbatches, rows, ...], or ``None`` if the ticks compute it.
        """
        context, program = self.context, self.context.program
        slots, first = program.table.first
        if x is None:
            assert program.embedding is not None
            x = embed_head.embed_microbatch(context, program.embedding, first)[:, None]

        def local(
            x: jax.Array, slot: jax.Array, weights: Any, batch: Any, side_weights: Any
        ) -> tuple[StageCarry, jax.Array]:
            fed, side = communicate.first_input(context, x, first), program.side(pick(batch, 0), side_weights)
            chunk = context.chunk(weights, jnp.asarray(0), jnp.asarray(0))
            y, residuals = jax.eval_shape(chunk.kept, fed, side)
            check_alike(fed, y)
            aux = empty_sums(jax.eval_shape(chunk.extras, fed, side), program.schedule.microbatches)
            activations = jnp.zeros((program.table.sizes["act"] + 1, *fed.shape), fed.dtype)
            stage = StageCarry(put(context.constrained(activations), fed, slot), aux=aux)
            if program.schedule.forward_only:
                return stage, x
            # The extra slot makes this a new array. The TPU compiler copies an input that the loop would overwrite in
            # place.
            x = context.constrained(jnp.concatenate([x, jnp.zeros_like(x[:1])]))
            return self._with_buffers(stage, chunk, fed, side, residuals), x

        ins = (Split.DEVICE_COLUMNS, Split.STAGE, context.weight_split, Split.DEVICE, Split.REPLICATED)
        call = context.per_device(local, ins, (Split.STAGE_DEVICE, Split.DEVICE_COLUMNS))
        stage, stored = call(x, jnp.asarray(slots), context.weights, context.batch, context.side_weights)
        sums, head_grad = embed_head.empty_head(context, x)
        return TickCarry(stage=stage, x=stored, head_grad=head_grad, sums=sums)

    def _with_buffers(self, stage: StageCarry, chunk: Chunk, fed: jax.Array, side: Any, kept: Any) -> StageCarry:
        """Adds the empty buffers of the backwards; ``kept`` are the shapes of a layer's residuals."""
        context, program, weights = self.context, self.context.program, chunk.weights
        sizes, layer_slots, layers = program.table.sizes, program.layer_slots, jax.tree.leaves(weights)[0].shape[1]
        empty = lambda like, *slots: jnp.zeros((*slots, *like.shape), like.dtype)
        own = chunk.halves(side, list(map(empty, kept)), fed).shapes if program.schedule.split else []
        if layer_slots is None:
            slots = sizes["res"] + 1 if program.activation_checkpointing == "none" else 1
            residuals, inputs = [empty(k, slots, layers) for k in kept], []
        else:
            residuals = [empty(k, layer_slots.residuals + 1, 1) for k in kept]
            inputs = [context.constrained(empty(fed, layer_slots.inputs + 1, 1))]
        received = communicate.cotangent_directions(program) if program.independent else []
        chunks = self.grad_chunks or jax.tree.leaves(weights)[0].shape[0]
        return stage._replace(
            received={direction: jnp.zeros_like(fed) for direction in received},
            cotangents=context.constrained(empty(fed, sizes["cot"] + 1)),
            grads=compute.empty_grads(program, weights, chunks),
            layer_inputs=inputs,
            split_residuals=[empty(k, sizes["own"] + 1, layers) for k in own],
            residuals=chunk.pools(residuals, layers, sizes) if isinstance(chunk, Carried) else residuals,
            sent=jnp.zeros_like(fed),
            buckets=compute.empty_buckets(program, weights, 1),
            completed=compute.empty_buckets(
                program, weights, 0 if program.buckets is None else program.buckets.completed
            ),
        )

    def __call__(self, carry: TickCarry, stage_rows: jax.Array, global_row: jax.Array) -> TickCarry:
        """Runs one tick.

        Args:
          carry: as :meth:`start` or the previous tick returned it.
          stage_rows: the rows of the stages, [stages, columns].
          global_row: the row of all stages, [columns].
        """
        context, schedule = self.context, self.context.program.schedule
        unused = carry.stage.sent

        def forward_and_head(carry: TickCarry, *, barrier: bool = False) -> tuple[TickCarry, jax.Array]:
            carry, y = compute.forward(context, carry, stage_rows, global_row)
            if barrier:
                # The head does not depend on the backward. Without the barrier, the compiler would run the head's
                # collective first.
                stage = carry.stage
                y, sent, grads = jax.lax.optimization_barrier((y, stage.sent, stage.grads))
                carry = carry._replace(stage=stage._replace(sent=sent, grads=grads))
            carry = embed_head.run_head(context, carry, y, stage_rows, global_row, self.add_sums)
            return embed_head.embed(context, carry, global_row), y

        on_stages = functools.partial(self._on_each_stage, stage_rows, global_row)
        if schedule.forward_only:
            carry, y = forward_and_head(carry)
            return on_stages(carry, y, embed_head.store_microbatch_weight, communicate.send)
        if not context.program.independent:
            carry, y = forward_and_head(carry)
            steps = (communicate.receive, embed_head.apply_head_grad, compute.backward, compute.complete_bucket)
            carry = on_stages(carry, y, *steps, compute.flush_bucket, communicate.send)
        else:
            # Collectives over `pipeline` synchronize all stages. Except for the head's, they run only at the start and
            # the end of a tick, never between compute.
            carry = on_stages(carry, unused, communicate.receive)
            if schedule.fused:
                carry, y = forward_and_head(carry)
                carry = on_stages(carry, y, embed_head.apply_head_grad, compute.backward, communicate.send)
            else:
                # A stage has at most one operation in a tick, so either order is correct.
                carry = on_stages(carry, unused, compute.backward)
                carry, y = forward_and_head(carry, barrier=True)
                carry = on_stages(carry, y, embed_head.apply_head_grad, communicate.send)
        return embed_head.embed_grad(context, carry, global_row)

    def _on_each_stage(
        self, stage_rows: jax.Array, global_row: jax.Array, carry: TickCarry, y: Any, *steps: Step
    ) -> TickCarry:
        """Runs these steps in order on every stage."""
        context = self.context

        def local(*inputs: Any) -> tuple[StageCarry, jax.Array]:
            tick = TickInputs(*inputs)
            for step in steps:
                tick = step(context, tick)
            return tick.carry, tick.x

        own, device = Split.STAGE_DEVICE, Split.DEVICE
        ins = (Split.STAGE, Split.REPLICATED, context.weight_split, own, Split.DEVICE_COLUMNS, own, device, device)
        call = context.per_device(local, (*ins, Split.REPLICATED), (own, Split.DEVICE_COLUMNS))
        given = (context.weights, carry.stage, carry.x, y, carry.head_grad, context.batch, context.side_weights)
        stage, x = call(stage_rows, global_row, *given)
        return carry._replace(stage=stage, x=x)

    def finish(self, carry: TickCarry, last: int, was_first: jax.Array) -> TickCarry:
        """Completes the carry after the last tick.

        Adds the layers' scalars to the sums, and takes the cotangent that the last tick sent out of the pipeline.

        Args:
          carry: as the last tick returned it.
          last: the microbatch of that cotangent; the number of microbatches if there is none.
          was_first: [stages], whether a stage did the backward of the first layers in the last tick.
        """
        context, program, stage = self.context, self.context.program, carry.stage
        aux = stage.aux
        local = lambda aux: jax.tree.map(over_stages, totals(aux))
        scalars = {} if aux is None else context.per_device(local, (Split.STAGE_DEVICE,), Split.DEVICE)(aux)
        sums, x = program.join(carry.sums, scalars), carry.x
        if last < program.schedule.microbatches:

            def drain(was_first: jax.Array, x: jax.Array, sent: jax.Array) -> jax.Array:
                return communicate.store_input_grad(context, x, sent, was_first, jnp.asarray(last))

            ins = (Split.STAGE, Split.DEVICE_COLUMNS, Split.STAGE_DEVICE)
            x = context.per_device(drain, ins, Split.DEVICE_COLUMNS)(was_first, x, stage.sent)
            if program.embedding is not None:
                sums = embed_head.add_embed_grad(context, program.embedding, sums, x, jnp.asarray(last))
        return carry._replace(x=x, sums=sums)


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
    carry = run_ticks(context, x)
    return carry.stage.grads, carry.sums, None if x is None else carry.x[:, :-1]


def run_ticks(context: TickContext, x: jax.Array | None) -> TickCarry:
    """Runs all ticks and returns the carry after the last one. A forward-only schedule stores nothing for backwards.

    Args:
      context, x: as for :func:`run`. With a forward-only schedule, the program's ``head`` returns no cotangent.
    """
    carry, program = TickRunner(context).start(x), context.program
    if program.first_ticks:
        carry, weights = run_first_ticks(context, carry)
        context = replace(context.of_ticks(program.first_ticks, None), weights=weights)
    tick = TickRunner(context)
    one = lambda carry, rows: (tick(carry, *rows), None)
    carry, _ = jax.lax.scan(one, carry, tuple(jnp.asarray(rows[program.first_ticks :]) for rows in program.rows()))
    return tick.finish(carry, program.table.last, jnp.asarray(program.was_first()[-1]))
