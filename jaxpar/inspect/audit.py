"""``audit``: what a compiled program computes and sends, weighted by how often its loops run.

``compiled.cost_analysis()`` counts a loop's body once and knows no network. This walks the optimised HLO instead: every
dot, every collective, through fusions, calls, branches and loops, with the trip counts the program itself shows.
"""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpar.errors import AuditError
from jaxpar.inspect.collectives import Collective, axes_of, groups_of, kind_of, pairs_of, ring_role, wire_bytes
from jaxpar.inspect.flops import kernel_flops, matmul_flops, trip_count
from jaxpar.inspect.hlo import Computation, Instruction, Module, parse
from jaxpar.inspect.report import show_bytes

_FREE = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"))
_SPANS = ("fusion", "dot", "convolution", "custom-call", "while", "call", "reduce")


@dataclass(frozen=True)
class Audit:
    """What one device does in one run of a program.

    Attributes:
      matmul_flops: of every dot and convolution, trip-weighted; a branch counts with its costliest arm.
      kernel_flops: of custom kernels that state them.
      hbm_bytes: operands and results of every unfused operation: an upper bound on memory traffic.
      collectives: each collective of the program.
      unknown_loops: loops whose trip count the program does not show; what they hold is counted once, so totals are lower
        bounds.
      memory: argument, output, temporary and peak bytes, where the executable tells.
    """

    matmul_flops: int
    kernel_flops: int
    hbm_bytes: int
    collectives: tuple[Collective, ...]
    unknown_loops: tuple[str, ...]
    memory: dict[str, int] = field(default_factory=dict)

    def select(self, kind: str | None = None, axis: str | None = None) -> list[Collective]:
        """The collectives of this kind and over this axis."""
        return [c for c in self.collectives if kind in (None, c.kind) and (axis is None or axis in c.axes)]

    def wire_bytes(self, kind: str | None = None, axis: str | None = None) -> float:
        """Bytes that one device sends in one run."""
        return sum(c.total_wire_bytes for c in self.select(kind, axis))

    def count(self, kind: str | None = None, axis: str | None = None) -> int:
        """Executions in one run."""
        return sum(c.count for c in self.select(kind, axis))

    def exposed(self, kind: str | None = None, axis: str | None = None) -> float:
        """Bytes on the wire that no compute is scheduled beside."""
        return sum(c.total_wire_bytes for c in self.select(kind, axis) if not c.overlapped)

    @property
    def certain(self) -> bool:
        """Whether every loop's trip count was found."""
        return not self.unknown_loops

    def rows(self) -> list[tuple[str, ...]]:
        """The collectives as text, largest first; equal ones from one source together."""
        together: dict[tuple[Any, ...], list[Collective]] = {}
        for c in self.collectives:
            key = (c.kind, c.form, c.axes, c.dtype, c.source, c.overlapped, c.conditional, c.certain)
            together.setdefault(key, []).append(c)
        rows: list[tuple[str, ...]] = []
        for same in sorted(together.values(), key=lambda cs: -sum(c.total_wire_bytes for c in cs)):
            first, sent = same[0], sum(c.total_wire_bytes for c in same)
            marks = [
                text
                for flag, text in (
                    (first.overlapped, "overlapped"),
                    (first.conditional, "in a branch"),
                    (not first.certain, "in a loop of unknown length"),
                )
                if flag
            ]
            kind = first.kind + (f" ({first.form})" if first.form else "")
            count = str(sum(c.count for c in same))
            result = show_bytes(sum(c.result_bytes * c.count for c in same))
            marked = ", ".join(marks)
            rows.append(
                (kind, "+".join(first.axes), count, first.dtype, result, show_bytes(int(sent)), marked, first.source)
            )
        return rows

    def __str__(self) -> str:
        head = ("collective", "axes", "count", "dtype", "results", "on the wire", "", "source")
        rows = [head, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.headline(), *lines]) + "\n"

    def headline(self) -> str:
        """Totals in one line, marked when they are lower bounds."""
        text = (
            f"matmul {self.matmul_flops:.4g} FLOPs, kernels {self.kernel_flops:.4g} FLOPs, wire "
            f"{show_bytes(int(self.wire_bytes()))} ({show_bytes(int(self.exposed()))} exposed) in {self.count()} collectives"
        )
        if not self.certain:
            text += f"; LOWER BOUNDS: the trip count of {', '.join(self.unknown_loops)} is unknown"
        return text

    def _repr_html_(self) -> str:
        head = ("collective", "axes", "count", "dtype", "results", "on the wire", "", "source")
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in [head, *self.rows()]
        )
        return f"<div><b>{html.escape(self.headline())}</b><table>{rows}</table></div>"

    def to_json(self) -> str:
        """Everything, with totals by kind and by axis."""
        by_kind = {kind: self.wire_bytes(kind) for kind in sorted({c.kind for c in self.collectives})}
        by_axis = {axis: self.wire_bytes(axis=axis) for axis in sorted({a for c in self.collectives for a in c.axes})}
        return json.dumps(
            {
                "matmul_flops": self.matmul_flops,
                "kernel_flops": self.kernel_flops,
                "hbm_bytes": self.hbm_bytes,
                "wire_bytes": {"total": self.wire_bytes(), "by_kind": by_kind, "by_axis": by_axis},
                "exposed_bytes": self.exposed(),
                "memory": self.memory,
                "unknown_loops": list(self.unknown_loops),
                "collectives": [dataclasses.asdict(c) for c in self.collectives],
            },
            indent=1,
        )


