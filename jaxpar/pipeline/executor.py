"""A schedule's table carried out: every tick each stage does what its row says, and what a row does not say is masked.

All stages run one program and there is no control flow in it: a tick whose stages do forwards and backwards has both, and a stage that stands
still computes what nobody reads. That is the time a bubble takes anyway, and it is safe whatever the other axes of the mesh do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxpar.crossing import wide
from jaxpar.layout import current_layout, hint
from jaxpar.pipeline.phases import Round, Work, rounds_of
from jaxpar.pipeline.stage import Chunk, Layer
from jaxpar.rules import Axes
from jaxpar.schedules.schedule import Schedule
from jaxpar.schedules.table import ALL, FIELDS, Keeps, Table
from jaxpar.topology import platform_of

AXIS = "pipeline"
type Head = Callable[[Any, Any, jax.Array], tuple[Any, jax.Array]]


@dataclass(frozen=True)
class Program:
    """What is carried out.

    Attributes:
      schedule: which microbatch is where, and when.
      layer: of the model.
      side: of a microbatch, what layers want to know of it.
      head: ``head(weights, microbatch, y) -> (sums, cotangent)``: what one microbatch adds to the sums over all, and the cotangent of ``y``.
      axes: of the batch and the sequence, over which each device has its own rows.
      keeps: of a forward: its input, from which the backward computes it again, or its residuals.
      counts: [stages, chunks], how many layers each has; ``None`` where all have as many.
      dims: logical dims of what goes from layer to layer.
    """

    schedule: Schedule
    layer: Layer
    side: Callable[[Any], Any]
    head: Head
    axes: Axes
    keeps: Keeps = "input"
    counts: np.ndarray | None = None
    dims: tuple[str | None, ...] | None = None
    table: Table = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", self.schedule.table(self.keeps))

    def run(self, weights: Any, after: Any, x: jax.Array, pieces: Any) -> tuple[Any, Any, jax.Array]:
        """Sums of gradients of the weights, sums over microbatches, and the cotangents of ``x``: each device's own.

        Args:
          weights: of the layers, [stages, chunks, layers, ...].
          after: weights that ``head`` is given.
          x: what the first layer is given: [devices, microbatches, rows, ...], the devices being those along ``axes``.
          pieces: of the batch, [devices, microbatches, rows, ...].

        Returns:
          Gradients [stages, devices, chunks, layers, ...], sums [devices, ...], and what ``x`` is.
        """
        tick = _Tick(self, weights, after, pieces, x.shape[-1] % self.schedule.stages == 0)
        carry = tick.start(x)
        rows, every = jnp.asarray(self._rows()), jnp.asarray(self.table.ticks)
        at = 0
        for found in rounds_of(self.schedule):
            ticks = found.times * found.ticks
            carry = _rounds(tick, carry, found, rows[at : at + ticks], every[at : at + ticks])
            at += ticks
        carry = tick.finish(carry, self.table.last, jnp.asarray(self._was_first()[-1]))
        return carry["grads"], carry["sums"], carry["x"][:, :-1]

    def _was_first(self) -> np.ndarray:
        """[ticks + 1, stages]: whether the tick before had the backward of the model's first layers."""
        return np.concatenate([np.zeros((1, self.schedule.stages), np.int32), self.table.column("b_first")])

    def _rows(self) -> np.ndarray:
        return np.concatenate([self.table.stages, self._was_first()[:-1, :, None]], axis=2)


