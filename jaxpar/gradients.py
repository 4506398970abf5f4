"""Loss and gradients of a batch: at once or in microbatches, reduced by the compiler or by each device's own sums.

By default the compiler decides: gradients are reduced where they arise, and a loop over microbatches reduces in every round.
``reduce="once"`` makes the axes of the batch manual instead: each device sums the gradients of its own rows over all microbatches, and
one reduction (a scatter, where the gradient is sharded) follows, in the dtype that :class:`jaxpar.Precision` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.contract import PRODUCT
from jaxpar.crossing import Parts, asking, gather, parts_of, reduce, wide
from jaxpar.errors import ConfigError, LayoutError, ModelError
from jaxpar.fusion import LAYERS, Fusion, check_groups, in_groups
from jaxpar.layout import Layout, current_layout, lay_out, to_spec
from jaxpar.model import show, to_path
from jaxpar.objective import Metrics, loss_of
from jaxpar.precision import FP8, INT8, Precision
from jaxpar.rules import Axes, Resolved
from jaxpar.state import TrainState

Gather = Literal["use", "step"]
Reduce = Literal["once", "each"]


@dataclass(frozen=True)
class How:
    """The ways of :func:`jaxpar.train_step` to gradients; its arguments of the same names."""

    accumulate: int = 1
    gather: Gather = "use"
    reduce: Reduce | None = None
    precision: Precision = field(default_factory=Precision)
    fusion: Fusion = field(default_factory=Fusion)


@dataclass(frozen=True)
class Found:
    """What one batch gave."""

    loss: jax.Array
    metrics: Metrics
    rest: Any
    grads: Any


def gradients(layout: Layout, loss_fn: Callable[..., Any], state: TrainState, batch: Any, how: How) -> Found:
    """Loss, metrics, carried variables and gradients of ``state``'s parameters on ``batch``."""
    with asking(how.precision):
        by_hand = how.reduce is None and how.accumulate > 1 and not _sharded(layout, state)
        if how.reduce == "once" or by_hand:
            _check_handed(layout, loss_fn, state, batch, how, ())
            return _once(layout, loss_fn, state, batch, how)
        _check_dtypes(how)
        _check_fusion(how)
        crossing = [("gather", how.gather == "use" and _sharded(layout, state)), ("reduce", bool(batch_axes(layout)))]
        _check_handed(layout, loss_fn, state, batch, how, [name for name, does in crossing if does])
        return _by_compiler(layout, loss_fn, state, batch, how)


def _by_compiler(layout: Layout, loss_fn: Callable[..., Any], state: TrainState, batch: Any, how: How) -> Found:
    """Gradients reduced where they arise."""
    weights, compute, scale = state.params, how.precision.computing, _scale(state, how.precision)
    if how.gather == "step":
        weights = _each(state, lambda path, w: _whole(layout, state, path, w, how.precision))
        weights = jax.tree.map(compute, weights)
        compute = lambda w: w

    def run(weights: Any, rest: Any, batch: Any, n: Any) -> tuple[Any, Any]:
        here = state if n is None else _at(state, rest, state.key, n)
        grad = _value_and_grad(lambda w: loss_of(loss_fn, here, batch)(jax.tree.map(compute, w)), scale)
        (loss, (metrics, rest)), grads = grad(weights)
        return (loss, (metrics, rest)), place_gradients(layout, state, grads)

    if how.accumulate == 1:
        (loss, (metrics, rest)), grads = run(weights, state.rest, batch, None)
    else:
        axes = batch_axes(layout)
        pieces = _pieces(batch, how.accumulate, math.prod(layout.sizes[axis] for axis in axes), 1)
        pieces = jax.tree.map(lambda x: lay_out(layout.mesh, x, PartitionSpec(None, axes)), pieces)
        place = lambda grads: place_gradients(layout, state, grads)
        sums, weight, rest = _sums(run, weights, state.rest, pieces, how.accumulate, place)
        loss, metrics, grads = _means(sums, weight)
    return Found(loss, metrics, rest, _unscaled(state, grads, scale))


