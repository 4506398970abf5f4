"""Every train step of ``configs/bench``, beside MaxText's and the figures before, by one audit and one roofline.

    uv run python benchmarks/maxtext/bench_steps.py [NAME ...] [--json FILE]

Needs no TPU, only the TPU compiler (extra ``tpu``, or ``JAXPAR_TPU_PYTHON``), and uv for MaxText. Each row compiles the
step of a configuration as ``jaxpar check --topology`` does, and then MaxText's step of the same sizes where MaxText has
one, with the same compiler. One row takes one to four CPU minutes, all of them an hour. Programs come from jaxpar's
cache where it holds them. With ``--json`` the figures are written after each row, and rows that the file already has
are not compiled again: an interrupted run goes on where it stopped. Remove the file after a change of the code.
``--program NAME=FOLDER`` audits a program that was compiled earlier, in a folder of jaxpar's cache, instead.

``compute`` and ``HBM`` are the times of the FLOPs and of the memory traffic, ``step`` that of the roofline
(``docs/explanation/roofline.md``): a model, not a measurement. The last column divides the step by the larger of the
two. ``before`` are the figures from before transfers were moved beside compute, as they were measured then.

Goal: each step of jaxpar takes at most 1.10 times the larger of compute and HBM. Exit status 1 if one takes longer;
what it waits for is listed below the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.experts.train_step import SETTINGS, SIZES
from benchmarks.maxtext.train_step import RUNS, job_of, maxtext_settings
from benchmarks.pipeline.ahead_of_time import CIRCULAR
from benchmarks.shared.compile_maxtext import QUIET, maxtext_program, maxtext_with_our_compiler
from benchmarks.shared.paths import BENCH_CONFIGS
from jaxpar.analysis.checkup.checkup import Checkup, check_up, examine
from jaxpar.analysis.compile.ahead_of_time import AheadOfTime
from jaxpar.analysis.hlo.audit import Audit
from jaxpar.analysis.roofline import Roofline, show_time, time_each
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.app.model_facts import about
from jaxpar.sharding.hardware.topology import Topology

LIMIT = 1.10
"""The most time that a step may take, relative to the larger of its compute and memory time."""
SLICES = {"70b": "v5e:8x8", "8b_1m": "v5p:4x4x4"}
"""The beginning of a configuration's name → its topology, if that is not ``DEFAULT``."""
DEFAULT = "v5e:4x4"
LISTED = 5
"""The most waits that are listed for a step."""


class Before(NamedTuple):
    """Figures from before: GB on the wire, GB exposed, MiB at the peak, and the roofline's step in ms, where known."""

    wire: float | None
    exposed: float | None
    peak: float
    step: float | None = None


BEFORE = {
    "1b_dp16_zero1": Before(4.24, 4.12, 5232),
    "1b_fsdp4_tp4": Before(10.30, 8.29, 1838, 350),
    "1b_fsdp4_tp4_matmuls": Before(10.30, 8.29, 1838, 350),
    "1b_pp4_fsdp4": Before(3.49, 2.65, 2469, 250),
    "8b_fsdp16": Before(43.17, 1.55, 10019),
    "8b_fsdp4_tp4": Before(44.24, 34.57, 10286),
    "8b_fsdp4_tp4_matmuls": Before(44.24, 34.57, 10286),
    "8b_pp4_fsdp4_m4": Before(15.9, 14.2, 15343),
    "8b_pp4_fsdp4_m8": Before(57.5, None, 12937, 2530),
    "8b_pp4_fsdp4_m8_per_chunk": Before(57.5, None, 12937, 2530),
    "1b_fsdp16": Before(6.01, 0.41, 1779, 189),
}


@dataclass(frozen=True)
class Figures:
    """The figures of one compiled step on one device; bytes and seconds.

    Attributes:
      side: ``jaxpar`` or ``MaxText``.
      wire, exposed, peak, flops: bytes sent, those that overlap with no compute, peak memory, FLOPs of matmuls.
      compute, hbm, step: seconds by the roofline.
      waits: what the device waits for, longest first.
      note: why figures are missing or are bounds.
      versions: of the compiler.
    """

    side: str
    wire: float = 0.0
    exposed: float = 0.0
    peak: int = 0
    flops: int = 0
    compute: float = 0.0
    hbm: float = 0.0
    step: float = 0.0
    waits: tuple[str, ...] = ()
    note: str = ""
    versions: str = ""

    @property
    def ratio(self) -> float:
        """The step divided by the larger of compute and memory time; 0 for a step that was rejected."""
        return self.step / max(self.compute, self.hbm) if self.step else 0.0


