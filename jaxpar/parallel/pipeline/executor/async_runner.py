"""Runs the ticks of one call of an asynchronous pipeline, from the microbatches in flight before it to those after it.

To :mod:`jaxpar.parallel.pipeline.executor.run` the previous batch and the call's own batch are two chunks of each
stage. Weights and sums of gradients therefore exist twice, [2, layers, ...], and each position of the window has the
number of its batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import ModelError, listing
from jaxpar.parallel.pipeline.executor.carry import TickCarry
from jaxpar.parallel.pipeline.executor.communicate import first_input
from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.pipeline.executor.primitives import pick, put
from jaxpar.parallel.pipeline.executor.program import GLOBAL_FIELDS, PipelineProgram
from jaxpar.parallel.pipeline.executor.run import TickRunner
from jaxpar.parallel.pipeline.executor.tick_context import Split, TickContext
from jaxpar.parallel.pipeline.schedules.async_window import TURNING
from jaxpar.parallel.pipeline.schedules.table import FIELDS


def concat_batches(old: Any, new: Any, dim: int) -> Any:
    """Concatenates the arrays of two batches along a dim."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], dim), old, new)


def numbered(program: PipelineProgram) -> PipelineProgram:
    """Adapts a program to two batches, each with its own version of the weights.

    ``non_layer_weights`` become [2, ...] and a piece ``{"batch": 0 or 1, "of": piece}``. The loss of a microbatch and
    its layers' further inputs use the version of its batch.
    """

    def head(weights: Any, piece: Any, y: jax.Array) -> tuple[Any, tuple[Any, jax.Array]]:
        return program.head(pick(weights, piece["batch"]), piece["of"], y)

    def side(piece: Any, weights: Any) -> Any:
        return program.side(piece["of"], pick(weights, piece["batch"]))

    return replace(program, head=head, side=side)


