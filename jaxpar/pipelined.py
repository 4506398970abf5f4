"""Loss and gradients of a batch by a pipeline: the layers over its stages, what comes before and after them over all devices.

The axes of the batch and of the sequence are manual, as for ``reduce="once"``: weights are gathered once a step, every device sums its own gradients over
all microbatches, and one reduction follows. What comes before the layers runs once for the whole batch, outside of the ticks; what comes
after them, for each microbatch on all stages at once, so that rules may split its weights over ``pipeline`` (``vocab: [pipeline, model]``).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxpar.crossing import batch_axes, gather, parts_of, reduce, wide
from jaxpar.errors import ConfigError, LayoutError, ModelError
from jaxpar.host import on_host
from jaxpar.layout import Layout
from jaxpar.microbatches import Found, How, each_parameter, means_of, pieces_of, resolved_of, scale_of, unscaled
from jaxpar.model import show, to_path
from jaxpar.objective import unpack
from jaxpar.ownsums import spec_of
from jaxpar.pipeline.asked import Pipeline
from jaxpar.pipeline.executor import AXIS, Head, Program
from jaxpar.rules import Axes
from jaxpar.schedules.schedule import Schedule
from jaxpar.staged import Staged, stacked_part
from jaxpar.state import TrainState


def piped(layout: Layout, loss_fn: Any, state: TrainState, batch: Any, how: How, asked: Pipeline) -> Found:
    """Loss, metrics and gradients of ``state``'s parameters on ``batch``, as :func:`jaxpar.gradients.gradients` gives them."""
    _check(layout, loss_fn, state, how, asked)
    axes = (*batch_axes(layout), *_seq_axes(layout))
    schedule, precision, scale = asked.schedule, how.precision, scale_of(state, how.precision)
    split = _Split(state, loss_fn)
    batch = loss_fn.prepare(split.model(state.params), batch)
    ways = math.prod(layout.sizes[axis] for axis in batch_axes(layout))
    _check_rows(batch, schedule.microbatches, ways)

    others = jax.tree.map(precision.computing, split.others(state.params))
    before = lambda others: _columns(layout, loss_fn, loss_fn.before(split.model_of(others), batch))
    x, pull = jax.vjp(before, others)

    stored = each_parameter(state, lambda path, w: parts_of(resolved_of(layout, state, path, w, "params"), axes))
    wanted = each_parameter(state, lambda path, w: parts_of(resolved_of(layout, state, path, w, "gradients"), axes))
    placed = _Layers(split, schedule, asked.layers)
    manual = {*axes, *(axis for axis, size in layout.sizes.items() if size == 1)} - {AXIS}
    rows, own = (lambda x: PartitionSpec(*_row_axes(layout, x))), PartitionSpec(axes or None)

    def enter(params: Any, batch: Any, x: jax.Array) -> Any:
        weights = jax.tree.map(lambda w, parts: gather(w, parts, precision), params, stored)
        return weights, jax.tree.map(lambda x: x[None], pieces_of((batch, x), schedule.microbatches, 1, 0))

    def leave(grads: Any, sums: Any, weight: jax.Array, x: jax.Array) -> Any:
        grads, sums, weight, x = jax.tree.map(lambda x: x[0], (grads, sums, weight, x))
        grads = jax.tree.map(lambda g, parts: reduce(g, parts, axes, precision), grads, wanted)
        sums, weight = jax.lax.psum((sums, weight), axes) if axes else (sums, weight)
        return sums, weight, grads, x.reshape(-1, *x.shape[2:])

    if manual:
        inside = functools.partial(jax.shard_map, axis_names=manual, check_vma=False)
        ins = (spec_of(stored), jax.tree.map(rows, batch), rows(x))
        enter = inside(enter, in_specs=ins, out_specs=(PartitionSpec(), own))
        results = (PartitionSpec(), PartitionSpec(), spec_of(wanted), rows(x))
        leave = inside(leave, in_specs=own, out_specs=results)
    weights, (pieces, x) = enter(state.params, batch, x)
    layer = lambda w, x, side: loss_fn.layer(split.block(w), x, side)
    side = lambda piece: loss_fn.side(split.model_of(split.others(split.shapes)), piece)
    program = Program(
        schedule, layer, side, _head(loss_fn, split, scale), axes, asked.keeps, placed.counts, loss_fn.dims
    )
    grads, (sums, weight, grads_after), x = program.run(
        placed.cut(split.stack(weights)), split.others(weights), x, pieces
    )
    sums, weight, grads, x = leave(split.join(placed.back(grads), grads_after), sums, weight, x)
    (grads_before,) = pull(x)
    grads = split.add(grads, jax.tree.map(wide, grads_before))
    loss, metrics, grads = means_of((*sums, grads), weight)
    return Found(loss, metrics, state.rest, unscaled(state, grads, scale))