def _check_dtypes(how: How) -> None:
    """What the compiler gathers and reduces crosses the mesh in the dtype of the compute, whatever else was asked for."""
    precision, by_compiler = how.precision, {"reduce"} if how.gather == "step" else {"reduce", "gather"}
    for name in sorted(by_compiler):
        value = getattr(precision, name)
        if value not in (None, INT8, precision.compute):
            what = "reduces gradients where they arise" if name == "reduce" else "gathers weights where they are used"
            ways = "reduce='once' (ZeRO stage 1)" + ("" if name == "reduce" else " or gather='step' (stages 1 and 2)")
            raise ConfigError(
                f"precision: {name} is {value}, but here the compiler {what}, in the dtype of the compute "
                f"({precision.compute or 'the model'}). Remedy: {ways}, or leave precision.{name} out."
            )


def _check_fusion(how: How) -> None:
    for name, value in vars(how.fusion).items():
        if isinstance(value, tuple):
            what = "gathers weights" if name == "gather" else "reduces gradients"
            raise ConfigError(
                f"fusion: {name} is {list(value)}, but here the compiler {what} where it sees fit. Remedy: reduce='once' (ZeRO stage 1), a "
                f"size, or auto."
            )


def _check_handed(
    layout: Layout, loss_fn: Callable[..., Any], state: TrainState, batch: Any, how: How, crossing: Sequence[str]
) -> None:
    """8 bits are for what a model hands to ``project``; for one that hands it nothing, the key would be an empty word."""
    precision = how.precision
    keys = [(name, INT8) for name in crossing if getattr(precision, name) == INT8]
    keys += [("matmul", FP8)] if precision.matmul == FP8 else []
    if keys and f"name={PRODUCT}" not in str(jax.make_jaxpr(loss_of(loss_fn, state, batch))(state.params)):
        name, dtype = keys[0]
        raise ConfigError(
            f"precision: {name} is {dtype}, but loss_fn hands no weight to jaxpar.project, so nothing would be. "
            f"Remedy: project(x, (w, dims)) in the place of x @ w, or leave precision.{name} out."
        )


def _scale(state: TrainState, precision: Precision) -> jax.Array | None:
    """What the loss is multiplied by."""
    if (precision.scale is None) is not (state.scale is None):
        who = ("the step scales the loss", "the state carries no scale")
        who = who if state.scale is None else ("the state carries a loss scale", "the step scales none")
        raise ModelError(f"{who[0]}, but {who[1]}. Remedy: give init() and train_step() the same precision.")
    return None if state.scale is None else state.scale["scale"]


def _value_and_grad(compute: Callable[[Any], tuple[jax.Array, Any]], scale: jax.Array | None) -> Callable[[Any], Any]:
    """``jax.value_and_grad(compute, has_aux=True)``, the gradients multiplied by ``scale`` from their beginning."""
    if scale is None:
        return jax.value_and_grad(compute, has_aux=True)

    def scaled(weights: Any) -> tuple[jax.Array, Any]:
        loss, found = compute(weights)
        return wide(loss) * scale, (loss, found)

    def run(weights: Any) -> Any:
        (_, found), grads = jax.value_and_grad(scaled, has_aux=True)(weights)
        return found, grads

    return run


def _unscaled(state: TrainState, grads: Any, scale: jax.Array | None) -> Any:
    """Gradients in their parameters' dtypes, without the scale."""
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    return grads if scale is None else jax.tree.map(lambda g: (wide(g) / scale).astype(g.dtype), grads)


def batch_axes(layout: Layout) -> Axes:
    """The mesh axes, larger than 1, that the rules split the dim ``batch`` over.

    Raises:
      LayoutError: the rules do not know ``batch``.
    """
    resolved = layout.resolve(("batch",))
    if resolved.problems:
        raise LayoutError(
            "microbatches and reduce='once' go by the rule of the logical dim 'batch', which the rules do not have. Remedy: "
            "add it, as batch='data'."
        )
    return resolved.axes[0]


