"""Gradients summed per device: the batch's axes are manual, and one reduction follows all microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.errors import ConfigError, ModelError
from jaxpar.parallel.batch_rows import batch_rows, microbatch_rows, rows_of
from jaxpar.parallel.collectives.bucketing import CollectiveFusion, check_groups, in_groups
from jaxpar.parallel.collectives.gather_reduce import Parts, batch_axes, gather, parts_of, reduce
from jaxpar.parallel.precision.policy import STORED
from jaxpar.sharding.layout import Layout, current_layout, manual_axes
from jaxpar.sharding.names import LAYERS
from jaxpar.sharding.resolve import num_shards_over
from jaxpar.sharding.rules import Axes
from jaxpar.training import microbatches
from jaxpar.training.exact_weights import exact_by_path
from jaxpar.training.loss import LossFn, loss_of
from jaxpar.training.microbatches import GradientResult, StepConfig
from jaxpar.training.model import leaves_with_paths, show, to_path
from jaxpar.training.state import TrainState
from jaxpar.utils.arrays import at_least_fp32


def manual_gradients(
    layout: Layout, loss_fn: LossFn, state: TrainState, batch: Any, config: StepConfig
) -> GradientResult:
    """Returns gradients summed per device and reduced once, or not at all (``config.per_device_grads``).

    Args:
      layout: the ambient layout.
      loss_fn: as for :func:`jaxpar.train_step`.
      state: the state that the step received.
      batch: arrays ``[rows, ...]``.
      config: the step's arguments.

    Raises:
      ConfigError: ``config.fusion`` groups a kind of collective that does not occur.
      LayoutError: the devices and microbatches do not divide the batch's rows.
      ModelError: ``loss_fn`` changes carried float arrays, which would then differ between devices.
    """
    axes, precision, fusion = batch_axes(layout), config.precision, config.fusion
    scale = microbatches.scale_of(state, precision)
    num_shards = num_shards_over(axes, layout.sizes)
    exact = exact_by_path(loss_of(loss_fn, state, batch), state, precision)
    roles = (microbatches.resolved_tree(layout, state, state.params, role) for role in ("params", "gradients"))
    part = lambda keys, resolved: parts_of(resolved, axes, exact=exact.get(to_path(keys), False))
    stored, wanted = (jax.tree_util.tree_map_with_path(part, tree) for tree in roles)
    microbatches.pieces_of(batch, config.grad_accum_steps, num_shards, 1)  # only to raise with the global shapes
    index = lambda: jax.lax.axis_index(axes) if axes else 0  # of this device's part of the batch

    def local(params: Any, rest: Any, key: Any, step: Any, scale: Any, batch: Any) -> tuple[Any, jax.Array, Any]:
        weights = _cross(state, params, stored, fusion, ("gather",), lambda w, parts: gather(w, parts, precision))
        first = index() * config.grad_accum_steps

        def run(weights: Any, rest: Any, batch: Any, n: Any) -> Any:
            here = replace(microbatches.seen_by(state, rest, key, first + n), step=step)
            rows = microbatch_rows(rows_of(batch), config.grad_accum_steps, n, index=index)
            with batch_rows(rows):
                return microbatches.value_and_grad(loss_of(loss_fn, here, batch), scale)(weights)

        pieces = microbatches.pieces_of(batch, config.grad_accum_steps, 1, 0)
        _check_alike(run, weights, rest, jax.tree.map(lambda x: x[0], pieces))
        own = _own_keys(rest, index())
        (loss, metrics, grads), weight, own = microbatches.sums_of(run, weights, own, pieces, config.grad_accum_steps)
        rest = _first_keys(own, index(), axes)
        if config.per_device_grads:
            grads = jax.tree.map(lambda g: at_least_fp32(g)[None], grads)
        else:
            sums = lambda g, parts: reduce(g, parts, axes, precision)
            grads = _cross(state, grads, wanted, fusion, ("scatter", "reduce"), sums)
        loss, metrics, weight = jax.lax.psum((loss, metrics, weight), axes) if axes else (loss, metrics, weight)
        return (loss, metrics, grads), weight, rest

    arguments = (state.params, state.variables, state.key, state.step, scale, batch)
    if axes:
        specs = (spec_of(stored), *(PartitionSpec(),) * 4, PartitionSpec(axes))
        given = PartitionSpec(axes) if config.per_device_grads else spec_of(wanted)
        results = ((PartitionSpec(), PartitionSpec(), given), PartitionSpec(), PartitionSpec())
        # Unchecked: JAX would take the gathered values to vary between devices.
        # Axes of size 1 are manual too, so that no sharding over them remains.
        manual = manual_axes(layout, axes)
        local = jax.shard_map(local, in_specs=specs, out_specs=results, axis_names=manual, check_vma=False)
    sums, weight, rest = local(*arguments)
    loss, metrics, grads = microbatches.means_of(sums, weight)
    if config.per_device_grads:  # so that their mean, not their sum, is the gradient
        grads = jax.tree.map(lambda g: g * num_shards, grads)
    return GradientResult(loss, metrics, rest, microbatches.unscaled(state, grads, scale))


def _cross(
    state: TrainState,
    tree: Any,
    split: Any,
    fusion: CollectiveFusion,
    kinds: Sequence[str],
    cross: Callable[..., jax.Array],
) -> Any:
    """Applies ``cross(x, parts)`` to every tensor, or to groups of layers as ``fusion`` sets.

    ``kinds`` are keys of ``fusion``: ``reduce`` applies to the replicated tensors, the others to the sharded ones.
    """
    leaves, parts = jax.tree.leaves(tree), jax.tree.leaves(split)
    paths = [path for path, _ in leaves_with_paths(tree)]
    dims = dict(state.metadata.dims)
    layered = [dims.get(("params", *path), ())[:1] == (LAYERS,) for path in paths]
    found: dict[int, jax.Array] = {}
    for kind in kinds:
        # Experts that stay sharded cross the mesh by themselves, and so do weights that cross it exactly.
        apart = [bool(part.kept or part.exact == STORED or (part.exact and kind == "gather")) for part in parts]
        mine = [i for i, part in enumerate(parts) if any(part.dims) is not (kind == "reduce") and not apart[i]]
        if not isinstance(getattr(fusion, kind), tuple):
            continue
        if batch_axes(current_layout()) and not mine:
            what = {"gather": "gathered", "scatter": "scattered", "reduce": "summed unsharded"}[kind]
            raise ConfigError(
                f"fusion: {kind} is {list(getattr(fusion, kind))}, but nothing is {what} here. Remedy: leave "
                f"fusion.{kind} out."
            )
        if not mine:
            continue
        grouped = [i for i in range(len(parts)) if not apart[i]]
        names = [show(("params", *paths[i])) for i in grouped]
        check_groups(names, [parts[i] for i in grouped], [layered[i] for i in grouped])
        layers = max(x.shape[0] for x, has in zip(leaves, layered, strict=True) if has)
        crossed = in_groups(
            [leaves[i] for i in mine],
            [parts[i] for i in mine],
            [layered[i] for i in mine],
            fusion.groups(kind, layers) or [],
            lambda x, axes: cross(x, Parts((axes, (), ()))),
            gathers=kind == "gather",
        )
        found |= dict(zip(mine, crossed, strict=True))
    results = [found[i] if i in found else cross(leaves[i], parts[i]) for i in range(len(leaves))]
    return jax.tree.unflatten(jax.tree.structure(tree), results)


def spec_of(tree: Any) -> Any:
    return jax.tree.map(lambda parts: parts.spec, tree)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _own_keys(rest: Any, index: Any) -> Any:
    """Folds the device's index into carried PRNG keys (such as those of ``nnx.Rngs``), so that dropout differs.

    The first device keeps its keys, so that the step can carry them on (``_first_keys``).
    """

    def own(key: Any) -> Any:
        folded = jax.vmap(jax.random.fold_in, (0, None))(key.reshape(-1), index).reshape(key.shape)
        return jnp.where(index == 0, key, folded)

    return jax.tree.map(lambda x: own(x) if _is_key(x) else x, rest)


def _first_keys(rest: Any, index: Any, axes: Axes) -> Any:
    """Broadcasts the first device's carried PRNG keys to all devices."""

    def first(key: Any) -> Any:
        bits = jax.random.key_data(key)
        bits = jax.lax.psum(jnp.where(index == 0, bits, jnp.zeros_like(bits)), axes)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(key))

    return jax.tree.map(lambda x: first(x) if axes and _is_key(x) else x, rest)


def _check_alike(run: Callable[..., Any], weights: Any, rest: Any, batch: Any) -> None:
    """Raises if carried float arrays change: they would depend on a device's rows. Counters and keys may change."""
    leaves = leaves_with_paths(rest)
    if not leaves:
        return
    traced = jax.make_jaxpr(lambda rest: jax.tree.leaves(run(weights, rest, batch, 0)[0][1][1]))(rest)
    pairs = zip(leaves, traced.jaxpr.invars, traced.jaxpr.outvars, strict=True)
    changed = [
        show(("variables", *path)) for (path, x), i, o in pairs if o is not i and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    if changed:
        raise ModelError(
            f"loss_fn changes {', '.join(changed)}, but with grad_reduction='per_step' each device sees only its own "
            "rows, so the values would differ between devices. Remedy: set grad_reduction='per_microbatch' (jp.Zero: "
            "stage 2), which reduces in every microbatch."
        )
