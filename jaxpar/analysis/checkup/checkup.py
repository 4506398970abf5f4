"""``check_up`` analyzes one compiled step: memory, collectives, step time, and what to change."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optax

from jaxpar.analysis.checkup.findings import About, Evidence, Finding, find, knob
from jaxpar.analysis.checkup.footprint import CATEGORIES, KEPT, Footprint, HeldTensor, footprint, held_by
from jaxpar.analysis.checkup.imbalance import LoadImbalance, check_factor, load_imbalance
from jaxpar.analysis.compile.ahead_of_time import AheadOfTime, CompilerOptions, aim, compile_for, step_for
from jaxpar.analysis.compile.warnings import rematerialised
from jaxpar.analysis.hlo.audit import Audit, audit
from jaxpar.analysis.hlo.liveness import ON_CHIP, Peak, peak
from jaxpar.analysis.hlo.parser import Module, parse
from jaxpar.analysis.roofline import Roofline, roofline, time_each
from jaxpar.analysis.units import show_bytes, table_lines
from jaxpar.errors import CompileError
from jaxpar.parallel.partitioner.repair import Repaired, noting_repairs
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.sharding.layout import Layout
from jaxpar.training.model import MakeModel
from jaxpar.utils.terminal import fit

WORST = 3
"""The number of findings that are printed. The JSON has all of them."""

_LARGEST = 8
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Checkup:
    """The result of ``jaxpar check --topology``.

    Attributes:
      topology: the topology that the step was compiled for.
      mesh: mesh axis → size.
      program: the compiled step; ``None`` if the compiler rejected it because it is too large.
      audit, roofline, memory: of the program; ``None`` if it was rejected.
      findings: the worst first.
      held: the arrays that the step receives.
      refused: the compiler's message if it rejected the program; else empty.
      reshard_after_forward: the run's ``parallel.reshard_after_forward``.
      imbalance: the step under an imbalanced load, if one was requested.
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
    imbalance: LoadImbalance | None = None

    @property
    def fits(self) -> bool:
        """Whether the step fits into the memory of a device."""
        return self.memory is not None and self.memory.fits

    def headline(self) -> str:
        """Returns one line that says whether the step fits, and by how much."""
        m = self.memory
        if m is None or not m.fits:
            return f"DOES NOT FIT {self.topology}: {self.findings[0].text}"
        total = f"{show_bytes(m.total)} at the peak"
        if m.limit is None:
            return f"{total}; the memory of {self.topology} is unknown"
        return f"fits {self.topology}: {total} of {show_bytes(m.limit)}, {show_bytes(-m.over)} free"

    def categories(self) -> list[tuple[str, int]]:
        """Returns (category, bytes on one device) pairs; for a rejected program, only those of its arguments."""
        if self.memory is None:
            sums = dict.fromkeys(CATEGORIES, 0)
            for h in self.held:
                sums[h.category] += h.bytes
            return [(name, size) for name, size in sums.items() if size]
        rows = [*self.memory.categories.items(), ("not attributed", self.memory.unattributed)]
        return [*((name, size) for name, size in rows if size), ("host", self.memory.host)]

    def largest(self) -> list[tuple[str, str, str, str]]:
        """Returns the bytes, shape, category and origin of the largest tensors at the peak, as text."""
        if self.memory is None:
            return []
        rows = []
        for category, b in self.memory.buffers[:_LARGEST]:
            path = self.held[b.number].path if b.argument and b.number < len(self.held) else ""
            origin = path or b.source or b.op_name or "the compiler"
            rows.append((show_bytes(b.bytes), b.shape, category, origin + (f", in {b.scope}" if b.scope else "")))
        return rows

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """Returns the report, in lines of at most ``width`` columns."""
        lines = [self.headline(), "", "memory of one device at the peak"]
        kept = f"  (parallel: {{reshard_after_forward: {str(self.reshard_after_forward).lower()}}})"
        notes = {} if self.reshard_after_forward is True else {KEPT: kept}
        lines += [f"  {name:<15} {_signed(size):>12}{notes.get(name, '')}" for name, size in self.categories()]
        if self.largest():
            lines += ["", "largest tensors at the peak", *(f"  {line}" for line in self._largest(width))]
        if self.audit is not None:
            lines += ["", self.audit.to_text(width).rstrip()]
        if self.roofline is not None:
            lines += ["", self.roofline.to_text(width).rstrip()]
        if self.imbalance is not None:
            lines += ["", str(self.imbalance)]
        count = len(self.findings)
        shown = f"{count} finding{'s' * (count > 1)}" + (f", the worst {WORST}:" if count > WORST else ":")
        lines += ["", shown if count else "no findings"]
        lines += [f"{i}. {f}".replace("\n", "\n ") for i, f in enumerate(self.findings[:WORST], 1)]
        if self.refused:
            lines += ["", f"the compiler: {self.refused}"]
        return fit("\n".join(lines) + "\n", width)

    def _largest(self, width: int | None) -> list[str]:
        rows = [("", "", "", ""), *self.largest()]
        return table_lines(rows, None if width is None else width - len("  "))[1:]

    def to_json(self) -> str:
        """Returns everything as JSON. The keys are those of ``Audit.to_json`` and those of this report."""
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
        facts["imbalance"] = None if self.imbalance is None else dataclasses.asdict(self.imbalance)
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
    imbalance: float | None = None,
    compiler_options: CompilerOptions | None = None,
    **options: Any,
) -> Checkup:
    """Returns an analysis of a run's step, compiled for a topology.

    Args:
      topology, layout, make_model, tx, loss_fn, batch, compiler_options, options: as for
        :func:`jaxpar.analysis.compile.ahead_of_time.compile_for`.
      about: facts about the model.
      imbalance: also report the step of a device with as many times the balanced load of ragged operations.

    Returns:
      The checkup. If the compiler rejects the program because it exceeds a device's memory, the checkup says so.

    Raises:
      PlanError: ``imbalance`` is not a finite number of at least 1.
      CompileError: as :func:`jaxpar.analysis.compile.ahead_of_time.compile_for`, except for a program that is too
        large.

    >>> import jax, jax.numpy as jnp, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=4).on("v5e:2x2"), jp.Rules(batch="data", embed=None))
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (16, 16)), "embed", "embed")}
    >>> loss_fn = lambda model, batch: ((batch["x"] @ model["w"]) ** 2).mean()
    >>> batch = {"x": jp.tag(jax.ShapeDtypeStruct((8, 16), jnp.float32), "batch", "embed")}
    >>> run = ("v5e:2x2", layout, make_model, optax.sgd(0.1), loss_fn, batch)
    >>> check_up(*run).fits  # doctest: +SKIP
    True
    """
    if imbalance is not None:
        check_factor(imbalance)
    parsed = Topology.parse(str(topology))
    aimed = aim(layout, parsed)
    _, state, inputs = step_for(aimed, make_model, tx, loss_fn, batch, **options)
    held = held_by(aimed, state, inputs)
    try:
        with noting_repairs() as repaired:
            step = compile_for(
                parsed, layout, make_model, tx, loss_fn, batch, compiler_options=compiler_options, **options
            )
    except CompileError as error:
        found = too_large(str(error), (about or About()).remat, held)
        if found is None:
            raise
        return Checkup(str(parsed), layout.sizes, None, None, None, None, (found,), held, str(error))
    report = examine(step, layout.sizes, held, about, tuple(repaired))
    loads = None if imbalance is None else load_imbalance(step, report.mesh, imbalance)
    return dataclasses.replace(report, imbalance=loads)


