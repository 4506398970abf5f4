"""``pipedream`` (Harlap et al. 2018, arXiv:1806.03377): every stage updates its weights with every microbatch, and keeps those that microbatches on
their way were forwarded with.

A tick is a small step. Before it the newest weights go to a ring of versions; each stage forwards a microbatch with the newest and backwards another
with the version of its forward; then whatever has a gradient is updated: each stage's layers, what comes before them and what comes after.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxpar.boarding import row_axes
from jaxpar.crossing import wide
from jaxpar.errors import ConfigError, ModelError, listing
from jaxpar.inflight import Call, InFlight, split_over
from jaxpar.layout import Layout
from jaxpar.microbatches import How, means_of, unscaled
from jaxpar.model import show, to_path
from jaxpar.objective import Metrics
from jaxpar.pipeline.asked import Asynchronous
from jaxpar.pipeline.endless import Stashing, beside, rows_of
from jaxpar.pipeline.layers import AXIS
from jaxpar.pipeline.moves import pick, put
from jaxpar.pipeline.program import EVERY, Head
from jaxpar.pipelined import head_of
from jaxpar.rules import Axes
from jaxpar.schedules.table import FIELDS
from jaxpar.state import TrainState, moment_names

GROUPS = ("before", "layers", "after")
"""What has an optimizer's state of its own; of the layers each stage has one."""
_B_ON, _HEADS = FIELDS.index("b_on"), EVERY.index("heads")


