"""Walks a compiled program and finds its collectives, each weighted by the trip counts of its loops."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpar.analysis.hlo.collective_patterns import Part, loop_role, parts_of, plain, ragged, ring_role
from jaxpar.analysis.hlo.collectives import Collective, along, axes_of, groups_of, kind_of, pairs_of
from jaxpar.analysis.hlo.costs import Costs, Work
from jaxpar.analysis.hlo.dataflow import Flow
from jaxpar.analysis.hlo.flops import kernel_flops, target
from jaxpar.analysis.hlo.overlap import HloOrder
from jaxpar.analysis.hlo.parser import ARMS, CALLS, FUSIONS, Computation, Instruction, Location, Module
from jaxpar.analysis.hlo.slices import Slices, crosses, groups_between
from jaxpar.analysis.hlo.trip_counts import trip_count
from jaxpar.sharding.resolve import num_shards_over

_LIBRARIES = re.compile(r"(?:^|[/\\])(?:site|dist)-packages[/\\](?:jax|jaxlib|flax|optax|chex|haiku|equinox)[/\\]")
_PLUMBING = (
    "jaxpar/parallel/collectives/gather_reduce.py",
    "jaxpar/parallel/collectives/quantized.py",
    "jaxpar/parallel/experts/balance.py",
    "jaxpar/parallel/experts/dispatch.py",
    "jaxpar/parallel/experts/exchange.py",
    "jaxpar/parallel/experts/experts.py",
    "jaxpar/parallel/experts/experts_local.py",
    "jaxpar/parallel/overlap/permute_collectives.py",
    "jaxpar/parallel/overlap/sequence_dot.py",
    "jaxpar/parallel/overlap/weight_gradient.py",
    "jaxpar/parallel/precision/fp8_matmul.py",
    "jaxpar/parallel/zero/gather.py",
    "jaxpar/parallel/zero/sharded_matmul.py",
    "jaxpar/sharding/layout.py",
)
"""Files of jaxpar whose functions move tensors for a model: their collectives are attributed to the model."""
_OF_A_TURN = ("wire_bytes", "exposed_bytes", "beside_flops")
"""What a ring's turns add up to."""


@dataclass(frozen=True)
class Scope:
    """The position of the walk.

    Attributes:
      times: how often this place runs.
      conditional, certain: as for a collective.
      overlapping_work: the compute that overlaps with the asynchronous instruction around this place.
      callers: the instructions that lead here, innermost first. They give the source of an instruction without one.
      window: inside the loop of a windowed einsum: the collective that it implements, the computation around the loop,
        and how often that runs.
    """

    times: int = 1
    conditional: bool = False
    certain: bool = True
    overlapping_work: Work | None = None
    callers: tuple[Instruction, ...] = ()
    window: tuple[str, str, int] | None = None