def _check(layout: Layout, loss_fn: Any, state: TrainState, how: How, asked: Pipeline) -> None:
    """What a pipeline cannot do."""
    if not isinstance(loss_fn, Staged):
        raise ConfigError(
            f"pipeline: loss_fn is {getattr(loss_fn, '__name__', type(loss_fn).__name__)!r}, which does not say what the layers are. Remedy: "
            f"jaxpar.Staged(layers=..., before=..., layer=..., after=...), which names the stack and what comes before and after it."
        )
    stages = layout.sizes.get(AXIS, 1)
    if asked.schedule.stages != stages:
        raise ConfigError(
            f"pipeline: the schedule {asked.schedule.name!r} has {asked.schedule.stages} stages, but the mesh's axis {AXIS!r} has {stages} "
            f"devices. Remedy: stages={stages}, or mesh {{{AXIS}: {asked.schedule.stages}}}."
        )
    if asked.schedule.forward_only:
        raise ConfigError(
            f"pipeline: the schedule {asked.schedule.name!r} has no backwards, so nothing can be trained. Remedy: '1f1b'."
        )
    if how.accumulate != 1:
        raise ConfigError(
            f"pipeline: accumulate is {how.accumulate}, but the schedule's {asked.schedule.microbatches} microbatches are the accumulation. "
            f"Remedy: leave accumulate out, or a schedule of {how.accumulate * asked.schedule.microbatches}."
        )
    if how.own or any(map(on_host, jax.tree.leaves(state.params))):
        what = (
            "an optimizer that reduces gradients itself (one_bit_adam)"
            if how.own
            else "parameters in the host's memory"
        )
        raise ConfigError(f"pipeline: {what} cannot be. Remedy: leave it out, or the pipeline.")
    carried = [
        show(("rest", *to_path(keys)))
        for keys, x in jax.tree_util.tree_leaves_with_path(state.rest)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    if carried:
        raise ModelError(
            f"pipeline: the model carries {', '.join(carried)}, but microbatches pass the stages in an order of their own, so no state can be "
            f"carried from one to the next. Remedy: a model without it (LayerNorm or RMSNorm in the place of BatchNorm)."
        )


def _check_rows(batch: Any, microbatches: int, ways: int) -> None:
    for keys, x in jax.tree_util.tree_leaves_with_path(batch):
        if x.ndim == 0 or x.shape[0] % (ways * microbatches):
            raise LayoutError(
                f"{show(('batch', *to_path(keys)))} {list(x.shape)} cannot be cut into the {microbatches} microbatches of the pipeline over "
                f"{ways} devices: its first dim is no multiple of {ways * microbatches}. Remedy: a batch of a multiple of "
                f"{ways * microbatches} rows, or a schedule of fewer microbatches."
            )


class _Split:
    """A state's parameters as the stack of layers and all others."""

    def __init__(self, state: TrainState, loss_fn: Staged):
        self.kind, self.path, self.rest = state.static.kind, loss_fn.path, state.rest
        self.shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), state.params)
        self.model = lambda params: self.kind.merge(params, self.rest)
        _, self.block = stacked_part(self.model(self.shapes), self.path)
        self.names = dict(state.static.dims)

    def stack(self, params: Any) -> Any:
        for name in self.path:
            params = params[name]
        return params

    def others(self, params: Any) -> Any:
        """Without the layers."""
        return _replaced(params, self.path, None)

    def join(self, stack: Any, others: Any) -> Any:
        return _replaced(others, self.path, stack)

    def model_of(self, others: Any) -> Any:
        """The model, with nothing but shapes for its layers."""
        return self.model(self.join(self.stack(self.shapes), others))

    def add(self, grads: Any, others: Any) -> Any:
        """Gradients with those of what comes before the layers."""
        summed = jax.tree.map(jnp.add, self.others(grads), others)
        return self.join(self.stack(grads), summed)


def _check_layers(total: int, pieces: int, layers: tuple[int, ...], where: str) -> None:
    if not layers and total % pieces:
        low, more = divmod(total, pieces)
        fits = (*(low + 1,) * more, *(low,) * (pieces - more))
        raise ConfigError(
            f"pipeline: the {total} layers of {where} make no {pieces} equal pieces. Remedy: layers={fits}, one number for each piece, or a "
            f"schedule of as many stages and chunks as divide {total}."
        )
    if layers and (len(layers) != pieces or sum(layers) != total or min(layers) < 1):
        raise ConfigError(
            f"pipeline: layers is {list(layers)}, of {sum(layers)} layers in {len(layers)} pieces, but {where} has {total} layers and the "
            f"schedule {pieces} pieces, of one layer or more each. Remedy: {pieces} numbers that sum to {total}."
        )