def _rounds(tick: _Tick, carry: Any, found: Round, rows: jax.Array, every: jax.Array) -> Any:
    def one(work: Work, carry: Any, xs: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        return tick(work, carry, *xs), None

    def once(carry: Any, xs: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        at = 0
        for run in found.runs:
            part = jax.tree.map(lambda x, at=at, run=run: x[at : at + run.ticks], xs)
            if run.ticks == 1:
                carry = tick(run.work, carry, *(x[0] for x in part))
            else:
                carry, _ = jax.lax.scan(functools.partial(one, run.work), carry, part)
            at += run.ticks
        return carry, None

    if found.times == 1:
        return once(carry, (rows, every))[0]
    cut = lambda x: x.reshape(found.times, found.ticks, *x.shape[1:])
    return jax.lax.scan(once, carry, (cut(rows), cut(every)))[0]


@dataclass(frozen=True)
class _Tick:
    """One tick of all stages. Functions named ``local`` are of one device: its own arrays, without the dims that are split."""

    program: Program
    weights: Any
    after: Any
    pieces: Any
    grows: bool

    def start(self, x: jax.Array) -> dict[str, Any]:
        """Empty buffers, with the first microbatch where the first tick wants it."""
        table = self.program.table
        slots, first = table.first

        def local(x: jax.Array, slot: jax.Array, weights: Any, pieces: Any) -> dict[str, Any]:
            fed = self._fed(x, first)
            keeps = self.program.keeps == "residuals"
            kept = self._chunk(weights, jnp.asarray(0)).forward(fed, self.program.side(_at(pieces, 0)), keep=keeps)[1]
            empty = lambda name, like: jnp.zeros((table.sizes[name] + 1, *like.shape), like.dtype)
            return {
                "act": _put(self._hinted(empty("act", fed)), fed, slot),
                "cot": self._hinted(empty("cot", fed)),
                "res": [empty("res", like) for like in kept],
                "sent": jnp.zeros_like(fed),
                "x": jnp.concatenate([x, jnp.zeros_like(x[:1])]),
                "grads": jax.tree.map(lambda w: jnp.zeros(w.shape, wide_dtype(w.dtype)), weights),
            }

        specs = {**dict.fromkeys(("act", "cot", "res", "sent", "grads"), "stage own"), "x": "columns"}
        call = self._inside(local, ("columns", "stage", "stage", "own"), specs)
        carry = call(x, jnp.asarray(slots), self.weights, self.pieces)
        first_y = jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype)
        sums = jax.eval_shape(self._head, jnp.asarray(0), first_y)[0]
        return {**carry, "sums": jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)}

    def __call__(self, work: Work, carry: dict[str, Any], row: jax.Array, every: jax.Array) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if work.forward:
            carry, given = self._forward(work, carry, row)
        if work.head:
            found, given["cotangent"] = self._head(every[ALL.index("head")], given.pop("last"))
            carry = {**carry, "sums": jax.tree.map(jnp.add, carry["sums"], found)}
        return self._backward(work, carry, given, row, every)

    def _forward(self, work: Work, carry: dict[str, Any], row: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        keeps = self.program.keeps == "residuals"

        def local(row: jax.Array, weights: Any, act: jax.Array, res: Any, pieces: Any) -> tuple[Any, Any]:
            at = _reader(row)
            side = self.program.side(_at(pieces, at("f_microbatch")))
            y, kept = self._chunk(weights, at("f_chunk")).forward(_at(act, at("f_input")), side, keep=keeps)
            y = self._hinted(y)
            res = [_put(buffer, x, at("f_residuals")) for buffer, x in zip(res, kept, strict=True)]
            last = {"last": _sum(jnp.where(at("f_last") == 1, y, 0))} if work.head else {}
            return res, {"y": y, **last}

        out = {"y": "stage own", **({"last": "own"} if work.head else {})}
        call = self._inside(local, ("stage", "stage", "stage own", "stage own", "own"), ("stage own", out))
        res, given = call(row, self.weights, carry["act"], carry["res"], self.pieces)
        return {**carry, "res": res}, given

    def _head(self, microbatch: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        """What comes after the layers, on all stages at once: the rules may split its weights over them."""

        def local(microbatch: jax.Array, after: Any, y: jax.Array, pieces: Any) -> tuple[Any, jax.Array]:
            return self.program.head(after, _at(pieces, microbatch), y)

        call = self._inside(local, ("all", "all", "own", "own"), ("own", "own"), stages=False)
        found: tuple[Any, jax.Array] = call(microbatch, self.after, y, self.pieces)
        return found

    def _backward(
        self, work: Work, carry: dict[str, Any], given: dict[str, Any], row: jax.Array, every: jax.Array
    ) -> dict[str, Any]:
        """What arrives, backwards, and what is sent."""
        channels = self.program.table.channels
        rest = {name: value for name, value in carry.items() if name != "sums"}

        def local(row: jax.Array, every: jax.Array, weights: Any, now: Any, given: Any, pieces: Any) -> Any:
            at, now = _reader(row), dict(now)
            if work.backward:
                for way in ("down", "up"):
                    if f"cot_{way}" in channels:
                        now["cot"] = _put(now["cot"], _from_neighbour(now["sent"], way), at(f"cot_{way}"))
            if work.drain:
                now["x"] = self._drained(now, row[len(FIELDS)], every[ALL.index("drain")])
            if work.head:
                now["cot"] = _put(now["cot"], given["cotangent"], at("cot_head"))
            if work.backward:
                now["sent"], now["grads"] = self._gradients(at, weights, now, pieces)
                if "cot_self" in channels:
                    now["cot"] = _put(now["cot"], now["sent"], at("cot_self"))
            if work.forward:
                for way in ("down", "up", "self"):
                    if f"act_{way}" in channels:
                        y = given["y"] if way == "self" else _from_neighbour(given["y"], way)
                        now["act"] = _put(now["act"], y, at(f"act_{way}"))
            if work.feed:
                now["act"] = _put(now["act"], self._fed(now["x"], every[ALL.index("feed")]), at("act_feed"))
            return now

        kinds = {**dict.fromkeys(rest, "stage own"), "x": "columns"}
        specs = {"y": "stage own", "cotangent": "own"}
        given = {name: x for name, x in given.items() if name in specs}
        specs = {name: specs[name] for name in given}
        call = self._inside(local, ("stage", "all", "stage", kinds, specs, "own"), kinds)
        return {**carry, **call(row, every, self.weights, rest, given, self.pieces)}

    def _gradients(
        self, at: Callable[[str], jax.Array], weights: Any, now: dict[str, Any], pieces: Any
    ) -> tuple[jax.Array, Any]:
        """The cotangent of a chunk's input, and the sums of gradients with its own."""
        number, on = at("b_chunk"), at("b_on") == 1
        chunk = self._chunk(weights, number)
        side = self.program.side(_at(pieces, at("b_microbatch")))
        cotangent = _at(now["cot"], at("b_cotangent"))
        if self.program.keeps == "residuals":
            kept = [_at(buffer, at("b_residuals")) for buffer in now["res"]]
        else:
            _, kept = chunk.forward(_at(now["act"], at("b_input")), side, keep=True)

        def add(sums: Any, i: jax.Array, found: Any, here: jax.Array) -> Any:
            def one(total: jax.Array, grad: jax.Array) -> jax.Array:
                where: list[Any] = [number, i, *(0,) * grad.ndim]
                have = jax.lax.dynamic_slice(total, where, (1, 1, *grad.shape))
                more = have + jnp.where(on & here, wide(grad), 0)[None, None]
                return jax.lax.dynamic_update_slice(total, more, where)

            return jax.tree.map(one, sums, found)

        sent, grads = chunk.backward(kept, side, cotangent, cotangent, add, now["grads"])
        return self._hinted(sent), grads

    def finish(self, carry: dict[str, Any], last: int, was_first: jax.Array) -> dict[str, Any]:
        """What the last tick sent out of the pipeline is taken."""

        def local(was: jax.Array, x: jax.Array, sent: jax.Array) -> jax.Array:
            return self._drained({"x": x, "sent": sent}, was, jnp.asarray(last))

        call = self._inside(local, ("stage", "columns", "stage own"), "columns")
        return {**carry, "x": call(was_first, carry["x"], carry["sent"])}

    def _drained(self, now: dict[str, Any], was_first: jax.Array, microbatch: jax.Array) -> jax.Array:
        """The cotangent of a microbatch's input, from the stage that has it, in the place of the input."""
        sent = _sum(jnp.where(was_first == 1, now["sent"], 0), scatter=self.grows)
        return _put(now["x"], sent, microbatch)

    def _fed(self, x: jax.Array, microbatch: Any) -> jax.Array:
        """The input of a microbatch, of which each stage holds some columns."""
        x = _at(x, microbatch)
        return jax.lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True) if self.grows else x

    def _chunk(self, weights: Any, number: jax.Array) -> Chunk:
        counts = self.program.counts
        count = None if counts is None else jnp.asarray(counts)[jax.lax.axis_index(AXIS), number]
        return Chunk(self.program.layer, _at(weights, number), count)

    def _hinted(self, x: jax.Array) -> jax.Array:
        dims = self.program.dims
        return x if dims is None else hint(x, *(None,) * (x.ndim - len(dims)), *dims)

    def _inside(self, f: Callable[..., Any], ins: Any, outs: Any, *, stages: bool = True) -> Callable[..., Any]:
        """``f`` of each device's own, in a ``shard_map``.

        Args:
          ins, outs: trees of what arrays are. ``stage``: [stages, ...]; ``own``: [devices, ...]; ``stage own``: [stages, devices, ...];
            ``columns``: own, its last dim split over the stages; ``all``: the same everywhere.
          stages: also each stage's own.
        """
        axes = self.program.axes or None
        last = AXIS if self.grows else None
        spec: dict[str, Callable[[int], PartitionSpec]] = {
            "stage": lambda _: PartitionSpec(AXIS),
            "own": lambda _: PartitionSpec(axes),
            "stage own": lambda _: PartitionSpec(AXIS, axes),
            "columns": lambda ndim: PartitionSpec(axes, *(None,) * (ndim - 2), last),
            "all": lambda _: PartitionSpec(),
        }
        lead = {"stage": 1, "own": 1, "stage own": 2, "columns": 1, "all": 0}

        def local(*args: Any) -> Any:
            inner = _each(lambda kind, x: x.reshape(x.shape[lead[kind] :]), ins, args)
            return _each(lambda kind, x: x.reshape((1,) * lead[kind] + x.shape), outs, f(*inner))

        def run(*args: Any) -> Any:
            sizes = current_layout().sizes
            alone = {axis for axis, size in sizes.items() if size == 1 and axis != AXIS}
            manual = {*self.program.axes, *alone, *((AXIS,) if stages else ())}
            in_specs = _each(lambda kind, x: spec[kind](x.ndim), ins, args)
            # What comes out has the dims of what went in under the same name.
            dims = next((x.ndim for kind, x in _pairs(ins, args) if kind == "columns"), 0)
            out_specs = jax.tree.map(lambda kind: spec[kind](dims), outs)
            return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False)(
                *args
            )

        return run