@dataclass
class HloWalk:
    """A walk through a program, and its results.

    Attributes:
      module: the program.
      sizes: mesh axis → size, of the program's own devices. For a program with several slices, the part inside of one.
      slices: how the mesh is split over slices; ``None`` for one slice.
      imbalance: the load of the busiest device divided by the balanced load, for ragged operations.
      collectives: the collectives that count.
      other_arms: the collectives of the other arms of conditionals.
      unknown_loops: loops with an unknown trip count.
      silent_kernels: custom kernels that state no FLOPs.
    """

    module: Module
    sizes: Mapping[str, int]
    slices: Slices | None = None
    imbalance: float = 1.0
    collectives: list[Collective] = field(default_factory=list)
    other_arms: list[Collective] = field(default_factory=list)
    unknown_loops: list[str] = field(default_factory=list)
    silent_kernels: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.flow = Flow(self.module)
        self.costs = Costs(self.flow, self.imbalance)
        self._schedule = HloOrder(self.costs)
        # Ring → its index in ``collectives``, and its number of permutes.
        self._rings: dict[tuple[Any, ...], tuple[int, int]] = {}
        # Computation → the last place in its schedule at which exposed permutes are in flight, and their number.
        self._flights: dict[str, tuple[int, int]] = {}
        self._num_flights = 0

    def run(self) -> Work:
        """Walk the program; return its work."""
        self._computation(self.module[self.module.entry], Scope())
        return self.costs.computation(self.module.entry)

    def _computation(self, where: Computation, scope: Scope) -> None:
        for instruction in where:
            kind = kind_of(instruction)
            if kind is not None and not self._schedule.reprint(instruction, where):
                self._collective(kind, instruction, where, scope)
            elif self.slices is not None and crosses(instruction):
                self._transfer(self.slices, instruction, where, scope)
            elif kernel_flops(instruction) is None and target(instruction) not in self.silent_kernels:
                self.silent_kernels.append(target(instruction))
            inside = dataclasses.replace(scope, callers=(instruction, *scope.callers))
            if instruction.opcode == "while":
                self._loop(instruction, where, inside)
            elif instruction.opcode == "conditional":
                self._arms(instruction, inside)
            elif instruction.opcode in CALLS:
                if instruction.opcode != "call":
                    work = self._schedule.overlapping_work(instruction, where)
                    inside = dataclasses.replace(inside, overlapping_work=work)
                for name in instruction.called("calls", "to_apply"):
                    self._computation(self.module[name], inside)

    def _loop(self, loop: Instruction, where: Computation, scope: Scope) -> None:
        trips = trip_count(loop, where, self.flow)
        if trips is None:
            frames = self.module.frames(loop)
            self.unknown_loops.append(f"{loop.name} from {model_line(frames)}" if frames else loop.name)
        body = loop.called("body")[0]
        # The mean over an enclosing loop's iterations is an integer in total.
        times = round(scope.times * (1 if trips is None else trips))
        role = loop_role(body)
        window = (role, where.name, scope.times) if role else scope.window
        inside = dataclasses.replace(scope, times=times, certain=scope.certain and trips is not None, window=window)
        self._computation(self.module[body], inside)
        # The condition runs once more than the body.
        inside = dataclasses.replace(inside, times=times + scope.times, window=None)
        self._computation(self.module[loop.called("condition")[0]], inside)

    def _arms(self, conditional: Instruction, scope: Scope) -> None:
        """Keep the collectives of the arm that sends most; those of the other arms go to ``other_arms``."""
        kept, rings, found = self.collectives, self._rings, []
        for name in conditional.called(*ARMS):
            self.collectives, self._rings = [], {}
            self._computation(self.module[name], dataclasses.replace(scope, conditional=True))
            found.append(self.collectives)
        found.sort(key=lambda arm: (sum(c.total_wire_bytes for c in arm), len(arm)))
        self.collectives, self._rings = kept + found.pop(), rings
        self.other_arms += [collective for arm in found for collective in arm]

    def _collective(self, kind: str, instruction: Instruction, where: Computation, scope: Scope) -> None:
        if kind == "collective-permute":
            self._permute(instruction, where, scope)
            return
        groups = groups_of(instruction, self.module.partitions)
        axes, size = axes_of(groups, self.sizes), groups.shape[1]
        if not axes:  # a group of one device moves no data
            return
        exchange = self.costs.ragged.exchange(instruction, where)
        fused = bool(scope.callers) and scope.callers[0].opcode in FUSIONS
        parts = [ragged(exchange, size, self.imbalance)] if exchange else []
        for part in parts or parts_of(kind, instruction, where, self.flow, size, fused=fused):
            self.collectives.append(self._describe(part, axes, size, instruction, where, scope))

    def _transfer(self, slices: Slices, send: Instruction, where: Computation, scope: Scope) -> None:
        kind, groups = groups_between(send)
        members = groups.shape[1]
        part = plain(kind, where[send.operands[0]].types, members)
        found = self._describe(part, slices.axes(groups), members, send, where, scope)
        self.collectives.append(dataclasses.replace(found, between_slices=True))

    def _permute(self, instruction: Instruction, where: Computation, scope: Scope) -> None:
        pairs = pairs_of(instruction)
        if not pairs:
            return
        axes = axes_of(pairs, self.sizes)
        arrays = tuple(array for source in where.inputs(instruction) for array in source.types)
        given = sum(array.bytes for array in arrays)
        role = ring_role(instruction, pairs, where, self.flow, scope.window[0] if scope.window else None)
        if role is None:
            found = self._describe(plain("collective-permute", arrays, 2), axes, 2, instruction, where, scope)
            flight = None if found.overlapped or scope.overlapping_work else self._flight(instruction, where)
            pairs_along = along(pairs, axes, self.sizes)
            self.collectives.append(dataclasses.replace(found, pairs=pairs_along, flight=flight))
            return
        group = num_shards_over(axes, self.sizes)
        part = Part(role, "", arrays, given * group if role == "all-gather" else given, given)
        step = self._describe(part, axes, group, instruction, where, scope)
        # All permutes of one ring become one collective of the computation around the ring.
        _, owner, times = scope.window or ("", where.name, scope.times)
        self._turn((owner, instruction.attribute("metadata"), role, axes, part.dtype), step, times)

    def _flight(self, start: Instruction, where: Computation) -> int:
        """Returns the number of the permutes in flight together: each starts before the last of the others ends."""
        begin, end = self._schedule.span(start, where)
        until, number = self._flights.get(where.name, (-1, 0))
        if begin > until:
            self._num_flights += 1
            until, number = -1, self._num_flights
        self._flights[where.name] = max(until, end), number
        return number

    def _turn(self, key: tuple[Any, ...], step: Collective, times: int) -> None:
        """Add one permute to the ring with this key, which runs ``times`` times in one run of the program."""
        place, steps = self._rings.get(key, (len(self.collectives), 0))
        share = step.count // times if times else 0
        self._rings[key] = place, steps + share
        turn: dict[str, Any] = {name: getattr(step, name) * share for name in _OF_A_TURN}
        ring = dataclasses.replace(step, form=f"ring of {steps + share} permutes", count=times, **turn)
        if place == len(self.collectives):
            self.collectives.append(ring)
            return
        earlier = self.collectives[place]
        turn = {name: value + getattr(earlier, name) for name, value in turn.items()}
        certain, tensor = ring.certain and earlier.certain, ring.tensor or earlier.tensor
        self.collectives[place] = dataclasses.replace(ring, certain=certain, tensor=tensor, **turn)

    def _describe(
        self, part: Part, axes: tuple[str, ...], group: int, instruction: Instruction, where: Computation, scope: Scope
    ) -> Collective:
        overlapping_work = scope.overlapping_work or self._schedule.overlapping_work(instruction, where)
        flops = overlapping_work.matmul_flops + overlapping_work.kernel_flops
        # A matmul hides a transfer, and so does elementwise work on as many bytes; an operation on scalars does not.
        hidden = flops > 0 or overlapping_work.hbm_bytes >= part.wire_bytes > 0
        # Without a source of its own, an instruction takes that of its caller, its operands or its readers.
        sources = (instruction, *scope.callers[:1], *where.inputs(instruction), *scope.callers[1:])
        frames = next((f for i in sources if (f := self.module.frames(i))), [])
        frames = frames or next((f for i in self.flow.readers(instruction, where) if (f := self.module.frames(i))), [])
        moved, home = self.flow.origin(instruction.operands[0], where)
        argument = moved.opcode == "parameter" and home.name == self.module.entry
        return Collective(
            kind=part.kind,
            form=part.form,
            axes=axes,
            group=group,
            dtype=part.dtype,
            arrays=len(part.arrays),
            result_bytes=part.result_bytes,
            wire_bytes=part.wire_bytes,
            exposed_bytes=0.0 if hidden else part.wire_bytes,
            beside_flops=flops,
            count=scope.times,
            conditional=scope.conditional,
            certain=scope.certain,
            source=model_line(frames) if frames else "",
            module=module_path(frames),
            tensor=moved.op_name if argument else "",
            op_name=next((i.op_name for i in sources if i.op_name), ""),
            between_slices=None if self.slices is None else False,
            worst_wire_bytes=part.worst_wire_bytes,
        )


def model_line(frames: Sequence[Location]) -> str:
    """Returns the innermost line outside of libraries and of jaxpar's functions that move tensors."""
    models = (f for f in frames if not _LIBRARIES.search(f.file))
    own = (f for f in models if not f.file.replace("\\", "/").endswith(_PLUMBING))
    return str(next(own, frames[0]))


def module_path(frames: Sequence[Location]) -> str:
    """Returns the classes whose ``__call__`` methods are on the stack, outermost first: ``Llama/Block/Attention``.

    >>> module_path([Location("Block.__call__", "model.py", 7), Location("Llama.__call__", "model.py", 9)])
    'Llama/Block'
    """
    calls = [f for f in reversed(frames) if f.function.endswith(".__call__") and not _LIBRARIES.search(f.file)]
    names = [f.function.removesuffix(".__call__").rpartition(".")[2] for f in calls]
    # A scan's stack repeats the frames around it.
    return "/".join(dict.fromkeys(names))
