"""A schedule's table carried out: every tick each stage does what its row says, and what a row does not say is masked.

All stages run one program, the same for every tick, and there is no conditional in it, in either of two lowerings.
**Uniform**: A tick whose stages do forwards and backwards has both; where none
does either, the loop over layers runs zero times, on all stages alike. A stage that stands still in a tick computes what nobody reads: that
is the time a bubble takes anyway, and it is safe whatever the other axes of the mesh do. **Divergent**: each stage's loops run as its own row says, so a
stage waits for its neighbours only; there must be no collective in a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxpar.crossing import wide
from jaxpar.errors import ModelError
from jaxpar.layout import current_layout, hint
from jaxpar.pipeline.layers import AXIS
from jaxpar.pipeline.stage import Add, Chunk, Layer, held, read, write
from jaxpar.rules import Axes
from jaxpar.schedules.schedule import Schedule
from jaxpar.schedules.table import ALL, FIELDS, Keeps, Table
from jaxpar.topology import platform_of

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
      divergent: a stage's loops run as often as its own row says, and not as any stage's does.
      reduce: of one layer's gradients, done with every microbatch; ``None`` leaves them each device's own.
      counts: [stages, chunks], how many layers each has; ``None`` where all have as many.
      dims: logical dims of what goes from layer to layer.
    """

    schedule: Schedule
    layer: Layer
    side: Callable[[Any], Any]
    head: Head
    axes: Axes
    keeps: Keeps = "input"
    divergent: bool = False
    reduce: Callable[[Any], Any] | None = None
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
        rows, every = self._rows()

        def one(carry: Any, xs: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            return tick(carry, *xs), None

        carry, _ = jax.lax.scan(one, tick.start(x), (jnp.asarray(rows), jnp.asarray(every)))
        carry = tick.finish(carry, self.table.last, jnp.asarray(self._was_first()[-1]))
        return carry["grads"], carry["sums"], carry["x"][:, :-1]

    def _was_first(self) -> np.ndarray:
        """[ticks + 1, stages]: whether the tick before had the backward of the model's first layers."""
        return np.concatenate([np.zeros((1, self.schedule.stages), np.int32), self.table.column("b_first")])

    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        """What a stage reads of a tick, and what all stages do: see ``_EVERY``."""
        rows = np.concatenate([self.table.stages, self._was_first()[:-1, :, None]], axis=2)
        does = [self.table.column(f"{kind}_on").any(axis=1) for kind in "fbw"]
        works = self.table.ticks < self.schedule.microbatches
        return rows, np.concatenate([self.table.ticks, np.stack(does, 1), works], axis=1).astype(np.int32)

    def does(self, name: str) -> tuple[int, int]:
        """In how many ticks something is done, of how many; of what stages do by themselves, in the mean of all stages."""
        if self.divergent and name in ("forward", "backward", "weights"):
            each = self.table.column(f"{name[0]}_on")
            return int(each.sum()), each.size
        column = self._rows()[1][:, _EVERY.index(name)]
        return int(column.sum()), len(column)


_EVERY = (*ALL, "forward", "backward", "weights", "feeds", "heads", "drains")
"""Columns of a tick: microbatches, and whether any stage does something."""


_WAYS = ("down", "up")


@dataclass(frozen=True)
class _Here:
    """What a stage knows in a tick: its row, what all do, weights, its part of the carry, what its forward and the head gave, the batch."""

    row: jax.Array
    every: jax.Array
    weights: Any
    now: dict[str, Any]
    y: jax.Array
    cotangent: jax.Array
    pieces: Any

    def at(self, name: str) -> jax.Array:
        """A field of the row."""
        return self.row[FIELDS.index(name)]


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
        table, keeps = self.program.table, self.program.keeps
        slots, first = table.first
        came = [way for way in _WAYS if self.program.divergent and f"cot_{way}" in table.channels]

        def local(x: jax.Array, slot: jax.Array, weights: Any, pieces: Any) -> dict[str, Any]:
            fed, side = self._fed(x, first), self.program.side(_at(pieces, 0))
            chunk = self._chunk(weights, jnp.asarray(0), jnp.asarray(0))
            y, residuals = jax.eval_shape(chunk.kept, fed, side)
            _check_alike(fed, y)
            kept = [jnp.zeros(k.shape, k.dtype) for k in residuals]
            own = chunk.halves(side, kept, fed).shapes if self.program.schedule.split else []
            layers = jax.tree.leaves(weights)[0].shape[1]
            empty = lambda name, like: jnp.zeros((table.sizes[name] + 1, *like.shape), like.dtype)
            of_layers = lambda slots, like: jnp.zeros((slots, layers, *like.shape), like.dtype)
            return {
                "act": _put(self._hinted(empty("act", fed)), fed, slot),
                "cot": self._hinted(empty("cot", fed)),
                "res": [of_layers(table.sizes["res"] + 1 if keeps == "residuals" else 1, k) for k in kept],
                "own": [of_layers(table.sizes["own"] + 1, k) for k in own],
                "sent": jnp.zeros_like(fed),
                "came": {way: jnp.zeros_like(fed) for way in came},
                "x": jnp.concatenate([x, jnp.zeros_like(x[:1])]),
                "grads": self._empty(weights),
            }

        specs = {**dict.fromkeys(("act", "cot", "res", "own", "sent", "came", "grads"), "stage own"), "x": "columns"}
        call = self._inside(local, ("columns", "stage", "stage", "own"), specs)
        carry = call(x, jnp.asarray(slots), self.weights, self.pieces)
        y = jax.ShapeDtypeStruct((self.program.schedule.stages, x.shape[0], *x.shape[2:]), x.dtype)
        row = jnp.zeros((self.program.schedule.stages, len(FIELDS) + 1), jnp.int32)
        sums, cotangent = jax.eval_shape(self._head, row, jnp.asarray(0), y)
        empty = lambda tree: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tree)
        return {**carry, "sums": empty(sums), "cotangent": empty(cotangent)}

    def __call__(self, carry: dict[str, Any], row: jax.Array, every: jax.Array) -> dict[str, Any]:
        if not self.program.divergent:
            carry, y = self._forward(carry, row, every)
            carry = self._heads(carry, y, row, every)
            steps = (self._arrived, self._taken, self._gradients, self._sent)
            return self._each_stage(carry, y, row, every, *steps)
        # Whatever crosses stages makes all of them wait: it stands together where the tick begins and ends, and not between works.
        unused = carry["sent"]
        carry = self._each_stage(carry, unused, row, every, self._arrived)
        if self.program.schedule.fused:
            carry, y = self._forward(carry, row, every)
            carry = self._heads(carry, y, row, every)
            return self._each_stage(carry, y, row, every, self._taken, self._gradients, self._sent)
        # A stage has one operation in a tick, so which comes first is all the same.
        carry = self._each_stage(carry, unused, row, every, self._gradients)
        carry, y = self._forward(carry, row, every)
        # Behind the backward, too: it needs nothing of it, and would come first.
        y, carry["sent"], carry["grads"] = jax.lax.optimization_barrier((y, carry["sent"], carry["grads"]))
        carry = self._heads(carry, y, row, every)
        return self._each_stage(carry, y, row, every, self._taken, self._sent)

    def _forward(self, carry: dict[str, Any], row: jax.Array, every: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        keeps = self.program.keeps == "residuals"

        def local(
            row: jax.Array, every: jax.Array, weights: Any, act: jax.Array, res: Any, pieces: Any
        ) -> tuple[Any, Any]:
            at = _reader(row)
            side = self.program.side(_at(pieces, at("f_microbatch")))
            chunk = self._chunk(weights, at("f_chunk"), self._on("forward", at, every))
            with self._visits("forward"):
                y, kept = chunk.forward(_at(act, at("f_input")), side, res if keeps else [], at("f_residuals"))
            return (kept if keeps else res), self._hinted(y)

        call = self._inside(
            local, ("stage", "all", "stage", "stage own", "stage own", "own"), ("stage own", "stage own")
        )
        res, y = call(row, every, self.weights, carry["act"], carry["res"], self.pieces)
        return {**carry, "res": res}, y

    def _heads(self, carry: dict[str, Any], y: jax.Array, row: jax.Array, every: jax.Array) -> dict[str, Any]:
        """The loss of a microbatch that has come through all layers, if one has."""

        def one(run: jax.Array, found: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            more, cotangent = self._head(row, _every(every, "head"), held(y, run))
            return jax.tree.map(jnp.add, found[0], more), cotangent

        with self._visits("heads"):
            sums, cotangent = jax.lax.fori_loop(0, _every(every, "heads"), one, (carry["sums"], carry["cotangent"]))
        return {**carry, "sums": sums, "cotangent": cotangent}

    def _head(self, row: jax.Array, microbatch: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        """What comes after the layers, on all stages at once: the rules may split its weights over them."""

        def last(row: jax.Array, y: jax.Array) -> jax.Array:
            return _sum(jnp.where(_reader(row)("f_last") == 1, y, 0))

        def local(microbatch: jax.Array, after: Any, y: jax.Array, pieces: Any) -> tuple[Any, jax.Array]:
            return self.program.head(after, _at(pieces, microbatch), y)

        y = self._inside(last, ("stage", "stage own"), "own")(row, y)
        call = self._inside(local, ("all", "all", "own", "own"), ("own", "own"), stages=False)
        found: tuple[Any, jax.Array] = call(microbatch, self.after, y, self.pieces)
        return found

    def _each_stage(
        self, carry: dict[str, Any], y: jax.Array, row: jax.Array, every: jax.Array, *steps: Callable[[_Here], Any]
    ) -> dict[str, Any]:
        """These steps of every stage, one after the other."""
        rest = {name: value for name, value in carry.items() if name not in ("sums", "cotangent")}

        def local(row: jax.Array, every: jax.Array, weights: Any, now: Any, *more: Any) -> Any:
            for step in steps:
                now = {**now, **step(_Here(row, every, weights, now, *more))}
            return now

        kinds = {**dict.fromkeys(rest, "stage own"), "x": "columns"}
        call = self._inside(local, ("stage", "all", "stage", kinds, "stage own", "own", "own"), kinds)
        return {**carry, **call(row, every, self.weights, rest, y, carry["cotangent"], self.pieces)}

    def _arrived(self, here: _Here) -> dict[str, Any]:
        """Cotangents of the tick before: to the stages that want them, and out of the pipeline."""
        cot, sent, channels = here.now["cot"], here.now["sent"], self.program.table.channels
        for way in _WAYS:
            if f"cot_{way}" in channels:
                comes = here.now["came"][way] if self.program.divergent else _from_neighbour(sent, way)
                cot = _put(cot, comes, here.at(f"cot_{way}"))
        was = here.row[len(FIELDS)]
        drain = lambda run, x: self._drained(x, held(sent, run), was, _every(here.every, "drain"))
        with self._visits("drains"):
            x = jax.lax.fori_loop(0, _every(here.every, "drains"), drain, here.now["x"])
        return {"cot": cot, "x": x}

    def _taken(self, here: _Here) -> dict[str, Any]:
        """The cotangent of what the last layer gave."""
        return {"cot": _put(here.now["cot"], here.cotangent, here.at("cot_head"))}

    def _sent(self, here: _Here) -> dict[str, Any]:
        """What goes to other stages, and what is fed to the first."""
        at, now, channels = here.at, here.now, self.program.table.channels
        result: dict[str, Any] = {}
        y, sent, act = here.y, now["sent"], now["act"]
        if "cot_self" in channels:
            result["cot"] = _put(now["cot"], sent, at("cot_self"))
        if self.program.divergent:
            # Behind all work of the tick: a stage that waits for it would wait twice.
            y, sent = jax.lax.optimization_barrier((y, sent))
            result["came"] = {way: _from_neighbour(sent, way) for way in _WAYS if f"cot_{way}" in channels}
        for way in (*_WAYS, "self"):
            if f"act_{way}" in channels:
                act = _put(act, y if way == "self" else _from_neighbour(y, way), at(f"act_{way}"))
        feed = lambda run, act: _put(act, self._fed(now["x"], held(_every(here.every, "feed"), run)), at("act_feed"))
        with self._visits("feeds"):
            result["act"] = jax.lax.fori_loop(0, _every(here.every, "feeds"), feed, act)
        return result

    def _gradients(self, here: _Here) -> dict[str, Any]:
        """Cotangents of a chunk's input, and sums of gradients with its own: at once, or inputs now and weights later."""
        split, at, every, weights = self.program.schedule.split, here.at, here.every, here.weights
        now, pieces = here.now, here.pieces
        chunk = self._chunk(weights, at("b_chunk"), self._on("backward", at, every))
        side = self.program.side(_at(pieces, at("b_microbatch")))
        res, slot = now["res"], at("b_residuals")
        if self.program.keeps == "input":
            slot = jnp.asarray(0)
            with self._visits("backward"):
                _, res = chunk.forward(_at(now["act"], at("b_input")), side, res, slot)
        cotangent, result = _at(now["cot"], at("b_cotangent")), {"res": res}
        if not split:
            add = self._adder(at("b_chunk"), at("b_on"))
            with self._visits("backward"):
                sent, result["grads"] = chunk.backward(res, slot, side, cotangent, add, now["grads"])
            return {**result, "sent": self._hinted(sent)}
        with self._visits("backward"):
            sent, own = chunk.backward_of_inputs(res, slot, side, cotangent, now["own"], at("b_own"))
        late = self._chunk(weights, at("w_chunk"), self._on("weights", at, every))
        side = self.program.side(_at(pieces, at("w_microbatch")))
        parts = late.halves(side, [jnp.zeros(k.shape[2:], k.dtype) for k in res], jnp.zeros_like(cotangent))
        add = self._adder(at("w_chunk"), at("w_on"))
        with self._visits("weights"):
            result["grads"] = late.backward_of_weights(own, at("w_own"), side, parts, add, now["grads"])
        return {**result, "own": own, "sent": self._hinted(sent)}

    def _adder(self, number: jax.Array, on: jax.Array) -> Add:
        """Adds a layer's gradients to the sums [chunks, layers, ...], in fp32 or wider."""

        def add(sums: Any, i: jax.Array, found: Any, here: jax.Array) -> Any:
            found = self._reduced(found)

            def one(total: jax.Array, grad: jax.Array) -> jax.Array:
                (have,) = read([total], number, i)
                return write(total, have + jnp.where((on == 1) & here, wide(grad), 0), number, i)

            return jax.tree.map(one, sums, found)

        return add

    def _reduced(self, grads: Any) -> Any:
        return grads if self.program.reduce is None else self.program.reduce(grads)

    def _empty(self, weights: Any) -> Any:
        """Sums of gradients [chunks, layers, ...], in fp32 or wider."""
        layer = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[2:], w.dtype), weights)
        found = jax.eval_shape(self._reduced, layer)
        zeros = lambda w, g: jnp.zeros((*w.shape[:2], *g.shape), wide_dtype(g.dtype))
        return jax.tree.map(zeros, weights, found)

    def finish(self, carry: dict[str, Any], last: int, was_first: jax.Array) -> dict[str, Any]:
        """What the last tick sent out of the pipeline is taken."""

        def local(was: jax.Array, x: jax.Array, sent: jax.Array) -> jax.Array:
            return self._drained(x, sent, was, jnp.asarray(last))

        call = self._inside(local, ("stage", "columns", "stage own"), "columns")
        return {**carry, "x": call(was_first, carry["x"], carry["sent"])}

    def _drained(self, x: jax.Array, sent: jax.Array, was_first: jax.Array, microbatch: jax.Array) -> jax.Array:
        """The cotangent of a microbatch's input, from the stage that has it, in the place of the input."""
        return _put(x, _sum(jnp.where(was_first == 1, sent, 0), scatter=self.grows), microbatch)

    def _fed(self, x: jax.Array, microbatch: Any) -> jax.Array:
        """The input of a microbatch, of which each stage holds some columns."""
        x = _at(x, microbatch)
        return jax.lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True) if self.grows else x

    def _chunk(self, weights: Any, number: jax.Array, on: jax.Array) -> Chunk:
        """A chunk of the stage, whose loops run if ``on`` is 1."""
        counts = self.program.counts
        count = None if counts is None else jnp.asarray(counts)[jax.lax.axis_index(AXIS), number]
        layers = jax.tree.leaves(weights)[0].shape[1]
        return Chunk(self.program.layer, weights, number, on * layers, count)

    def _on(self, kind: str, at: Callable[[str], jax.Array], every: jax.Array) -> jax.Array:
        """Whether loops over layers run in this tick: on this stage, or on all stages alike."""
        return at(f"{kind[0]}_on") if self.program.divergent else _every(every, kind)

    def _visits(self, name: str) -> AbstractContextManager[None]:
        """The scope of loops that run in some ticks only, saying in how many of all."""
        count, ticks = self.program.does(name)
        if name not in ("forward", "backward", "weights"):
            return jax.named_scope(f"visits_{count}of{ticks}")
        layers = jax.tree.leaves(self.weights)[0].shape[2]
        return jax.named_scope(f"own_layers/visits_{count * layers}of{ticks}")

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


def _check_alike(x: Any, y: Any) -> None:
    """What goes from stage to stage is of one shape and dtype."""
    was, now = (f"{a.dtype}{list(a.shape)}" for a in (x, y))
    if was != now:
        raise ModelError(
            f"pipeline: a layer turned {was} into {now} (of one device's microbatch), but what goes from layer to layer keeps shape and dtype. "
            f"Remedy: a Staged(layer=...) that returns what it was given, cast as it was, or a before that gives {now}."
        )


def _every(every: jax.Array, name: str) -> jax.Array:
    return every[_EVERY.index(name)]


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
