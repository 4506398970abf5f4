"""The parts of a :class:`jaxpar.pipeline.PipelineLoss` in the form that an executor calls them.

They see one microbatch's rows, and a model without its layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec

from jaxpar.errors import LayoutError, ModelError
from jaxpar.parallel.batch_rows import batch_rows, rows_of
from jaxpar.parallel.collectives.gather_reduce import at_least_fp32, batch_axes, seq_axes
from jaxpar.parallel.pipeline.executor.frozen import trained_part, with_trained
from jaxpar.parallel.pipeline.executor.layer_inputs import LayerInputs
from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.pipeline.executor.program import Embedding, PipelineProgram
from jaxpar.parallel.pipeline.executor.stage import StageLayer
from jaxpar.parallel.pipeline.executor.tick_context import TickContext
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.sharding.layout import Layout
from jaxpar.training.loss import Metrics, key_of, own_constraints_explained, unpack
from jaxpar.training.microbatches import check_rows_divide, weight_of
from jaxpar.training.model import Path, leaves_with_paths, show, to_path
from jaxpar.training.pipeline.adapters import run_adapted
from jaxpar.training.pipeline.model_split import ModelSplit
from jaxpar.training.pipeline.transfer import StageTransfer, row_axes


class Given(NamedTuple):
    """The values that an executor splits into microbatches.

    Attributes:
      batch: arrays ``[rows, ...]``.
      keys: ``[rows]``, the PRNG key of each row; ``None`` if layers draw no random numbers.
      numbers: int32 ``[rows]``, each row's place in the whole batch; ``None`` for a batch that is not split.
    """

    batch: Any
    keys: Any = None
    numbers: Any = None


def given_of(batch: Any, keys: Any = None) -> Given:
    """Returns a whole batch with its rows' numbers, before it is split."""
    rows = rows_of(batch)
    return Given(batch, keys, None if rows is None else jnp.arange(rows, dtype=jnp.int32))


def context_of(
    transfer: StageTransfer, schedule: Schedule, batch: Any, x: jax.Array | None, **fields: Any
) -> tuple[TickContext, Any]:
    """Returns the program with these ``fields`` on a prepared batch, and the first layer's input ``x`` in the ticks."""
    split, state = transfer.split, transfer.split.state
    given = given_of(batch, split.loss_fn.rows(batch, key_of(state)))
    program = program_of(transfer, schedule=schedule, **fields)
    params, beside = state.params, program.first_ticks > 0
    params = transfer.with_stage_shards(params) if beside else params
    weights, (pieces, fed) = transfer.scatter_to_stages(params, given, x, schedule.microbatches, shards=beside)
    others, shards = split.others(weights), split.stack(params) if beside else None
    read = layer_input_weights(transfer, others, pieces.batch)
    return TickContext.of(program, fed, split.stack(weights), others, pieces, read, shards), fed


def program_of(transfer: StageTransfer, **fields: Any) -> PipelineProgram:
    """Returns the program that the stages execute, with the loss's layers placed by ``transfer``.

    ``fields`` are the program's other fields, or overrides of these.
    """
    layers, split = transfer.layers, transfer.split
    defaults: dict[str, Any] = {
        "layer": layer_of(split),
        "side": layer_inputs_of(transfer),
        "dims": split.loss_fn.dims,
        "axes": transfer.axes,
        "counts": layers.counts,
        "starts": layers.starts,
        "weight_specs": transfer.weight_specs,
        "shard_specs": transfer.shard_specs,
        "gather_layer": transfer.gather_layer,
    }
    return PipelineProgram(**{**defaults, **fields})


def run_embed(split: ModelSplit, others: Any, batch: Any) -> jax.Array:
    """Returns the first layer's input."""
    return _call_part(split, "embed", lambda model: split.loss_fn.embed(model, batch), others)


def embedding_of(split: ModelSplit) -> Embedding:
    """Returns the first layer's input and its backward pass for one microbatch at a time, for use in the ticks."""

    def forward(weights: Any, piece: Given) -> jax.Array:
        with batch_rows(piece.numbers):
            return run_embed(split, weights, piece.batch)

    def grads(weights: Any, piece: Any, cotangent: jax.Array) -> Any:
        run = lambda trained: forward(with_trained(weights, trained), piece)
        _, pull = jax.vjp(run, trained_part(weights))
        (found,) = pull(cotangent)
        return split.constrained(jax.tree.map(at_least_fp32, found))

    return Embedding(forward, grads)