def rows_of(program: PipelineProgram, exists: jax.Array, rotation: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the rows of the table for one call.

    Args:
      program: the program of the call.
      exists: [2], whether the previous batch and the call's own batch exist.
      rotation: the number of positions by which the rings are rotated.

    Returns:
      The rows of stages, with rotated rings and without the backwards of a missing batch; the rows of all stages,
      without its heads; and the slots [stages] of the first input.
    """
    (rows, global_rows), table = program.rows(), program.table
    batch = program.schedule.microbatches // 2

    def rotated(column: np.ndarray, size: int) -> jax.Array:
        return jnp.where(column < size, (column + rotation) % max(size, 1), column)

    columns = {name: rotated(table.column(name), table.sizes[buffer]) for name, buffer in TURNING.items()}
    columns["b_on"] = exists[table.column("b_chunk")]
    found = jnp.asarray(rows)
    for name, column in columns.items():
        found = found.at[:, :, FIELDS.index(name)].set(column)
    heads = exists[np.minimum(global_rows[:, GLOBAL_FIELDS.index("head")] // batch, 1)]
    made = jnp.asarray(global_rows).at[:, GLOBAL_FIELDS.index("heads")].multiply(heads)
    return found, made, rotated(table.first[0], table.sizes["act"])


class _BatchSums(NamedTuple):
    """What the head returned, where the microbatches of two batches pass it.

    Attributes:
      seen: the weight of all microbatches.
      sums: loss and metrics of all microbatches.
      weight: of each batch, [2].
      grads: of the weights outside the layers, for each batch, [2, ...].
    """

    seen: jax.Array
    sums: Any
    weight: jax.Array
    grads: Any


@dataclass(frozen=True)
class AsyncRunner:
    """The ticks of one call.

    ``weights`` are [stages, 2, layers, ...], ``non_layer_weights`` are [2, ...], and :func:`numbered` returns the
    program.
    """

    context: TickContext

    def nothing_in_flight(self, x: jax.Array) -> dict[str, Any]:
        """Returns the state between two calls if nothing is in flight: zeros in the shapes and dtypes of that state.

        Args:
          x: the inputs of the first layer for two batches, [devices, 2 * microbatches, rows, ...].

        Returns:
          ``activations``, ``sent``, ``residuals``: the stored inputs or residuals, and the cotangents between stages,
          [stages, devices, ...]. ``grads``: the gradient sums of the batch whose backwards have begun,
          [stages, devices, 1, layers, ...]. ``weight``, ``non_layer_grads``: the weight of its loss and the gradient
          sums of the other weights, [devices, ...]. ``x``: the cotangents of its inputs,
          [devices, microbatches, rows, ...].
        """
        carry, count = _start(TickRunner(self.context), x), x.shape[1] // 2
        _, weight, non_layer_grads = carry.sums
        stashes = jax.tree.map(jnp.zeros_like, _stashes(self.context.program, carry))
        grads = jax.tree.map(lambda g: g[:, :, :1], carry.stage.grads)
        sums = {"grads": grads, "weight": weight, "non_layer_grads": non_layer_grads}
        return {**stashes, **sums, "x": jnp.zeros_like(x[:, :count])}

    def run(
        self, in_flight: dict[str, Any], x: jax.Array, exists: jax.Array, rotation: jax.Array
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Runs the ticks of one call.

        Args:
          in_flight: the state between calls, as :meth:`nothing_in_flight` or the previous call returned it.
          x: the inputs of the first layer for the call's own batch, [devices, microbatches, rows, ...].
          exists: [2], whether the previous batch and the call's own batch exist.
          rotation: the number of positions that the rings advanced before this call.

        Returns:
          Two dicts. The first has ``grads``, ``weight``, ``non_layer_grads`` and ``x`` of the previous batch, now
          complete, in the shapes of :meth:`nothing_in_flight`. It also has ``sums``, the loss and metrics of all
          microbatches whose loss this call computed, and ``seen``, their weight. The second dict is the state for the
          next call.
        """
        program = self.context.program
        stage_rows, global_rows, first = rows_of(program, exists, rotation)
        tick = TickRunner(self.context, self._add_sums)

        def one(carry: TickCarry, rows: tuple[jax.Array, jax.Array]) -> tuple[TickCarry, None]:
            return tick(carry, *rows), None

        carry, _ = jax.lax.scan(one, self._resume(in_flight, x, first), (stage_rows, global_rows))
        carry = tick.finish(carry, program.table.last, jnp.asarray(program.was_first()[-1]))
        count, sums = x.shape[1], carry.sums
        part = lambda n: {
            "grads": jax.tree.map(lambda g: g[:, :, n : n + 1], carry.stage.grads),
            "weight": sums.weight[n],
            "non_layer_grads": jax.tree.map(lambda g: g[n], sums.grads),
            "x": carry.x[:, n * count : (n + 1) * count],
        }
        return {**part(0), "sums": sums.sums, "seen": sums.seen}, {**_stashes(program, carry), **part(1)}

    def _resume(self, in_flight: dict[str, Any], x: jax.Array, first: jax.Array) -> TickCarry:
        """Returns the carry of the first tick: empty working buffers, and the state of the previous call."""
        context, program = self.context, self.context.program
        x = concat_batches(in_flight["x"], x, 1)
        carry = _start(TickRunner(context), x)

        def local(x: jax.Array, slot: jax.Array, activations: jax.Array) -> jax.Array:
            return put(activations, first_input(context, x, program.table.first[1]), slot)

        ins = (Split.DEVICE_COLUMNS, Split.STAGE, Split.STAGE_DEVICE)
        activations = context.per_device(local, ins, Split.STAGE_DEVICE)(x, first, in_flight["activations"])
        both = lambda stored: jax.tree.map(lambda s: jnp.stack([s, jnp.zeros_like(s)]), stored)
        sums, seen, _ = carry.sums
        sums = _BatchSums(seen, sums, both(in_flight["weight"]), both(in_flight["non_layer_grads"]))
        grads = concat_batches(in_flight["grads"], jax.tree.map(lambda g: g[:, :, 1:], carry.stage.grads), 2)
        stored = {name: in_flight[name] for name in _stashes(program, carry)}
        stage = carry.stage._replace(**{**stored, "activations": activations, "grads": grads})
        return carry._replace(stage=stage, sums=sums)

    def _add_sums(self, have: _BatchSums, found: Any, microbatch: jax.Array) -> _BatchSums:
        """Adds weight and gradients to the sums of the microbatch's batch."""
        sums, weight, grads = found
        batch = microbatch // (self.context.program.schedule.microbatches // 2)
        plus = lambda total, more: put(total, pick(total, batch) + more, batch)
        seen, sums = have.seen + weight, jax.tree.map(jnp.add, have.sums, sums)
        return _BatchSums(seen, sums, plus(have.weight, weight), jax.tree.map(plus, have.grads, grads))


@dataclass(frozen=True)
class StashingRunner:
    """Single ticks during which weights change.

    Forwards use the newest weights, [:, 1] of ``weights``. Backwards use the version of their forward, [:, 0].
    """

    context: TickContext

    def nothing_in_flight(self, x: jax.Array) -> dict[str, Any]:
        """Returns zeros for ``activations``, ``sent`` and ``residuals`` of :meth:`AsyncRunner.nothing_in_flight`."""
        carry = _start(TickRunner(self.context, grad_chunks=1), x)
        return jax.tree.map(jnp.zeros_like, _stashes(self.context.program, carry))

    def run(
        self, in_flight: dict[str, Any], x: jax.Array, stage_rows: jax.Array, global_row: jax.Array
    ) -> tuple[dict[str, Any], Any, Any, jax.Array]:
        """Runs one tick.

        Args:
          in_flight: the state after the previous tick.
          x: the input of the first stage, [devices, 1, rows, ...].
          stage_rows: the tick's row of each stage, [stages, columns].
          global_row: the tick's row of all stages, [columns].

        Returns:
          The state for the next tick; gradients of the layers [stages, devices, 1, layers, ...]; the sums of the
          microbatch whose loss was computed; and the input cotangent of the microbatch that left the pipeline, in the
          shape of ``x``.
        """
        context, tick = self.context, TickRunner(self.context, grad_chunks=1)
        carry = _start(tick, x)

        def feed(x: jax.Array, stage_row: jax.Array, activations: jax.Array) -> jax.Array:
            at = stage_row[FIELDS.index("f_input")]
            first = jax.lax.axis_index(AXIS) == 0
            return put(activations, jnp.where(first, first_input(context, x, 0), pick(activations, at)), at)

        ins = (Split.DEVICE_COLUMNS, Split.STAGE, Split.STAGE_DEVICE)
        activations = context.per_device(feed, ins, Split.STAGE_DEVICE)(x, stage_rows, in_flight["activations"])
        # The caller passes the input and takes the cotangent of this tick, so the tick itself feeds and drains nothing.
        none = [GLOBAL_FIELDS.index(name) for name in ("feeds", "drains")]
        stage_rows = stage_rows.at[:, FIELDS.index("f_chunk")].set(1).at[:, FIELDS.index("b_chunk")].set(0)
        stage = carry.stage._replace(**{**in_flight, "activations": activations})
        carry = tick(carry._replace(stage=stage), stage_rows, global_row.at[np.asarray(none)].set(0))
        carry = tick.finish(carry, 0, stage_rows[:, FIELDS.index("b_first")])
        return _stashes(context.program, carry), carry.stage.grads, carry.sums, carry.x[:, :1]


def _start(tick: TickRunner, x: jax.Array) -> TickCarry:
    """Returns empty buffers.

    Raises:
      ModelError: layers return losses or metrics, which calls do not pass on.
    """
    carry = tick.start(x)
    if carry.stage.aux is not None:
        raise ModelError(
            f"asynchronous pipeline: layers returned {listing(carry.stage.aux.sums)} in addition to x, but these "
            f"values are not kept for the microbatches in flight between calls. Remedy: use layers that return only x, "
            f"or the schedule '1f1b'."
        )
    return carry


def _stashes(program: PipelineProgram, carry: TickCarry) -> dict[str, Any]:
    """Returns the arrays that outlive a call; residuals are only working memory if no forward stores them."""
    stage = carry.stage
    stored = {"residuals": stage.residuals} if program.activation_checkpointing == "none" else {}
    return {"activations": stage.activations, "sent": stage.sent, **stored}
