"""The state with microbatches in flight, and one call of ``pipedream_2bw``.

``pipedream_2bw`` (Narayanan et al. 2021, arXiv:2006.09503): call t runs the forward pass of batch t with weights W_t.
Each microbatch's backward pass uses the same version, whether it runs in call t or in call t + 1. When a call returns,
the gradients of the previous batch are complete.
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
from jaxpar.parallel.collectives.gather_reduce import at_least_fp32
from jaxpar.parallel.pipeline.executor.async_runner import AsyncRunner, concat_batches, numbered
from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.pipeline.executor.program import Head, PipelineProgram
from jaxpar.parallel.pipeline.executor.tick_context import TickContext
from jaxpar.parallel.pipeline.options import Asynchronous
from jaxpar.parallel.pipeline.schedules.async_window import AsyncSchedule
from jaxpar.sharding.layout import Layout, with_sharding
from jaxpar.sharding.rules import Axes
from jaxpar.training.exact_weights import computing
from jaxpar.training.microbatches import GradientResult, StepConfig, means_of, unscaled
from jaxpar.training.model import to_path
from jaxpar.training.pipeline.gradients import check_trained, head_of
from jaxpar.training.pipeline.model_split import ModelSplit
from jaxpar.training.pipeline.stage_functions import check_rows, embed_batch, given_of, layer_input_weights, program_of
from jaxpar.training.pipeline.transfer import StageTransfer, row_axes
from jaxpar.training.state import TrainState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "variables", "key", "loss_scale", "flight"],
    meta_fields=["metadata"],
)
@dataclass(frozen=True)
class InFlight(TrainState):
    """A :class:`jaxpar.TrainState` between two calls, with the microbatches in flight; an ordinary pytree.

    Attributes:
      flight: with ``pipedream_2bw``, a dict of ``pending`` (int32: whether a batch is in flight); ``batch``;
        ``previous`` (the weights that the batch is computed with; ``params`` are newer); ``in_flight`` (see
        :meth:`jaxpar.parallel.pipeline.executor.async_runner.AsyncRunner.nothing_in_flight`); and ``layers``, whose
        only key gives the number of layers of each stage, because the arrays in flight depend on it. With
        ``pipedream``, ``previous`` is replaced by ``versions``, the weights of the forward passes in flight,
        ``[ring, ...]``, and by ``late``, gradients of tied parameters that are pending until the first stage adds its
        part, ``[stages, ...]``. Its ``opt_state`` is a dict of ``before``, ``layers``
        ``[stages, layers of the largest stage, ...]`` and ``after``.
    """

    flight: Any = None

    @property
    def landed(self) -> TrainState:
        """The state without the microbatches in flight."""
        return TrainState(**{field.name: getattr(self, field.name) for field in fields(TrainState)})


@dataclass(frozen=True)
class InFlightCall:
    """One call of an asynchronous pipeline on a state.

    Attributes:
      layout: the ambient layout.
      loss_fn: the :class:`jaxpar.pipeline.PipelineLoss`.
      config: the step's arguments.
      options: the pipeline's options.
      window: the schedule of the call's ticks.
      state: holds the parameters that the call's own batch is computed with.
      counts: ``[stages, 1]``, the number of layers of each stage, if the stacks are padded to the largest stage;
        ``None``: as ``options`` says.
    """

    layout: Layout
    loss_fn: Any
    config: StepConfig
    options: Asynchronous
    window: AsyncSchedule
    state: TrainState
    counts: np.ndarray | None = None

    def prepared(self, batch: Any) -> Any:
        """Returns a batch in the form that layers and loss take, after all checks.

        Raises:
          ConfigError, LayoutError, ModelError: something that a pipeline does not support, or a batch that cannot be
            split into its microbatches.
        """
        check_trained(self.layout, self.loss_fn, self.state, self.config, self.options)
        if self.loss_fn.keys:
            raise ConfigError(
                f"asynchronous pipeline: layers draw random numbers (keys=True), but {self.options.name!r} does not "
                "keep the keys of the microbatches in flight. Remedy: use layers that draw none, or the schedule "
                "'1f1b'."
            )
        batch = self.split.prepare(self.state.params, batch, self.config.precision)
        check_rows(self.layout, batch, self.window.batch)
        return batch

    def of_batch(self, batch: Any | None) -> tuple[Any, jax.Array]:
        """Returns the call's own batch, prepared (without one, the batch in flight), and which batches exist [2]."""
        state: Any = self.state
        exists = jnp.stack([state.flight["pending"], jnp.asarray(batch is not None, jnp.int32)])
        return state.flight["batch"] if batch is None else self.prepared(batch), exists

    @functools.cached_property
    def split(self) -> ModelSplit:
        return ModelSplit(self.state, self.loss_fn)

    @functools.cached_property
    def transfer(self) -> StageTransfer:
        batch = getattr(self.state, "flight", {}).get("batch")  # before the first call only shapes are computed
        return StageTransfer.of(self.layout, self.split, self.config.precision, self.options, batch)

    @property
    def sizes(self) -> str:
        """The number of layers of each stage, such as ``3-2-1``."""
        return "-".join(map(str, self.transfer.layers.each))

    def before(self, params: Any, batch: Any, numbers: Any = None) -> tuple[jax.Array, Any]:
        """Returns the first layer's input, and the VJP from its cotangent to the parameters outside the layers.

        Args:
          params: the parameters.
          batch: arrays ``[rows, ...]``.
          numbers: int32 ``[rows]``, the places of the rows in the batch, if ``batch`` holds only some of them.
        """
        others = computing(self.split.others(params), self.state, self.config.precision)

        def f(others: Any) -> jax.Array:
            with batch_rows(numbers):
                return embed_batch(self.layout, self.split, others, batch)

        return jax.vjp(f, others)

    def ticks(self, previous: Any, before: Any, batch: Any) -> tuple[AsyncRunner, jax.Array]:
        """Returns the runner of the call's ticks for two prepared batches, and its input from the own batch.

        ``previous`` are the parameters that the batch ``before`` is computed with.
        """
        split, count = self.split, self.window.batch
        x, _ = self.before(self.state.params, batch)
        new, (pieces, fed) = self.transfer.scatter_to_stages(self.state.params, given_of(batch), x, count)
        old, (pieces_before, _) = self.transfer.scatter_to_stages(previous, given_of(before), x, count)
        numbers = jnp.broadcast_to(jnp.arange(2 * count, dtype=jnp.int32) // count, (fed.shape[0], 2 * count))
        others = jax.tree.map(lambda a, b: jnp.stack([a, b]), split.others(old), split.others(new))
        program = numbered(self.program(head_of(split, None)))
        weights = concat_batches(split.stack(old), split.stack(new), 1)
        numbered_pieces = {"batch": numbers, "of": concat_batches(pieces_before, pieces, 1)}
        read = layer_input_weights(self.transfer, others, pieces[0])
        return AsyncRunner(TickContext.of(program, fed, weights, others, numbered_pieces, read)), fed

    def program(self, head: Head) -> PipelineProgram:
        """Returns the program of stages and head; both chunks of a stage are the same layers."""
        counts = self.transfer.layers.counts if self.counts is None else self.counts
        return program_of(
            self.transfer,
            schedule=self.window,
            head=head,
            activation_checkpointing=self.options.activation_checkpointing,
            reduce=self.transfer.of_one_layer if self.transfer.scattered else None,
            counts=None if counts is None else counts.repeat(2, axis=1),
            starts=None,
        )

    def put(self, x: jax.Array, *spec: Any) -> jax.Array:
        return with_sharding(self.layout.mesh, x, PartitionSpec(*spec))

    def put_stashes(self, in_flight: dict[str, Any]) -> dict[str, Any]:
        """Constrains what the stages keep and send to the sharding that the next call takes."""
        axes, manual, dims = self.transfer.axes or None, (AXIS, *self.transfer.axes), self.loss_fn.dims or ()

        def one(x: jax.Array) -> jax.Array:
            lead = x.ndim - len(dims) - 2
            rest = split_over(self.layout, dims, "activations", x.shape[2 + lead :], manual)
            return self.put(x, AXIS, axes, *(None,) * lead, *rest)

        # Residuals have no logical dims, so any that the layers keep sharded are gathered here.
        kept = {name: [self.put(x, AXIS, axes) for x in in_flight[name]] for name in in_flight if name == "residuals"}
        return {"activations": one(in_flight["activations"]), "sent": one(in_flight["sent"]), **kept}

    def put_batch(self, flight: dict[str, Any]) -> dict[str, Any]:
        """Constrains the batch in flight, and what is known about it, to the sharding that the next call takes."""
        return {
            "pending": self.put(flight["pending"]),
            "layers": jax.tree.map(self.put, flight["layers"]),
            "batch": jax.tree.map(lambda x: self.put(x, *row_axes(self.layout, x)), flight["batch"]),
        }

    def put_params(self, params: Any, *lead: Any, role: str = "params") -> Any:
        """Constrains parameters, or several versions of them, or gradients, to the sharding of this role."""
        names = dict(self.state.metadata.dims)

        def one(keys: Any, w: jax.Array) -> jax.Array:
            shape = w.shape[len(lead) :]
            dims = names.get(("params", *to_path(keys)), (None,) * len(shape))
            return self.put(w, *lead, *split_over(self.layout, dims, role, shape, ()))

        return jax.tree_util.tree_map_with_path(one, params)

    def placed(self, flight: dict[str, Any]) -> dict[str, Any]:
        """Constrains everything in flight to the sharding that the next call takes."""
        axes, layout, split = self.transfer.axes or None, self.layout, self.split
        in_flight, names = flight["in_flight"], dict(self.state.metadata.dims)
        manual = (AXIS, *self.transfer.axes)

        def of_layer(keys: Any, x: jax.Array) -> jax.Array:
            dims = names.get(("params", *split.path, *to_path(keys)), ())[1:]
            return self.put(x, AXIS, axes, None, None, *split_over(layout, dims, "gradients", x.shape[4:], manual))

        def of_other(keys: Any, x: jax.Array) -> jax.Array:
            dims = names.get(("params", *to_path(keys)), ())
            return self.put(x, axes, *split_over(layout, dims, "gradients", x.shape[1:], self.transfer.axes))

        x = in_flight["x"]
        last = AXIS if x.shape[-1] % self.window.stages == 0 else None
        found = {
            **self.put_stashes(in_flight),
            "grads": jax.tree_util.tree_map_with_path(of_layer, in_flight["grads"]),
            "weight": self.put(in_flight["weight"], axes),
            "non_layer_grads": jax.tree_util.tree_map_with_path(of_other, in_flight["non_layer_grads"]),
            "x": self.put(x, axes, *(None,) * (x.ndim - 2), last),
        }
        return {**self.put_batch(flight), "previous": self.put_params(flight["previous"]), "in_flight": found}


def split_over(layout: Layout, dims: Any, role: str, shape: tuple[int, ...], manual: Axes) -> list[Axes | None]:
    """Returns the mesh axes of a tensor's dims, without the manual axes."""
    resolved = layout.resolve(dims, shape if len(dims) == len(shape) else None, role=role)
    return [tuple(axis for axis in dim if axis not in manual) or None for dim in resolved.axes]


@numbering
def start(call: InFlightCall, batch: Any) -> InFlight:
    """Returns the call's state with empty buffers for the microbatches in flight.

    Args:
      call: a call on a state as :func:`jaxpar.init` returns it.
      batch: a batch with the shapes and dtypes of those to come.
    """
    state = call.state
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    batch = call.prepared(batch)
    ticks, fed = call.ticks(zeros, batch, batch)
    nothing_yet = ticks.nothing_in_flight(jnp.concatenate([fed, fed], 1))
    batch = jax.tree.map(jnp.zeros_like, batch)
    none = jnp.zeros((), jnp.int32)
    flight = {"pending": none, "batch": batch, "previous": zeros, "in_flight": nothing_yet}
    flight = call.placed({**flight, "layers": {call.sizes: none}})
    return InFlight(**{**vars(state), "flight": flight})


@numbering
def two_versions(call: InFlightCall, batch: Any | None) -> tuple[GradientResult, dict[str, Any]]:
    """Runs one call of ``pipedream_2bw``.

    Args:
      call: a call on the state that :func:`start` or the previous call returned.
      batch: the call's own batch; ``None`` to finish the previous one only.

    Returns:
      Loss and metrics of the microbatches whose loss this call computed, with the gradients of the previous batch; and
      the new ``flight``.
    """
    state: Any = call.state
    flight, own, exists = state.flight, *call.of_batch(batch)
    _, back = call.before(flight["previous"], flight["batch"])
    ticks, fed = call.ticks(flight["previous"], flight["batch"], own)
    # The window begins where the previous call's batch began.
    rotation = (state.step - 1) % (call.options.schedule.delay + 1) * call.window.batch
    done, in_flight = ticks.run(flight["in_flight"], fed, exists, rotation)

    split = call.split
    grads = split.join(done["grads"], done["non_layer_grads"])
    (sums, seen), weight, grads, x = call.transfer.gather_from_stages(
        grads, (done["sums"], done["seen"]), done["weight"], done["x"]
    )
    (embed_grads,) = back(x)
    grads = split.add(grads, jax.tree.map(at_least_fp32, embed_grads))
    grads = jax.tree.map(lambda g: jnp.where(flight["pending"] == 1, g, 0), grads)
    loss, metrics, _ = means_of((*sums, {}), seen)
    _, _, grads = means_of((jnp.zeros(()), {}, grads), weight)
    found = GradientResult(loss, metrics, state.variables, unscaled(state, grads, None))
    going = {"pending": exists[1], "batch": own, "previous": state.params, "in_flight": in_flight}
    return found, call.placed({**going, "layers": flight["layers"]})