@dataclass(frozen=True)
class Groups:
    """Parameters as those of the first stage's input, of stages' layers [stages, layers, ...], and of the last stage's output.

    Attributes:
      first: paths of what ``Staged.before`` reads. All others that are not of the layers go with the last stage.
    """

    call: Call
    first: frozenset[tuple[Any, ...]]

    def cut(self, params: Any) -> dict[str, Any]:
        split, stages = self.call.split, self.call.window.stages
        others = split.others(params)
        of_stages = lambda w: w.reshape(stages, -1, *w.shape[1:])
        return {
            "before": self._only(others, first=True),
            "layers": jax.tree.map(of_stages, split.stack(params)),
            "after": self._only(others, first=False),
        }

    def join(self, groups: dict[str, Any]) -> Any:
        none = lambda x: x is None
        others = jax.tree.map(lambda a, b: b if a is None else a, groups["before"], groups["after"], is_leaf=none)
        whole = jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), groups["layers"])
        return self.call.split.join(whole, others)

    def _only(self, others: Any, *, first: bool) -> Any:
        keep = lambda keys, w: w if (to_path(keys) in self.first) is first else None
        return jax.tree_util.tree_map_with_path(keep, others)

    def with_first(self, params: Any, first: Any) -> Any:
        """Parameters with others in the first group."""
        return self.join({**self.cut(params), "before": first})

    def start(self, params: Any) -> dict[str, Any]:
        """The optimizer's states."""
        tx, cut = self.call.state.static.tx, self.cut(params)
        return {name: (jax.vmap(tx.init) if name == "layers" else tx.init)(cut[name]) for name in GROUPS}

    def update(self, grads: Any, states: dict[str, Any], params: Any, takes: dict[str, jax.Array]) -> tuple[Any, Any]:
        """Parameters and states after an update of the groups that take one; ``takes["layers"]`` is of each stage."""
        tx, cut, given = self.call.state.static.tx, self.cut(params), self.cut(grads)
        new, after = {}, {}
        for name in GROUPS:
            f = jax.vmap(tx.update) if name == "layers" else tx.update
            updates, state = f(given[name], states[name], cut[name])
            where = lambda a, b, on=takes[name]: jnp.where(on.reshape(on.shape + (1,) * (a.ndim - on.ndim)), a, b)
            new[name] = jax.tree.map(where, optax.apply_updates(cut[name], updates), cut[name])
            after[name] = jax.tree.map(where, state, states[name])
        return self.join(new), after

    def squares(self, grads: Any) -> dict[str, jax.Array]:
        """Squared norms; of layers each stage's."""
        square = lambda g, n: jnp.sum(jnp.square(g.astype(jnp.promote_types(g.dtype, jnp.float32))), range(n, g.ndim))
        return {
            name: sum((square(g, int(name == "layers")) for g in jax.tree.leaves(part)), jnp.zeros(()))
            for name, part in self.cut(grads).items()
        }

    def placed(self, states: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's states, where their parameters' moments lie."""
        call, dims = self.call, dict(self.call.state.static.dims)
        shapes, names = {}, {}
        for group, tree in jax.eval_shape(self.cut, call.state.params).items():
            for keys, w in jax.tree_util.tree_leaves_with_path(tree):
                path = to_path(keys)
                of_layers = group == "layers"
                own = dims.get(("params", *(call.split.path if of_layers else ()), *path))
                shapes[group, *path] = w.shape
                if own is not None:
                    names["params", group, *path] = (own[0], None, *own[1:]) if of_layers else own

        def one(group: str, keys: Any, x: jax.Array) -> jax.Array:
            within = {path[1:]: shape for path, shape in shapes.items() if path[0] == group}
            known = {("params", *path[2:]): name for path, name in names.items() if path[1] == group}
            _, found, _ = moment_names(to_path(keys), x.shape, within, known)
            if found is None:
                return call.put(x, *((AXIS,) if group == "layers" else ()))
            return call.put(x, *split_over(call.layout, found, "optimizer", x.shape, ()))

        return {
            group: jax.tree_util.tree_map_with_path(lambda keys, x, group=group: one(group, keys, x), states[group])
            for group in GROUPS
        }


def groups_of(call: Call, batch: Any) -> Groups:
    """Which parameters go with which stage.

    Raises:
      ConfigError: stages have not the same number of layers each, or the layers do not lie with their stages.
      ModelError: something is read before the layers and after them.
    """
    layers, stack = call.board.layers, call.board.split.stack(call.board.stored)
    where = "/".join(call.split.path)
    if layers.counts is not None or call.asked.reduce == "each":
        what = f"layers is {list(layers.each)}" if layers.counts is not None else "reduce is 'each'"
        raise ConfigError(
            f"asynchronous pipeline: {what}, but under 'pipedream' stages have as many layers each, which they update with every microbatch. Remedy: leave "
            f"it out, or 'pipedream_2bw'."
        )
    for lies in jax.tree.leaves(stack):
        if lies.dims[0] != (AXIS,) and layers.pieces.stages > 1:
            raise ConfigError(
                f"asynchronous pipeline: the layers of {where} are split over {listing(lies.dims[0]) if lies.dims[0] else 'nothing'}, but under 'pipedream' "
                f"each stage holds its own. Remedy: the rule layers: {AXIS}."
            )
    split, loss_fn = call.split, call.loss_fn
    others = split.others(split.shapes)
    piece = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // call.window.batch, *x.shape[1:]), x.dtype), batch
    )
    before = lambda others, piece: loss_fn.before(split.model_of(others), piece)
    x = jax.eval_shape(before, others, piece)
    after = lambda others, piece, x: loss_fn.after(split.model_of(others), x, piece)
    first, last = _read(before, others, piece), _read(after, others, piece, x)
    both = sorted(show(("params", *path)) for path in first & last)
    if both:
        raise ModelError(
            f"asynchronous pipeline: {listing(both)} are read before the layers and after them, but under 'pipedream' the first stage and the last update at "
            f"different times. Remedy: embeddings that are not tied, or 'pipedream_2bw'."
        )
    return Groups(call, frozenset(first))


def _read(f: Callable[..., Any], others: Any, *more: Any) -> set[tuple[Any, ...]]:
    """Paths of the leaves that a function reads."""
    leaves = jax.tree_util.tree_leaves_with_path(others)
    jaxpr = jax.make_jaxpr(f)(others, *more).jaxpr
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    return {to_path(keys) for (keys, _), v in zip(leaves, jaxpr.invars, strict=False) if id(v) in used}


def start(layout: Layout, loss_fn: Any, state: TrainState, batch: Any, how: How, asked: Asynchronous) -> InFlight:
    """A state with room for what will be on its way, nothing there yet, and an optimizer's state for each stage, at its beginning."""
    call = Call(layout, loss_fn, how, asked, asked.schedule, state, state.params)
    batch = call.prepared(batch)
    groups = groups_of(call, batch)
    run = _Run(call, groups, batch, batch)
    tick, fed = run.tick(state.params, call.split.stack(state.params), run.pieces(), jnp.asarray(0))
    nothing = jax.tree.map(jnp.zeros_like, batch)
    versions = {name: run.ring(part) for name, part in run.kept(state.params).items()}
    flight = {"pending": jnp.zeros((), jnp.int32), "batch": nothing, "versions": versions, "aboard": tick.aboard(fed)}
    parts = {field.name: getattr(state, field.name) for field in fields(TrainState)}
    parts["opt_state"] = groups.placed(groups.start(state.params))
    return InFlight(**parts, flight=run.placed(flight))


@dataclass(frozen=True)
class _Run:
    """The ticks of a call over two batches, the one before and its own."""

    call: Call
    groups: Groups
    before: Any
    own: Any

    def pieces(self) -> Any:
        """[devices, 2 microbatches, rows, ...]."""
        call = self.call
        ways = math.prod(call.layout.sizes[axis] for axis in call.board.axes)
        rows = jax.tree.leaves(self.own)[0].shape[0]
        nothing = jnp.zeros((rows, ways, call.window.stages))
        enter = lambda batch: call.board.enter(call.state.params, (batch, None), nothing, call.window.batch)[1][0][0]
        return beside(enter(self.before), enter(self.own), 1)

    def piece(self, pieces: Any, at: jax.Array) -> Any:
        """One microbatch [rows, ...], of all devices."""
        call = self.call
        found = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, at, 1, keepdims=False), pieces)
        out = jax.tree.map(lambda x: PartitionSpec(*row_axes(call.layout, x)), self.own)
        manual = {*call.board.axes, *(axis for axis, size in call.layout.sizes.items() if size == 1 and axis != AXIS)}
        local = lambda piece: jax.tree.map(lambda x: x[0], piece)
        if not call.board.axes:
            return local(found)
        own = PartitionSpec(call.board.axes)
        return jax.shard_map(local, in_specs=own, out_specs=out, axis_names=manual, check_vma=False)(found)

    def kept(self, params: Any) -> dict[str, Any]:
        """What backwards want again: the stack of layers, and what comes before it."""
        split = self.call.split
        return {"layers": split.stack(params), "before": self.groups.cut(params)["before"]}

    def ring(self, tree: Any) -> Any:
        """Room for as many versions as a microbatch of the first stage sees."""
        return jax.tree.map(lambda w: jnp.zeros((self.call.window.delay + 1, *w.shape), w.dtype), tree)

    def placed(self, flight: dict[str, Any]) -> dict[str, Any]:
        """What is on its way, each array where the next call wants it."""
        call = self.call
        return {
            "pending": call.put(flight["pending"]),
            "batch": call.put_batch(flight["batch"]),
            "versions": self.put_versions(flight["versions"]),
            "aboard": call.put_stashes(flight["aboard"]),
        }

    def joined(self, versions: dict[str, Any]) -> Any:
        return self.call.split.join(versions["layers"], versions["before"])

    def stashed(self, ring: Any, slots: jax.Array) -> Any:
        """Of every stage's layers the version in its slot."""
        local = lambda ring, slot: pick(ring, slot[0])
        versions = jax.shard_map(
            local,
            in_specs=(PartitionSpec(None, AXIS), PartitionSpec(AXIS)),
            out_specs=PartitionSpec(AXIS),
            axis_names={AXIS},
            check_vma=False,
        )
        return versions(ring, slots)

    def tick(self, params: Any, layers: Any, pieces: Any, at: jax.Array) -> tuple[Stashing, jax.Array]:
        """A tick on the newest parameters and the layers that backwards want, and what the first stage is given."""
        call = self.call
        split, piece = call.split, self.piece(pieces, at)
        x, _ = call.before(params, piece)
        new, (_, fed) = call.board.enter(params, (piece, None), x, 1)
        old, _ = call.board.enter(split.join(layers, split.others(params)), (piece, None), x, 1)
        program = call.program(_mean(head_of(call.loss_fn, split, None), call.board.axes))
        grows = fed.shape[-1] % call.window.stages == 0
        weights = beside(split.stack(old), split.stack(new), 1)
        return Stashing(program, weights, split.others(new), (pieces, None), grows), fed

    def __call__(self, state: InFlight, have: jax.Array, skips: bool) -> tuple[InFlight, Metrics]:
        """The state after the ticks of the window, and metrics."""
        call, window, groups, board = self.call, self.call.window, self.groups, self.call.board
        full, delay, pieces = call.asked.schedule, window.delay, self.pieces()
        program = call.program(head_of(call.loss_fn, call.split, None))
        rows, every, _ = rows_of(program, have, (state.step - 1) % (delay + 1) * full.batch)
        ring, stages = delay + 1, np.arange(window.stages)

        def one(carry: Any, xs: Any) -> tuple[Any, Any]:
            params, states, versions, aboard = carry
            t, row, every = xs
            now = (state.step % ring * full.batch + t) % ring
            versions = jax.tree.map(lambda ring, w: put(ring, w, now), versions, self.kept(params))
            layers = self.stashed(versions["layers"], (now - delay + 2 * jnp.asarray(stages)) % ring)
            tick, fed = self.tick(params, layers, pieces, full.batch + t)
            aboard, grads, (sums, weight, after), x = tick.once(aboard, fed, row, every)
            sums, weight, grads, x = board.leave(call.split.join(grads, after), sums, weight, x)
            first = pick(versions["before"], (now - delay) % ring)
            _, back = call.before(groups.with_first(params, first), self.piece(pieces, full.batch + t - delay))
            (grads_before,) = back(x)
            grads = unscaled(state, call.split.add(grads, jax.tree.map(wide, grads_before)), None)
            valid = {"before": row[0, _B_ON] == 1, "layers": row[:, _B_ON] == 1, "after": every[_HEADS] == 1}
            squares = groups.squares(grads)
            finite = {name: jnp.isfinite(square) for name, square in squares.items()}
            takes = {name: valid[name] & finite[name] if skips else valid[name] for name in GROUPS}
            params, states = groups.update(grads, states, params, takes)
            square = sum((jnp.where(valid[name], squares[name], 0).sum() for name in GROUPS), jnp.zeros(()))
            skipped = jnp.stack([jnp.any(valid[name] & ~finite[name]) for name in GROUPS]).any()
            taken = jnp.stack([jnp.any(takes[name]) for name in GROUPS]).any()
            carry = call.put_params(params), groups.placed(states), self.put_versions(versions), aboard
            return carry, (sums, weight, square, skipped, taken)

        flight = state.flight
        carry = state.params, state.opt_state, flight["versions"], flight["aboard"]
        xs = jnp.arange(window.length), rows, every
        (params, states, versions, aboard), (sums, weight, squares, skipped, taken) = jax.lax.scan(one, carry, xs)
        loss, metrics, _ = means_of((*jax.tree.map(lambda x: x.sum(0), sums), {}), weight.sum(0))
        norm = jnp.sqrt(squares.sum() / max(window.length, 1))
        told = {"skipped": skipped.any()} if skips else {}
        flight = {"pending": have[1], "batch": self.own, "versions": versions, "aboard": aboard}
        new = replace(state, params=params, opt_state=states, flight=self.placed(flight))
        return new, {"loss": loss, "grad_norm": norm, "updated": taken.any(), **metrics, **told}

    def put_versions(self, versions: dict[str, Any]) -> dict[str, Any]:
        split = self.call.split
        found = self.call.put_params(self.joined(versions), None)
        return {"layers": split.stack(found), "before": split.others(found)}


