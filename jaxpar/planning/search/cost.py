"""``CostModel``: the seconds and bytes of a step under any plan, in closed form: no trace and no compilation.

The FLOPs, the bytes that are kept and the collectives follow from the workload's named dims; the time of a collective
is that of :mod:`jaxpar.sharding.hardware.links`. What the compiler hides, and how often it moves activations through
main memory, are constants that were fitted to compiled programs (``benchmarks/planning/``). The search corrects the
model with each program that it compiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from jaxpar.planning.search.plan import BATCH, EMBED, LAYERS, SEQ, VOCAB, Plan
from jaxpar.planning.search.workload import Backward, Factors, KeptArray, Workload, count
from jaxpar.sharding.hardware.links import Links
from jaxpar.sharding.hardware.topology import Topology

type Axes = tuple[str, ...]


_HIDDEN = {
    "gather in layer": 1.0, "scatter in layer": 1.0, "gather in outside": 0.3, "scatter in outside": 0.0,
    "gather in step": 0.0, "scatter in step": 0.0, "reduce": 0.0, "tensor": 0.1, "ring": 1.0, "exchange": 0.0,
    "stages": 0.5, "ends": 0.0,
}  # fmt: skip
_TILE = 1024
"""Queries and keys of a tile of attention."""
_SCATTERS = ("scatter in layer", "scatter in outside")
_STALLED = {"gather in layer": 0.2, "scatter in layer": 0.2, "ring": 0.4, "tensor": 0.4}


@dataclass(frozen=True)
class Calibration:
    """What cannot be derived, as fitted to programs that XLA:TPU compiled.

    Attributes:
      matmul_traffic: bytes through main memory for each byte of a matmul's operands and result.
      kept_traffic: the same for each byte that is kept for the backward pass.
      stash_traffic: the same where a pipeline stage stores it in slots for its microbatches.
      state_traffic: the same for each byte of parameters and optimizer state.
      whole_traffic: bytes sent for each byte of a weight that XLA gathers whole.
      gathered_copies: gathered copies of the residual stream under sequence parallelism.
      stage_copies: copies of the residual stream of all microbatches in a pipeline.
      step_copies: the part of the weights gathered before a step that is alive at the peak.
      hidden: kind of transfer → the fraction of its time that the compiler overlaps with compute.
      stalled: kind of transfer → the fraction of that for which it outlasts the compute.
    """

    matmul_traffic: float = 0.52
    kept_traffic: float = 2.6
    stash_traffic: float = 5.2
    state_traffic: float = 4.6
    whole_traffic: float = 1.75
    gathered_copies: float = 4.0
    stage_copies: float = 6.0
    step_copies: float = 0.6
    hidden: Mapping[str, float] = field(default_factory=lambda: dict(_HIDDEN))
    stalled: Mapping[str, float] = field(default_factory=lambda: dict(_STALLED))


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind over the same axes, in one step.

    Attributes:
      what: a kind of ``Calibration.hidden``.
      axes: the mesh axes.
      wire_bytes: bytes that one device sends.
      seconds: on the links.
      network_seconds, network_bytes: the part of both on the network between slices or hosts.
    """

    what: str
    axes: Axes
    wire_bytes: float
    seconds: float
    network_seconds: float = 0.0
    network_bytes: float = 0.0


