"""``audit``: the FLOPs and collectives of a compiled program, weighted by how often its loops run.

``compiled.cost_analysis()`` counts the body of a loop once and ignores the network. The audit reads the optimized HLO
instead. It finds every matmul and every collective, in fusions, calls, branches and loops, and takes the trip counts
from the program.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.analysis.hlo.collectives import KINDS, Collective
from jaxpar.analysis.hlo.parser import Module, parse
from jaxpar.analysis.hlo.slices import Slices, slices_named
from jaxpar.analysis.hlo.walk import HloWalk
from jaxpar.analysis.units import aligned, html_table, show_bytes, table_lines
from jaxpar.errors import AuditError, did_you_mean, listing
from jaxpar.utils.terminal import fit

_COLUMNS = ("collective", "axes", "count", "dtype", "results", "on the wire", "notes", "from")


@dataclass(frozen=True)
class Audit:
    """The computation and the traffic of one device in one run of a program.

    Attributes:
      mesh: mesh axis → size; the collectives' ``axes`` are names from it.
      matmul_flops: of every dot and convolution. A conditional counts its most expensive arm.
      kernel_flops: of custom kernels that state their FLOPs.
      hbm_bytes: an upper bound on the traffic of main memory: the operands and results of every unfused operation.
        Slices and in-place updates count only what they touch. Data that stays in a cache is counted at each access.
      collectives: the collectives of the program. A conditional counts the arm that sends most.
      other_arms: the collectives of the other arms, which no total counts.
      unknown_loops: loops whose trip count the program does not show. Each counts as one run, so totals are lower
        bounds.
      silent_kernels: custom kernels that state no FLOPs and are missing from ``kernel_flops``.
      memory: argument, output, temp, alias, peak and host bytes, if the executable reports them.
      imbalance: the load of the busiest device divided by the balanced load; it scales the figures of ragged operations
        (:mod:`jaxpar.analysis.hlo.ragged`).
      grouped_flops: the part of ``matmul_flops`` of grouped matmuls (``jax.lax.ragged_dot``).
      worst_grouped_flops: the same if the buffers of all grouped matmuls are full.

    >>> import jax, jax.numpy as jnp
    >>> report = audit(jax.jit(lambda x, y: x @ y).lower(jnp.ones((8, 16)), jnp.ones((16, 4))).compile())
    >>> report.matmul_flops, report.count(), report.certain
    (1024, 0, True)
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
    imbalance: float = 1.0
    grouped_flops: int = 0
    worst_grouped_flops: int = 0

    def select(self, kind: str | None = None, axis: str | None = None) -> list[Collective]:
        """Returns the collectives of a kind and over an axis.

        Args:
          kind: one of ``jaxpar.analysis.hlo.collectives.KINDS``; ``None`` selects all kinds.
          axis: a mesh axis that the collective runs over, alone or with others; ``None`` selects all axes.

        Raises:
          AuditError: unknown ``kind``, or the mesh has no such ``axis``.
        """
        if kind is not None and kind not in KINDS:
            raise AuditError(f"unknown collective kind {kind!r}.{did_you_mean(kind, KINDS)} Kinds: {listing(KINDS)}.")
        if axis is not None and axis not in self.mesh:
            raise AuditError(
                f"the mesh has no axis {axis!r}.{did_you_mean(axis, self.mesh)} Axes: {listing(self.mesh)}."
            )
        return [c for c in self.collectives if kind in (None, c.kind) and (axis is None or axis in c.axes)]

    def wire_bytes(self, kind: str | None = None, axis: str | None = None) -> float:
        """Returns the bytes that one device sends in one run. Arguments and errors are those of :meth:`select`."""
        return sum(c.total_wire_bytes for c in self.select(kind, axis))

    def worst_wire_bytes(self, kind: str | None = None, axis: str | None = None) -> float:
        """Returns :meth:`wire_bytes` in the worst routing: the buffers of all ragged exchanges are full."""
        return sum(c.total_worst_wire_bytes for c in self.select(kind, axis))

    def count(self, kind: str | None = None, axis: str | None = None) -> int:
        """Returns how many times collectives execute in one run. Arguments and errors are those of :meth:`select`."""
        return sum(c.count for c in self.select(kind, axis))

    def exposed(self, kind: str | None = None, axis: str | None = None) -> float:
        """Returns the bytes sent that overlap with no compute. Arguments and errors are those of :meth:`select`."""
        return sum(c.exposed_bytes * c.count for c in self.select(kind, axis))

    def through_other_arms(self) -> Audit:
        """Returns the audit with the other arms of conditionals counted.

        They replace the arms that send most. FLOPs and memory traffic stay the same. The result is correct for
        conditionals with two arms.
        """
        always = tuple(c for c in self.collectives if not c.conditional)
        replaced_arms = tuple(c for c in self.collectives if c.conditional)
        return dataclasses.replace(self, collectives=(*always, *self.other_arms), other_arms=replaced_arms)

    @property
    def worst_matmul_flops(self) -> int:
        """``matmul_flops`` in the worst routing: the buffers of all grouped matmuls are full."""
        return self.matmul_flops - self.grouped_flops + self.worst_grouped_flops

    @property
    def ragged(self) -> bool:
        """Whether the program has ragged operations, whose work depends on the routing of tokens."""
        return self.worst_grouped_flops > 0 or any(c.worst_wire_bytes is not None for c in self.collectives)

    @property
    def certain(self) -> bool:
        """Whether the trip count of every loop is known."""
        return not self.unknown_loops

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the collectives as table cells, largest first; equal ones from one source share a row."""
        groups: dict[tuple[Any, ...], list[Collective]] = {}
        for c in self.collectives:
            key = (c.kind, c.form, c.axes, c.dtype, c.place, _notes(c))
            groups.setdefault(key, []).append(c)
        largest_first = sorted(groups.items(), key=lambda item: -sum(c.total_wire_bytes for c in item[1]))
        rows: list[tuple[str, ...]] = []
        for (kind, form, axes, dtype, place, notes), same in largest_first:
            count = str(sum(c.count for c in same))
            result = show_bytes(sum(c.result_bytes * c.count for c in same))
            sent = show_bytes(round(sum(c.total_wire_bytes for c in same)))
            name = f"{kind} ({form})" if form else kind
            if same[0].worst_wire_bytes is not None:
                worst = show_bytes(round(sum(c.total_worst_wire_bytes for c in same)))
                notes = ", ".join(filter(None, (notes, f"worst routing {worst}")))
            rows.append((name, "+".join(axes), count, dtype, result, sent, notes, place))
        return rows

    def table(self, width: int | None = None) -> str:
        """Returns :meth:`rows` as a text table with a header; in a narrow one, notes stand below their row."""
        lines = aligned([_COLUMNS, *self.rows()])
        if width is not None and max(map(len, lines)) > width:
            lines = table_lines([(*_COLUMNS[:-2], ""), *map(_narrow, self.rows())], width)
        return "\n".join(lines) + "\n"

    def to_text(self, width: int | None = None) -> str:
        """Returns the totals and :meth:`table`, in lines of at most ``width`` columns."""
        return fit(f"{self.headline()}\n{self.table(width)}", width)

    def __str__(self) -> str:
        return self.to_text()

    def headline(self) -> str:
        """Returns the totals in one line, which says so if they are lower bounds."""
        text = (
            f"matmul {self.matmul_flops:.4g} FLOPs, kernels {self.kernel_flops:.4g} FLOPs, wire "
            f"{show_bytes(round(self.wire_bytes()))} ({show_bytes(round(self.exposed()))} exposed) in {self.count()} "
            f"executions of collectives"
        )
        if self.ragged:
            load = "balanced routing" if self.imbalance == 1 else f"an imbalance of {self.imbalance:g}"
            text += (
                f"; with {load}; the worst routing has {self.worst_matmul_flops:.4g} matmul FLOPs and "
                f"{show_bytes(round(self.worst_wire_bytes()))} on the wire"
            )
        if self.other_arms:
            sent = _sent_by(self.other_arms, lambda c: c.dtype)
            by_dtype = ", ".join(f"{dtype} {show_bytes(round(size))}" for dtype, size in sorted(sent.items()))
            text += f"; other arms of branches, not counted, send {show_bytes(round(sum(sent.values())))} ({by_dtype})"
        if not self.certain:
            loops = ", ".join(self.unknown_loops)
            text += f"; LOWER BOUNDS, counting one iteration of the loops with an unknown trip count: {loops}"
        if self.silent_kernels:
            text += f"; excluding the FLOPs of {', '.join(self.silent_kernels)}, which report none"
        return text

    def _repr_html_(self) -> str:
        return f"<div><b>{html.escape(self.headline())}</b>{html_table(self.rows(), _COLUMNS)}</div>"

    def to_json(self) -> str:
        """Returns all fields as JSON, plus the bytes on the wire by kind and by axes.

        The key of a collective over several axes joins their names, as ``data+model``.
        """
        by_kind = _sent_by(self.collectives, lambda c: c.kind)
        by_axis = _sent_by(self.collectives, lambda c: "+".join(c.axes))
        sent = {"total": self.wire_bytes(), "by_kind": by_kind, "by_axis": by_axis}
        derived = {"wire_bytes": sent, "exposed_bytes": self.exposed(), "certain": self.certain}
        worst = {"matmul_flops": self.worst_matmul_flops, "wire_bytes": self.worst_wire_bytes()}
        derived |= {"worst_routing": worst if self.ragged else None}
        return json.dumps(dataclasses.asdict(self) | derived, indent=1)


def _sent_by(collectives: Iterable[Collective], key: Callable[[Collective], str]) -> dict[str, float]:
    """Returns the bytes that collectives send in one run, by a key."""
    sent: dict[str, float] = {}
    for c in collectives:
        sent[key(c)] = sent.get(key(c), 0) + c.total_wire_bytes
    return sent


def _narrow(row: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a row whose last cell says everything but names and numbers."""
    name, *numbers, notes, place = row
    kind, _, form = name.removesuffix(")").partition(" (")
    return kind, *numbers, "; ".join(filter(None, (form and f"as {form}", notes, place and f"from {place}")))