def _replaced(tree: Any, path: tuple[str, ...], value: Any) -> Any:
    if not path:
        return value
    inner = tree[path[0]] if tree.get(path[0]) is not None else {}
    return {**tree, path[0]: _replaced(inner, path[1:], value)}


class _Layers:
    """Layers of the model as [stages, chunks, layers], and back."""

    def __init__(self, split: _Split, schedule: Schedule, layers: tuple[int, ...]):
        pieces = schedule.pieces
        self.total = jax.tree.leaves(split.stack(split.shapes))[0].shape[0]
        _check_layers(self.total, pieces.count, layers, "/".join(split.path))
        each = layers or (self.total // pieces.count,) * pieces.count
        starts = np.concatenate([[0], np.cumsum(each)])
        self.most = max(each)
        index = np.full((pieces.stages, pieces.chunks, self.most), self.total)
        counts = np.zeros((pieces.stages, pieces.chunks), np.int32)
        for piece, count in enumerate(each):
            place = pieces.place(piece)
            index[place][:count] = np.arange(starts[piece], starts[piece + 1])
            counts[place] = count
        self.index, self.even = index, len(set(each)) == 1
        self.counts = None if self.even else counts
        self.straight = self.even and np.array_equal(index.ravel(), np.arange(self.total))

    def cut(self, stack: Any) -> Any:
        def one(w: jax.Array) -> jax.Array:
            if not self.straight:
                w = jnp.take(w, np.minimum(self.index.ravel(), self.total - 1), axis=0)
            w = w.reshape(*self.index.shape, *w.shape[1:])
            return jax.lax.with_sharding_constraint(w, PartitionSpec(AXIS))

        return jax.tree.map(one, stack)

    def back(self, stack: Any) -> Any:
        """Of [stages, devices, chunks, layers, ...], as [devices, layers, ...]."""
        order = np.argsort(self.index.ravel())[: self.total]

        def one(w: jax.Array) -> jax.Array:
            w = jnp.moveaxis(w, 1, 0)
            w = w.reshape(w.shape[0], -1, *w.shape[4:])
            return w if self.straight else jnp.take(w, order, axis=1)

        return jax.tree.map(one, stack)


def _head(loss_fn: Staged, split: _Split, scale: Any) -> Head:
    """What comes after the layers, of one microbatch: its share of all sums, and the cotangent of what it is given."""

    def loss_of(after: Any, y: jax.Array, piece: Any) -> tuple[jax.Array, Any]:
        loss, metrics, updates = unpack(loss_fn.after(split.model_of(after), y, piece))
        if updates is not None:
            raise ModelError(
                "Staged(after=...) returned a third value (updates), but a pipeline carries no variables. Remedy: return loss or (loss, aux)."
            )
        for name, value in metrics.items():
            if jnp.shape(value):
                raise ModelError(
                    f"Staged(after=...) returned the metric {name!r} of shape {jnp.shape(value)}, but microbatches are averaged, so scalars are "
                    f"wanted. Remedy: return its mean."
                )
        weight = jnp.asarray(metrics.get("weight", 1), jnp.float32)
        scaled = wide(loss) * weight * (1 if scale is None else scale)
        return scaled, (loss, metrics, weight)

    def head(after: Any, piece: Any, y: jax.Array) -> tuple[Any, jax.Array]:
        grad = jax.grad(loss_of, argnums=(0, 1), has_aux=True)
        (grads, cotangent), (loss, metrics, weight) = grad(after, y, piece)
        sums = jax.tree.map(lambda x: wide(x) * weight.astype(wide(x).dtype), (loss, metrics))
        return (sums, weight, jax.tree.map(wide, grads)), cotangent

    return head


def _columns(layout: Layout, loss_fn: Staged, x: jax.Array) -> jax.Array:
    """What the first layer is given, its last dim over the stages: only the first wants it whole, a microbatch at a time."""
    stages = layout.sizes.get(AXIS, 1)
    if x.shape[-1] % stages:
        return x
    spec = PartitionSpec(*_row_axes(layout, x), *(None,) * (x.ndim - 1 - len(_row_axes(layout, x))), AXIS)
    return jax.lax.with_sharding_constraint(x, spec)


def _seq_axes(layout: Layout) -> Axes:
    """The axes, larger than 1, that the rules split the dim ``seq`` over; none where no rule names it."""
    resolved = layout.resolve(("seq",))
    model = {axis for dim in layout.resolve(("heads",)).dims for axis in dim.axes} if not resolved.problems else set()
    return () if resolved.problems else tuple(axis for axis in resolved.axes[0] if axis not in model)


def _row_axes(layout: Layout, x: Any) -> tuple[Axes, ...]:
    """The manual axes of an array's first dims, rows and sequence."""
    seq = _seq_axes(layout)
    return (batch_axes(layout), seq) if seq and x.ndim > 1 else (batch_axes(layout),)