def examine(
    step: AheadOfTime,
    sizes: Mapping[str, int],
    held: Sequence[HeldTensor] = (),
    about: About | None = None,
    repaired: Sequence[Repaired] = (),
) -> Checkup:
    """Analyze a compiled step.

    Args:
      step: the compiled step.
      sizes: mesh axis → size.
      held: the arrays that the step receives, in the order of its arguments.
      about: facts about the model.
      repaired: operations of the step that XLA's partitioner would compute wrongly.

    Returns:
      The checkup.

    Raises:
      AuditError: the program cannot be parsed.
      PlanError: there are no figures for the accelerator.
    """
    about = about or About()
    module = parse(step.text)
    report = _named(audit(step, mesh=sizes), held)
    tokens, flops = about.tokens or None, about.model_flops or None
    line = roofline(report, step.topology, tokens=tokens, model_flops=flops, rings=step.rings)
    memory = footprint(_peak(module, step), held, step.memory, sizes, Topology.parse(step.topology).accelerator)
    warnings = [w for text in step.warnings if (w := rematerialised(text, module)) is not None]
    times = time_each(report, step.topology, rings=step.rings)
    findings = find(Evidence(report, line, times, memory, held, warnings, about, step.rings, repaired))
    kept = about.reshard_after_forward
    return Checkup(step.topology, sizes, step, report, line, memory, findings, tuple(held), reshard_after_forward=kept)