def place_gradients(layout: Layout, state: TrainState, grads: Any) -> Any:
    """Gradients laid out by the rules of the role ``gradients``."""

    def one(keys: Any, grad: jax.Array) -> jax.Array:
        resolved = _resolved(layout, state, to_path(keys), grad, "gradients")
        if resolved.problems:
            raise LayoutError(resolved.problems)
        return lay_out(layout.mesh, grad, to_spec(resolved))

    return jax.tree_util.tree_map_with_path(one, grads)


def _resolved(layout: Layout, state: TrainState, path: Sequence[Any], x: Any, role: str) -> Resolved:
    names = dict(state.static.dims).get(("params", *path), (None,) * x.ndim)
    where = show(("params", *path))
    where = f"gradient of {where}" if role == "gradients" else where
    return layout.resolve(names, x.shape, role=role, dtype=x.dtype, path=where)


def _each(state: TrainState, f: Callable[[Sequence[Any], jax.Array], Any]) -> Any:
    """``f(path, w)`` of every parameter."""
    return jax.tree_util.tree_map_with_path(lambda keys, w: f(to_path(keys), w), state.params)


def _sharded(layout: Layout, state: TrainState) -> bool:
    """Whether an axis of the batch splits parameters too, which a device then does not hold whole."""
    axes = set(batch_axes(layout))
    found = _each(
        state, lambda path, w: axes & {a for d in _resolved(layout, state, path, w, "params").axes for a in d}
    )
    return any(jax.tree.leaves(jax.tree.map(bool, found, is_leaf=lambda x: isinstance(x, set))))


def _whole(layout: Layout, state: TrainState, path: Sequence[Any], w: jax.Array, precision: Precision) -> jax.Array:
    """A weight as the compute uses it, gathered over the axes that only its storage is split over."""
    stored, used = (_resolved(layout, state, path, w, role) for role in ("params", "activations"))
    if used.problems:
        raise LayoutError(used.problems)
    if stored.axes != used.axes and precision.gather == INT8:
        return _whole_packed(layout, w, stored, used, precision)
    if stored.axes != used.axes:
        w = jax.lax.optimization_barrier(precision.crossing(w))
    return lay_out(layout.mesh, w, to_spec(used))


def _whole_packed(layout: Layout, w: jax.Array, stored: Resolved, used: Resolved, precision: Precision) -> jax.Array:
    kept = {axis for dim in used.axes for axis in dim}
    axes = tuple(axis for dim in stored.axes for axis in dim if axis not in kept)
    parts, manual = parts_of(stored, axes), {*axes, *(axis for axis, size in layout.sizes.items() if size == 1)}
    whole = jax.shard_map(
        lambda w: gather(w, parts, precision),
        in_specs=_spec(parts),
        out_specs=PartitionSpec(),
        axis_names=manual,
        check_vma=False,  # jax would take what is gathered for different on every device
    )
    return lay_out(layout.mesh, whole(w), to_spec(used))


def _at(state: TrainState, rest: Any, key: Any, n: Any) -> TrainState:
    """The state as microbatch ``n`` sees it: with a key of its own."""
    return replace(state, rest=rest, key=jax.random.fold_in(key, n))


def _pieces(batch: Any, count: int, ways: int, dim: int) -> Any:
    """Every array [rows, ...] of a batch as [microbatches, rows, ...]; each microbatch has rows of every device.

    Args:
      batch: arrays whose first dim is the batch.
      count: of microbatches.
      ways: devices that the rows are spread over.
      dim: 1 if the rows are those of all devices, in their order; 0 if of one.
    """

    def one(keys: Any, x: jax.Array) -> jax.Array:
        name = show(("batch", *to_path(keys)))
        if x.ndim == 0 or x.shape[0] % (ways * count):
            raise LayoutError(
                f"{name} {list(x.shape)} cannot be cut into {count} microbatches (accumulate) over {ways} devices: its first dim "
                f"is no multiple of {ways * count}. Remedy: a batch of a multiple of {ways * count} rows, or another accumulate."
            )
        if dim == 0:
            return x.reshape(count, -1, *x.shape[1:])
        return x.reshape(ways, count, -1, *x.shape[1:]).swapaxes(0, 1).reshape(count, -1, *x.shape[1:])

    return jax.tree_util.tree_map_with_path(one, batch)


