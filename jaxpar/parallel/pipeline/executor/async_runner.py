"""A window of ticks carried out: what a call finds on its way it carries on, and what is on its way at its end it hands to the next.

The batch before and the call's own are two *chunks* of each stage to the ticks of :mod:`jaxpar.parallel.pipeline.executor.tick`: weights and sums of gradients are there twice,
[2, layers, ...], and every position of the window says of which batch it is.
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


def beside(old: Any, new: Any, dim: int) -> Any:
    """Two batches' arrays, one after the other along a dim."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], dim), old, new)


def numbered(program: PipelineProgram) -> PipelineProgram:
    """A program for ``after`` [2, ...] and pieces ``{"batch": 0 or 1, "of": piece}``: a microbatch's loss, and what its layers know, is of its batch's version."""

    def head(after: Any, piece: Any, y: jax.Array) -> tuple[Any, tuple[Any, jax.Array]]:
        return program.head(pick(after, piece["batch"]), piece["of"], y)

    return replace(program, head=head, side=lambda piece, read: program.side(piece["of"], pick(read, piece["batch"])))


def rows_of(program: PipelineProgram, have: jax.Array, turn: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The table's rows, with its rings turned and without what is of no batch (see :meth:`AsyncRunner.run`); and where the first input goes."""
    (rows, every), table = program.rows(), program.table
    batch = program.schedule.microbatches // 2

    def turned(column: np.ndarray, size: int) -> jax.Array:
        return jnp.where(column < size, (column + turn) % max(size, 1), column)

    columns = {name: turned(table.column(name), table.sizes[buffer]) for name, buffer in TURNING.items()}
    columns["b_on"] = have[table.column("b_chunk")]
    found = jnp.asarray(rows)
    for name, column in columns.items():
        found = found.at[:, :, FIELDS.index(name)].set(column)
    heads = have[np.minimum(every[:, EVERY.index("head")] // batch, 1)]
    made = jnp.asarray(every).at[:, EVERY.index("heads")].multiply(heads)
    return found, made, turned(table.first[0], table.sizes["act"])


@dataclass(frozen=True)
class _Going(TickRunner):
    """Ticks that find something on its way."""

    def _started(self, x: jax.Array) -> dict[str, Any]:
        """Empty buffers.

        Raises:
          ModelError: layers have losses or metrics of their own, which no call would hand on.
        """
        carry = self.start(x)
        if carry["aux"]:
            raise ModelError(
                f"asynchronous pipeline: layers gave {listing(carry['aux']['sums'])} beside x, but what a microbatch's layers give is not handed on from "
                f"call to call. Remedy: layers that return x alone, or the schedule '1f1b'."
            )
        return carry


@dataclass(frozen=True)
class AsyncRunner(_Going):
    """The ticks of a window. ``weights`` are [stages, 2, layers, ...], ``after`` [2, ...]; programs are :func:`numbered`."""

    def aboard(self, x: jax.Array) -> dict[str, Any]:
        """What is on its way where nothing is: zeros, of the shapes and dtypes of what a call hands to the next.

        Returns:
          ``act``, ``sent``, ``res``: inputs or residuals that are kept, and cotangents between stages, [stages, devices, ...]; ``grads``: sums of the
          batch whose backwards have begun, [stages, devices, 1, layers, ...]; ``weight``, ``after``: those of its loss and of what comes after the
          layers, [devices, ...]; ``x``: the cotangents of its inputs, [devices, microbatches, rows, ...].
        """
        carry, count = self._started(x), x.shape[1] // 2
        _, weight, after = carry["sums"]
        kept = {name: jax.tree.map(jnp.zeros_like, carry[name]) for name in self._lasting}
        grads = jax.tree.map(lambda g: g[:, :, :1], carry["grads"])
        return {**kept, "grads": grads, "weight": weight, "after": after, "x": jnp.zeros_like(x[:, :count])}

    def run(self, aboard: Any, x: jax.Array, have: jax.Array, turn: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        """The window's ticks.

        Args:
          aboard: what is on its way.
          x: what the first layer is given of the call's own batch, [devices, microbatches, rows, ...].
          have: [2], whether there is the batch before, and one of the call's own.
          turn: how many positions the rings have gone before this window.

        Returns:
          Of the batch before, now whole, ``grads``, ``weight``, ``after`` and ``x``, as ``aboard`` has them, with ``sums`` of loss and metrics over all
          microbatches whose loss was made, and their weight ``seen``; and what is aboard now.
        """
        rows, every, first = rows_of(self.program, have, turn)

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
        """Buffers that outlive a call; where residuals are not kept, theirs is only a place to work in."""
        return ("act", "sent", "res") if self.program.activation_checkpointing == "none" else ("act", "sent")

    def _resumed(self, aboard: Any, x: jax.Array, first: jax.Array) -> dict[str, Any]:
        """The carry of the first tick: empty places to work in, and what is aboard."""
        x = beside(aboard["x"], x, 1)
        carry = self._started(x)

        def local(x: jax.Array, slot: jax.Array, act: jax.Array) -> jax.Array:
            return put(act, self._fed(x, self.program.table.first[1]), slot)

        act = self._inside(local, ("columns", "stage", "stage own"), "stage own")(x, first, aboard["act"])
        both = lambda kept: jax.tree.map(lambda s: jnp.stack([s, jnp.zeros_like(s)]), kept)
        seen, weight, _ = carry["sums"]
        sums = {"sums": seen, "seen": weight, "weight": both(aboard["weight"]), "after": both(aboard["after"])}
        grads = beside(aboard["grads"], jax.tree.map(lambda g: g[:, :, 1:], carry["grads"]), 2)
        lasting = {name: aboard[name] for name in self._lasting}
        return {**carry, **lasting, "act": act, "grads": grads, "sums": sums}

    def _heads(self, carry: dict[str, Any], y: jax.Array, row: jax.Array, every: jax.Array) -> dict[str, Any]:
        """As of any tick, but weight and gradients go to the sums of the microbatch's batch."""
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
class Stashing(_Going):
    """Single ticks of a window in which weights change: forwards are done with the newest, [:, 1] of ``weights``, backwards with those of their forward, [:, 0]."""

    def aboard(self, x: jax.Array) -> dict[str, Any]:
        """What is on its way where nothing is: ``act``, ``sent`` and ``res``, zeros, as of :meth:`AsyncRunner.aboard`."""
        carry = self._started(x)
        names = ("act", "sent", "res") if self.program.activation_checkpointing == "none" else ("act", "sent")
        return {name: jax.tree.map(jnp.zeros_like, carry[name]) for name in names}

    def once(
        self, aboard: dict[str, Any], x: jax.Array, row: jax.Array, every: jax.Array
    ) -> tuple[dict[str, Any], Any, Any, jax.Array]:
        """A tick on what is aboard, the first stage being given ``x`` [devices, 1, rows, ...].

        Returns:
          What is aboard then; gradients of layers [stages, devices, 1, layers, ...]; of the microbatch whose loss was made, its share of all sums; and the
          cotangent of the input of the one that came out, as ``x`` is.
        """
        carry = self._started(x)

        def fed(x: jax.Array, row: jax.Array, act: jax.Array) -> jax.Array:
            at = row[FIELDS.index("f_input")]
            return put(act, jnp.where(jax.lax.axis_index(AXIS) == 0, self._fed(x, 0), pick(act, at)), at)

        act = self._inside(fed, ("columns", "stage", "stage own"), "stage own")(x, row, aboard["act"])
        # What is fed and what comes out goes by this tick alone.
        none = [EVERY.index(name) for name in ("feeds", "drains")]
        row = row.at[:, FIELDS.index("f_chunk")].set(1).at[:, FIELDS.index("b_chunk")].set(0)
        carry = self({**carry, **aboard, "act": act}, row, every.at[np.asarray(none)].set(0))
        carry = self.finish(carry, 0, row[:, FIELDS.index("b_first")])
        return {name: carry[name] for name in aboard}, carry["grads"], carry["sums"], carry["x"][:, :1]

    def _empty(self, weights: Any) -> Any:
        return super()._empty(jax.tree.map(lambda w: w[:1], weights))
