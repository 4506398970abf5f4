"""A state with microbatches on their way, and what a call of an asynchronous pipeline makes of it and of a batch.

``pipedream_2bw`` (Narayanan et al. 2021, arXiv:2006.09503): microbatches of a call's batch are forwarded and, in this call and the next, backwarded with the
weights that the call found; those of the batch before with the weights before. At a call's end the batch before is through, and its gradients are whole.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxpar.errors import ConfigError
from jaxpar.parallel.batch_rows import batch_rows, numbering
from jaxpar.parallel.collectives.gather_reduce import wide
from jaxpar.parallel.pipeline.executor.async_runner import AsyncRunner, beside, numbered
from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.pipeline.executor.program import Head, PipelineProgram
from jaxpar.parallel.pipeline.options import Asynchronous
from jaxpar.parallel.pipeline.schedules.async_window import AsyncSchedule
from jaxpar.sharding.layout import Layout, lay_out
from jaxpar.sharding.rules import Axes
from jaxpar.training.microbatches import GradientResult, StepConfig, means_of, unscaled
from jaxpar.training.model import to_path
from jaxpar.training.pipeline.gradients import check_trained, head_of
from jaxpar.training.pipeline.stage_functions import before_of, check_rows, columns, given_of, program_of, side_weights
from jaxpar.training.pipeline.transfer import ModelSplit, StageTransfer, row_axes
from jaxpar.training.state import TrainState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "variables", "key", "loss_scale", "flight"],
    meta_fields=["metadata"],
)
@dataclass(frozen=True)
class InFlight(TrainState):
    """A :class:`jaxpar.TrainState` between two calls of an asynchronous pipeline: an ordinary pytree of arrays, to be saved and gone on with.

    Attributes:
      flight: of ``pipedream_2bw`` a dict of ``pending`` (int32: whether a batch is on its way), ``batch``, ``previous`` (the weights that it is computed
        with; ``params`` are newer), ``aboard`` (see :meth:`jaxpar.parallel.pipeline.executor.async_runner.AsyncRunner.aboard`) and ``layers``, whose one name says how many layers each
        stage has: what is on its way lies by them. ``pipedream`` has ``versions`` in the place of
        ``previous``: those that microbatches on their way were forwarded with, [ring, ...]; ``late``, gradients of tied parameters that wait for the first
        stage's part, [stages, ...]; and its ``opt_state`` is a dict of ``before``, ``layers`` [stages, layers of the largest, ...] and ``after``.
    """

    flight: Any = None

    @property
    def landed(self) -> TrainState:
        """The state without what is on its way."""
        return TrainState(**{field.name: getattr(self, field.name) for field in fields(TrainState)})


@dataclass(frozen=True)
class Call:
    """One call of a 2BW pipeline on a state: how its parts fit.

    Attributes:
      window: its ticks.
      state: whose parameters the call's own batch is computed with.
      previous: those of the batch before.
      counts: [stages, 1], how many layers stages have, where their stack is filled up to the largest; ``None``: as ``asked`` says.
    """

    layout: Layout
    loss_fn: Any
    how: StepConfig
    asked: Asynchronous
    window: AsyncSchedule
    state: TrainState
    previous: Any
    counts: np.ndarray | None = None

    def prepared(self, batch: Any) -> Any:
        """A batch as layers and loss want it.

        Raises:
          ConfigError, LayoutError, ModelError: what a pipeline cannot do, or a batch that does not make its microbatches.
        """
        check_trained(self.layout, self.loss_fn, self.state, self.how, self.asked)
        if self.loss_fn.keys:
            raise ConfigError(
                f"asynchronous pipeline: layers draw random numbers (keys=True), but {self.asked.name!r} hands on no keys with what is on its way. Remedy: "
                f"layers that draw none, or the schedule '1f1b'."
            )
        batch = self.loss_fn.prepare(
            self.split.model(jax.tree.map(self.how.precision.computing, self.state.params)), batch
        )
        check_rows(self.layout, batch, self.window.batch)
        return batch

    @functools.cached_property
    def split(self) -> ModelSplit:
        return ModelSplit(self.state, self.loss_fn)

    @functools.cached_property
    def board(self) -> StageTransfer:
        return StageTransfer.of(self.layout, self.split, self.state, self.how.precision, self.asked)

    @property
    def sizes(self) -> str:
        """How many layers each stage has, as ``3-2-1``."""
        return "-".join(map(str, self.board.layers.each))

    def before(self, params: Any, batch: Any, numbers: Any = None) -> tuple[jax.Array, Any]:
        """What the first layer is given, and the way back to gradients of what is not of the layers; ``numbers`` of rows, if not all are there."""
        others = jax.tree.map(self.how.precision.computing, self.split.others(params))

        def f(others: Any) -> jax.Array:
            with batch_rows(numbers):
                x = before_of(self.loss_fn, self.split, others, batch)
            return columns(self.layout, x, self.loss_fn.dims)

        found: tuple[jax.Array, Any] = jax.vjp(f, others)
        return found

    def ticks(self, before: Any, batch: Any, x: jax.Array) -> tuple[AsyncRunner, jax.Array]:
        """The ticks, for prepared batches, and the own one's inputs as they want them."""
        split, count = self.split, self.window.batch
        new, (pieces, fed) = self.board.enter(self.state.params, given_of(batch), x, count)
        old, (pieces_before, _) = self.board.enter(self.previous, given_of(before), x, count)
        numbers = jnp.broadcast_to(jnp.arange(2 * count, dtype=jnp.int32) // count, (fed.shape[0], 2 * count))
        after = jax.tree.map(lambda a, b: jnp.stack([a, b]), split.others(old), split.others(new))
        program = numbered(self.program(head_of(self.loss_fn, split, None)))
        weights = beside(split.stack(old), split.stack(new), 1)
        numbered_pieces = {"batch": numbers, "of": beside(pieces_before, pieces, 1)}
        grows = fed.shape[-1] % self.window.stages == 0
        read = side_weights(self.loss_fn, split, self.board, after, pieces[0])
        return AsyncRunner(program, weights, after, numbered_pieces, grows, read), fed

    def program(self, head: Head) -> PipelineProgram:
        """What stages and head do; both chunks of a stage are its layers."""
        counts = self.board.layers.counts if self.counts is None else self.counts
        return program_of(
            self.layout,
            self.loss_fn,
            self.split,
            self.board,
            schedule=self.window,
            head=head,
            activation_checkpointing=self.asked.activation_checkpointing,
            reduce=self.board.of_one_layer if self.board.each else None,
            counts=None if counts is None else counts.repeat(2, axis=1),
            starts=None,
        )

    def put(self, x: jax.Array, *spec: Any) -> jax.Array:
        return lay_out(self.layout.mesh, x, PartitionSpec(*spec))

    def put_stashes(self, aboard: dict[str, Any]) -> dict[str, Any]:
        """What stages keep and send, each array where the next call wants it."""
        axes, manual, dims = self.board.axes or None, (AXIS, *self.board.axes), self.loss_fn.dims or ()

        def one(x: jax.Array) -> jax.Array:
            lead = x.ndim - len(dims) - 2
            rest = split_over(self.layout, dims, "activations", x.shape[2 + lead :], manual)
            return self.put(x, AXIS, axes, *(None,) * lead, *rest)

        # Residuals have no names, so where layers keep split what they keep, it is gathered here.
        kept = {"res": [self.put(x, AXIS, axes) for x in aboard["res"]]} if "res" in aboard else {}
        return {"act": one(aboard["act"]), "sent": one(aboard["sent"]), **kept}

    def put_batch(self, batch: Any) -> Any:
        return jax.tree.map(lambda x: self.put(x, *row_axes(self.layout, x)), batch)

    def put_params(self, params: Any, *lead: Any) -> Any:
        """Parameters, or several versions of them, where parameters lie."""
        names = dict(self.state.metadata.dims)

        def one(keys: Any, w: jax.Array) -> jax.Array:
            shape = w.shape[len(lead) :]
            dims = names.get(("params", *to_path(keys)), (None,) * len(shape))
            return self.put(w, *lead, *split_over(self.layout, dims, "params", shape, ()))

        return jax.tree_util.tree_map_with_path(one, params)

    def placed(self, flight: dict[str, Any]) -> dict[str, Any]:
        """What is on its way, each array where the next call wants it."""
        axes, layout, split = self.board.axes or None, self.layout, self.split
        aboard, names = flight["aboard"], dict(self.state.metadata.dims)
        manual = (AXIS, *self.board.axes)

        def of_layer(keys: Any, x: jax.Array) -> jax.Array:
            dims = names.get(("params", *split.path, *to_path(keys)), ())[1:]
            return self.put(x, AXIS, axes, None, None, *split_over(layout, dims, "gradients", x.shape[4:], manual))

        def of_other(keys: Any, x: jax.Array) -> jax.Array:
            dims = names.get(("params", *to_path(keys)), ())
            return self.put(x, axes, *split_over(layout, dims, "gradients", x.shape[1:], self.board.axes))

        last = AXIS if aboard["x"].shape[-1] % self.window.stages == 0 else None
        found = {
            **self.put_stashes(aboard),
            "grads": jax.tree_util.tree_map_with_path(of_layer, aboard["grads"]),
            "weight": self.put(aboard["weight"], axes),
            "after": jax.tree_util.tree_map_with_path(of_other, aboard["after"]),
            "x": self.put(aboard["x"], axes, *(None,) * (aboard["x"].ndim - 2), last),
        }
        return {
            "pending": self.put(flight["pending"]),
            "layers": jax.tree.map(self.put, flight["layers"]),
            "batch": self.put_batch(flight["batch"]),
            "previous": self.put_params(flight["previous"]),
            "aboard": found,
        }


def split_over(layout: Layout, dims: Any, role: str, shape: tuple[int, ...], manual: Axes) -> list[Axes | None]:
    """The axes of a tensor's dims, without those that are split elsewhere."""
    resolved = layout.resolve(dims, shape if len(dims) == len(shape) else None, role=role)
    return [tuple(axis for axis in dim if axis not in manual) or None for dim in resolved.axes]


@numbering
def start(
    layout: Layout, loss_fn: Any, state: TrainState, batch: Any, how: StepConfig, asked: Asynchronous
) -> InFlight:
    """A state with room for what will be on its way, and nothing there yet."""
    nothing = jax.tree.map(jnp.zeros_like, state.params)
    call = Call(layout, loss_fn, how, asked, asked.schedule, state, nothing)
    batch = call.prepared(batch)
    x, _ = call.before(state.params, batch)
    ticks, fed = call.ticks(batch, batch, x)
    aboard = ticks.aboard(jnp.concatenate([fed, fed], 1))
    batch = jax.tree.map(jnp.zeros_like, batch)
    none = jnp.zeros((), jnp.int32)
    flight = {"pending": none, "batch": batch, "previous": nothing, "aboard": aboard, "layers": {call.sizes: none}}
    parts = {field.name: getattr(state, field.name) for field in fields(TrainState)}
    return InFlight(**parts, flight=call.placed(flight))


@numbering
def two_versions(
    layout: Layout, loss_fn: Any, state: InFlight, batch: Any | None, how: StepConfig, asked: Asynchronous
) -> tuple[GradientResult, dict[str, Any]]:
    """What a call of ``pipedream_2bw`` gives: loss and metrics of the microbatches whose loss was made in it, gradients of the batch before, and
    what is on its way then.

    Args:
      batch: the call's own; ``None`` where only the one before is to be finished.
    """
    flight, full = state.flight, asked.schedule
    window = full if batch is not None else full.flush()
    call = Call(layout, loss_fn, how, asked, window, state, flight["previous"])
    own = flight["batch"] if batch is None else call.prepared(batch)
    _, back = call.before(flight["previous"], flight["batch"])
    x, _ = call.before(state.params, own)
    ticks, fed = call.ticks(flight["batch"], own, x)
    have = jnp.stack([flight["pending"], jnp.asarray(batch is not None, jnp.int32)])
    # The window begins where the batch of the call before began.
    turn = (state.step - 1) % (full.delay + 1) * window.batch
    done, aboard = ticks.run(flight["aboard"], fed, have, turn)

    split = call.split
    grads = split.join(done["grads"], done["after"])
    (sums, seen), weight, grads, x = call.board.leave(grads, (done["sums"], done["seen"]), done["weight"], done["x"])
    (grads_before,) = back(x)
    grads = split.add(grads, jax.tree.map(wide, grads_before))
    grads = jax.tree.map(lambda g: jnp.where(flight["pending"] == 1, g, 0), grads)
    loss, metrics, _ = means_of((*sums, {}), seen)
    _, _, grads = means_of((jnp.zeros(()), {}, grads), weight)
    found = GradientResult(loss, metrics, state.variables, unscaled(state, grads, None))
    going = {"pending": have[1], "batch": own, "previous": state.params, "aboard": aboard, "layers": flight["layers"]}
    return found, call.placed(going)
