"""Loss and gradients of a batch by a pipeline: the layers over its stages, what comes before and after them over all devices.

The axes of the batch and of the sequence are manual, as for ``reduce="once"``: weights are gathered once a step, every device sums its own gradients over
all microbatches, and one reduction follows. What comes before the layers runs once for the whole batch, outside of the ticks; what comes
after them, for each microbatch on all stages at once, so that rules may split its weights over ``pipeline`` (``vocab: [pipeline, model]``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.crossing import Parts, batch_axes, gather, parts_of, reduce, wide
from jaxpar.errors import ConfigError, LayoutError, ModelError, listing
from jaxpar.host import on_host
from jaxpar.layout import Layout, hint
from jaxpar.microbatches import Found, How, each_parameter, means_of, pieces_of, resolved_of, scale_of, unscaled
from jaxpar.model import show, to_path
from jaxpar.objective import unpack
from jaxpar.pipeline.asked import Pipeline
from jaxpar.pipeline.executor import Head, Program
from jaxpar.pipeline.layers import AXIS, Layers
from jaxpar.rules import Axes
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

    layers = _layers(split, asked)
    stored, wanted = (_lies(layout, state, role, axes) for role in ("params", "gradients"))
    scatter = lambda g, lies: reduce(g, lies.parts(axes), axes, precision)

    def enter(params: Any, batch: Any, x: jax.Array) -> Any:
        weights = split.apart(params, stored, lambda w, lies: gather(w, lies.parts(axes), precision), take)
        return weights, jax.tree.map(lambda x: x[None], pieces_of((batch, x), schedule.microbatches, 1, 0))

    def take(w: jax.Array, lies: _Lies) -> jax.Array:
        """A stage's layers, gathered."""
        w = gather(w, Parts((lies.parts(axes).dims[0],)), precision) if lies.parts(axes).dims[0] else w
        # Cast before it goes to another stage, too.
        w = layers.cut(precision.crossing(w))
        return gather(w, Parts(((), (), *lies.parts(axes).dims[1:])), precision)[None]

    def leave(grads: Any, sums: Any, weight: jax.Array, x: jax.Array) -> Any:
        sums, weight, x = jax.tree.map(lambda x: x[0], (sums, weight, x))
        grads = split.apart(grads, wanted, lambda g, lies: scatter(g[0], lies), give)
        sums, weight = jax.lax.psum((sums, weight), axes) if axes else (sums, weight)
        return sums, weight, grads, x.reshape(-1, *x.shape[2:])

    def give(g: jax.Array, lies: _Lies) -> jax.Array:
        """A stage's gradients [1, 1, chunks, layers, ...], scattered."""
        of_stack, on = lies.parts(axes).dims, AXIS in lies.dims[0]
        if asked.reduce == "each" and of_stack[0]:
            raise ConfigError(
                f"pipeline: reduce is 'each', but gradients are split over {listing(of_stack[0])} layer by layer, of which one alone cannot be. Remedy: "
                f"reduce='once', or rules that split another dim."
            )
        if asked.reduce == "each":
            g = layers.back(g[0, 0], split=on)
        elif of_stack[0]:
            g = reduce(layers.back(g[0, 0], split=on), lies.parts(axes), axes, precision)
        else:
            g = layers.back(reduce(g[0, 0], Parts(((), (), *of_stack[1:])), axes, precision), split=on)
        return g if on or stages == 1 else jax.lax.psum(g, AXIS)

    def scattered(g: jax.Array, lies: _Lies) -> jax.Array:
        """One layer's gradients."""
        return reduce(g, Parts(lies.parts(axes).dims[1:]), axes, precision)

    stages, own = layout.sizes.get(AXIS, 1), PartitionSpec(axes or None)
    spec = lambda lies: PartitionSpec(*(dim or None for dim in lies.dims))
    leads = lambda *lead: lambda lies: PartitionSpec(*lead, *(dim or None for dim in lies.parts((AXIS,)).dims))
    rows = lambda x: PartitionSpec(*_row_axes(layout, x))
    last = AXIS if x.shape[-1] % stages == 0 else None
    columns = lambda ndim, lead: PartitionSpec(*lead, *(None,) * (ndim - len(lead) - 1), last)
    each = lambda f, g: split.apart(stored, stored, lambda _, lies: f(lies), lambda _, lies: g(lies))
    alone = {axis for axis, size in layout.sizes.items() if size == 1}
    inside = functools.partial(jax.shard_map, axis_names={*axes, *alone, AXIS}, check_vma=False)
    stacked = lambda _: PartitionSpec(AXIS)
    out = (each(leads(), stacked), (jax.tree.map(lambda _: own, batch), columns(x.ndim + 2, (axes or None,))))
    into = (jax.tree.map(spec, stored), jax.tree.map(rows, batch), columns(x.ndim, _row_axes(layout, x)))
    weights, (pieces, fed) = inside(enter, in_specs=into, out_specs=out)(state.params, batch, x)

    layer = lambda w, x, side: loss_fn.layer(split.block(w), x, side)
    side = lambda piece: loss_fn.side(split.model_of(split.others(split.shapes)), piece)
    head = _head(loss_fn, split, scale)
    each_layer = None
    if asked.reduce == "each":
        each_layer = lambda grads: jax.tree.map(scattered, grads, split.stack(wanted))
    program = Program(
        schedule,
        layer,
        side,
        head,
        axes,
        asked.keeps,
        asked.lowering == "divergent",
        each_layer,
        layers.counts,
        loss_fn.dims,
    )
    grads, (sums, weight, grads_after), fed = program.run(split.stack(weights), split.others(weights), fed, pieces)

    ones = split.apart(
        wanted, wanted, lambda _, lies: leads(axes or None)(lies), lambda *_: PartitionSpec(AXIS, axes or None)
    )
    given = (ones, own, own, columns(x.ndim + 2, (axes or None,)))
    results = (PartitionSpec(), PartitionSpec(), jax.tree.map(spec, wanted), columns(x.ndim, _row_axes(layout, x)))
    inside = functools.partial(inside, in_specs=given, out_specs=results)
    sums, weight, grads, x = inside(leave)(split.join(grads, grads_after), sums, weight, fed)
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
    if asked.schedule.sequence_chunks != 1:
        raise ConfigError(
            f"pipeline: the schedule {asked.schedule.name!r} cuts each sequence into {asked.schedule.sequence_chunks} chunks, but stages here take "
            f"whole sequences. Remedy: sequence_chunks=1, or context parallelism (seq: context)."
        )
    others = {axis: size for axis, size in layout.sizes.items() if size > 1 and axis not in (AXIS, *batch_axes(layout))}
    if asked.lowering == "divergent" and others:
        said = ", ".join(f"{axis} {size}" for axis, size in others.items())
        raise ConfigError(
            f"pipeline: lowering is 'divergent', in which each stage runs loops of its own length, but the mesh has {said}: collectives over it "
            f"stand inside of layers, where some stages would wait for others for ever. Remedy: lowering='uniform', or a mesh of pipeline and "
            f"the axes of the batch alone."
        )
    if how.accumulate != 1:
        raise ConfigError(
            f"pipeline: accumulate is {how.accumulate}, but the schedule's {asked.schedule.microbatches} microbatches are the accumulation. "
            f"Remedy: leave accumulate out, or a schedule of {how.accumulate * asked.schedule.microbatches}."
        )
    groups = [name for name, value in vars(how.fusion).items() if isinstance(value, tuple)]
    if groups or how.reduce == "each":
        what = f"fusion: {groups[0]} names groups of layers" if groups else "reduce is 'each'"
        raise ConfigError(
            f"pipeline: {what}, but each stage gathers its weights at once, and reduces its gradients once a step. Remedy: leave it out."
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

    def laid(self, others: Any) -> Any:
        """Gradients of what is not of the layers, by their rules."""

        def one(keys: Any, grad: jax.Array) -> jax.Array:
            names = self.names.get(("params", *to_path(keys)))
            return grad if names is None else hint(grad, *names, role="gradients")

        return jax.tree_util.tree_map_with_path(one, others)

    def join(self, stack: Any, others: Any) -> Any:
        return _replaced(others, self.path, stack)

    def model_of(self, others: Any) -> Any:
        """The model, with nothing but shapes for its layers."""
        return self.model(self.join(self.stack(self.shapes), others))

    def apart(self, tree: Any, beside: Any, f: Callable[[Any, Any], Any], of_stack: Callable[[Any, Any], Any]) -> Any:
        """``f(x, y)`` of every parameter and what is beside it, ``of_stack(x, y)`` of those of the layers."""
        others = jax.tree.map(f, self.others(tree), self.others(beside))
        return self.join(jax.tree.map(of_stack, self.stack(tree), self.stack(beside)), others)

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


@dataclass(frozen=True)
class _Lies:
    """For each dim of a parameter, or of its gradient, the axes of the batch, the sequence and the pipeline that split it. A leaf."""

    dims: tuple[Axes, ...]

    def parts(self, axes: Axes) -> Parts:
        """Those of these axes."""
        return Parts(tuple(tuple(axis for axis in dim if axis in axes) for dim in self.dims))


def _lies(layout: Layout, state: TrainState, role: str, axes: Axes) -> Any:
    """Where every parameter, or its gradient, lies.

    Raises:
      LayoutError: a dim is split over ``pipeline`` inside of another axis.
    """

    def one(path: Any, w: jax.Array) -> _Lies:
        found = parts_of(resolved_of(layout, state, path, w, role), (*axes, AXIS)).dims
        for dim, names in enumerate(found):
            if AXIS in names[1:]:
                raise LayoutError(
                    f"{show(('params', *path))}: dim {dim} is split over {listing(names)}, but a pipeline's stages come first. Remedy: a rule with "
                    f"{AXIS!r} before {names[0]!r}."
                )
        return _Lies(found)

    return each_parameter(state, one)


def _layers(split: _Split, asked: Pipeline) -> Layers:
    """How the stack goes over the pieces."""
    total, pieces = jax.tree.leaves(split.stack(split.shapes))[0].shape[0], asked.schedule.pieces
    _check_layers(total, pieces.count, asked.layers, "/".join(split.path))
    return Layers(total, pieces, asked.layers or (total // pieces.count,) * pieces.count)


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
        return (sums, weight, split.laid(jax.tree.map(wide, grads))), cotangent

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