def _each(f: Callable[[str, Any], Any], kinds: Any, tree: Any) -> Any:
    """``f(kind, array)`` of every array; ``kinds`` is a prefix of the tree."""
    return jax.tree.map(lambda kind, part: jax.tree.map(lambda x: f(kind, x), part), kinds, tree)


def _pairs(kinds: Any, tree: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    _each(lambda kind, x: found.append((kind, x)), kinds, tree)
    return found


def wide_dtype(dtype: Any) -> Any:
    """fp32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def _reader(row: jax.Array) -> Callable[[str], jax.Array]:
    return lambda name: row[FIELDS.index(name)]


def _at(tree: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)


def _put(buffer: jax.Array, x: jax.Array, slot: jax.Array) -> jax.Array:
    """``buffer`` [slots, ...] with ``x`` in a slot."""
    return jax.lax.dynamic_update_index_in_dim(buffer, x.astype(buffer.dtype), slot, 0)


def _from_neighbour(x: jax.Array, way: str) -> jax.Array:
    """What the stage before (``down``) or after (``up``) has."""
    stages = jax.lax.axis_size(AXIS)
    step = 1 if way == "down" else -1
    return jax.lax.ppermute(x, AXIS, [(i, (i + step) % stages) for i in range(stages)])


def _sum(x: jax.Array, *, scatter: bool = False) -> jax.Array:
    """The sum over stages, of which each keeps some columns if they are scattered."""
    dtype = x.dtype
    mesh = jax.sharding.get_abstract_mesh()
    if set(mesh.axis_names) - set(mesh.manual_axes) and platform_of(current_layout().mesh) == "cpu":
        x = wide(x)  # XLA:CPU aborts on a sum of 16 bits where some axes are manual and others not
    x = jax.lax.psum_scatter(x, AXIS, scatter_dimension=x.ndim - 1, tiled=True) if scatter else jax.lax.psum(x, AXIS)
    return x.astype(dtype)