def _peak(module: Module, step: AheadOfTime) -> Peak:
    """The peak of a program; with that of the memory on the chip, if the compiler's own peak is larger."""
    found = peak(module)
    if Topology.parse(step.topology).platform != "tpu" or step.memory.get("peak", 0) <= found.bytes:
        return found
    return dataclasses.replace(found, on_chip=peak(module, ON_CHIP).bytes)


def too_large(text: str, remat: str = "", held: Sequence[HeldTensor] = ()) -> Finding | None:
    """Returns a finding if a compiler's error message says that the program exceeds the memory; else ``None``.

    Args:
      text: the error message.
      remat: the model's remat policy, for the remedy.
      held: the arrays that the step receives.

    >>> too_large(
    ...     "Ran out of memory in memory space hbm. Used 20.00G of 15.75G hbm. Exceeded hbm capacity by 4.25G."
    ... ).text
    '20.00 GiB needed, but a program may use 15.75 GiB: 4.25 GiB too much'
    """
    figure = r"([\d.]+)([KMGT]?)"
    forms = (rf"Used {figure} of {figure} hbm", rf"\({figure}\) exceeds available HBM \({figure}\)")
    found = next((match for form in forms if (match := re.search(form, text))), None)
    if found is None:
        return None
    used, limit = (round(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
    part = " of temporaries" if "HLO temporaries" in text else ""
    description = (
        f"{show_bytes(used)}{part} needed, but a program may use {show_bytes(limit)}: {show_bytes(used - limit)} "
        "too much"
    )
    state = sum(h.bytes for h in held)
    category = "temporaries"
    if held:
        description += f"; {show_bytes(state)} of it are the step's arguments"
    if state > used / 2:
        sums = {name: sum(h.bytes for h in held if h.category == name) for name in ("parameters", "optimizer")}
        category = max(sums, key=lambda name: sums[name])
    return Finding("does not fit", category, description, knob(category, remat), 0.0, used - limit, used / limit)


def _named(report: Audit, held: Sequence[HeldTensor]) -> Audit:
    """Returns the audit with tensor paths instead of the names of an exported program, such as ``args[7]``."""

    def name(text: str) -> str:
        found = re.fullmatch(r"\w+\[(\d+)\]", text)
        return held[int(found[1])].path if found and int(found[1]) < len(held) else text

    def source(text: str) -> str:
        # If only the compiling process is on the stack, no line of the model made the collective.
        return "" if re.fullmatch(r"\w+ \((worker|ahead_of_time)\.py:\d+\)", text) else text

    collectives, arms = (
        tuple(dataclasses.replace(c, tensor=name(c.tensor), source=source(c.source)) for c in group)
        for group in (report.collectives, report.other_arms)
    )
    return dataclasses.replace(report, collectives=collectives, other_arms=arms)


def _signed(size: int) -> str:
    return f"-{show_bytes(-size)}" if size < 0 else show_bytes(size)