def figures_of(side: str, found: Checkup) -> Figures:
    """Return the figures of a checkup."""
    if found.audit is None or found.roofline is None or found.program is None:
        return Figures(side, note=found.findings[0].text)
    report, line = found.audit, found.roofline
    return Figures(
        side,
        report.wire_bytes(),
        report.exposed(),
        found.program.memory["peak"],
        report.matmul_flops,
        line.compute,
        line.hbm,
        line.step,
        waits_of(report, line, found.program.rings),
        "; ".join(line.missing),
        ", ".join(f"{name} {version}" for name, version in found.program.versions.items()),
    )


def waits_of(report: Audit, line: Roofline, rings: Sequence[str] = ()) -> tuple[str, ...]:
    """Return what a device waits for in a step, longest first: transfers, from where, and the compute beside them."""
    seconds: dict[tuple[str, str], float] = {}
    for c, t in zip(report.collectives, time_each(report, line.topology, rings=rings), strict=True):
        name = f"{c.kind}{f' ({c.form})' if c.form else ''} over {'+'.join(c.axes)}, {c.dtype}, from {c.place}"
        longer = f"longer than the {c.beside_flops:.3g} FLOPs beside each"
        for how, time in (("nothing beside it", t.exposed), (longer, t.stalled)):
            seconds[name, how] = seconds.get((name, how), 0.0) + time
    longest = sorted(((s, name, how) for (name, how), s in seconds.items() if s), reverse=True)
    texts = [f"{show_time(s)}: {name} ({how})" for s, name, how in longest[:LISTED]]
    if line.overlapped > max(line.compute, line.hbm) + line.stalled:
        texts.append(f"{show_time(line.overlapped)}: the busiest link, for the transfers beside compute")
    return tuple(texts)


def ours(name: str) -> Figures:
    """Compile jaxpar's step of a configuration; return its figures."""
    topology, job = topology_of(name), make_job(load_run(BENCH_CONFIGS / f"{name}.yaml"))
    options = job.step_options() | {"compiler_options": job.compiler_options(topology.platform)}
    run = (job.layout(topology.devices), job.make_model, job.tx, job.loss_fn, job.batch_spec())
    return figures_of("jaxpar", check_up(topology, *run, about=about(job), **options))


def earlier(folder: Path) -> Figures:
    """Return the figures of a program of jaxpar's cache."""
    request, result = (json.loads((folder / f"{name}.json").read_text()) for name in ("request", "result"))
    memory = {name.removesuffix("_memory").removesuffix("_size"): size for name, size in result["memory"].items()}
    program = AheadOfTime(
        topology=request["name"],
        text=(folder / "program.hlo").read_text(),
        memory=memory,
        compile_cpu_seconds=result["compile_cpu_seconds"],
        device_kind=result["device_kind"],
        versions=request["versions"],
        cached=True,
        rings=tuple(request.get("rings", ())),
    )
    return figures_of("jaxpar", examine(program, request["mesh"]))


def theirs(name: str, python: str) -> Figures | None:
    """Compile MaxText's step of the same sizes; return its figures, or ``None`` where MaxText has none."""
    settings, topology = settings_of(name), topology_of(name)
    if settings is None:
        return None
    try:
        program, mesh = maxtext_program(python, settings, topology)
    except SystemExit as error:
        return Figures("MaxText", note=f"does not compile: {str(error).strip().splitlines()[-1]}")
    return figures_of("MaxText", examine(program, mesh))


def settings_of(name: str) -> list[str] | None:
    """Return MaxText's settings for a configuration."""
    slices = ["compile_topology=v5e-16", "compile_topology_num_slices=1"]
    if name in RUNS:
        topology = topology_of(name)
        return maxtext_settings(RUNS[name], job_of(RUNS[name], topology.devices, None), topology, None)
    if name == "1b_pp4_fsdp4":
        return [*CIRCULAR, *QUIET]
    return [*slices, *QUIET, *SIZES, *SETTINGS[name]] if name in SETTINGS else None