def _sums(
    run: Callable[..., Any],
    weights: Any,
    rest: Any,
    pieces: Any,
    count: int,
    place: Callable[[Any], Any] = lambda grads: grads,
) -> tuple[Any, jax.Array, Any]:
    """Weighted sums of (loss, metrics, gradients) over microbatches, in fp32 or wider; the sum of the weights; carried variables.

    A microbatch weighs what ``loss_fn`` returns as the metric ``weight``, 1 without.
    """

    def weighted(rest: Any, piece: Any, n: Any) -> tuple[Any, Any]:
        (loss, (metrics, rest)), grads = run(weights, rest, piece, n)
        for name, value in metrics.items():
            if jnp.shape(value):
                raise ModelError(
                    f"loss_fn returned the metric {name!r} of shape {jnp.shape(value)}, but microbatches are averaged, so scalars "
                    f"are wanted. Remedy: return its mean, or set accumulate=1 and leave reduce out."
                )
        weight = jnp.asarray(metrics.get("weight", 1), jnp.float32)
        scaled = jax.tree.map(lambda x: wide(x) * weight.astype(wide(x).dtype), (loss, metrics, grads))
        return (scaled, weight), rest

    def one(carry: Any, xs: Any) -> tuple[Any, None]:
        sums, rest = carry
        found, rest = weighted(rest, xs[1], xs[0])
        (loss, metrics, grads), weight = jax.tree.map(jnp.add, sums, found)
        return (((loss, metrics, place(grads)), weight), rest), None

    first = jax.tree.map(lambda x: x[0], pieces)
    if count == 1:
        (sums, weight), rest = weighted(rest, first, 0)
    else:
        shapes, after = jax.eval_shape(weighted, rest, first, 0)
        _check_carried(rest, after)
        (loss, metrics, grads), weight = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        carry = (((loss, metrics, place(grads)), weight), rest)
        ((sums, weight), rest), _ = jax.lax.scan(one, carry, (jnp.arange(count), pieces))
    return sums, weight, rest


def _means(sums: Any, weight: jax.Array) -> Any:
    counted = jnp.where(weight == 0, 1, weight)  # where nothing counts, all sums are 0
    loss, metrics, grads = jax.tree.map(lambda x: x / counted.astype(x.dtype), sums)
    return loss, metrics | ({"weight": weight} if "weight" in metrics else {}), grads


