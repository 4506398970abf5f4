"""Loss and gradients of a batch, in one pass or in microbatches.

By default the compiler reduces gradients where they arise, so a loop over microbatches reduces in every iteration.
``grad_reduction="per_step"`` makes the batch's axes manual instead. Each device then sums the gradients of its own rows
over all microbatches, and one reduction follows (a reduce-scatter where the gradient is sharded), in the dtype that
:class:`jaxpar.Precision` sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jaxpar.errors import ConfigError, LayoutError, allow_replication
from jaxpar.parallel.batch_rows import batch_rows, microbatch_rows, numbering, rows_of
from jaxpar.parallel.collectives.gather_reduce import batch_axes, gather, parts_of, precision_scope
from jaxpar.parallel.offload.host_weights import split, waiting
from jaxpar.parallel.offload.placement import on_host
from jaxpar.parallel.pipeline.staged_loss import PipelineLoss
from jaxpar.parallel.precision.fp8_matmul import PRODUCT
from jaxpar.parallel.precision.policy import FP8, INT8, Precision
from jaxpar.sharding.layout import Layout, manual_axes, to_spec, with_sharding
from jaxpar.sharding.resolve import Resolved, num_shards_over
from jaxpar.training import layer_gathers, microbatches
from jaxpar.training.exact_weights import computing, exact_by_path
from jaxpar.training.lora.state import frozen_params, is_adapted
from jaxpar.training.loss import LossFn, key_of, loss_of
from jaxpar.training.manual_gradients import manual_gradients, spec_of
from jaxpar.training.microbatches import GradientResult, StepConfig
from jaxpar.training.model import show, to_path
from jaxpar.training.model.parts import FROZEN
from jaxpar.training.pipeline.gradients import pipeline_gradients
from jaxpar.training.rounded_weights import with_rounded_weights
from jaxpar.training.state import TrainState, place
from jaxpar.utils.contexts import keep_gathered
from jaxpar.utils.jaxprs import has_checkpoint_name


@numbering
def gradients(layout: Layout, loss_fn: LossFn, state: TrainState, batch: Any, config: StepConfig) -> GradientResult:
    """Returns loss, metrics, carried variables and gradients of ``state``'s parameters on ``batch``.

    Args:
      layout: the ambient layout.
      loss_fn: as for :func:`jaxpar.train_step`.
      state: the state that the step received.
      batch: arrays ``[rows, ...]``.
      config: the step's arguments.

    Raises:
      ConfigError: ``config`` combines arguments that exclude each other.
      LayoutError: the batch's axes or the microbatches do not divide its rows, or the rules cannot place a tensor.
      ModelError: ``loss_fn`` returned something invalid.
    """
    state = with_rounded_weights(layout, state)
    with precision_scope(config.precision):
        if config.pipeline is not None:
            return pipeline_gradients(layout, loss_fn, state, batch, config, config.pipeline)
        hosted = _hosted(state, config)
        if hosted and is_adapted(state):
            # Gradients of adapters are small, so they are reduced where they arise: weights stay where they are.
            config = replace(config, grad_reduction=None, weight_gather="per_use")
        if early := layer_gathers.overlaps(layout, config):
            config = replace(config, grad_reduction="per_microbatch")
        own_choice = config.grad_reduction is None and config.grad_accum_steps > 1 and not hosted
        by_hand = own_choice and not _sharded(layout, state)
        once_a_step = config.grad_reduction == "per_step" or config.per_device_grads or by_hand
        sharded = (lambda x: x) if once_a_step or config.grad_accum_steps > 1 else (lambda x: rows_apart(layout, x))
        batch = sharded(batch)
        if isinstance(loss_fn, PipelineLoss) and loss_fn.keys:
            # Split the keys with the batch, so that a row draws the same numbers in any microbatch and on any device.
            batch, loss_fn = (batch, sharded(loss_fn.rows(batch, key_of(state)))), loss_fn.of_rows
        if once_a_step:
            _check_handed(layout, loss_fn, state, batch, config, ())
            return manual_gradients(layout, loss_fn, state, batch, config)
        _check_dtypes(config)
        _check_fusion(config)
        crossing = [
            ("gather", config.weight_gather == "per_use" and _sharded(layout, state)),
            ("reduce", bool(batch_axes(layout))),
        ]
        _check_handed(layout, loss_fn, state, batch, config, [name for name, does in crossing if does])
        with keep_gathered(early):
            return _by_compiler(layout, loss_fn, state, batch, config)


def _by_compiler(layout: Layout, loss_fn: LossFn, state: TrainState, batch: Any, config: StepConfig) -> GradientResult:
    """Returns gradients that the compiler reduces where they arise."""
    weights, precision = state.params, config.precision
    compute = lambda weights: computing(weights, state, precision)
    scale = microbatches.scale_of(state, precision)
    if config.weight_gather == "per_step":
        roles = (microbatches.resolved_tree(layout, state, weights, role) for role in ("params", "activations"))
        loss = loss_of(loss_fn, state, batch)
        exact = exact_by_path(loss, state, precision)
        leaves, structure = jax.tree.flatten(weights)
        by_layers = layer_gathers.gathered_in_layers(loss, weights) if keep_gathered.value else [False] * len(leaves)

        def whole(keys: Any, w: jax.Array, stored: Resolved, used: Resolved, in_layers: bool) -> jax.Array:
            if in_layers and stored.axes[0] == used.axes[0]:  # else each iteration would gather all layers
                return w
            return _whole(layout, w, stored, used, precision.for_weight(exact.get(to_path(keys), False)))

        by_layers = jax.tree.unflatten(structure, by_layers)
        weights = compute(jax.tree_util.tree_map_with_path(whole, weights, *roles, by_layers))
        compute = lambda weights: weights

    # Frozen weights are not carried from one microbatch to the next.
    frozen = {FROZEN: frozen_params(state)} if is_adapted(state) else {}
    without = lambda rest: {name: x for name, x in rest.items() if name != FROZEN} if frozen else rest
    with_frozen = lambda rest: {**rest, **frozen} if frozen else rest

    def run(weights: Any, rest: Any, batch: Any, n: Any) -> tuple[Any, Any]:
        here = state if n is None else microbatches.seen_by(state, with_frozen(rest), state.key, n)
        trained, merge = split(waiting(dict(state.metadata.dims), weights, layout))
        grad = microbatches.value_and_grad(lambda w: loss_of(loss_fn, here, batch)(compute(merge(w))), scale)
        rows = None if n is None else microbatch_rows(rows_of(batch), config.grad_accum_steps, n, num_shards=num_shards)
        with batch_rows(rows):
            (loss, (metrics, rest)), grads = grad(trained)
        return (loss, (metrics, without(rest))), place_gradients(layout, state, grads)

    axes = batch_axes(layout) if config.grad_accum_steps > 1 else ()
    num_shards = num_shards_over(axes, layout.sizes)
    if config.grad_accum_steps == 1:
        (loss, (metrics, rest)), grads = run(weights, without(state.variables), batch, None)
    else:
        pieces = microbatches.pieces_of(batch, config.grad_accum_steps, num_shards, 1)
        pieces = jax.tree.map(lambda x: with_sharding(layout.mesh, x, PartitionSpec(None, axes)), pieces)
        place = lambda grads: place_gradients(layout, state, grads)
        rest = without(state.variables)
        sums, weight, rest = microbatches.sums_of(run, weights, rest, pieces, config.grad_accum_steps, place)
        loss, metrics, grads = microbatches.means_of(sums, weight)
    return GradientResult(loss, metrics, with_frozen(rest), microbatches.unscaled(state, grads, scale))


def rows_apart(layout: Layout, batch: Any) -> Any:
    """Returns the batch with dim 0 (the rows) of each array sharded by the rule for ``batch``.

    jit replicates arrays without a sharding, such as NumPy's, so every device would compute all of their rows. Scalars
    stay replicated, and so do arrays with one row when another array has more, because all rows share them. On Explicit
    mesh axes arrays have their own sharding and stay unchanged.

    Raises:
      LayoutError: the axes do not divide the rows of some arrays, and the rules do not replicate such rows.
    """
    found = layout.resolve(("batch",))
    if found.problems or not found.axes[0] or AxisType.Explicit in layout.mesh.axis_types:
        return batch
    most = max((x.shape[0] for x in jax.tree.leaves(batch) if x.ndim), default=0)
    problems: dict[tuple[str, str], list[str]] = {}

    def rows(keys: Any, x: Any) -> Any:
        if not x.ndim or (x.shape[0] == 1 and most > 1):
            return x
        resolved = layout.resolve(("batch", *(None,) * (x.ndim - 1)), x.shape, dtype=x.dtype)
        first = resolved.dims[0]
        if resolved.problems:
            problems.setdefault((first.why, first.rule), []).append(
                f"{show(('batch', *to_path(keys)))} {list(x.shape)}"
            )
        if not first.axes:
            return x
        return with_sharding(layout.mesh, x, PartitionSpec(first.axes, *(PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)))

    placed = jax.tree_util.tree_map_with_path(rows, batch)
    if problems:
        raise LayoutError(
            [
                f"{', '.join(arrays)}: {why} (rule {rule}), so every device would compute all rows. Remedy: pad the "
                f"rows to a multiple and mask the padding out of the loss, drop the remainder, or let every device "
                f"compute all of them: {allow_replication('batch')}. "
                f"An array that all rows share has a first dim of 1."
                for (why, rule), arrays in problems.items()
            ]
        )
    return placed


def _hosted(state: TrainState, config: StepConfig) -> bool:
    """Whether weights are in host memory; raises if the step would gather all of them first."""
    if is_adapted(state):
        return any(map(on_host, jax.tree.leaves(frozen_params(state))))
    if not any(map(on_host, jax.tree.leaves(state.params))):
        return False
    for name in ("grad_reduction", "weight_gather"):
        if getattr(config, name) == "per_step":
            raise ConfigError(
                f"offload: parameters are in host memory and move to the device one layer at a time, but "
                f"{name}='per_step' (ZeRO stages 1 and 2) gathers all of them before the step. Remedy: use ZeRO stage "
                "3 or none, or keep parameters on the device."
            )
    return True


def _check_dtypes(config: StepConfig) -> None:
    """Raises if ``precision`` sets a wider dtype for gathers than for the compute, or a narrower one for reductions.

    The compiler gathers the weights after the cast to the compute dtype, and reduces the gradients in the dtype it
    computed.
    """
    precision, per_step = config.precision, "grad_reduction='per_step' (ZeRO stage 1)"
    computed, either = precision.compute or "float32", f"{per_step} or weight_gather='per_step' (stages 1 and 2)"
    by_compiler = [("reduce", "reduces gradients where they arise, in a dtype no narrower", per_step)]
    if config.weight_gather != "per_step":
        by_compiler.insert(0, ("gather", "gathers weights where they are used, in a dtype no wider", either))
    for name, what, remedy in by_compiler:
        value = getattr(precision, name)
        if value in (None, INT8, precision.compute) or (name == "reduce" and precision.compute is None):
            continue  # Precision.summing compares it with the model's own dtype
        if (jnp.promote_types(value, computed) == jnp.dtype(value)) is (name == "gather"):
            raise ConfigError(
                f"precision: {name} is {value}, but the compiler {what} than the compute dtype "
                f"({precision.compute or 'that of the model'}). Remedy: set {remedy}, or leave precision.{name} out."
            )


def _check_fusion(config: StepConfig) -> None:
    for name, value in vars(config.fusion).items():
        if isinstance(value, tuple):
            what = "gathers weights" if name == "gather" else "reduces gradients"
            raise ConfigError(
                f"fusion: {name} is {list(value)}, but here the compiler decides where it {what}. Remedy: set "
                f"grad_reduction='per_step' (ZeRO stage 1), or set fusion.{name} to a size or auto."
            )


def _check_handed(
    layout: Layout, loss_fn: LossFn, state: TrainState, batch: Any, config: StepConfig, crossing: Sequence[str]
) -> None:
    """Raises if ``precision`` sets a dtype that only ``sharded_dot`` uses, and the model never calls it."""
    precision = config.precision
    keys = [(name, getattr(precision, name)) for name in crossing]
    keys = [(name, dtype) for name, dtype in keys if dtype not in (None, precision.compute)]
    keys += [("matmul", FP8)] if precision.matmul == FP8 else []
    if keys and not has_checkpoint_name(jax.make_jaxpr(loss_of(loss_fn, state, batch))(state.params).jaxpr, PRODUCT):
        name, dtype = keys[0]
        raise ConfigError(
            f"precision: {name} is {dtype}, which applies only to weights passed to jaxpar.sharded_dot, and loss_fn "
            f"passes none. Remedy: use sharded_dot(x, (w, dims)) instead of x @ w, or leave precision.{name} out."
        )


def place_gradients(layout: Layout, state: TrainState, grads: Any) -> Any:
    """Constrains gradients to the rules of the role ``gradients``.

    Raises:
      LayoutError: the rules cannot place a gradient.
    """

    def one(grad: jax.Array, resolved: Resolved) -> jax.Array:
        if resolved.problems:
            raise LayoutError(resolved.problems)
        return with_sharding(layout.mesh, grad, to_spec(resolved))

    return jax.tree.map(one, grads, microbatches.resolved_tree(layout, state, grads, "gradients"))


def _sharded(layout: Layout, state: TrainState) -> bool:
    """Whether an axis of the batch also shards weights, so that a device holds only parts of them."""
    axes, weights = set(batch_axes(layout)), (tensor for tensor in place(layout, state) if tensor.is_weight)
    return any(axes.intersection(dim) for tensor in weights for dim in tensor.resolved.axes)


def _whole(layout: Layout, w: jax.Array, stored: Resolved, used: Resolved, precision: Precision) -> jax.Array:
    """Gathers a weight over the axes that shard its storage but not its use."""
    if used.problems:
        raise LayoutError(used.problems)
    if stored.axes != used.axes and precision.gather == INT8:
        return _whole_packed(layout, w, stored, used, precision)
    if stored.axes != used.axes:
        w = jax.lax.optimization_barrier(precision.crossing(w))
    return with_sharding(layout.mesh, w, to_spec(used))


def _whole_packed(layout: Layout, w: jax.Array, stored: Resolved, used: Resolved, precision: Precision) -> jax.Array:
    kept = {axis for dim in used.axes for axis in dim}
    axes = tuple(axis for dim in stored.axes for axis in dim if axis not in kept)
    parts, manual = parts_of(stored, axes), manual_axes(layout, axes)
    whole = jax.shard_map(
        lambda w: gather(w, parts, precision),
        in_specs=spec_of(parts),
        out_specs=PartitionSpec(),
        axis_names=manual,
        check_vma=False,  # JAX would take the gathered value to vary between devices
    )
    return with_sharding(layout.mesh, whole(w), to_spec(used))
