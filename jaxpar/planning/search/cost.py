"""``CostModel``: the seconds and bytes of a step under any plan, in closed form: no trace and no compilation.

The FLOPs, the bytes that are kept and the collectives follow from the workload's named dims; the time of a collective
is that of :mod:`jaxpar.sharding.hardware.links`. What the compiler hides, and how often it moves activations through
main memory, are constants that were fitted to compiled programs (``benchmarks/planning/``). The search corrects the
model with each program that it compiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from jaxpar.planning.search.attention import is_recomputed, passes_in_tiles
from jaxpar.planning.search.calibration import Calibration
from jaxpar.planning.search.experts import ExpertExchange, exchanges
from jaxpar.planning.search.forward_pass import ForwardPass, forward_pass
from jaxpar.planning.search.large_arrays import LargeArrays, large_arrays
from jaxpar.planning.search.plan import BATCH, LAYERS, SEQ, VOCAB, Plan
from jaxpar.planning.search.shards import Axes, Shards, WeightGroup, weight_groups
from jaxpar.planning.search.step_cost import StepCost, Transfer
from jaxpar.planning.search.workload import Backward, KeptArray, Workload
from jaxpar.sharding.hardware.links import Links
from jaxpar.sharding.hardware.topology import Topology

_SCATTERS = ("scatter in layer", "scatter in outside", "scatter in experts", "scatter in chunks", "scatter beside ring")

_RINGS = ("ring", "ring in chunks")


class CostModel:
    """The cost of one step of a workload on a topology, under any plan.

    Args:
      workload: the step.
      topology: the hardware.
      calibration: what the compiler does; by default with the workload's options.
    """

    def __init__(self, workload: Workload, topology: Topology, calibration: Calibration | None = None):
        self.workload, self.topology = workload, topology
        self.calibration = calibration or Calibration.of(topology, workload.compiler_options)
        self._known: dict[object, Any] = {}

    def cost(self, plan: Plan) -> StepCost:
        """Returns the estimated cost of a step."""
        w, device, fitted = self.workload, self.topology.accelerator, self.calibration
        if plan.batch not in (0, w.sizes.get(BATCH)):
            return self._of_batch(plan.batch).cost(plan)
        once, back = self._once(self._forward, plan), self._backward(plan)
        again = plan.checkpoint_stages  # a stage's forward pass runs once more, before its backward pass
        passes = back.weight_passes + again
        layers = once.layer_flops * passes + once.attention_flops * (self._attention_passes(plan, back) + again)
        flops = layers * plan.ticks + 3.0 * once.head_flops
        state, traffic = self._state(plan), fitted.matmul_traffic * once.traffic * passes * plan.ticks
        kept_traffic = fitted.stash_traffic if plan.pipeline > 1 else fitted.kept_traffic
        traffic += kept_traffic * self._held(plan, plan.remat) + fitted.state_traffic * sum(state.values())
        traffic += self._gradient_sums(plan) + self._chunk_traffic(plan) + self._expert_traffic(plan, once, passes)
        traffic += self._large_traffic(plan, passes * plan.ticks)
        compute, hbm = flops / device.rate("bf16"), traffic / device.hbm_bandwidth
        transfers = tuple(self._transfers(plan, once, back))
        exposed = sum(t.seconds * (1.0 - fitted.hidden[t.what]) for t in transfers)
        stalled = sum(t.seconds * fitted.hidden[t.what] * fitted.stalled.get(t.what, 0.0) for t in transfers)
        # A ring's keys travel beside tiles and beside what the compiler schedules around them.
        around = sum(t.seconds * fitted.hidden[t.what] for t in transfers if t.what in _RINGS)
        stalled += max(around - fitted.beside_ring * max(compute, hbm), 0.0)
        overlapped = sum(t.seconds * fitted.hidden[t.what] for t in transfers)
        step = exposed + max(max(compute, hbm) + stalled, overlapped)
        memory = state | self._working(plan)
        return StepCost(compute, hbm, transfers, exposed, overlapped, step, memory)

    def _of_batch(self, batch: int) -> CostModel:
        """The model of the same workload with another batch."""
        if ("batch", batch) not in self._known:
            self._known["batch", batch] = type(self)(self.workload.of_batch(batch), self.topology, self.calibration)
        found: CostModel = self._known["batch", batch]
        return found

    def _exchanges(self, plan: Plan) -> tuple[ExpertExchange, ...]:
        """What the layers with experts do."""
        key = "experts", plan.mesh_sizes, plan.microbatches, plan.virtual_stages, plan.grad_accum_steps
        if key not in self._known:
            self._known[key] = exchanges(plan, self.workload, self.topology)
        found: tuple[ExpertExchange, ...] = self._known[key]
        return found

    def _sends_again(self, found: ExpertExchange, back: Backward) -> bool:
        """Whether rows travel to their experts again in the backward pass."""
        return found.pieces > 1 or back.weight_passes > 3.0

    def _backward(self, plan: Plan, remat: str | None = None) -> Backward:
        """What the backward pass keeps and does under a plan's policy, or another one."""
        pieces = any(found.pieces > 1 for found in self._exchanges(plan))
        table = self.workload.in_pieces if pieces else self.workload.backward
        return table[plan.remat if remat is None else remat]

    def _in_tiles(self, plan: Plan) -> bool:
        """Whether attention runs in tiles: if it does without a mesh, and where the sequence is sharded."""
        return self.workload.flash or plan.context * plan.ulysses > 1

    def _attention_passes(self, plan: Plan, back: Backward) -> float:
        """Attention's work in a step, in forward passes."""
        if not self._in_tiles(plan):
            return back.attention_passes
        return passes_in_tiles(plan, self.topology.platform, back.attention_passes)

    def _expert_traffic(self, plan: Plan, once: ForwardPass, passes: float) -> float:
        """Bytes through main memory of experts: rows, with room for another routing, and weights in each piece.

        Weights that several devices share are also written where they are gathered, and their gradients reduced.
        """
        fitted, found = self.calibration, self._exchanges(plan)
        if not found:
            return 0.0
        rows = sum(f.rows * f.pieces * f.layers.call.row_bytes * f.calls for f in found)
        room, pieces = max(f.room for f in found), max(f.pieces for f in found)
        steps = plan.microbatches if plan.pipeline > 1 else plan.grad_accum_steps
        weights = fitted.expert_weight_traffic * once.expert_weights * pieces * steps
        traffic = passes * plan.ticks * (fitted.expert_traffic * once.rows * room + weights)
        shared = (group for group in self._groups(plan) if group.experts and group.others > 1)
        gathered = sum(group.elements * self._gathers(plan, group) for group in shared) * self.workload.compute_bytes
        return traffic + fitted.rows_traffic * rows + fitted.expert_gather_traffic * gathered

    def _large_traffic(self, plan: Plan, passes: float) -> float:
        """Bytes through main memory, beside those of all arrays, of those that do not fit into the chip's memory."""
        if math.isinf(self.calibration.large):
            return 0.0
        found = self._once(self._large, plan, plan.remat, plan.microbatches, plan.grad_accum_steps)
        others = math.prod(plan.mesh[axis] for axis in plan.zero_axes) if _gathers_in_layers(plan) else 1
        return float(found.traffic(plan, self.calibration, passes, others))

    def _large(self, plan: Plan, *_: Any) -> LargeArrays:
        return large_arrays(plan, self.workload, self.calibration.large, self._kept_bytes)

    def _gradient_sums(self, plan: Plan) -> float:
        """Bytes through main memory of the sums of gradients over microbatches, in fp32."""
        runs = plan.microbatches * plan.virtual_stages * plan.ticks / plan.virtual_stages if plan.pipeline > 1 else 0.0
        if plan.grad_accum_steps > 1:
            runs += plan.grad_accum_steps
        spread = _gathers_in_layers(plan)
        sums = sum(g.stored if spread else g.elements for g in self._groups(plan) if g.layered)
        return 2.0 * runs * 4 * sums

    def _chunk_traffic(self, plan: Plan) -> float:
        """Bytes through main memory where a tick takes a chunk's weights from its stage's, and adds its gradients."""
        if plan.pipeline == 1 or plan.virtual_stages == 1:
            return 0.0
        groups, fitted = [group for group in self._groups(plan) if group.layered], self.calibration
        experts = sum(group.elements for group in groups if group.experts)
        each = fitted.chunk_traffic * sum(group.elements for group in groups) + fitted.expert_chunk_traffic * experts
        return plan.microbatches * plan.ticks * each

    def _once(self, find: Callable[..., Any], plan: Plan, *more: Any) -> Any:
        """Returns ``find(plan, *more)``, which depends on the plan's mesh and sharded dims alone, computed once."""
        key = find.__name__, plan.mesh_sizes, plan.tensor, plan.sequence_parallel, *more
        if key not in self._known:
            self._known[key] = find(plan, *more)
        return self._known[key]

    def _forward(self, plan: Plan) -> ForwardPass:
        return forward_pass(plan, self.workload, self._in_tiles(plan))

    def _transfers(self, plan: Plan, once: ForwardPass, back: Backward) -> Iterator[Transfer]:
        """What a plan sends: for tensor, context and pipeline parallelism, and for the weights and their gradients."""
        if plan.model > 1:
            again = max(back.weight_passes - 3.0, 0.0) + plan.checkpoint_stages
            layers = (once.outputs * (1.0 + again) + once.inputs) * plan.ticks
            yield self._transfer(plan, "tensor", "all-reduce", ("model",), layers)
            lookup = 1.5 * once.residual if VOCAB in plan.tensor else 0.0
            yield self._transfer(plan, "tensor", "all-reduce", ("model",), once.head + lookup)
        if plan.ulysses > 1:
            yield self._transfer(plan, "exchange", "all-to-all", ("ulysses",), _exchanged(once, back))
        if plan.context > 1:
            # Keys and values go around in the forward pass; in the backward pass their gradients in fp32 do, too.
            around = once.keys * plan.context * (1.0 + 3.0)
            what = "ring in chunks" if plan.virtual_stages > 1 else "ring"
            yield self._transfer(plan, what, "all-gather", ("context",), around)
        if plan.pipeline > 1:
            runs = plan.ticks * plan.virtual_stages
            shared = plan.model if plan.sequence_parallel else 1
            yield self._transfer(
                plan, "stages", "collective-permute", ("pipeline",), 2.0 * once.residual * runs / shared
            )
            yield self._transfer(plan, "ends", "all-reduce", ("pipeline",), 4.0 * once.residual / shared)
            if plan.virtual_stages > 1:  # a stage stores layers in a row, but runs chunks of other ones
                stored = sum(group.stored for group in self._groups(plan) if group.layered)
                moved = stored * (self.workload.compute_bytes + 4)
                yield self._transfer(plan, "layers", "all-to-all", ("pipeline",), moved)
        for found in self._exchanges(plan):
            sent = found.sent(again=self._sends_again(found, back)) * plan.expert / max(plan.expert - 1, 1)
            yield self._transfer(plan, "experts", found.kind, ("expert",), sent)
        yield from self._weights(plan)

    def _weights(self, plan: Plan) -> Iterator[Transfer]:
        """The weights that a plan gathers, and the gradients that it reduces."""
        w = self.workload
        for group in self._groups(plan):
            if plan.zero == 0:
                axes = tuple(axis for axis in plan.token_axes if axis != "expert" or not group.experts)
                yield self._transfer(plan, "reduce", "all-reduce", axes, group.elements * w.reduce_bytes)
            else:
                yield from self._gathered(plan, group)

    def _gathered(self, plan: Plan, group: WeightGroup) -> Iterator[Transfer]:
        """The weights of a group that a plan gathers, and their gradients."""
        w, axes, across = self.workload, group.axes, ("replica",) if plan.replica > 1 else ()
        in_layers = _gathers_in_layers(plan)
        # Where weights are sharded over `model` and over other axes than `data`, or gathered before the step, XLA
        # gathers them whole, some of them twice, and reduces whole gradients over one axis and then the others.
        whole = plan.model > 1 and (plan.zero < 3 or axes != ("data",)) and not (group.experts and in_layers)
        size = group.elements * (plan.model * self.calibration.whole_traffic if whole else 1.0)
        runs = plan.grad_accum_steps if in_layers else _scatters_of_chunks(plan, group)
        gathers = self._gathers(plan, group)
        where = ("experts" if group.experts else "layer") if group.layered else "outside"
        where = where if in_layers else "step"
        first = axes if in_layers or plan.pipeline > 1 else axes[:1]
        early, late = self._beside_forward(plan, group), self._beside_backward(plan, group)
        for what, times in ("gather in chunks", early), (f"gather in {where}", gathers - early):
            yield self._transfer(plan, what, "all-gather", first, size * w.compute_bytes * times)
        beside = "scatter beside ring" if plan.context > 1 else "scatter in chunks"
        for what, times in (beside, late), (f"scatter in {where}", runs - late):
            yield self._transfer(plan, what, "reduce-scatter", first, size * w.reduce_bytes * times)
        yield self._transfer(plan, "reduce", "all-reduce", axes[len(first) :], size * w.reduce_bytes)
        yield self._transfer(plan, "reduce", "all-reduce", group.summed, group.stored * w.reduce_bytes * runs)
        yield self._transfer(plan, "reduce", "all-reduce", across, group.stored * w.reduce_bytes * runs)

    def _beside_forward(self, plan: Plan, group: WeightGroup) -> float:
        """The part of a group's weights that a pipeline gathers beside a forward: those of all chunks but the first."""
        return 1.0 - 1.0 / plan.virtual_stages if plan.pipeline > 1 and group.layered else 0.0

    def _beside_backward(self, plan: Plan, group: WeightGroup) -> float:
        """How often a pipeline scatters a group's gradients beside a backward: all chunks but the last have one."""
        runs = _scatters_of_chunks(plan, group)
        return runs - 1.0 / plan.virtual_stages if plan.scatters_chunks and group.layered else 0.0

    def _gathers(self, plan: Plan, group: WeightGroup) -> int:
        """How often a step gathers a group's weights: in both passes of each microbatch, if its layers gather them."""
        if not _gathers_in_layers(plan):
            return 1
        return plan.grad_accum_steps * (2 if group.layered and not self._keeps_weights(plan, group) else 1)

    def _keeps_weights(self, plan: Plan, group: WeightGroup) -> bool:
        """Whether gathered weights of layers stay for the backward pass. Pieces of experts gather theirs again."""
        alone = self.workload.backward[plan.remat].without_loops(plan)
        return alone is not None and alone.keeps_weights and not group.experts

    def _groups(self, plan: Plan) -> tuple[WeightGroup, ...]:
        """The weights of a plan."""
        key = "weights", plan.mesh_sizes, plan.tensor, plan.zero
        if key not in self._known:
            self._known[key] = weight_groups(plan, self.workload)
        found: tuple[WeightGroup, ...] = self._known[key]
        return found

    def _transfer(self, plan: Plan, what: str, kind: str, axes: Axes, size: float) -> Transfer:
        """A collective over ``axes`` whose largest operand or result has ``size`` bytes on a device."""
        axes = tuple(axis for axis in axes if plan.mesh[axis] > 1)
        n = math.prod(plan.mesh[axis] for axis in axes)
        sent = (
            size * {"all-reduce": 2.0, "collective-permute": n / (n - 1) if n > 1 else 0.0}.get(kind, 1.0) * (n - 1) / n
        )
        if n == 1 or not sent:
            return Transfer(what, axes, 0.0, 0.0)
        seconds, network = self._seconds_per_byte(plan, what if what in (*_RINGS, *_SCATTERS) else kind, axes)
        bandwidth = self.topology.accelerator.network_bandwidth
        return Transfer(what, axes, sent, sent * seconds, sent * network, sent * network * bandwidth)

    def _seconds_per_byte(self, plan: Plan, kind: str, axes: Axes) -> tuple[float, float]:
        """Seconds of a collective for each byte that a device sends, and the part of them on the network."""
        key = plan.mesh_sizes, kind, axes
        if key not in self._known:
            if plan.mesh_sizes not in self._known:
                self._known[plan.mesh_sizes] = Links.of(self.topology, plan.mesh)
            links: Links = self._known[plan.mesh_sizes]
            # All devices of a ring wait for the one that sends furthest: to another slice, or along an open line.
            ring = kind in _RINGS
            if kind in _SCATTERS:
                # XLA:TPU scatters a gradient across slices by a ring of permutes, unlike one that stays in a slice.
                ring = bool(links.torus) and any(axis in links.crossing for axis in axes)
                kind = "reduce-scatter"
            kind = "collective-permute" if ring else kind
            phases = links.phases(kind, axes, 1.0)
            self._known[key] = sum(p.seconds for p in phases), sum(p.network_seconds for p in phases)
        found: tuple[float, float] = self._known[key]
        return found

    def _state(self, plan: Plan) -> dict[str, float]:
        """Bytes of the parameters and the optimizer state at rest."""
        itemsize = self.workload.param_bytes / max(self.workload.param_count, 1)
        held = sum(group.stored for group in self._groups(plan)) * itemsize
        optimizer = 0.0 if plan.offload else held * self.workload.state_bytes
        return {"parameters": held, "optimizer": optimizer}

    def _held(self, plan: Plan, remat: str, dim: str | None = None) -> float:
        """Bytes that the backward pass keeps of one device's whole batch, in arrays that have the dim."""
        found = self._exchanges(plan)
        pieces, room = any(f.pieces > 1 for f in found), max((f.room for f in found), default=1.0)
        plain, rows = (self._once(self._kept, plan, remat, dim, pieces, of_rows) for of_rows in (False, True))
        return float(plain + room * rows)

    def _kept(self, plan: Plan, remat: str, dim: str | None, pieces: bool, of_rows: bool) -> float:
        """As :meth:`_held`, in rows of experts, or in all other arrays; without room for another routing."""
        kept = (self.workload.in_pieces if pieces else self.workload.backward)[remat].kept_by(plan)
        chosen = (k for k in kept if k.rows == of_rows and (dim is None or dim in dict(k.factors)))
        return sum(self._kept_bytes(plan, held) for held in chosen)

    def _kept_bytes(self, plan: Plan, held: KeptArray) -> float:
        names = [name for name, _ in held.factors]
        if self._in_tiles(plan) and (names.count(SEQ) > 1 or names.count(None) > 2):
            return 0.0  # scores and their mask, which no tile writes
        shards, size = Shards(plan), held.itemsize
        spread = plan.sequence_parallel and not held.rows and "model" not in shards.axes(held.factors)
        return shards.local(held.factors) * size / (plan.model if spread else 1)

    def _one_layer(self, plan: Plan) -> float:
        """Bytes that a layer needs while it is recomputed: of experts, those of one piece."""
        count = self.workload.sizes.get(LAYERS, 1)
        if self._held(plan, plan.remat, LAYERS) >= self._held(plan, self._most, LAYERS):
            return 0.0
        plain: float = self._once(self._kept, plan, self._most, LAYERS, False, False)
        rows = self._once(self._forward, plan).rows * plan.pipeline
        piece = max((found.room / found.pieces for found in self._exchanges(plan)), default=0.0)
        return (plain + self.calibration.rows_copies * rows * piece) / count

    def _working(self, plan: Plan) -> dict[str, float]:
        """Bytes that the step needs beside its state."""
        part = 1.0 / plan.grad_accum_steps
        # A stage holds one microbatch for each stage, and receives another.
        in_flight = min(1.0, (plan.pipeline + 1) / plan.microbatches) if plan.pipeline > 1 else 1.0
        count = self.workload.sizes.get(LAYERS, 1)
        layers = self._held(plan, plan.remat, LAYERS) / (count if plan.checkpoint_stages else 1)
        alone = self._backward(plan).without_loops(plan)
        again = sum(self._kept_bytes(plan, array) for array in (alone.again if alone else ()))
        outside = self._held(plan, plan.remat) - layers + again
        residual = self._once(self._forward, plan).residual
        gathered = self.calibration.gathered_copies * residual * plan.sequence_parallel
        # Stages hand on what a device has of the residual stream, which sequence parallelism shards.
        handed_on = residual / (plan.model if plan.sequence_parallel else 1)
        staged = self.calibration.stage_copies * handed_on * (plan.pipeline > 1)
        return {
            "saved activations": layers * part * in_flight,
            "working": (max(self._one_layer(plan), outside) + gathered) * part + staged,
            **self._copies(plan),
        }

    def _copies(self, plan: Plan) -> dict[str, float]:
        """Bytes of weights in the compute dtype, and of gradients."""
        w, in_layers, groups = self.workload, plan.zero == 3 or _gathers_in_layers(plan), self._groups(plan)
        of = lambda group: group.stored if in_layers else group.elements
        inside = sum(group.elements for group in groups if group.layered)
        if plan.pipeline > 1:
            # A stage gathers its weights once, and sums their gradients over its microbatches before it reduces them.
            elsewhere = [group for group in groups if not group.layered]
            # Those of a microbatch's experts, which are most of a stage's weights, have memory of their own.
            experts = sum(group.elements for group in groups if group.layered and group.experts) / plan.virtual_stages
            copies = inside + sum(map(of, elsewhere))
            sums = inside / (plan.virtual_stages if plan.zero == 3 else 1) + sum(g.elements for g in elsewhere)
            gradients = 4 * (sums + experts)
        else:
            copies = sum(map(of, groups))
            # The peak of a layer with experts is in its backward pass, where all layers' gradients have their memory.
            alone = w.reduce_bytes * copies if w.experts else 0.0
            gradients = 4 * copies if plan.grad_accum_steps > 1 else alone
            copies *= self.calibration.step_copies if plan.zero and not in_layers else 1.0
        # A layer's backward pass holds its gathered weights, and their gradients before they are scattered.
        # That of experts adds up the gradients of its pieces.
        held = [g for g in groups if g.layered and in_layers and (g.others > 1 or g.experts) and plan.pipeline == 1]
        count = w.sizes.get(LAYERS, 1)
        gathered = sum(g.elements / (1 if self._keeps_weights(plan, g) else count) for g in held)
        layer = gathered * w.compute_bytes + sum(g.elements for g in held) / count * w.reduce_bytes
        return {"weight copies": copies * w.compute_bytes + layer, "gradients": gradients}

    @cached_property
    def _most(self) -> str:
        """The policy that keeps most."""
        return max(self.workload.backward, key=lambda name: sum(h.bytes for h in self.workload.backward[name].kept))


def _exchanged(once: ForwardPass, back: Backward) -> float:
    """Bytes of queries, keys, values and results whose heads are exchanged, in both passes and where computed again."""
    results, again = once.queries / 2, is_recomputed(back.attention_passes)
    inputs = results + once.keys
    return inputs * (2 + (again or back.weight_passes > 3.0)) + results * (2 + again)


def _scatters_of_chunks(plan: Plan, group: WeightGroup) -> float:
    """How often a pipeline scatters a group's gradients: those of chunks once for as many microbatches as stages."""
    return plan.microbatches / plan.pipeline if plan.scatters_chunks and group.layered else 1.0


def _gathers_in_layers(plan: Plan) -> bool:
    """Whether each layer gathers its weights: under stage 3, and under the others where no axis shards the rows.

    Stages 1 and 2 gather all weights before the step, and sum each device's gradients of its own rows.
    """
    return plan.pipeline == 1 and (plan.zero == 3 or (plan.zero > 0 and plan.replica * plan.data * plan.expert == 1))
