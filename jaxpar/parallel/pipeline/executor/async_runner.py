"""Runs the ticks of one call of an asynchronous pipeline, from the microbatches in flight before it to those after it.

To :mod:`jaxpar.parallel.pipeline.executor.tick` the previous batch and the call's own batch are two chunks of each
stage. Weights and sums of gradients therefore exist twice, [2, layers, ...], and each position of the window has the
number of its batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import ModelError, listing
from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.pipeline.executor.primitives import pick, put
from jaxpar.parallel.pipeline.executor.program import EVERY, PipelineProgram, of_every
from jaxpar.parallel.pipeline.executor.stage import held
from jaxpar.parallel.pipeline.executor.tick import TickRunner
from jaxpar.parallel.pipeline.schedules.async_window import TURNING
from jaxpar.parallel.pipeline.schedules.table import FIELDS


def concat_batches(old: Any, new: Any, dim: int) -> Any:
    """Concatenates the arrays of two batches along a dim."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], dim), old, new)


def numbered(program: PipelineProgram) -> PipelineProgram:
    """Adapts a program to two batches, each with its own version of the weights.

    ``after`` becomes [2, ...] and a piece ``{"batch": 0 or 1, "of": piece}``. The loss of a microbatch and its layers'
    further inputs use the version of its batch.
    """

    def head(after: Any, piece: Any, y: jax.Array) -> tuple[Any, tuple[Any, jax.Array]]:
        return program.head(pick(after, piece["batch"]), piece["of"], y)

    return replace(program, head=head, side=lambda piece, read: program.side(piece["of"], pick(read, piece["batch"])))


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
    (rows, every), table = program.rows(), program.table
    batch = program.schedule.microbatches // 2

    def rotated(column: np.ndarray, size: int) -> jax.Array:
        return jnp.where(column < size, (column + rotation) % max(size, 1), column)

    columns = {name: rotated(table.column(name), table.sizes[buffer]) for name, buffer in TURNING.items()}
    columns["b_on"] = exists[table.column("b_chunk")]
    found = jnp.asarray(rows)
    for name, column in columns.items():
        found = found.at[:, :, FIELDS.index(name)].set(column)
    heads = exists[np.minimum(every[:, EVERY.index("head")] // batch, 1)]
    made = jnp.asarray(every).at[:, EVERY.index("heads")].multiply(heads)
    return found, made, rotated(table.first[0], table.sizes["act"])


@dataclass(frozen=True)
class _InFlightRunner(TickRunner):
    """Ticks that start with microbatches in flight."""

    def _started(self, x: jax.Array) -> dict[str, Any]:
        """Returns empty buffers.

        Raises:
          ModelError: layers return losses or metrics, which calls do not pass on.
        """
        carry = self.start(x)
        if carry["aux"]:
            raise ModelError(
                f"asynchronous pipeline: layers returned {listing(carry['aux']['sums'])} in addition to x, but these "
                "values are not kept for the microbatches in flight between calls. Remedy: use layers that return "
                "only x, or the schedule '1f1b'."
            )
        return carry


@dataclass(frozen=True)
class AsyncRunner(_InFlightRunner):
    """The ticks of one call.

    ``weights`` are [stages, 2, layers, ...], ``after`` is [2, ...], and :func:`numbered` returns the program.
    """

    def aboard(self, x: jax.Array) -> dict[str, Any]:
        """Returns the state between two calls if nothing is in flight: zeros in the shapes and dtypes of that state.

        Args:
          x: the inputs of the first layer for two batches, [devices, 2 * microbatches, rows, ...].

        Returns:
          ``act``, ``sent``, ``res``: the stored inputs or residuals, and the cotangents between stages,
          [stages, devices, ...]. ``grads``: the gradient sums of the batch whose backwards have begun,
          [stages, devices, 1, layers, ...]. ``weight``, ``after``: the weight of its loss and the gradient sums of the
          other weights, [devices, ...]. ``x``: the cotangents of its inputs, [devices, microbatches, rows, ...].
        """
        carry, count = self._started(x), x.shape[1] // 2
        _, weight, after = carry["sums"]
        kept = {name: jax.tree.map(jnp.zeros_like, carry[name]) for name in self._lasting}
        grads = jax.tree.map(lambda g: g[:, :, :1], carry["grads"])
        return {**kept, "grads": grads, "weight": weight, "after": after, "x": jnp.zeros_like(x[:, :count])}

    def run(
        self, aboard: Any, x: jax.Array, exists: jax.Array, rotation: jax.Array
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Runs the ticks of one call.

        Args:
          aboard: the state between calls, as :meth:`aboard` or the previous call returned it.
          x: the inputs of the first layer for the call's own batch, [devices, microbatches, rows, ...].
          exists: [2], whether the previous batch and the call's own batch exist.
          rotation: the number of positions that the rings advanced before this call.

        Returns:
          Two dicts. The first has ``grads``, ``weight``, ``after`` and ``x`` of the previous batch, now complete, in
          the shapes of :meth:`aboard`. It also has ``sums``, the loss and metrics of all microbatches whose loss this
          call computed, and ``seen``, their weight. The second dict is the state for the next call.
        """
        rows, every, first = rows_of(self.program, exists, rotation)

        def one(carry: Any, xs: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            return self(carry, *xs), None

        carry, _ = jax.lax.scan(one, self._resumed(aboard, x, first), (rows, every))
        carry = self.finish(carry, self.program.table.last, jnp.asarray(self.program.was_first()[-1]))
        count, sums = x.shape[1], carry["sums"]
        part = lambda n: {
            "grads": jax.tree.map(lambda g: g[:, :, n : n + 1], carry["grads"]),
            "weight": sums["weight"][n],
            "after": jax.tree.map(lambda g: g[n], sums["after"]),
            "x": carry["x"][:, n * count : (n + 1) * count],
        }
        lasting = {name: carry[name] for name in self._lasting}
        return {**part(0), "sums": sums["sums"], "seen": sums["seen"]}, {**lasting, **part(1)}

    @property
    def _lasting(self) -> tuple[str, ...]:
        """The buffers that outlive a call; ``res`` is only working memory if residuals are not stored."""
        return ("act", "sent", "res") if self.program.activation_checkpointing == "none" else ("act", "sent")

    def _resumed(self, aboard: Any, x: jax.Array, first: jax.Array) -> dict[str, Any]:
        """Returns the carry of the first tick: empty working buffers, and the state of the previous call."""
        x = concat_batches(aboard["x"], x, 1)
        carry = self._started(x)

        def local(x: jax.Array, slot: jax.Array, act: jax.Array) -> jax.Array:
            return put(act, self._fed(x, self.program.table.first[1]), slot)

        act = self._inside(local, ("columns", "stage", "stage own"), "stage own")(x, first, aboard["act"])
        both = lambda kept: jax.tree.map(lambda s: jnp.stack([s, jnp.zeros_like(s)]), kept)
        seen, weight, _ = carry["sums"]
        sums = {"sums": seen, "seen": weight, "weight": both(aboard["weight"]), "after": both(aboard["after"])}
        grads = concat_batches(aboard["grads"], jax.tree.map(lambda g: g[:, :, 1:], carry["grads"]), 2)
        lasting = {name: aboard[name] for name in self._lasting}
        return {**carry, **lasting, "act": act, "grads": grads, "sums": sums}

    def _heads(self, carry: dict[str, Any], y: jax.Array, row: jax.Array, every: jax.Array) -> dict[str, Any]:
        """As in the base class, but adds weight and gradients to the sums of the microbatch's batch."""
        at = of_every(every, "head")
        batch = at // (self.program.schedule.microbatches // 2)

        def one(run: jax.Array, found: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            have, _ = found
            (sums, weight, after), cotangent = self._head(row, at, held(y, run))
            plus = lambda total, more: put(total, pick(total, batch) + more, batch)
            result = {
                "sums": jax.tree.map(jnp.add, have["sums"], sums),
                "seen": have["seen"] + weight,
                "weight": plus(have["weight"], weight),
                "after": jax.tree.map(plus, have["after"], after),
            }
            return result, cotangent

        with self._visits("heads"):
            sums, cotangent = jax.lax.fori_loop(0, of_every(every, "heads"), one, (carry["sums"], carry["cotangent"]))
        return {**carry, "sums": sums, "cotangent": cotangent}


@dataclass(frozen=True)
class Stashing(_InFlightRunner):
    """Single ticks during which weights change.

    Forwards use the newest weights, [:, 1] of ``weights``. Backwards use the version of their forward, [:, 0].
    """

    def aboard(self, x: jax.Array) -> dict[str, Any]:
        """Returns ``act``, ``sent`` and ``res`` as zeros, as :meth:`AsyncRunner.aboard` does: nothing is in flight."""
        carry = self._started(x)
        names = ("act", "sent", "res") if self.program.activation_checkpointing == "none" else ("act", "sent")
        return {name: jax.tree.map(jnp.zeros_like, carry[name]) for name in names}

    def once(
        self, aboard: dict[str, Any], x: jax.Array, row: jax.Array, every: jax.Array
    ) -> tuple[dict[str, Any], Any, Any, jax.Array]:
        """Runs one tick.

        Args:
          aboard: the state after the previous tick.
          x: the input of the first stage, [devices, 1, rows, ...].
          row: the tick's row of each stage, [stages, columns].
          every: the tick's row of all stages, [columns].

        Returns:
          The state for the next tick; gradients of the layers [stages, devices, 1, layers, ...]; the sums of the
          microbatch whose loss was computed; and the input cotangent of the microbatch that left the pipeline, in the
          shape of ``x``.
        """
        carry = self._started(x)

        def fed(x: jax.Array, row: jax.Array, act: jax.Array) -> jax.Array:
            at = row[FIELDS.index("f_input")]
            return put(act, jnp.where(jax.lax.axis_index(AXIS) == 0, self._fed(x, 0), pick(act, at)), at)

        act = self._inside(fed, ("columns", "stage", "stage own"), "stage own")(x, row, aboard["act"])
        # The caller passes the input and takes the cotangent of this tick, so the tick itself feeds and drains nothing.
        skipped = [EVERY.index(name) for name in ("feeds", "drains")]
        row = row.at[:, FIELDS.index("f_chunk")].set(1).at[:, FIELDS.index("b_chunk")].set(0)
        carry = self({**carry, **aboard, "act": act}, row, every.at[np.asarray(skipped)].set(0))
        carry = self.finish(carry, 0, row[:, FIELDS.index("b_first")])
        return {name: carry[name] for name in aboard}, carry["grads"], carry["sums"], carry["x"][:, :1]

    def _empty(self, weights: Any) -> Any:
        return super()._empty(jax.tree.map(lambda w: w[:1], weights))
