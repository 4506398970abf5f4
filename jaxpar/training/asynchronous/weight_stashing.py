"""``pipedream`` (Harlap et al. 2018, arXiv:1806.03377): every stage updates its weights with every microbatch.

The stage keeps the weights that the microbatches in flight ran their forward pass with (weight stashing). Each tick is
a small step. First the newest weights enter a ring of versions. Then each stage runs the forward pass of one microbatch
with the newest weights, and the backward pass of another with the version of its forward pass. Last, everything that
has a gradient is updated: each stage's layers, the parameters before them and those after.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxpar.errors import ConfigError
from jaxpar.parallel.batch_rows import numbering
from jaxpar.parallel.pipeline.executor.async_runner import StashingRunner, concat_batches, rows_of
from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.pipeline.executor.primitives import pick, put
from jaxpar.parallel.pipeline.executor.program import GLOBAL_FIELDS, Head
from jaxpar.parallel.pipeline.executor.tick_context import TickContext
from jaxpar.parallel.pipeline.schedules.table import FIELDS
from jaxpar.sharding.layout import manual_axes
from jaxpar.sharding.resolve import num_shards_over
from jaxpar.sharding.rules import Axes
from jaxpar.training.asynchronous.in_flight import InFlight, InFlightCall
from jaxpar.training.asynchronous.stage_groups import GROUPS, Groups, groups_of, in_stages, with_padded_stages
from jaxpar.training.loss import Metrics
from jaxpar.training.microbatches import means_of, unscaled
from jaxpar.training.pipeline.gradients import head_of
from jaxpar.training.pipeline.stage_functions import Given, given_of, listed, read_by_layer_inputs
from jaxpar.training.pipeline.transfer import row_axes
from jaxpar.utils.arrays import accumulator, at_least_fp32

_B_ON, _HEADS = FIELDS.index("b_on"), GLOBAL_FIELDS.index("heads")


@numbering
def start(call: InFlightCall, batch: Any) -> InFlight:
    """Returns the call's state with empty buffers for the microbatches in flight, and each stage's optimizer state.

    Args:
      call: a call on a state as :func:`jaxpar.init` returns it.
      batch: a batch with the shapes and dtypes of those to come.
    """
    state, batch, sizes = call.state, call.prepared(batch), call.sizes
    call = with_padded_stages(call)
    groups, params = groups_of(call, batch), call.state.params
    run = _Run(call, groups, batch, batch)
    first = groups.cut(params)["before"]
    pieces = run.pieces()
    run.check_side(pieces.batch)
    tick, fed = run.tick(params, call.split.stack(params), first, pieces, jnp.asarray(0))
    empty_batch = jax.tree.map(jnp.zeros_like, batch)
    versions = {name: run.ring(part) for name, part in run.kept(params).items()}
    late = jax.tree.map(lambda w: jnp.zeros((call.options.stages, *w.shape), accumulator(w)), groups.of_tied(params))
    none = jnp.zeros((), jnp.int32)
    flight = {"pending": none, "batch": empty_batch, "versions": versions, "late": late, "layers": {sizes: none}}
    flight["in_flight"] = tick.nothing_in_flight(fed)
    changed = {"opt_state": groups.placed(groups.start(params)), "flight": run.placed(flight)}
    return InFlight(**{**vars(state), **changed})


@dataclass(frozen=True)
class _Run:
    """The ticks of a call over two batches, the previous one and its own."""

    call: InFlightCall
    groups: Groups
    before: Any
    own: Any

    def pieces(self) -> Any:
        """Returns both batches as ``[devices, 2 * microbatches, rows, ...]``."""
        call, rows = self.call, jax.tree.leaves(self.own)[0].shape[0]
        num_shards = num_shards_over(call.transfer.axes, call.layout.sizes)
        placeholder, params = jnp.zeros((rows, num_shards, call.window.stages)), call.state.params
        scatter = lambda batch: call.transfer.scatter_to_stages(params, batch, placeholder, call.window.batch)
        split_rows = lambda batch: scatter(given_of(batch))[1][0]
        return concat_batches(split_rows(self.before), split_rows(self.own), 1)

    def piece(self, pieces: Given, at: jax.Array) -> Given:
        """Returns one microbatch ``[rows, ...]``, with the rows of all devices."""
        call = self.call
        found = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, at, 1, keepdims=False), pieces)
        out = jax.tree.map(lambda x: PartitionSpec(*row_axes(call.layout, x)), given_of(self.own))
        manual = manual_axes(call.layout, call.transfer.axes, but=(AXIS,))
        local = lambda piece: jax.tree.map(lambda x: x[0], piece)
        if call.transfer.axes:
            own = PartitionSpec(call.transfer.axes)
            local = jax.shard_map(local, in_specs=own, out_specs=out, axis_names=manual, check_vma=False)
        return local(found)

    def kept(self, params: Any) -> dict[str, Any]:
        """Returns the parameters that backward passes need again: the stack of layers, and those before it."""
        split = self.call.split
        return {"layers": split.stack(params), "before": split.others(self.groups.cut(params)["before"])}

    def ring(self, tree: Any) -> Any:
        """Returns empty buffers for all versions in use while a microbatch of the first stage is in flight."""
        return jax.tree.map(lambda w: jnp.zeros((self.call.window.delay + 1, *w.shape), w.dtype), tree)

    def placed(self, flight: dict[str, Any]) -> dict[str, Any]:
        """Constrains everything in flight to the sharding that the next call takes."""
        call = self.call
        return {
            **call.put_batch(flight),
            "versions": self.put_versions(flight["versions"]),
            "late": self.put_late(flight["late"]),
            "in_flight": call.put_stashes(flight["in_flight"]),
        }

    def stashed(self, ring: Any, slots: jax.Array) -> Any:
        """Returns, for every stage's layers, the version in the given slot."""
        local, own = lambda ring, slot: pick(ring, slot[0]), PartitionSpec(AXIS)
        ins = (PartitionSpec(None, AXIS), own)
        return jax.shard_map(local, in_specs=ins, out_specs=own, axis_names={AXIS}, check_vma=False)(ring, slots)

    def check_side(self, pieces: Any) -> None:
        """Raises if ``PipelineLoss.layer_inputs`` reads parameters; each stage would need another version of them.

        Raises:
          ConfigError: ``layer_inputs`` reads parameters; the error lists them.
        """
        call = self.call
        call.transfer.trace_piece(lambda piece: read_by_layer_inputs(call.split, piece), pieces)
        if read := call.split.read["layer_inputs"]:
            raise ConfigError(
                f"asynchronous pipeline: PipelineLoss(layer_inputs=...) reads {listed(read)}, of which each stage of "
                "'pipedream' would need a different version. Remedy: use layer_inputs that read no parameters, or the "
                "schedule 'pipedream_2bw' or '1f1b'."
            )

    def tick(
        self, params: Any, layers: Any, first: Any, pieces: Any, at: jax.Array
    ) -> tuple[StashingRunner, jax.Array]:
        """Returns the runner of one tick, and the first stage's input.

        Args:
          params: the newest parameters.
          layers: the versions of the layers that the backward passes use.
          first: the version of the first group that the loss reads.
          pieces: both batches, from :meth:`pieces`.
          at: index of the microbatch that enters.
        """
        call = self.call
        split, piece = call.split, self.piece(pieces, at)
        x, _ = call.before(params, piece.batch, piece.numbers)
        read_by_loss = self.groups.with_first(params, first) if self.groups.tied else params
        new, (_, fed) = call.transfer.scatter_to_stages(read_by_loss, piece, x, 1)
        old, _ = call.transfer.scatter_to_stages(split.join(layers, split.others(params)), piece, x, 1)
        program = call.program(_mean(head_of(split, None), call.transfer.axes))
        weights = concat_batches(split.stack(old), split.stack(new), 1)
        return StashingRunner(TickContext.of(program, fed, weights, split.others(new), pieces)), fed

    def __call__(self, state: InFlight, exists: jax.Array, skips: bool) -> tuple[InFlight, Metrics]:
        """Returns the state after the ticks of the window, and metrics."""
        call, window, groups, transfer = self.call, self.call.window, self.groups, self.call.transfer
        full, delay, pieces = call.options.schedule, window.delay, self.pieces()
        program = call.program(head_of(call.split, None))
        stage_rows, global_rows, _ = rows_of(program, exists, (state.step - 1) % (delay + 1) * full.batch)
        ring, count, stages = delay + 1, window.stages, np.arange(window.stages)

        def one(carry: Any, xs: Any) -> tuple[Any, Any]:
            params, states, versions, late, in_flight = carry
            t, stage_rows, global_row = xs
            now = (state.step % ring * full.batch + t) % ring
            versions = jax.tree.map(lambda ring, w: put(ring, w, now), versions, self.kept(params))
            layers = self.stashed(versions["layers"], (now - delay + 2 * jnp.asarray(stages)) % ring)
            read_by_loss = pick(versions["before"], (now - (count - 1)) % ring)
            tick, fed = self.tick(params, layers, read_by_loss, pieces, full.batch + t)
            in_flight, grads, (sums, weight, head_grads), x = tick.run(in_flight, fed, stage_rows, global_row)
            sums, weight, grads, x = transfer.gather_from_stages(call.split.join(grads, head_grads), sums, weight, x)
            # For tied parameters, the head's part of the gradient is pending until the first stage adds its own.
            slot = (state.step % count * full.batch + t) % count
            late = jax.tree.map(lambda g, ring: put(ring, g, slot), groups.of_tied(grads), late)
            grads = groups.with_tied(grads, pick(late, (slot + 1) % count))
            first = pick(versions["before"], (now - delay) % ring)
            piece = self.piece(pieces, full.batch + t - delay)
            _, back = call.before(groups.with_first(params, first), piece.batch, piece.numbers)
            (embed_grads,) = back(x)
            grads = unscaled(state, call.split.add(grads, jax.tree.map(at_least_fp32, embed_grads)), None)
            valid = {"before": stage_rows[0, _B_ON] == 1, "layers": stage_rows[:, _B_ON] == 1}
            valid["after"] = global_row[_HEADS] == 1
            squares = groups.squares(grads)
            finite = {name: jnp.isfinite(square) for name, square in squares.items()}
            updated = {name: valid[name] & finite[name] if skips else valid[name] for name in GROUPS}
            params, states = groups.update(grads, states, params, updated)
            square = sum((jnp.where(valid[name], squares[name], 0).sum() for name in GROUPS), jnp.zeros(()))
            skipped = jnp.stack([jnp.any(valid[name] & ~finite[name]) for name in GROUPS]).any()
            taken = jnp.stack([jnp.any(updated[name]) for name in GROUPS]).any()
            kept = self.put_versions(versions), self.put_late(late), in_flight
            carry = call.put_params(params), groups.placed(states), *kept
            return carry, (sums, weight, square, skipped, taken)

        flight = state.flight
        carry = call.state.params, state.opt_state, flight["versions"], flight["late"], flight["in_flight"]
        xs = jnp.arange(window.length), stage_rows, global_rows
        carry, (sums, weight, squares, skipped, taken) = jax.lax.scan(one, carry, xs)
        params, states, versions, late, in_flight = carry
        loss, metrics, _ = means_of((*jax.tree.map(lambda x: x.sum(0), sums), {}), weight.sum(0))
        norm = jnp.sqrt(squares.sum() / max(window.length, 1))
        skip_metric = {"skipped": skipped.any()} if skips else {}
        kept = {"batch": self.own, "versions": versions, "late": late, "in_flight": in_flight}
        flight = {"pending": exists[1], "layers": flight["layers"], **kept}
        new = replace(state, params=params, opt_state=states, flight=self.placed(flight))
        return new, {"loss": loss, "grad_norm": norm, "updated": taken.any(), **metrics, **skip_metric}

    def put_versions(self, versions: dict[str, Any]) -> dict[str, Any]:
        split = self.call.split
        found = self.call.put_params(split.join(versions["layers"], versions["before"]), None)
        return {"layers": split.stack(found), "before": split.others(found)}

    def put_late(self, late: Any) -> Any:
        """Constrains pending gradients to the gradients' sharding."""
        return self.call.put_params(late, None, role="gradients")