def layer_of(split: ModelSplit) -> StageLayer:
    """Returns the function that runs one layer with given weights."""

    def layer(weights: Any, x: jax.Array, side: LayerInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        one = lambda weights: split.loss_fn.one(split.block(weights), x, side.given, side.keys, side.layer)
        with batch_rows(side.numbers), own_constraints_explained():
            return run_adapted(one, weights, layer=True)

    return layer


def layer_inputs_of(transfer: StageTransfer) -> Callable[[Any, Sequence[jax.Array]], LayerInputs]:
    """Returns a function of a microbatch and :func:`layer_input_weights` that computes the layer inputs."""
    split = transfer.split

    def side(piece: Given, weights: Sequence[jax.Array]) -> LayerInputs:
        batch, keys, numbers = piece
        read, values = read_by_layer_inputs(split, batch), iter(weights)
        # Parameters that it does not read stay shapes, so that no tick receives them.
        value = lambda keys, shape: next(values) if to_path(keys) in read else shape
        others = jax.tree_util.tree_map_with_path(value, split.others(split.shapes))
        with batch_rows(numbers):
            given = _call_part(split, "layer_inputs", lambda model: split.loss_fn.layer_inputs(model, batch), others)
        if keys is not None:
            for axis in seq_axes(transfer.layout):
                keys = jax.vmap(jax.random.fold_in, (0, None))(keys, jax.lax.axis_index(axis))
        layer = jnp.zeros((), jnp.int32) if split.loss_fn.numbered else None
        return LayerInputs(given, keys, jnp.zeros((), jnp.float32), numbers, layer)

    return side


def read_by_layer_inputs(split: ModelSplit, batch: Any) -> frozenset[Path]:
    """Returns the paths of the parameters that ``PipelineLoss.layer_inputs`` reads; none are of the layers."""
    call = lambda model: split.loss_fn.layer_inputs(model, batch)
    return read_by(split, "layer_inputs", call, split.others(split.shapes))


def layer_input_weights(transfer: StageTransfer, weights: Any, pieces: Any) -> list[jax.Array]:
    """Returns the parameters that ``PipelineLoss.layer_inputs`` reads, replicated over the stages.

    They are replicated because each stage computes the layer inputs of its own microbatch.

    Args:
      transfer: the loss, its parameters and their transfer.
      weights: the parameters outside the layers, as the ticks use them; or several versions of them,
        ``[versions, ...]``.
      pieces: the batch alone, ``[devices, microbatches, rows, ...]``.
    """
    transfer.trace_piece(lambda piece: read_by_layer_inputs(transfer.split, piece), pieces)
    read = transfer.split.read["layer_inputs"]
    leaves = [w for path, w in leaves_with_paths(weights) if path in read]
    return transfer.on_all_stages(leaves) if leaves else []


def run_head(split: ModelSplit, weights: Any, y: jax.Array, piece: Given) -> tuple[jax.Array, Metrics, jax.Array]:
    """Returns loss, metrics and weight of a microbatch that has passed all layers.

    Raises:
      ModelError: ``head`` returned updates, or a metric that is not a scalar.
    """
    with batch_rows(piece.numbers):
        found = _call_part(split, "head", lambda model: split.loss_fn.head(model, y, piece.batch), weights)
    loss, metrics, updates = unpack(found)
    if updates is not None:
        raise ModelError(
            "PipelineLoss(head=...) returned a third value (updates), but a pipeline carries no variables. Remedy: "
            "return loss or (loss, aux)."
        )
    return loss, metrics, weight_of(metrics, "PipelineLoss(head=...)")


def read_by(split: ModelSplit, what: str, call: Callable[[Any], Any], others: Any) -> frozenset[Path]:
    """Returns the paths of the parameters that the result of ``call(model)`` depends on.

    Args:
      split: the parameters; caches the result.
      what: the name of this part of the loss, the key in the cache.
      call: calls this part of the loss.
      others: the parameters outside the layers.

    Raises:
      ModelError: the result depends on parameters of the layers.
    """
    if what not in split.read:

        def run(stack: Any, others: Any) -> list[jax.Array]:
            with own_constraints_explained():
                found = call(split.model(split.join(stack, others)))
            return [x for x in jax.tree.leaves(found) if isinstance(x, jax.Array)]

        shape = lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype)
        given = split.stack(split.shapes), jax.tree.map(shape, others)
        jaxpr = jax.make_jaxpr(run)(*given).jaxpr
        _, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        stack, rest = ([path for path, _ in leaves_with_paths(part)] for part in given)
        paths = [*((*split.path, *path) for path in stack), *rest]
        read = [path for path, is_used in zip(paths, used, strict=True) if is_used]
        if of_layers := read[: sum(used[: len(stack)])]:
            stack_path = "/".join(split.path)
            raise ModelError(
                f"PipelineLoss({what}=...) reads {listed(of_layers)}, but in a pipeline each stage has only the "
                "parameters of its own layers. Remedy: read them in PipelineLoss(layer=...), or keep them outside of "
                f"{stack_path!r}."
            )
        split.read[what] = frozenset(read)
    return split.read[what]


