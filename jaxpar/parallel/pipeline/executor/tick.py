"""Runs one tick of all stages, as the rows of the table say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxpar.parallel.collectives.gather_reduce import at_least_fp32
from jaxpar.parallel.pipeline.executor import recompute
from jaxpar.parallel.pipeline.executor.aux_losses import added, counted, empty_sums, nothing_of, totals
from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.pipeline.executor.per_device import per_device
from jaxpar.parallel.pipeline.executor.primitives import (
    at_least_fp32_dtype,
    check_alike,
    from_neighbour,
    over_stages,
    pick,
    put,
    reader,
)
from jaxpar.parallel.pipeline.executor.program import Before, PipelineProgram, of_every
from jaxpar.parallel.pipeline.executor.sequence_chunks import Carried, slots_of
from jaxpar.parallel.pipeline.executor.stage import Add, Chunk, held, read, write
from jaxpar.parallel.pipeline.executor.tick_inputs import TickInputs
from jaxpar.parallel.pipeline.schedules.table import FIELDS
from jaxpar.sharding.layout import hint

_WAYS = ("down", "up")


@dataclass(frozen=True)
class TickRunner:
    """Runs one tick of all stages.

    Functions named ``local`` are per-device: their arrays lack the sharded leading dims.

    Attributes:
      program: the schedule's table and the functions to call.
      weights: of the layers, [stages, chunks, layers, ...].
      after: the other weights.
      pieces: the batch, [devices, microbatches, rows, ...].
      grows: the last dim of the first layer's input is sharded over the stages.
      read: the weights that ``program.side`` receives.
    """

    program: PipelineProgram
    weights: Any
    after: Any
    pieces: Any
    grows: bool
    read: Any = ()

    def start(self, x: jax.Array | None) -> dict[str, Any]:
        """Returns the carry before the first tick: empty buffers, and the first microbatch in its slot.

        Args:
          x: the input of the first layer, [devices, microbatches, rows, ...], or ``None`` if the ticks compute it.
        """
        table, activation_checkpointing = self.program.table, self.program.activation_checkpointing
        slots, first = table.first
        x = self.given(first)[:, None] if x is None else x
        came = [way for way in _WAYS if self.program.divergent and f"cot_{way}" in table.channels]

        def local(x: jax.Array, slot: jax.Array, weights: Any, pieces: Any, read: Any) -> dict[str, Any]:
            fed, side = self._fed(x, first), self.program.side(pick(pieces, 0), read)
            chunk = self._chunk(weights, jnp.asarray(0), jnp.asarray(0))
            y, residuals = jax.eval_shape(chunk.kept, fed, side)
            check_alike(fed, y)
            kept = [jnp.zeros(k.shape, k.dtype) for k in residuals]
            own = chunk.halves(side, kept, fed).shapes if self.program.schedule.split else []
            extras = jax.eval_shape(chunk.extras, fed, side)
            layers = jax.tree.leaves(weights)[0].shape[1]
            empty = lambda name, like: jnp.zeros((table.sizes[name] + 1, *like.shape), like.dtype)
            of_layers = lambda slots, like: jnp.zeros((slots, layers, *like.shape), like.dtype)
            layered = self.program.kept
            of_layer = lambda slots, like: jnp.zeros((slots + 1, 1, *like.shape), like.dtype)
            res = (
                [of_layers(table.sizes["res"] + 1 if activation_checkpointing == "none" else 1, k) for k in kept]
                if layered is None
                else [of_layer(layered.residuals, k) for k in kept]
            )
            return {
                "act": put(self._hinted(empty("act", fed)), fed, slot),
                "cot": self._hinted(empty("cot", fed)),
                "res": res if not isinstance(chunk, Carried) else chunk.pools(res, layers, table.sizes),
                "ins": [] if layered is None else [self._hinted(of_layer(layered.inputs, fed))],
                "own": [of_layers(table.sizes["own"] + 1, k) for k in own],
                "sent": jnp.zeros_like(fed),
                "came": {way: jnp.zeros_like(fed) for way in came},
                # The extra slot makes this a new array. The TPU compiler copies an input that the loop would overwrite
                # in place.
                "x": self._hinted(jnp.concatenate([x, jnp.zeros_like(x[:1])])),
                "aux": empty_sums(extras, self.program.schedule.microbatches),
                "grads": self._empty(weights),
                "turn": self._empty_turns(weights),
            }

        mine = ("act", "cot", "res", "ins", "own", "sent", "came", "aux", "grads", "turn")
        specs = {**dict.fromkeys(mine, "stage own"), "x": "columns"}
        call = self._inside(local, ("columns", "stage", "stage", "own", "all"), specs)
        return self._with_sums(call(x, jnp.asarray(slots), self.weights, self.pieces, self.read), x)

    def _with_sums(self, carry: dict[str, Any], x: jax.Array) -> dict[str, Any]:
        """Adds zeros for the sums and the cotangent that the head returns."""
        y = jax.ShapeDtypeStruct((self.program.schedule.stages, x.shape[0], *x.shape[2:]), x.dtype)
        row = jnp.zeros(self.program.rows()[0].shape[1:], jnp.int32)
        sums, cotangent = jax.eval_shape(self._head, row, jnp.asarray(0), y)
        empty = lambda tree: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tree)
        return {**carry, "sums": empty(sums), "cotangent": empty(cotangent)}

    def __call__(self, carry: dict[str, Any], row: jax.Array, every: jax.Array) -> dict[str, Any]:
        return self._given_back(self._worked(carry, row, every), every)

    def _worked(self, carry: dict[str, Any], row: jax.Array, every: jax.Array) -> dict[str, Any]:
        if not self.program.divergent:
            carry, y = self._forward(carry, row, every)
            carry = self._given(self._heads(carry, y, row, every), every)
            steps = (self._arrived, self._taken, self._gradients, self._ended, self._sent)
            return self._each_stage(carry, y, row, every, *steps)
        # Collectives over `pipeline` synchronize all stages. Except for the head's, they run only at the start and the
        # end of a tick, never between compute.
        unused = carry["sent"]
        carry = self._each_stage(carry, unused, row, every, self._arrived)
        if self.program.schedule.fused:
            carry, y = self._forward(carry, row, every)
            carry = self._given(self._heads(carry, y, row, every), every)
            return self._each_stage(carry, y, row, every, self._taken, self._gradients, self._sent)
        # A stage has at most one operation in a tick, so either order is correct.
        carry = self._each_stage(carry, unused, row, every, self._gradients)
        carry, y = self._forward(carry, row, every)
        # The head does not depend on the backward. Without the barrier, the compiler would run the head's collective
        # first.
        y, carry["sent"], carry["grads"] = jax.lax.optimization_barrier((y, carry["sent"], carry["grads"]))
        carry = self._given(self._heads(carry, y, row, every), every)
        return self._each_stage(carry, y, row, every, self._taken, self._sent)

    def given(self, microbatch: Any) -> jax.Array:
        """Computes the embedding of a microbatch on all stages in parallel, as for the head: [devices, rows, ...]."""
        make = cast(Before, self.program.before).given
        local = lambda microbatch, after, pieces: make(after, pick(pieces, microbatch))
        call = self._inside(local, ("all", "all", "own"), "own", stages=False)
        x: jax.Array = call(jnp.asarray(microbatch), self.after, self.pieces)
        return x

    def _given(self, carry: dict[str, Any], every: jax.Array) -> dict[str, Any]:
        """Embeds the microbatch that enters the pipeline in this tick, if the embedding runs in the ticks."""
        if self.program.before is None:
            return carry
        one = lambda run, x: x.at[:, 0].set(self.given(held(of_every(every, "feed"), run)))
        with self._visits("feeds"):
            return {**carry, "x": jax.lax.fori_loop(0, of_every(every, "feeds"), one, carry["x"])}

    def _given_back(self, carry: dict[str, Any], every: jax.Array) -> dict[str, Any]:
        """Runs the backward of the embedding for the microbatch that left in this tick, if it runs in the ticks."""
        if self.program.before is None:
            return carry
        one = lambda run, sums: self._back(sums, carry["x"], held(of_every(every, "drain"), run))
        with self._visits("drains"):
            return {**carry, "sums": jax.lax.fori_loop(0, of_every(every, "drains"), one, carry["sums"])}

    def _back(self, sums: Any, x: jax.Array, microbatch: jax.Array) -> Any:
        back = cast(Before, self.program.before).back
        local = lambda microbatch, after, x, pieces, sums: back(after, pick(pieces, microbatch), x[1], sums)
        call = self._inside(local, ("all", "all", "own", "own", "own"), "own", stages=False)
        return call(microbatch, self.after, x, self.pieces, sums)

    def _forward(self, carry: dict[str, Any], row: jax.Array, every: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        keeps = self.program.activation_checkpointing == "none"
        changes = keeps or self.program.carry is not None

        def local(
            row: jax.Array,
            every: jax.Array,
            weights: Any,
            read: Any,
            act: jax.Array,
            res: Any,
            ins: Any,
            aux: Any,
            pieces: Any,
        ) -> tuple[Any, Any, Any, Any]:
            at = reader(row)
            side = self.program.side(pick(pieces, at("f_microbatch")), read)
            chunk = self._chunk(weights, at("f_chunk"), self._on("forward", at, every))
            with self._visits("forward"):
                x = pick(act, at("f_input"))
                if ins:
                    y, res, ins, extras = recompute.forward(
                        chunk, x, side, res, ins, self.program.slots(row), nothing_of(aux)
                    )
                else:
                    slot = self._slots(at, "f", at("f_residuals") if keeps else None)
                    y, kept, extras = chunk.forward(x, side, res if changes else [], slot, nothing_of(aux))
                    res = kept if changes else res
            aux = added(aux, extras, at("f_on"), at("f_microbatch"))
            return res, ins, self._hinted(y), aux

        own = "stage own"
        call = self._inside(local, ("stage", "all", "stage", "all", own, own, own, own, "own"), (own, own, own, own))
        now = (carry["act"], carry["res"], carry["ins"], carry["aux"])
        res, ins, y, aux = call(row, every, self.weights, self.read, *now, self.pieces)
        return {**carry, "res": res, "ins": ins, "aux": aux}, y

    def _heads(self, carry: dict[str, Any], y: jax.Array, row: jax.Array, every: jax.Array) -> dict[str, Any]:
        """Runs the head for the microbatch that passed the last layer in this tick, if there is one."""

        def one(run: jax.Array, found: tuple[Any, Any]) -> tuple[Any, Any]:
            more, cotangent = self._head(row, of_every(every, "head"), held(y, run))
            return jax.tree.map(jnp.add, found[0], more), cotangent

        with self._visits("heads"):
            sums, cotangent = jax.lax.fori_loop(0, of_every(every, "heads"), one, (carry["sums"], carry["cotangent"]))
        return {**carry, "sums": sums, "cotangent": cotangent}

    def _head(self, row: jax.Array, microbatch: jax.Array, y: jax.Array) -> tuple[Any, Any]:
        """Runs the head on all stages in parallel, as the rules may shard its weights over them."""

        def last(row: jax.Array, y: jax.Array) -> jax.Array:
            return over_stages(jnp.where(reader(row)("f_last") == 1, y, 0))

        def local(microbatch: jax.Array, after: Any, y: jax.Array, pieces: Any) -> tuple[Any, Any]:
            return self.program.head(after, pick(pieces, microbatch), y)

        y = self._inside(last, ("stage", "stage own"), "own")(row, y)
        call = self._inside(local, ("all", "all", "own", "own"), ("own", "own"), stages=False)
        found: tuple[Any, Any] = call(microbatch, self.after, y, self.pieces)
        return found

    def _each_stage(
        self, carry: dict[str, Any], y: jax.Array, row: jax.Array, every: jax.Array, *steps: Callable[[TickInputs], Any]
    ) -> dict[str, Any]:
        """Runs these steps in order on every stage."""
        rest = {name: value for name, value in carry.items() if name not in ("sums", "cotangent")}

        def local(row: jax.Array, every: jax.Array, weights: Any, now: Any, *more: Any) -> Any:
            for step in steps:
                now = {**now, **step(TickInputs(row, every, weights, now, *more))}
            return now

        kinds = {**dict.fromkeys(rest, "stage own"), "x": "columns"}
        call = self._inside(local, ("stage", "all", "stage", kinds, "stage own", "own", "own", "all"), kinds)
        return {**carry, **call(row, every, self.weights, rest, y, carry["cotangent"], self.pieces, self.read)}

    def _arrived(self, here: TickInputs) -> dict[str, Any]:
        """Receives the cotangents of the previous tick, and stores the one that leaves the pipeline."""
        cot, sent, channels = here.now["cot"], here.now["sent"], self.program.table.channels
        for way in _WAYS:
            if f"cot_{way}" in channels:
                comes = here.now["came"][way] if self.program.divergent else from_neighbour(sent, way)
                cot = put(cot, comes, here.at(f"cot_{way}"))
        was = here.row[len(FIELDS)]
        drain = lambda run, x: self._drained(x, held(sent, run), was, of_every(here.every, "drain"))
        with self._visits("drains"):
            x = jax.lax.fori_loop(0, of_every(here.every, "drains"), drain, here.now["x"])
        return {"cot": cot, "x": x}

    def _taken(self, here: TickInputs) -> dict[str, Any]:
        """Stores the cotangent of the last layer's output and the weight of its microbatch."""
        return {"cot": put(here.now["cot"], here.cotangent[0], here.at("cot_head")), **self._counted(here)}

    def _counted(self, here: TickInputs) -> dict[str, Any]:
        """Stores the weight of the head's microbatch, which the layers' own losses need."""
        return {"aux": counted(here.now["aux"], here.cotangent[1], of_every(here.every, "head"))}

    def _sent(self, here: TickInputs) -> dict[str, Any]:
        """Sends the results of the tick to other stages, and feeds the first stage."""
        at, now, channels = here.at, here.now, self.program.table.channels
        result: dict[str, Any] = {}
        y, act = here.y, now["act"]
        if "cot_self" in channels:
            result["cot"] = put(now["cot"], now["sent"], at("cot_self"))
        if self.program.divergent:
            # Send after all compute of the tick, so that a stage waits for its neighbours only once.
            y, sent = jax.lax.optimization_barrier((y, now["sent"]))
            result["came"] = {way: from_neighbour(sent, way) for way in _WAYS if f"cot_{way}" in channels}
        for way in (*_WAYS, "self"):
            if f"act_{way}" in channels:
                act = put(act, y if way == "self" else from_neighbour(y, way), at(f"act_{way}"))
        feed = lambda run, act: put(act, self._fed(now["x"], held(of_every(here.every, "feed"), run)), at("act_feed"))
        with self._visits("feeds"):
            result["act"] = jax.lax.fori_loop(0, of_every(here.every, "feeds"), feed, act)
        return result

    def _gradients(self, here: TickInputs) -> dict[str, Any]:
        """Runs the backward of a chunk, or, if backwards are split, the B of one chunk and the W of another."""
        split, at, every, weights = self.program.schedule.split, here.at, here.every, here.weights
        now = here.now
        chunk = self._chunk(weights, at("b_chunk"), self._on("backward", at, every))
        side = self._side_back(here, at("b_microbatch"))
        from_input = self.program.activation_checkpointing == "full"
        res, slot = now["res"], self._slots(at, "b", jnp.asarray(0) if from_input else at("b_residuals"))
        if from_input:
            with self._visits("backward"):
                _, res, _ = chunk.forward(pick(now["act"], at("b_input")), side, res, slot)
        elif self.program.kept is not None:
            slots = self.program.slots(here.row)
            slot = slots["b_residuals"]
            with self._visits("again"):
                times = self._on("backward", at, every) * self._again()
                res = recompute.again(chunk, times, side, res, now["ins"], slots)
        cotangent, result = pick(now["cot"], at("b_cotangent")), {}
        if not split:
            add = self._adder(here, "b")
            with self._visits("backward"):
                found = chunk.backward(res, slot, side, cotangent, add, now[self._sums])
            sent, result[self._sums], result["res"] = found
            return {**result, "sent": self._hinted(sent)}
        with self._visits("backward"):
            sent, own = chunk.backward_of_inputs(res, slot, side, cotangent, now["own"], at("b_own"))
        late = self._chunk(weights, at("w_chunk"), self._on("weights", at, every))
        side = self._side_back(here, at("w_microbatch"))
        parts = late.halves(side, [jnp.zeros(k.shape[2:], k.dtype) for k in res], jnp.zeros_like(cotangent))
        add = self._adder(here, "w")
        with self._visits("weights"):
            result[self._sums] = late.backward_of_weights(own, at("w_own"), side, parts, add, now[self._sums])
        return {**result, "res": res, "own": own, "sent": self._hinted(sent)}

    def _side_back(self, here: TickInputs, microbatch: jax.Array) -> Any:
        """Returns the layers' further inputs for a microbatch in its backward, with the weight of its loss."""
        side, aux = self.program.side(pick(here.pieces, microbatch), here.read), here.now["aux"]
        return side._replace(weight=pick(aux["counts"], microbatch)[1]) if aux else side

    @property
    def _sums(self) -> str:
        """The carry's entry to which a tick adds gradients: those of all chunks, or those of the current turns."""
        return "grads" if self.program.turns is None else "turn"

    def _adder(self, here: TickInputs, kind: str) -> Add:
        """Returns a function that adds a layer's gradients to sums [chunks or slots, layers, ...], in at least fp32."""
        turns, on = self.program.turns, here.at(f"{kind}_on")
        number, begins = (here.at("turn"), here.at("turn_begins")) if turns else (here.at(f"{kind}_chunk"), None)

        def add(sums: Any, i: jax.Array, found: Any, here: jax.Array) -> Any:
            found = self._reduced(found)

            def one(total: jax.Array, grad: jax.Array) -> jax.Array:
                (have,) = read([total], number, i)
                have = have if begins is None else jnp.where(begins == 1, 0, have)
                return write(total, have + jnp.where((on == 1) & here, at_least_fp32(grad), 0), number, i)

            return jax.tree.map(one, sums, found)

        return add

    def _ended(self, here: TickInputs) -> dict[str, Any]:
        """Reduces the sums of a turn that has ended, layer by layer, and adds them to the sums of its chunk."""
        scatter, now = self.program.turn, here.now
        if scatter is None:
            return {}

        def one(i: jax.Array, sums: Any) -> Any:
            slot, chunk = held((here.at("turn_ended"), here.at("turn_chunk")), i)
            own = jax.tree.map(lambda total: read([total], slot, i)[0], now["turn"])
            more = lambda total, part: write(total, read([total], chunk, i)[0] + part, chunk, i)
            return jax.tree.map(more, sums, scatter(own))

        layers = jax.tree.leaves(here.weights)[0].shape[1]
        count, ticks = self.program.does("turns")
        with jax.named_scope(f"visits_{count * layers}of{ticks}"):
            return {"grads": jax.lax.fori_loop(0, of_every(here.every, "turns") * layers, one, now["grads"])}

    def _reduced(self, grads: Any) -> Any:
        return grads if self.program.reduce is None else self.program.reduce(grads)

    def _empty(self, weights: Any) -> Any:
        """Returns zeros for the sums of gradients [chunks, layers, ...], in fp32 or wider."""
        layer = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[2:], w.dtype), weights)
        found = jax.eval_shape(self.program.turn or self._reduced, layer)
        zeros = lambda w, g: jnp.zeros((*w.shape[:2], *g.shape), at_least_fp32_dtype(g.dtype))
        return jax.tree.map(zeros, weights, found)

    def _empty_turns(self, weights: Any) -> Any:
        """Returns zeros for the sums [slots, layers, ...] of the current turns, or an empty list without turns."""
        if self.program.turns is None:
            return []
        slots = self.program.turns.slots
        return jax.tree.map(lambda w: jnp.zeros((slots, *w.shape[1:]), at_least_fp32_dtype(w.dtype)), weights)

    def finish(self, carry: dict[str, Any], last: int, was_first: jax.Array) -> dict[str, Any]:
        """Completes the carry after the last tick.

        Adds the layers' scalars to the sums, and takes the cotangent that the last tick sent out of the pipeline.

        Args:
          carry: as the last tick returned it.
          last: the microbatch of that cotangent; the number of microbatches if there is none.
          was_first: [stages], whether a stage did the backward of the first layers in the last tick.
        """
        carry = self.joined(carry)
        if last == self.program.schedule.microbatches:
            return carry

        def local(was: jax.Array, x: jax.Array, sent: jax.Array) -> jax.Array:
            return self._drained(x, sent, was, jnp.asarray(last))

        call = self._inside(local, ("stage", "columns", "stage own"), "columns")
        x, sums = call(was_first, carry["x"], carry["sent"]), carry["sums"]
        if self.program.before is not None:
            sums = self._back(sums, x, jnp.asarray(last))
        return {**carry, "x": x, "sums": sums}

    def joined(self, carry: dict[str, Any]) -> dict[str, Any]:
        """Adds the layers' scalars to the sums."""
        local = lambda aux: jax.tree.map(over_stages, totals(aux))
        extras = self._inside(local, ("stage own",), "own")(carry["aux"]) if carry["aux"] else {}
        return {**carry, "sums": self.program.join(carry["sums"], extras)}

    def _drained(self, x: jax.Array, sent: jax.Array, was_first: jax.Array, microbatch: jax.Array) -> jax.Array:
        """Replaces a microbatch's input by the cotangent that left the pipeline."""
        out = over_stages(jnp.where(was_first == 1, sent, 0), scatter=self.grows)
        return self._hinted(put(x, self._hinted(out), microbatch if self.program.before is None else jnp.asarray(1)))

    def _fed(self, x: jax.Array, microbatch: Any) -> jax.Array:
        """Returns the input of a microbatch, gathered if each stage holds some of its columns."""
        x = self._hinted(pick(x, microbatch if self.program.before is None else 0))
        return jax.lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True) if self.grows else x

    def _chunk(self, weights: Any, number: jax.Array, on: jax.Array) -> Chunk:
        """Returns the chunk of index ``number``, whose loops run if ``on`` is 1."""
        counts = self.program.counts
        of_mine = lambda table: None if table is None else jnp.asarray(table)[jax.lax.axis_index(AXIS), number]
        layers, carry = jax.tree.leaves(weights)[0].shape[1], self.program.carry
        count, start = of_mine(counts), of_mine(self.program.starts)
        if carry is not None:
            like = carry.shapes(self.pieces)
            return Carried(self.program.layer, weights, number, on * layers, count, start, carry=carry, like=like)
        return Chunk(self.program.layer, weights, number, on * layers, count, start)

    def _slots(self, at: Callable[[str], jax.Array], kind: str, kept: jax.Array | None) -> Any:
        """Returns the slots of a forward (``f``) or a backward (``b``)."""
        return slots_of(at, kind, kept, self.program.schedule.sequence_chunks)

    def _on(self, kind: str, at: Callable[[str], jax.Array], every: jax.Array) -> jax.Array:
        """Whether loops over layers run in this tick: on this stage if divergent, else on all stages."""
        return at(f"{kind[0]}_on") if self.program.divergent else of_every(every, kind)

    def _again(self) -> jax.Array:
        """Returns how many layers a backward recomputes: the stage's own number if divergent, else the largest one."""
        most = self.program.kept.again if self.program.kept is not None else 0
        each = [min(n, most) for n in self.program.again]
        return jnp.asarray(each)[jax.lax.axis_index(AXIS)] if self.program.divergent else jnp.asarray(most)

    def _visits(self, name: str) -> AbstractContextManager[None]:
        """Returns a named scope for a loop that some ticks skip; the name states its total iterations and ticks."""
        if name == "again":
            count, ticks = self.program.does_again()
            return jax.named_scope(f"own_layers/visits_{count}of{ticks}")
        count, ticks = self.program.does(name)
        if name not in ("forward", "backward", "weights"):
            return jax.named_scope(f"visits_{count}of{ticks}")
        layers = jax.tree.leaves(self.weights)[0].shape[2]
        return jax.named_scope(f"own_layers/visits_{count * layers}of{ticks}")

    def _hinted(self, x: jax.Array) -> jax.Array:
        dims = self.program.dims
        return x if dims is None else hint(x, *(None,) * (x.ndim - len(dims)), *dims)

    def _inside(self, f: Callable[..., Any], ins: Any, outs: Any, *, stages: bool = True) -> Callable[..., Any]:
        return per_device(self.program.axes, f, ins, outs, stages=stages, columns=self.grows)
