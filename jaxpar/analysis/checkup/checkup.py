"""``check_up``: one compiled step, taken apart: does it fit, what fills the memory, what it sends, how fast, what to change."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optax

from jaxpar.analysis.checkup.findings import Evidence, Finding, find, knob
from jaxpar.analysis.checkup.footprint import CATEGORIES, KEPT, Footprint, HeldTensor, footprint, held_by
from jaxpar.analysis.compile.ahead_of_time import AheadOfTime, CompilerOptions, aim, compile_for, step_for
from jaxpar.analysis.compile.warnings import rematerialised
from jaxpar.analysis.hlo.audit import Audit, audit
from jaxpar.analysis.hlo.liveness import peak
from jaxpar.analysis.hlo.parser import parse
from jaxpar.analysis.roofline import Roofline, roofline, time_each
from jaxpar.analysis.units import show_bytes
from jaxpar.errors import CompileError
from jaxpar.sharding.hardware.accelerators import accelerator
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.sharding.layout import Layout
from jaxpar.training.model import MakeModel

WORST = 3
"""Findings that are printed; the JSON has all."""

_LARGEST = 8
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class About:
    """What a checkup knows of the model, beside its program.

    Attributes:
      tokens: of one step over all devices; 0 if not known, as for the others.
      model_flops: FLOPs of one step over all devices that the model needs, without recomputation.
      vocab, seq: sizes, to recognise logits and attention scores.
      remat: the model's policy, as ``full``.
      reshard_after_forward: as ``parallel.reshard_after_forward`` of the run.
    """

    tokens: int = 0
    model_flops: float = 0.0
    vocab: int = 0
    seq: int = 0
    remat: str = ""
    reshard_after_forward: bool | int = True


@dataclass(frozen=True)
class Checkup:
    """What ``jaxpar check --topology`` tells of a run.

    Attributes:
      topology: what it was compiled for.
      mesh: mesh axis → size.
      program: the compiled step; ``None`` if the compiler refused it for its size.
      audit, roofline, memory: of the program; of a refused one ``None``.
      findings: the worst first.
      held: what the step is given.
      refused: the compiler's words, if it refused.
      reshard_after_forward: what asked for the weights that the program keeps, if it is known.
    """

    topology: str
    mesh: Mapping[str, int]
    program: AheadOfTime | None
    audit: Audit | None
    roofline: Roofline | None
    memory: Footprint | None
    findings: tuple[Finding, ...]
    held: tuple[HeldTensor, ...]
    refused: str = ""
    reshard_after_forward: bool | int = True

    @property
    def fits(self) -> bool:
        """Whether the step fits a device's memory."""
        return self.memory is not None and self.memory.fits

    def headline(self) -> str:
        """Fits or not, and by how much."""
        if self.memory is None:
            return f"DOES NOT FIT {self.topology}: {self.findings[0].text}"
        m = self.memory
        if m.limit is None:
            return f"{show_bytes(m.total)} at the peak; the memory of {self.topology} is not known"
        if not m.fits:
            return f"DOES NOT FIT {self.topology}: {self.findings[0].text}"
        return f"fits {self.topology}: {show_bytes(m.total)} at the peak of {show_bytes(m.limit)}, {show_bytes(-m.over)} free"

    def categories(self) -> list[tuple[str, int]]:
        """Category → bytes on one device; of a refused program only what it is given."""
        if self.memory is None:
            sums = dict.fromkeys(CATEGORIES, 0)
            for h in self.held:
                sums[h.category] += h.bytes
            return [(name, size) for name, size in sums.items() if size]
        rows = [*self.memory.categories.items(), ("not attributed", self.memory.unattributed)]
        return [*((name, size) for name, size in rows if size), ("host", self.memory.host)]

    def largest(self) -> list[tuple[str, str, str, str]]:
        """Bytes, shape, category and origin of the largest tensors at the peak."""
        if self.memory is None:
            return []
        rows = []
        for category, b in self.memory.buffers[:_LARGEST]:
            path = self.held[b.number].path if b.argument and b.number < len(self.held) else ""
            origin = path or b.source or b.op_name or "the compiler"
            rows.append((show_bytes(b.bytes), b.shape, category, origin + (f", in {b.scope}" if b.scope else "")))
        return rows

    def __str__(self) -> str:
        lines = [self.headline(), "", "memory of one device at the peak"]
        by = (
            {}
            if self.reshard_after_forward is True
            else {KEPT: f"  (parallel: {{reshard_after_forward: {str(self.reshard_after_forward).lower()}}})"}
        )
        lines += [f"  {name:<15} {_signed(size):>12}{by.get(name, '')}" for name, size in self.categories()]
        if self.largest():
            lines += ["", "largest tensors at the peak", *_aligned(self.largest())]
        if self.audit is not None:
            lines += ["", str(self.audit).rstrip()]
        if self.roofline is not None:
            lines += ["", str(self.roofline).rstrip()]
        lines += ["", self._found()]
        lines += [f"{i}. {f}".replace("\n", "\n ") for i, f in enumerate(self.findings[:WORST], 1)]
        if self.refused:
            lines += ["", f"the compiler: {self.refused}"]
        return "\n".join(lines) + "\n"

    def _found(self) -> str:
        count = len(self.findings)
        if not count:
            return "nothing found that is worth changing"
        return f"{count} finding{'s' * (count > 1)}" + (f", the worst {WORST}:" if count > WORST else ":")

    def to_json(self) -> str:
        """Everything; the keys are those of ``Audit.to_json`` and those of this report."""
        facts: dict[str, Any] = dict.fromkeys(("matmul_flops", "kernel_flops", "wire_bytes", "compile_cpu_seconds"))
        facts |= {"topology": self.topology, "mesh": dict(self.mesh), "fits": self.fits, "collectives": None}
        if self.audit is not None:
            facts |= json.loads(self.audit.to_json())
        given = {} if self.program is None else self.program.memory
        facts["memory"] = {name: given.get(name) for name in ("argument", "output", "temp", "alias", "peak", "host")}
        facts["memory_by_category"] = dict(self.categories())
        facts["largest"] = [
            {"bytes": b.bytes, "shape": b.shape, "category": category, "source": b.source, "op_name": b.op_name}
            for category, b in (self.memory.buffers[: 4 * _LARGEST] if self.memory else ())
        ]
        if self.program is not None:
            p = self.program
            facts |= {"compile_cpu_seconds": p.compile_cpu_seconds, "versions": p.versions, "warnings": p.warnings}
            facts["device_kind"] = p.device_kind
        facts |= {"certain": self.audit is not None and self.audit.certain, "refused": self.refused}
        facts["roofline"] = None if self.roofline is None else dataclasses.asdict(self.roofline)
        facts["findings"] = [dataclasses.asdict(f) for f in self.findings]
        return json.dumps(facts, indent=1)