def listed(paths: Iterable[Path]) -> str:
    return ", ".join(sorted(show(("params", *path)) for path in paths))


def _call_part(split: ModelSplit, what: str, call: Callable[[Any], Any], others: Any) -> Any:
    """Returns ``call(model)`` for a model without its layers; ``call`` is a part of the loss.

    Raises:
      ModelError: it assigns to the model's variables; a pipeline carries none between microbatches.
    """
    read_by(split, what, call, others)

    def run(others: Any) -> Any:
        model, before = split.model_of(others), split.state.variables
        with own_constraints_explained():
            found = call(model)
        now = split.state.metadata.kind.carried(model, before, None)
        pairs = zip(leaves_with_paths(now), jax.tree.leaves(before), strict=True)
        changed = [show(("variables", *path)) for (path, new), old in pairs if new is not old]
        if changed:
            raise ModelError(
                f"PipelineLoss({what}=...) changed {', '.join(changed)}, but a pipeline carries no variables. Remedy: "
                "use a model that changes none; for random numbers in layers, set PipelineLoss(keys=True)."
            )
        return found

    # The layer inputs are not differentiated, and may be more than arrays.
    return run(others) if what == "layer_inputs" else run_adapted(run, others)


def check_rows(layout: Layout, batch: Any, microbatches: int) -> None:
    """Raises if an array's rows cannot be split into each device's microbatches, or its sequence over its axes.

    Raises:
      LayoutError: the arrays, with the numbers that do not divide.
    """
    num_shards = math.prod(layout.sizes[axis] for axis in batch_axes(layout))
    check_rows_divide(batch, microbatches, num_shards, "pipeline")
    for path, x in leaves_with_paths(batch):
        _, *seq = row_axes(layout, x)
        parts = math.prod(layout.sizes[axis] for axes in seq for axis in axes)
        if x.ndim > 1 and x.shape[1] % parts:
            raise LayoutError(
                f"{show(('batch', *path))} {list(x.shape)}: in a pipeline the rule for 'seq' shards the second "
                f"dim of the batch's arrays over {parts} devices, but {parts} does not divide {x.shape[1]}. Remedy: "
                f"use sequences whose length is a multiple of {parts}, or remove those axes from the rule for 'seq'."
            )


def embed_batch(layout: Layout, split: ModelSplit, others: Any, batch: Any) -> jax.Array:
    """Returns the first layer's input: its last dim sharded over the stages, the others by their names as in layers.

    Only the first stage needs the input in full, one microbatch at a time, and a whole batch is large.
    """
    x, dims, stages = run_embed(split, others, batch), split.loss_fn.dims, layout.sizes.get(AXIS, 1)
    if x.shape[-1] % stages:
        return x
    first = row_axes(layout, x) if dims is None else layout.resolve(dims, x.shape, dtype=x.dtype).axes[:-1]
    spec = PartitionSpec(*first, *(None,) * (x.ndim - 1 - len(first)), AXIS)
    return jax.lax.with_sharding_constraint(x, spec)