def _mean(head: Head, axes: Axes) -> Head:
    """Returns a head whose gradients are those of its microbatch's mean loss over all devices."""

    def mean(weights: Any, piece: Any, y: jax.Array) -> tuple[Any, tuple[Any, jax.Array]]:
        (sums, weight, grads), cotangent = head(weights, piece, y)
        total = jax.lax.psum(weight, axes) if axes else weight
        total = jnp.where(total == 0, 1, total)
        grads, cotangent = jax.tree.map(lambda g: g / total.astype(g.dtype), (grads, cotangent))
        return (sums, weight, grads), cotangent

    return mean


@numbering
def every_stage(call: InFlightCall, batch: Any | None, *, skips: bool) -> tuple[InFlight, Metrics]:
    """Runs one call of ``pipedream``.

    Args:
      call: a call on the state that :func:`start` or the previous call returned.
      batch: the call's own batch; ``None`` to finish the previous one only.
      skips: skip updates whose gradients are not finite.

    Returns:
      The new state, whose ``step`` is unchanged, and metrics.
    """
    state: Any = call.state
    own, exists = call.of_batch(batch)
    even = with_padded_stages(call)
    new, metrics = _Run(even, groups_of(even, own), state.flight["batch"], own)(state, exists, skips)
    return replace(new, params=in_stages(call, new.params, back=True)), metrics