def check_up(
    topology: str | Topology,
    layout: Layout,
    make_model: MakeModel,
    tx: optax.GradientTransformation,
    loss_fn: Callable[..., Any],
    batch: Any,
    *,
    about: About | None = None,
    compiler_options: CompilerOptions | None = None,
    **options: Any,
) -> Checkup:
    """Compile a run's step for a topology and take it apart.

    Args:
      topology, layout, make_model, tx, loss_fn, batch, compiler_options, options: as for
        :func:`jaxpar.analysis.compile.ahead_of_time.compile_for`.
      about: what is known of the model.

    Raises:
      What :func:`jaxpar.analysis.compile.ahead_of_time.compile_for` does; but a program that the compiler refuses because it is too large for a
      device's memory gives a checkup that says so.
    """
    parsed = Topology.parse(str(topology))
    aimed = aim(layout, parsed)
    _, state, inputs = step_for(aimed, make_model, tx, loss_fn, batch, **options)
    held = held_by(aimed, state, inputs)
    try:
        step = compile_for(parsed, layout, make_model, tx, loss_fn, batch, compiler_options=compiler_options, **options)
    except CompileError as error:
        found = too_large(str(error), (about or About()).remat, held)
        if found is None:
            raise
        return Checkup(str(parsed), layout.sizes, None, None, None, None, (found,), held, str(error))
    return examine(step, layout.sizes, held, about)