def topology_of(name: str) -> Topology:
    """Return the topology for which a configuration is compiled."""
    return Topology.parse(next((found for start, found in SLICES.items() if name.startswith(start)), DEFAULT))


HEAD = (
    "| `configs/bench/` | | wire GB | exposed GB | peak MiB | matmul FLOPs "
    "| compute ms | HBM ms | step ms | ÷ larger |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def show(name: str, found: Sequence[Figures]) -> str:
    """Return the rows of a configuration under ``HEAD``: before, jaxpar's and MaxText's."""
    rows = []
    if name in BEFORE:
        wire, exposed, peak, step = BEFORE[name]
        cells = ["" if x is None else f"{x:.2f}" for x in (wire, exposed)]
        rows.append(["before", *cells, f"{peak:,.0f}", "", "", "", "" if step is None else f"{step:,.0f}", ""])
    for f in found:
        if not f.step:
            rows.append([f"{f.side}: {f.note}", *[""] * 8])
            continue
        times = [f"{seconds * 1e3:,.0f}" for seconds in (f.compute, f.hbm, f.step)]
        cells = [f"{f.wire / 1e9:.2f}", f"{f.exposed / 1e9:.2f}", f"{f.peak / 2**20:,.0f}", f"{f.flops:.4g}"]
        bound = "≥ " if f.note else ""
        rows.append([f.side, *cells, *times, f"{bound}{f.ratio:.3f}"])
    heads = [f"`{name}`", *[""] * (len(rows) - 1)]
    return "\n".join(f"| {' | '.join([head, *row])} |" for head, row in zip(heads, rows, strict=True))


def show_waits(name: str, found: Sequence[Figures]) -> str:
    """Return what jaxpar's step of a configuration waits for, if it takes longer than ``LIMIT``; else nothing."""
    slow = [f for f in found if f.side == "jaxpar" and f.ratio > LIMIT]
    return "\n".join(f"{name}, {f.ratio:.3f}:\n" + "\n".join(f"  {wait}" for wait in f.waits) for f in slow)


def main() -> int:
    """Print the table and what slow steps wait for; return 1 if a step of jaxpar takes longer than ``LIMIT``."""
    names = sorted(file.stem for file in BENCH_CONFIGS.glob("*.yaml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="configurations of configs/bench; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures in this file, and go on from it")
    parser.add_argument(
        "--program", action="append", default=[], metavar="NAME=FOLDER", help="audit this program, do not compile NAME"
    )
    parser.add_argument("--no-maxtext", action="store_true", help="compile jaxpar's steps only")
    parser.add_argument("--maxtext-python", metavar="FILE", help="interpreter with MaxText (default: one is installed)")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(names)):
        parser.error(f"configs/bench has no {', '.join(unknown)}; it has {', '.join(names)}")
    python = None if options.no_maxtext else maxtext_with_our_compiler(options.maxtext_python)
    programs = dict(given.split("=", 1) for given in options.program)
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    table = {name: [Figures(**{**f, "waits": tuple(f["waits"])}) for f in found] for name, found in kept.items()}
    print(HEAD)
    for name in options.names or names:
        found = table.setdefault(name, [])
        sides = {f.side for f in found}
        if "jaxpar" not in sides:
            found.append(earlier(Path(programs[name])) if name in programs else ours(name))
        other = theirs(name, python) if python is not None and "MaxText" not in sides else None
        found += [] if other is None else [other]
        if options.json:
            rows = {name: [asdict(f) for f in row] for name, row in table.items()}
            options.json.write_text(json.dumps(rows, indent=1))
        print(show(name, found), flush=True)
    shown = [show_waits(name, table[name]) for name in options.names or names]
    slow = [text for text in shown if text]
    versions = sorted({f"{f.side}: {f.versions}" for row in table.values() for f in row if f.versions})
    print(f"\n{'; '.join(versions)}\n\n{len(slow)} steps above {LIMIT:.2f}; the device waits for\n")
    print("\n".join(slow))
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