@dataclass(frozen=True)
class StepCost:
    """The estimated cost of a step.

    Attributes:
      compute, hbm: seconds of the FLOPs and of the traffic of main memory.
      transfers: what is sent.
      exposed, overlapped: seconds of transfers that overlap with no compute, and of those that do.
      step: seconds.
      memory: part → bytes on one device at the peak.
    """

    compute: float
    hbm: float
    transfers: tuple[Transfer, ...]
    exposed: float
    overlapped: float
    step: float
    memory: Mapping[str, float]

    @property
    def peak_bytes(self) -> float:
        """Bytes on one device at the peak."""
        return sum(self.memory.values())

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends."""
        return sum(t.wire_bytes for t in self.transfers)

    @property
    def network_bytes(self) -> float:
        """Bytes that one device sends to other slices or hosts."""
        return sum(t.network_bytes for t in self.transfers)

    @property
    def network_seconds(self) -> float:
        """Seconds of the network between slices or hosts, hidden or not."""
        return sum(t.network_seconds for t in self.transfers)

    @property
    def exposed_bytes(self) -> float:
        """The bytes of transfers that overlap with nothing, in proportion to their time."""
        total = sum(t.seconds for t in self.transfers)
        return self.wire_bytes * self.exposed / total if total else 0.0


class Shards:
    """How many devices share the arrays of a plan.

    Args:
      plan: the plan.
      attention: whether the tables are those inside attention, where ``ulysses`` splits heads.
    """

    def __init__(self, plan: Plan, *, attention: bool = False):
        table: dict[str | None, Axes] = {BATCH: ("replica", "data"), SEQ: ("context", "ulysses"), LAYERS: ("pipeline",)}
        table |= dict.fromkeys(plan.tensor, ("model",))
        if plan.pipeline > 1:
            table[VOCAB] = ("pipeline", *table.get(VOCAB, ()))
        if attention:
            table[SEQ] = ("context",)
            for name in ("heads", "kv_heads"):
                table[name] = ("ulysses", *table.get(name, ()))
        self._table, self._mesh = table, plan.mesh

    def axes(self, *groups: Factors) -> Axes:
        """The axes that shard an array with these factors, each once."""
        found: list[str] = []
        for group in groups:
            for name, size in group:
                for axis in self._table.get(name, ()):
                    if axis not in found and self._mesh[axis] > 1 and size % self._mesh[axis] == 0:
                        found.append(axis)
                        size //= self._mesh[axis]
        return tuple(found)

    def ways(self, *groups: Factors) -> int:
        """The number of shards of an array with these factors."""
        return math.prod(self._mesh[axis] for axis in self.axes(*groups))

    def local(self, *groups: Factors) -> float:
        """The elements on one device of an array with these factors."""
        return count(*groups) / self.ways(*groups)


@dataclass(frozen=True)
class _Forward:
    """What one device does in the forward pass of a step, by the plan's mesh alone.

    Attributes:
      layer_flops, attention_flops, head_flops: of the layers' matmuls with weights, of matmuls of two activations, and
        of all other matmuls.
      traffic: bytes of the operands and results of matmuls.
      outputs, inputs: bytes of matmuls' results that are sums over ``model``, and of activations whose gradients are,
        in the layers.
      head: both outside the layers.
      queries, keys: bytes that attention reads and writes along queries, and along keys and values.
      residual: bytes of the activation between two layers.
    """

    layer_flops: float = 0.0
    attention_flops: float = 0.0
    head_flops: float = 0.0
    traffic: float = 0.0
    outputs: float = 0.0
    inputs: float = 0.0
    head: float = 0.0
    queries: float = 0.0
    keys: float = 0.0
    residual: float = 0.0


class CostModel:
    """The cost of one step of a workload on a topology, under any plan.

    Args:
      workload: the step.
      topology: the hardware.
      calibration: what the compiler does.
    """

    def __init__(self, workload: Workload, topology: Topology, calibration: Calibration | None = None):
        self.workload, self.topology = workload, topology
        self.calibration = calibration or Calibration()
        self._known: dict[object, Any] = {}

    def cost(self, plan: Plan) -> StepCost:
        """Returns the estimated cost of a step."""
        w, device, fitted = self.workload, self.topology.accelerator, self.calibration
        if plan.batch not in (0, w.sizes.get(BATCH)):
            return self._of_batch(plan.batch).cost(plan)
        once, back = self._once(self._forward, plan), w.backward[plan.remat]
        again = plan.checkpoint_stages  # a stage's forward pass runs once more, before its backward pass
        layers = once.layer_flops * (back.weight_passes + again)
        layers += once.attention_flops * (self._attention_passes(plan, back) + again)
        flops = layers * plan.ticks + 3.0 * once.head_flops
        state, kept = self._state(plan), self._once(self._kept, plan, plan.remat, None)
        traffic = fitted.matmul_traffic * once.traffic * (back.weight_passes + again) * plan.ticks
        kept_traffic = fitted.stash_traffic if plan.pipeline > 1 else fitted.kept_traffic
        traffic += kept_traffic * kept + fitted.state_traffic * sum(state.values())
        traffic += self._gradient_sums(plan)
        compute, hbm = flops / device.rate("bf16"), traffic / device.hbm_bandwidth
        transfers = tuple(self._transfers(plan, once, back))
        exposed = sum(t.seconds * (1.0 - fitted.hidden[t.what]) for t in transfers)
        stalled = sum(t.seconds * fitted.hidden[t.what] * fitted.stalled.get(t.what, 0.0) for t in transfers)
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

    def _in_tiles(self, plan: Plan) -> bool:
        """Whether attention runs in tiles: if it does without a mesh, and where the sequence is sharded."""
        return self.workload.flash or plan.context * plan.ulysses > 1

    def _attention_passes(self, plan: Plan, back: Backward) -> float:
        """Attention's work in a step, in forward passes; in tiles, the backward pass computes scores again."""
        if not self._in_tiles(plan):
            return back.attention_passes
        return 3.5 + (back.attention_passes > 3.75)

    def _gradient_sums(self, plan: Plan) -> float:
        """Bytes through main memory of the sums of gradients over microbatches, in fp32."""
        runs = plan.microbatches * plan.virtual_stages * plan.ticks / plan.virtual_stages if plan.pipeline > 1 else 0.0
        if plan.grad_accum_steps > 1:
            runs += plan.grad_accum_steps
        spread = math.prod(plan.mesh[axis] for axis in plan.zero_axes) if _gathers_in_layers(plan) else 1
        return 2.0 * runs * 4 * self._once(self._elements, plan)[0] / spread

    def _once(self, find: Callable[..., Any], plan: Plan, *more: Any) -> Any:
        """Returns ``find(plan, *more)``, which depends on the plan's mesh and sharded dims alone, computed once."""
        key = find.__name__, plan.mesh_sizes, plan.tensor, plan.sequence_parallel, *more
        if key not in self._known:
            self._known[key] = find(plan, *more)
        return self._known[key]

    def _forward(self, plan: Plan) -> _Forward:
        w, outside, inside = self.workload, Shards(plan), Shards(plan, attention=True)
        sums = dict.fromkeys((f.name for f in fields(_Forward)), 0.0)
        seen: set[int] = set()
        for m in w.matmuls:
            shards = outside if m.weight else inside
            # Devices of a pipeline each run their layers; `model` and the tokens' axes split what is left.
            share = shards.ways(m.shared, m.rows, m.columns, m.summed)
            flops = m.flops / share / (plan.pipeline if m.layered else 1)
            times = m.times * w.compute_bytes / (plan.pipeline if m.layered else 1)
            left, right, out = (
                shards.local(*parts) * times
                for parts in (
                    (m.shared, m.rows, m.summed),
                    (m.shared, m.columns, m.summed),
                    (m.shared, m.rows, m.columns),
                )
            )
            if m.attends:
                sums["attention_flops"] += flops * self._unmasked(plan)
                # Scores are [.., queries, keys]; the other three arrays of the two matmuls are the small ones.
                small = sorted((left, right, out))[:2]
                sums["keys"] += min(small)
                sums["queries"] += max(small)
                sums["traffic"] += sum(small) if self._in_tiles(plan) else left + right + out
                continue
            sums["layer_flops" if m.layered else "head_flops"] += flops
            sums["traffic"] += left + right + out
            if not m.weight or plan.model == 1:
                continue
            if "model" in shards.axes(m.summed):
                sums["outputs" if m.layered else "head"] += out
            if "model" in shards.axes(m.columns) and m.source not in seen:
                seen.add(m.source)
                sums["inputs" if m.layered else "head"] += left
        tokens = tuple((name, w.sizes[name]) for name in (BATCH, SEQ, EMBED) if name in w.sizes)
        sums["residual"] = outside.local(tokens) * w.compute_bytes
        return _Forward(**sums)

    def _unmasked(self, plan: Plan) -> float:
        """The fraction of the pairs of queries and keys that causal attention in tiles computes."""
        seq = self.workload.sizes.get(SEQ, 1)
        skips = self._in_tiles(plan) and self.workload.causal
        return (seq + _TILE) / (2 * seq) if skips and seq > _TILE else 1.0

    def _transfers(self, plan: Plan, once: _Forward, back: Backward) -> Iterator[Transfer]:
        """What a plan sends: for tensor, context and pipeline parallelism, and for the weights and their gradients."""
        if plan.model > 1:
            again = max(back.weight_passes - 3.0, 0.0) + plan.checkpoint_stages
            layers = (once.outputs * (1.0 + again) + once.inputs) * plan.ticks
            yield self._transfer(plan, "tensor", "all-reduce", ("model",), layers)
            lookup = 1.5 * once.residual if VOCAB in plan.tensor else 0.0
            yield self._transfer(plan, "tensor", "all-reduce", ("model",), once.head + lookup)
        attended = 2.0 + (self._attention_passes(plan, back) > 4.0)
        if plan.ulysses > 1:
            arrays = (once.queries + once.keys) * attended
            yield self._transfer(plan, "exchange", "all-to-all", ("ulysses",), arrays)
        if plan.context > 1:
            # Keys and values go around in the forward pass; in the backward pass their gradients in fp32 do, too.
            around = once.keys * plan.context * (1.0 + 3.0)
            yield self._transfer(plan, "ring", "all-gather", ("context",), around)
        if plan.pipeline > 1:
            runs = plan.ticks * plan.virtual_stages
            shared = plan.model if plan.sequence_parallel else 1
            yield self._transfer(
                plan, "stages", "collective-permute", ("pipeline",), 2.0 * once.residual * runs / shared
            )
            yield self._transfer(plan, "ends", "all-reduce", ("pipeline",), 4.0 * once.residual / shared)
        yield from self._weights(plan)

    def _weights(self, plan: Plan) -> Iterator[Transfer]:
        """The weights that a plan gathers, and the gradients that it reduces."""
        w = self.workload
        layered, outside = self._once(self._elements, plan)
        if plan.zero == 0:
            yield self._transfer(plan, "reduce", "all-reduce", plan.token_axes, (layered + outside) * w.reduce_bytes)
            return
        axes, across = plan.zero_axes, ("replica",) if plan.replica > 1 else ()
        inside = math.prod(plan.mesh[axis] for axis in axes)
        in_layers = _gathers_in_layers(plan)
        # Where weights are sharded over `model` and over other axes than `data`, or gathered before the step, XLA
        # gathers them whole, some of them twice, and reduces whole gradients over one axis and then the others.
        whole = plan.model > 1 and (plan.zero < 3 or axes != ("data",))
        scattered = plan.model * self.calibration.whole_traffic if whole else 1.0
        runs = plan.grad_accum_steps if in_layers else 1
        for elements, where in ((layered, "layer"), (outside, "outside")):
            where, size = where if in_layers else "step", elements * scattered
            gathers = runs * (2 if where == "layer" else 1)
            first = axes if in_layers or plan.pipeline > 1 else axes[:1]
            yield self._transfer(plan, f"gather in {where}", "all-gather", first, size * w.compute_bytes * gathers)
            yield self._transfer(plan, f"scatter in {where}", "reduce-scatter", first, size * w.reduce_bytes * runs)
            yield self._transfer(plan, "reduce", "all-reduce", axes[len(first) :], size * w.reduce_bytes)
            yield self._transfer(plan, "reduce", "all-reduce", across, elements * w.reduce_bytes / inside * runs)

    def _elements(self, plan: Plan) -> tuple[float, float]:
        """The elements of the weights that a device uses: in the layers, and outside them."""
        shards, sums = Shards(plan), {True: 0.0, False: 0.0}
        for p in self.workload.params:
            sums[LAYERS in dict(p.factors)] += shards.local(p.factors)
        return sums[True], sums[False]

    def _transfer(self, plan: Plan, what: str, kind: str, axes: Axes, size: float) -> Transfer:
        """A collective over ``axes`` whose largest operand or result has ``size`` bytes on a device."""
        axes = tuple(axis for axis in axes if plan.mesh[axis] > 1)
        n = math.prod(plan.mesh[axis] for axis in axes)
        sent = (
            size * {"all-reduce": 2.0, "collective-permute": n / (n - 1) if n > 1 else 0.0}.get(kind, 1.0) * (n - 1) / n
        )
        if n == 1 or not sent:
            return Transfer(what, axes, 0.0, 0.0)
        seconds, network = self._seconds_per_byte(plan, what if what == "ring" or what in _SCATTERS else kind, axes)
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
            ring = kind == "ring"
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
        held = sum(self._once(self._elements, plan)) * itemsize / math.prod(plan.mesh[axis] for axis in plan.zero_axes)
        optimizer = 0.0 if plan.offload else held * self.workload.state_bytes
        return {"parameters": held, "optimizer": optimizer}

    def _kept(self, plan: Plan, remat: str, dim: str | None) -> float:
        """Bytes that the backward pass keeps of one device's whole batch, in arrays that have the dim."""
        kept = self.workload.backward[remat].kept
        return sum(self._kept_bytes(plan, held) for held in kept if dim is None or dim in dict(held.factors))

    def _kept_bytes(self, plan: Plan, held: KeptArray) -> float:
        names = [name for name, _ in held.factors]
        if self._in_tiles(plan) and (names.count(SEQ) > 1 or names.count(None) > 2):
            return 0.0  # scores and their mask, which no tile writes
        shards, size = Shards(plan), held.itemsize
        split = plan.model if plan.sequence_parallel and "model" not in shards.axes(held.factors) else 1
        return shards.local(held.factors) * size / split

    def _working(self, plan: Plan) -> dict[str, float]:
        """Bytes that the step needs beside its state."""
        w = self.workload
        in_layers = plan.zero == 3 or _gathers_in_layers(plan)
        spread = math.prod(plan.mesh[axis] for axis in plan.zero_axes) if in_layers else 1
        part = 1.0 / plan.grad_accum_steps
        # A stage holds one microbatch for each stage, and receives another.
        in_flight = min(1.0, (plan.pipeline + 1) / plan.microbatches) if plan.pipeline > 1 else 1.0
        count = w.sizes.get(LAYERS, 1)
        layers = self._once(self._kept, plan, plan.remat, LAYERS) / (count if plan.checkpoint_stages else 1)
        outside = self._once(self._kept, plan, plan.remat, None) - layers
        everything = self._once(self._kept, plan, self._most, LAYERS) / count
        recomputes = self._once(self._kept, plan, plan.remat, LAYERS) < self._once(self._kept, plan, self._most, LAYERS)
        one_layer = everything if recomputes else 0.0
        residual = self._once(self._forward, plan).residual
        gathered = self.calibration.gathered_copies * residual * plan.sequence_parallel
        staged = self.calibration.stage_copies * residual * (plan.pipeline > 1)
        inside, elsewhere = self._once(self._elements, plan)
        if plan.pipeline > 1:
            # A stage gathers its weights once, and sums their gradients over its microbatches before it reduces them.
            copies = inside + elsewhere / spread
            gradients = 4 * (inside / (plan.virtual_stages if plan.zero == 3 else 1) + elsewhere)
        else:
            copies = (inside + elsewhere) / spread
            gradients = 4 * copies if plan.grad_accum_steps > 1 else 0.0
            copies *= self.calibration.step_copies if plan.zero and not in_layers else 1.0
        # A layer's backward pass holds its gathered weights, and their gradients before they are scattered.
        layer = inside / count * (w.compute_bytes + w.reduce_bytes) if spread > 1 and plan.pipeline == 1 else 0.0
        return {
            "saved activations": layers * part * in_flight,
            "working": (max(one_layer, outside) + gathered) * part + staged,
            "weight copies": copies * w.compute_bytes + layer,
            "gradients": gradients,
        }

    @cached_property
    def _most(self) -> str:
        """The policy that keeps most."""
        return max(self.workload.backward, key=lambda name: sum(h.bytes for h in self.workload.backward[name].kept))


def _gathers_in_layers(plan: Plan) -> bool:
    """Whether each layer gathers its weights: under stage 3, and under the others where no axis shards the rows.

    Stages 1 and 2 gather all weights before the step, and sum each device's gradients of its own rows.
    """
    return plan.pipeline == 1 and (plan.zero == 3 or (plan.zero > 0 and plan.replica * plan.data == 1))