def examine(
    step: AheadOfTime, sizes: Mapping[str, int], held: Sequence[HeldTensor] = (), about: About | None = None
) -> Checkup:
    """Take a compiled step apart.

    Args:
      step: what was compiled.
      sizes: mesh axis → size.
      held: what it is given, in the order of its arguments.
      about: what is known of the model.

    Raises:
      AuditError: the program cannot be read.
      PlanError: no figures for the accelerator.
    """
    about = about or About()
    module = parse(step.text)
    report = _named(dataclasses.replace(audit(step.text, mesh=sizes), memory=step.memory), held)
    line = roofline(report, step.topology, tokens=about.tokens or None, model_flops=about.model_flops or None)
    device = accelerator(Topology.parse(step.topology).kind)
    memory = footprint(peak(module), held, step.memory, sizes, device)
    warnings = [w for text in step.warnings if (w := rematerialised(text, module)) is not None]
    evidence = Evidence(
        audit=report,
        roofline=line,
        times=time_each(report, step.topology),
        memory=memory,
        held=held,
        warnings=warnings,
        vocab=about.vocab,
        seq=about.seq,
        remat=about.remat,
    )
    findings = find(evidence)
    return Checkup(
        step.topology,
        sizes,
        step,
        report,
        line,
        memory,
        findings,
        tuple(held),
        reshard_after_forward=about.reshard_after_forward,
    )


def too_large(text: str, remat: str = "", held: Sequence[HeldTensor] = ()) -> Finding | None:
    """The finding in a compiler's refusal of a program that exceeds the memory; ``None`` if it refused for another reason.

    >>> too_large("Ran out of memory in memory space hbm. Used 20.00G of 15.75G hbm. Exceeded hbm capacity by 4.25G.").text
    '20.00 GiB wanted of the 15.75 GiB that a program may take, 4.25 GiB too much'
    """
    figure = r"([\d.]+)([KMGT]?)"
    forms = (rf"Used {figure} of {figure} hbm", rf"\({figure}\) exceeds available HBM \({figure}\)")
    found = next((match for form in forms if (match := re.search(form, text))), None)
    if found is None:
        return None
    used, limit = (round(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
    part = " of temporaries" if "HLO temporaries" in text else ""
    said = f"{show_bytes(used)}{part} wanted of the {show_bytes(limit)} that a program may take, {show_bytes(used - limit)} too much"
    state = sum(h.bytes for h in held)
    category = "temporaries"
    if held:
        said += f"; {show_bytes(state)} of it is what the step is given"
    if state > used / 2:
        sums = {name: sum(h.bytes for h in held if h.category == name) for name in ("parameters", "optimizer")}
        category = max(sums, key=lambda name: sums[name])
    return Finding("does not fit", category, said, knob(category, remat), 0.0, used - limit, used / limit)


def _named(report: Audit, held: Sequence[HeldTensor]) -> Audit:
    """The audit with paths in the place of numbers: an exported program calls its arguments ``args[7]``."""

    def name(text: str) -> str:
        found = re.fullmatch(r"\w+\[(\d+)\]", text)
        return held[int(found[1])].path if found and int(found[1]) < len(held) else text

    def source(text: str) -> str:
        # Where only the compiling process is on the stack, no line of the model made it.
        return "" if re.fullmatch(r"\w+ \((worker|aot)\.py:\d+\)", text) else text

    collectives, arms = (
        tuple(dataclasses.replace(c, tensor=name(c.tensor), source=source(c.source)) for c in group)
        for group in (report.collectives, report.other_arms)
    )
    return dataclasses.replace(report, collectives=collectives, other_arms=arms)


def _signed(size: int) -> str:
    return f"-{show_bytes(-size)}" if size < 0 else show_bytes(size)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