def _check_carried(before: Any, after: Any) -> None:
    """A loop carries variables of fixed shapes and dtypes."""
    was, now = (
        {to_path(keys): (x.shape, x.dtype) for keys, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (before, after)
    )
    changed = [path for path in was | now if was.get(path) != now.get(path)]
    if changed:
        raise ModelError(
            f"loss_fn changed the shape or dtype of {', '.join(show(('rest', *path)) for path in changed)}, which a loop over "
            f"microbatches has to keep."
        )


def _once(layout: Layout, loss_fn: Callable[..., Any], state: TrainState, batch: Any, how: How) -> Found:
    """Each device's own sums, then one reduction."""
    axes, precision, scale, fusion = batch_axes(layout), how.precision, _scale(state, how.precision), how.fusion
    ways = math.prod(layout.sizes[axis] for axis in axes)
    stored = _each(state, lambda path, w: parts_of(_resolved(layout, state, path, w, "params"), axes))
    wanted = _each(state, lambda path, w: parts_of(_resolved(layout, state, path, w, "gradients"), axes))
    _pieces(batch, how.accumulate, ways, 1)  # said of the whole batch, before it is cut

    def local(params: Any, rest: Any, key: Any, step: Any, scale: Any, batch: Any) -> tuple[Any, jax.Array, Any]:
        weights = _cross(state, params, stored, fusion, ("gather",), lambda w, parts: gather(w, parts, precision))
        first = _index(layout, axes) * how.accumulate

        def run(weights: Any, rest: Any, batch: Any, n: Any) -> Any:
            here = replace(_at(state, rest, key, first + n), step=step)
            return _value_and_grad(loss_of(loss_fn, here, batch), scale)(weights)

        pieces = _pieces(batch, how.accumulate, 1, 0)
        _check_alike(run, weights, rest, jax.tree.map(lambda x: x[0], pieces))
        (loss, metrics, grads), weight, rest = _sums(run, weights, rest, pieces, how.accumulate)
        sums = lambda g, parts: reduce(g, parts, axes, precision)
        grads = _cross(state, grads, wanted, fusion, ("scatter", "reduce"), sums)
        loss, metrics, weight = jax.lax.psum((loss, metrics, weight), axes) if axes else (loss, metrics, weight)
        return (loss, metrics, grads), weight, rest

    arguments = (state.params, state.rest, state.key, state.step, scale, batch)
    if axes:
        specs = (_spec(stored), *(PartitionSpec(),) * 4, PartitionSpec(axes))
        results = ((PartitionSpec(), PartitionSpec(), _spec(wanted)), PartitionSpec(), PartitionSpec())
        # Unchecked: jax would take what is gathered for different on every device.
        # With axes of size 1, so that what is not there leaves none behind.
        manual = {*axes, *(axis for axis, size in layout.sizes.items() if size == 1)}
        local = jax.shard_map(local, in_specs=specs, out_specs=results, axis_names=manual, check_vma=False)
    sums, weight, rest = local(*arguments)
    loss, metrics, grads = _means(sums, weight)
    return Found(loss, metrics, rest, _unscaled(state, grads, scale))


def _cross(
    state: TrainState, tree: Any, split: Any, fusion: Fusion, kinds: Sequence[str], cross: Callable[..., jax.Array]
) -> Any:
    """``cross(x, parts)`` of every tensor, or of groups of layers as ``fusion`` asks, in the kinds for what is split and for what is not."""
    leaves, parts = jax.tree.leaves(tree), jax.tree.leaves(split)
    paths = [to_path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]
    dims = dict(state.static.dims)
    layered = [dims.get(("params", *path), ())[:1] == (LAYERS,) for path in paths]
    found: dict[int, jax.Array] = {}
    for kind in kinds:
        mine = [i for i, part in enumerate(parts) if any(part.dims) is not (kind == "reduce")]
        if not isinstance(getattr(fusion, kind), tuple):
            continue
        if batch_axes(current_layout()) and not mine:
            what = {"gather": "gathered", "scatter": "scattered", "reduce": "summed whole"}[kind]
            raise ConfigError(
                f"fusion: {kind} is {list(getattr(fusion, kind))}, but nothing is {what} here. Remedy: leave {kind} out."
            )
        if not mine:
            continue
        check_groups([show(("params", *path)) for path in paths], parts, layered)
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


def _spec(tree: Any) -> Any:
    return jax.tree.map(lambda parts: PartitionSpec(*(dim or None for dim in parts.dims)), tree)


def _index(layout: Layout, axes: Axes) -> Any:
    """Which of the parts of the batch this device has."""
    index: Any = 0
    for axis in axes:
        index = index * layout.sizes[axis] + jax.lax.axis_index(axis)
    return index


def _check_alike(run: Callable[..., Any], weights: Any, rest: Any, batch: Any) -> None:
    """Carried variables that depend on a device's rows would part; counters and keys, which do not, may change."""
    leaves = jax.tree_util.tree_leaves_with_path(rest)
    if not leaves:
        return
    traced = jax.make_jaxpr(lambda rest: jax.tree.leaves(run(weights, rest, batch, 0)[0][1][1]))(rest)
    pairs = zip(leaves, traced.jaxpr.invars, traced.jaxpr.outvars, strict=True)
    changed = [
        show(("rest", *to_path(keys)))
        for (keys, x), i, o in pairs
        if o is not i and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    if changed:
        raise ModelError(
            f"loss_fn changes {', '.join(changed)}, but with reduce='once' each device sees its own rows only, so the devices would "
            f"part. Remedy: reduce='each', which reduces in every microbatch."
        )