def audit(program: Any, *, mesh: Any = None) -> Audit:
    """Read a compiled program.

    Args:
      program: what ``jitted.lower(...).compile()`` gave, or its optimised HLO text.
      mesh: the mesh (concrete or abstract, or a mapping axis → size) whose axes name the collectives' groups. Without one
        there is a single axis ``devices``.

    Raises:
      AuditError: no HLO text, text cut short, or a mesh of another size than the program's.

    >>> import jax, jax.numpy as jnp, jaxpar as jp
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jp.MeshSpec(data=-1).build()
    >>> x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    >>> report = audit(jax.jit(lambda x: (x * x).sum(0)).lower(x).compile(), mesh=mesh)
    >>> report.wire_bytes("all-reduce", "data")  # 2 · 7/8 of 32 floats
    224.0
    """
    text = program if isinstance(program, str) else program.as_text()
    if not text:
        raise AuditError(
            "this executable has no HLO text. Remedy: compile with jit(...).lower(...).compile() and keep that."
        )
    module = parse(text)
    sizes = (
        dict(mesh if isinstance(mesh, Mapping) else mesh.shape) if mesh is not None else {"devices": module.partitions}
    )
    total = 1
    for size in sizes.values():
        total *= size
    if total != module.partitions:
        raise AuditError(
            f"the program runs on {module.partitions} devices, but the mesh has {total} ({sizes}). Remedy: pass the mesh it "
            f"was compiled for."
        )
    walk = _Walk(module, sizes)
    flops, kernels, traffic = walk.computation(module.computations[module.entry], 1, False, True, fused=False)
    return Audit(flops, kernels, traffic, tuple(walk.found), tuple(walk.unknown), _memory(program))


def _memory(program: Any) -> dict[str, int]:
    stats = program.memory_analysis() if hasattr(program, "memory_analysis") else None
    names = {"argument": "argument_size", "output": "output_size", "temp": "temp_size", "alias": "alias_size"}
    found = {name: getattr(stats, f"{field}_in_bytes", None) for name, field in names.items()}
    found["peak"] = getattr(stats, "peak_memory_in_bytes", None)
    return {name: int(value) for name, value in found.items() if value is not None}