def _notes(c: Collective) -> str:
    marks = (
        (bool(c.between_slices), "between slices"),
        (c.arrays > 1, f"{c.arrays} arrays"),
        (c.overlapped, "overlapped"),
        (0 < c.exposed_bytes < c.wire_bytes, "partly overlapped"),
        (c.conditional, "in a branch"),
        (not c.certain, "in a loop with an unknown trip count"),
    )
    return ", ".join(text for holds, text in marks if holds)


def audit(program: Any, *, mesh: Any = None, imbalance: float = 1.0) -> Audit:
    """Returns the FLOPs, memory traffic and collectives of a compiled program.

    Args:
      program: the result of ``jitted.lower(...).compile()``, or its optimized HLO text.
      mesh: the mesh that the program was compiled for: concrete, abstract, or a mapping axis → size. The audit names
        the mesh axes of each collective. Without a mesh there is one axis, ``devices``.
      imbalance: the load of the busiest device divided by the balanced load, at least 1. The audit is of that device:
        its ragged operations (``jax.lax.ragged_all_to_all``, ``jax.lax.ragged_dot``) have as many times the balanced
        rows, but no more than their buffers hold; ``math.inf`` fills the buffers.

    Returns:
      The :class:`Audit`. Its figures are for one device and one run.

    Raises:
      AuditError: the program has no HLO text, the text is cut short, the mesh has another size than the program, or
        ``imbalance`` is below 1.

    >>> import jax, jax.numpy as jnp, jaxpar as jp
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jp.MeshSpec(data=-1).build()
    >>> x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    >>> report = audit(jax.jit(lambda x: (x * x).sum(0)).lower(x).compile(), mesh=mesh)
    >>> report.wire_bytes("all-reduce", "data")  # 2 · 7/8 of 32 floats
    224.0
    """
    if not imbalance >= 1:
        raise AuditError(
            f"imbalance must be at least 1, got {imbalance:g}. Remedy: pass the load of the busiest device divided by "
            f"the mean load."
        )
    module = parse(_text(program))
    sizes, slices = _mesh(module, mesh)
    walk = HloWalk(module, sizes if slices is None else slices.inside, slices, imbalance)
    work = walk.run()
    return Audit(
        mesh=sizes,
        collectives=tuple(walk.collectives),
        other_arms=tuple(walk.other_arms),
        unknown_loops=tuple(dict.fromkeys(walk.unknown_loops)),
        silent_kernels=tuple(walk.silent_kernels),
        memory=_memory(program),
        imbalance=imbalance,
        **dataclasses.asdict(work),
    )