def _mean(head: Head, axes: Axes) -> Head:
    """A head whose gradients are those of its microbatch's mean loss, over all devices."""

    def mean(after: Any, piece: Any, y: jax.Array) -> tuple[Any, tuple[Any, jax.Array]]:
        (sums, weight, grads), cotangent = head(after, piece, y)
        total = jax.lax.psum(weight, axes) if axes else weight
        total = jnp.where(total == 0, 1, total)
        grads, cotangent = jax.tree.map(lambda g: g / total.astype(g.dtype), (grads, cotangent))
        return (sums, weight, grads), cotangent

    return mean


def every_stage(
    layout: Layout, loss_fn: Any, state: InFlight, batch: Any | None, how: How, asked: Asynchronous, *, skips: bool
) -> tuple[InFlight, Metrics]:
    """The state after a call of ``pipedream`` (but for ``step``) and its metrics; without a batch what is on its way is finished."""
    flight, full = state.flight, asked.schedule
    call = Call(layout, loss_fn, how, asked, full if batch is not None else full.flush(), state, state.params)
    own = flight["batch"] if batch is None else call.prepared(batch)
    have = jnp.stack([flight["pending"], jnp.asarray(batch is not None, jnp.int32)])
    return _Run(call, groups_of(call, own), flight["batch"], own)(state, have, skips)
