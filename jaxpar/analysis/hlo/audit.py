"""``audit``: what a compiled program computes and sends, weighted by how often its loops run.

``compiled.cost_analysis()`` counts a loop's body once and knows no network. This reads the optimised HLO instead: every
matmul and every collective, through fusions, calls, branches and loops, with the trip counts the program itself shows.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.analysis.hlo.collectives import KINDS, Collective
from jaxpar.analysis.hlo.parser import Module, parse
from jaxpar.analysis.hlo.slices import Slices, slices_named
from jaxpar.analysis.hlo.walk import HloWalk
from jaxpar.analysis.units import show_bytes
from jaxpar.errors import AuditError, did_you_mean, listing

_COLUMNS = ("collective", "axes", "count", "dtype", "results", "on the wire", "notes", "from")


@dataclass(frozen=True)
class Audit:
    """What one device does in one run of a program.

    Attributes:
      mesh: mesh axis → size, as the collectives' axes are named.
      matmul_flops: of every dot and convolution; of a conditional's arms, those of the one with most.
      kernel_flops: of custom kernels that state them.
      hbm_bytes: an upper bound on the traffic of main memory: the operands and results of every unfused operation, of
        slices and updates in place only what they touch. What caches keep is counted each time.
      collectives: each collective of the program; of a conditional's arms, those of the one that sends most.
      other_arms: the collectives of the other arms, which no total counts.
      unknown_loops: loops whose trip count the program does not show. They count as one run: totals are lower bounds.
      silent_kernels: custom kernels that state no FLOPs, so that ``kernel_flops`` lacks them.
      memory: argument, output, temp, alias, peak and host bytes, where the program is an executable that tells.
    """

    mesh: Mapping[str, int]
    matmul_flops: int
    kernel_flops: int
    hbm_bytes: int
    collectives: tuple[Collective, ...]
    other_arms: tuple[Collective, ...]
    unknown_loops: tuple[str, ...]
    silent_kernels: tuple[str, ...]
    memory: Mapping[str, int]

    def select(self, kind: str | None = None, axis: str | None = None) -> list[Collective]:
        """The collectives of this kind, and over this axis (alone or with others).

        Raises:
          AuditError: no such kind, or no such axis in the mesh.
        """
        if kind is not None and kind not in KINDS:
            raise AuditError(
                f"no collective has the kind {kind!r}.{did_you_mean(kind, KINDS)} Kinds: {listing(KINDS)}."
            )
        if axis is not None and axis not in self.mesh:
            raise AuditError(
                f"the mesh has no axis {axis!r}.{did_you_mean(axis, self.mesh)} Axes: {listing(self.mesh)}."
            )
        return [c for c in self.collectives if kind in (None, c.kind) and (axis is None or axis in c.axes)]

    def wire_bytes(self, kind: str | None = None, axis: str | None = None) -> float:
        """Bytes that one device sends in one run."""
        return sum(c.total_wire_bytes for c in self.select(kind, axis))

    def count(self, kind: str | None = None, axis: str | None = None) -> int:
        """Executions of collectives in one run."""
        return sum(c.count for c in self.select(kind, axis))

    def exposed(self, kind: str | None = None, axis: str | None = None) -> float:
        """Bytes on the wire that no compute is scheduled beside."""
        return sum(c.exposed_bytes * c.count for c in self.select(kind, axis))

    def through_other_arms(self) -> Audit:
        """The same run, but with what the other arms of conditionals send counted in the place of those that send most.

        FLOPs and memory traffic stay as they are. Right for conditionals of two arms.
        """
        always = tuple(c for c in self.collectives if not c.conditional)
        instead = tuple(c for c in self.collectives if c.conditional)
        return dataclasses.replace(self, collectives=(*always, *self.other_arms), other_arms=instead)

    @property
    def certain(self) -> bool:
        """Whether every loop's trip count was found."""
        return not self.unknown_loops

    def rows(self) -> list[tuple[str, ...]]:
        """The collectives as text, largest first; equal ones from one source together."""
        together: dict[tuple[Any, ...], list[Collective]] = {}
        for c in self.collectives:
            key = (c.kind, c.form, c.axes, c.dtype, c.place, _notes(c))
            together.setdefault(key, []).append(c)
        largest_first = sorted(together.items(), key=lambda item: -sum(c.total_wire_bytes for c in item[1]))
        rows: list[tuple[str, ...]] = []
        for (kind, form, axes, dtype, place, notes), same in largest_first:
            count = str(sum(c.count for c in same))
            result = show_bytes(sum(c.result_bytes * c.count for c in same))
            sent = show_bytes(round(sum(c.total_wire_bytes for c in same)))
            name = f"{kind} ({form})" if form else kind
            rows.append((name, "+".join(axes), count, dtype, result, sent, notes, place))
        return rows

    def table(self) -> str:
        """:meth:`rows` as a text table with a head."""
        rows = [_COLUMNS, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return f"{self.headline()}\n{self.table()}"

    def headline(self) -> str:
        """Totals in one line, marked when they are lower bounds."""
        text = (
            f"matmul {self.matmul_flops:.4g} FLOPs, kernels {self.kernel_flops:.4g} FLOPs, wire "
            f"{show_bytes(round(self.wire_bytes()))} ({show_bytes(round(self.exposed()))} exposed) in {self.count()} "
            f"executions of collectives"
        )
        if self.other_arms:
            sent: dict[str, float] = {}
            for c in self.other_arms:
                sent[c.dtype] = sent.get(c.dtype, 0) + c.total_wire_bytes
            each = ", ".join(f"{dtype} {show_bytes(round(size))}" for dtype, size in sorted(sent.items()))
            text += f"; other arms of branches, not counted, send {show_bytes(round(sum(sent.values())))} ({each})"
        if not self.certain:
            loops = ", ".join(self.unknown_loops)
            text += f"; LOWER BOUNDS, each loop counted as one run: the trip count is unknown of {loops}"
        if self.silent_kernels:
            text += f"; without the FLOPs of {', '.join(self.silent_kernels)}, which state none"
        return text

    def _repr_html_(self) -> str:
        def row(cells: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        rows = row(_COLUMNS, "th") + "".join(row(cells, "td") for cells in self.rows())
        return f"<div><b>{html.escape(self.headline())}</b><table>{rows}</table></div>"

    def to_json(self) -> str:
        """Everything, with the bytes on the wire by kind and by axes (``data+model`` for a collective over both)."""
        by_kind: dict[str, float] = {}
        by_axis: dict[str, float] = {}
        for c in self.collectives:
            by_kind[c.kind] = by_kind.get(c.kind, 0) + c.total_wire_bytes
            by_axis["+".join(c.axes)] = by_axis.get("+".join(c.axes), 0) + c.total_wire_bytes
        return json.dumps(
            {
                "mesh": dict(self.mesh),
                "matmul_flops": self.matmul_flops,
                "kernel_flops": self.kernel_flops,
                "silent_kernels": self.silent_kernels,
                "hbm_bytes": self.hbm_bytes,
                "wire_bytes": {"total": self.wire_bytes(), "by_kind": by_kind, "by_axis": by_axis},
                "exposed_bytes": self.exposed(),
                "memory": dict(self.memory),
                "certain": self.certain,
                "unknown_loops": self.unknown_loops,
                "collectives": [dataclasses.asdict(c) for c in self.collectives],
                "other_arms": [dataclasses.asdict(c) for c in self.other_arms],
            },
            indent=1,
        )


def _notes(c: Collective) -> str:
    marks = (
        (bool(c.between_slices), "between slices"),
        (c.arrays > 1, f"{c.arrays} arrays"),
        (c.overlapped, "overlapped"),
        (0 < c.exposed_bytes < c.wire_bytes, "partly overlapped"),
        (c.conditional, "in a branch"),
        (not c.certain, "in a loop of unknown length"),
    )
    return ", ".join(text for holds, text in marks if holds)


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
    module = parse(_text(program))
    sizes, slices = _mesh(module, mesh)
    walk = HloWalk(module, sizes if slices is None else slices.inside, slices)
    work = walk.run()
    return Audit(
        mesh=sizes,
        matmul_flops=work.matmul_flops,
        kernel_flops=work.kernel_flops,
        hbm_bytes=work.hbm_bytes,
        collectives=tuple(walk.collectives),
        other_arms=tuple(walk.other_arms),
        unknown_loops=tuple(dict.fromkeys(walk.unknown_loops)),
        silent_kernels=tuple(walk.silent_kernels),
        memory=_memory(program),
    )


def _mesh(module: Module, mesh: Any) -> tuple[dict[str, int], Slices | None]:
    """The mesh as axis → size, and how it lies on slices where the program is for several."""
    named = slices_named(module)
    given = {"devices": module.partitions * max(named, 1)} if mesh is None else getattr(mesh, "shape", mesh)
    sizes = {str(axis): int(size) for axis, size in given.items()}
    devices = math.prod(sizes.values())
    slices = Slices.of(sizes, module.partitions) if named else None
    fits = devices == module.partitions if slices is None else slices.count == named
    if not fits or devices % module.partitions:
        shape = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"
        several = f" of each of {named} slices" if named else ""
        raise AuditError(
            f"the program runs on {module.partitions} devices{several}, but the mesh has {devices} ({shape}). "
            f"Remedy: pass the mesh that the program was compiled for."
        )
    return sizes, slices


def _text(program: Any) -> str:
    """The HLO text of an executable, or the text itself."""
    if isinstance(program, str):
        return program
    if not hasattr(program, "as_text"):
        raise AuditError(
            f"audit() takes a compiled program or its HLO text, not a {type(program).__name__}. Remedy: pass "
            f"jitted.lower(...).compile()."
        )
    try:
        text = program.as_text()
    except (NotImplementedError, RuntimeError) as error:
        text, cause = None, f": {error}"
    else:
        cause = ""
    if not text:
        raise AuditError(
            f"this executable has no HLO text{cause}. Remedy: audit the program where it is compiled, not one that was "
            f"loaded or deserialized."
        )
    return str(text)


def _memory(program: Any) -> dict[str, int]:
    """Bytes by use, as far as the executable tells; ``host`` is what it keeps in the host's memory."""
    stats = program.memory_analysis() if hasattr(program, "memory_analysis") else None
    if stats is None:
        return {}

    def size(name: str) -> int:
        return int(getattr(stats, f"{name}_in_bytes", 0) or 0)  # an ahead-of-time one may hold None

    found = {name: size(f"{name}_size") for name in ("argument", "output", "temp", "alias")}
    host = sum(size(f"host_{name}_size") for name in ("argument", "output", "temp")) - size("host_alias_size")
    return {**found, "peak": size("peak_memory"), "host": host}