def _mesh(module: Module, mesh: Any) -> tuple[dict[str, int], Slices | None]:
    """Returns the mesh as axis → size, and its split over slices if the program is for several slices."""
    num_slices = slices_named(module)
    given = {"devices": module.partitions * max(num_slices, 1)} if mesh is None else getattr(mesh, "shape", mesh)
    sizes = {str(axis): int(size) for axis, size in given.items()}
    devices = math.prod(sizes.values())
    slices = Slices.of(sizes, module.partitions) if num_slices else None
    fits = devices == module.partitions if slices is None else slices.count == num_slices
    if not fits or devices % module.partitions:
        shape = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"
        several = f" of each of {num_slices} slices" if num_slices else ""
        raise AuditError(
            f"the program runs on {module.partitions} devices{several}, but the mesh has {devices} ({shape}). "
            f"Remedy: pass the mesh that the program was compiled for."
        )
    return sizes, slices


def _text(program: Any) -> str:
    """Returns the HLO text of an executable, or the text itself."""
    if isinstance(program, str):
        return program
    if not hasattr(program, "as_text"):
        raise AuditError(
            f"audit() takes a compiled program or its HLO text, not a {type(program).__name__}. Remedy: pass "
            f"jitted.lower(...).compile()."
        )
    cause = ""
    try:
        text = program.as_text()
    except (NotImplementedError, RuntimeError) as error:
        text, cause = None, f": {error}"
    if not text:
        raise AuditError(
            f"this executable has no HLO text{cause}. Remedy: audit the program where it is compiled, not one that was "
            f"loaded or deserialized."
        )
    return str(text)


def _memory(program: Any) -> dict[str, int]:
    """Returns bytes by use, as far as the executable reports them; ``host`` is what it keeps in host memory."""
    if isinstance(own := getattr(program, "memory", None), dict):  # compiled ahead of time
        return own
    stats = program.memory_analysis() if hasattr(program, "memory_analysis") else None
    if stats is None:
        return {}
    size = lambda name: int(getattr(stats, f"{name}_in_bytes", 0) or 0)
    found = {name: size(f"{name}_size") for name in ("argument", "output", "temp", "alias")}
    host = sum(size(f"host_{name}_size") for name in ("argument", "output", "temp")) - size("host_alias_size")
    return {**found, "peak": size("peak_memory"), "host": host}