class _Walk:
    """One pass over a module; ``found`` and ``unknown`` fill as it goes."""

    def __init__(self, module: Module, sizes: Mapping[str, int]):
        self.module, self.sizes = module, sizes
        self.found: list[Collective] = []
        self.unknown: list[str] = []

    def computation(
        self, where: Computation, times: int, branch: bool, certain: bool, *, fused: bool
    ) -> tuple[int, int, int]:
        """(matmul FLOPs, kernel FLOPs, HBM bytes) of ``times`` runs; collectives are added to ``found``."""
        flops = kernels = traffic = 0
        order = list(where)
        # An async collective fusion prints its collective in every fusion it overlaps; the first one starts it.
        fused_channels: set[str] = set()
        for position, instruction in enumerate(order):
            flops += times * matmul_flops(instruction, where)
            kernels += times * (kernel_flops(instruction) or 0)
            if not fused and instruction.opcode not in _FREE:
                reads = (where.instructions[o].bytes for o in instruction.operands if o in where.instructions)
                traffic += times * (instruction.bytes + sum(reads))
            if kind_of(instruction) is not None:
                self._collective(instruction, where, order[position + 1 :], times, branch, certain)
            inner = self._inside(instruction, where, times, branch, certain, fused, fused_channels)
            flops, kernels, traffic = flops + inner[0], kernels + inner[1], traffic + inner[2]
        return flops, kernels, traffic

    def _inside(
        self,
        instruction: Instruction,
        where: Computation,
        times: int,
        branch: bool,
        certain: bool,
        fused: bool,
        channels: set[str],
    ) -> tuple[int, int, int]:
        """What an instruction runs inside itself."""
        computations = self.module.computations
        if instruction.opcode == "while":
            trips = trip_count(instruction, where, self.module)
            if trips is None:
                self.unknown.append(instruction.name)
            body = computations[instruction.called("body")[0]]
            return self.computation(
                body, times * (1 if trips is None else trips), branch, certain and trips is not None, fused=fused
            )
        if instruction.opcode == "conditional":
            names = instruction.called("branch_computations", "true_computation", "false_computation")
            return self._worst([computations[name] for name in names], times, certain)
        if instruction.opcode in ("call", "async-start"):
            names = instruction.called("to_apply", "calls")
            parts = [self.computation(computations[n], times, branch, certain, fused=fused) for n in names]
            return sum(p[0] for p in parts), sum(p[1] for p in parts), sum(p[2] for p in parts)
        if instruction.opcode == "fusion":
            return self._fusion(
                instruction, computations[instruction.called("calls")[0]], times, branch, certain, channels
            )
        return 0, 0, 0

    def _worst(self, arms: list[Computation], times: int, certain: bool) -> tuple[int, int, int]:
        """The arm that sends most (then computes most); its collectives are marked."""
        kept = self.found
        results = []
        for arm in arms:
            self.found = []
            figures = self.computation(arm, times, True, certain, fused=False)
            results.append((sum(c.total_wire_bytes for c in self.found), figures, self.found))
        _, figures, found = max(results, key=lambda result: (result[0], result[1][0]))
        self.found = kept + found
        return figures

    def _fusion(
        self, fusion: Instruction, inner: Computation, times: int, branch: bool, certain: bool, channels: set[str]
    ) -> tuple[int, int, int]:
        kept, self.found = self.found, []
        figures = self.computation(inner, times, branch, certain, fused=True)
        inside, self.found = self.found, kept
        starts = [i for i in inner if kind_of(i) is not None]
        computes = any(i.opcode in ("dot", "convolution", "custom-call") for i in inner)
        for instruction, collective in zip(starts, inside, strict=True) if len(starts) == len(inside) else ():
            channel = instruction.attribute("channel_id")
            if channel is not None and channel in channels:
                continue
            channels.update({channel} if channel is not None else ())
            scattered = collective.kind == "all-reduce" and inner.root.opcode == "dynamic-slice"
            if scattered:
                collective = self._as_scatter(collective, fusion)
            self.found.append(dataclasses.replace(collective, overlapped=collective.overlapped or computes))
        if len(starts) != len(inside):
            self.found += inside
        return figures

    def _as_scatter(self, collective: Collective, fusion: Instruction) -> Collective:
        """An all-reduce whose fusion keeps one slice: the compiler's reduce-scatter."""
        return dataclasses.replace(
            collective,
            kind="reduce-scatter",
            form="all-reduce in a scatter fusion",
            result_bytes=fusion.bytes,
            wire_bytes=collective.wire_bytes / 2,
        )

    def _collective(
        self,
        instruction: Instruction,
        where: Computation,
        after: list[Instruction],
        times: int,
        branch: bool,
        certain: bool,
    ) -> None:
        kind = kind_of(instruction) or ""
        inputs = [where.instructions[o] for o in instruction.operands if o in where.instructions]
        arrays = [array for source in inputs for array in source.types]
        given = sum(array.bytes for array in arrays)
        form = ""
        if kind == "collective-permute":
            pairs = [(a, b) for a, b in pairs_of(instruction) if a != b]
            role = ring_role(instruction, where, self.module)
            form = f"{role} as a ring of permutes" if role else ""
            kind = role or kind
            axes, group = axes_of(pairs, self.sizes), 2
            result, sent = given, given * len(pairs) / self.module.partitions
        else:
            groups = groups_of(instruction, self.module.partitions)
            axes, group = axes_of(groups.tolist(), self.sizes), groups.shape[1]
            whole = given * group if kind == "all-gather" else given
            result = whole // group if kind == "reduce-scatter" else whole
            sent = wire_bytes(kind, whole, group)
        if not axes:
            return  # groups of one device: nothing moves
        frames = self.module.frames(instruction)
        self.found.append(
            Collective(
                kind=kind,
                form=form,
                axes=axes,
                group=group,
                dtype="+".join(dict.fromkeys(array.dtype for array in arrays)),
                result_bytes=result,
                wire_bytes=sent,
                count=times,
                overlapped=_overlapped(instruction, after),
                conditional=branch,
                certain=certain,
                source=str(frames[0]) if frames else "",
                op_name=instruction.op_name,
            )
        )


def _overlapped(start: Instruction, after: list[Instruction]) -> bool:
    """Whether compute is scheduled between an asynchronous collective's start and its end."""
    if not start.opcode.endswith("-start"):
        return False
    for instruction in after:
        if start.name in instruction.operands and instruction.opcode.endswith("-done"):
            return False
        if instruction.opcode in _SPANS and start.name not in instruction.operands:
            return True
    return False
