"""``jaxpar explain`` and ``jaxpar check``: how a run is sharded and why, what is wrong, and whether it fits."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpar.app.arguments import Config, File, Flag, Fraction, Number, Overrides, TopologyName
from jaxpar.app.outputs import write_output
from jaxpar.utils.terminal import say, terminal_width

if TYPE_CHECKING:
    from jaxpar.analysis.checkup.checkup import Checkup
    from jaxpar.analysis.layout.report import Report
    from jaxpar.app.job import Job
    from jaxpar.sharding.layout import Layout


@dataclass(frozen=True)
class _LayoutCommand:
    """What ``explain`` and ``check`` share.

    Attributes:
      devices: number of devices (default: that of the config's mesh)
      json: also write the report as JSON
      html: also write the report as HTML
      topology: trace the step for the chips of this topology, such as v5e:4x4 (adds memory)
    """

    config: Config
    set: Overrides = ()
    devices: Number = None
    json: File = None
    html: File = None
    topology: TopologyName = None


@dataclass(frozen=True)
class Explain(_LayoutCommand):
    """Show how every tensor of a run is sharded, and why; exit with 2 if there are problems. Needs no devices.

    Attributes:
      full: every tensor with its dtype, its rule and the reasons, and the activations, in wide tables
    """

    full: Flag = False

    def run(self) -> int:
        from rich.console import Console

        from jaxpar.app.optimizer_config import decay_lines

        job = _job(self)
        report = _explained(self, job)
        console = Console(highlight=False, soft_wrap=True)
        if self.full:
            # rich would cut the tables to 80 columns when the output is a pipe.
            console.print(report) if console.is_terminal else print(report.to_text(), end="")
        else:
            print(report.summary(console.width if console.is_terminal else 80), end="")
            print("\n--full lists dtypes, rules and reasons of every tensor, and the activations.")
        for line in decay_lines(job.config.optimizer, job.make_model):
            print(line)
        untraced = "" if report.memory is None else report.memory.untraced
        if untraced:
            print(f"the step cannot be traced: {untraced}", file=sys.stderr)
        return 2 if untraced or report.problems else 0


@dataclass(frozen=True)
class Check(_LayoutCommand):
    """List all problems of a run's layout; the exit status is 0 only if there are none. Needs no devices.

    Attributes:
      strict: treat an unused rule as an error
      max_replicated: largest allowed fraction of the bytes that is replicated on every device
      topology: also compile for this topology, such as v5e:4x4 (extra tpu), and audit the program
      hlo: with --topology: write the compiled program
      golden: with --topology: compare with this file, or write it if it does not exist
      imbalance: with --topology: also the step of a device with this many times the mean load of experts, such as 2.0
    """

    strict: bool = True
    max_replicated: Fraction = None
    topology: TopologyName = None
    hlo: File = None
    golden: File = None
    imbalance: Fraction = None

    def run(self) -> int:
        if self.topology is not None:
            return _compiled(self, self.topology)
        _checked(self, _job(self))
        return 0


def _job(command: _LayoutCommand) -> Job:
    from jaxpar.app.config import load_run
    from jaxpar.app.job import make_job

    return make_job(load_run(command.config, command.set))


def _layout(command: _LayoutCommand, job: Job) -> Layout:
    if command.topology is None:
        return job.layout(job.abstract_devices() if command.devices is None else command.devices)
    from jaxpar.analysis.compile.ahead_of_time import aim
    from jaxpar.sharding.hardware.topology import Topology

    parsed = Topology.parse(command.topology)
    return aim(job.layout(parsed.devices), parsed)


def _inputs(job: Job) -> dict[str, Any]:
    return {"batch": job.batch_spec(), "loss_fn": job.loss_fn, "step": job.step_options()}


def _explained(command: _LayoutCommand, job: Job) -> Report:
    """The report of a run's layout, which it also writes to the files that the command names."""
    import jaxpar as jp
    from jaxpar.analysis.html_document import document

    report = jp.explain(_layout(command, job), job.make_model, job.tx, **_inputs(job))
    write_output("--json", command.json, report.to_json)
    write_output("--html", command.html, lambda: document(job.name, report._repr_html_()))
    return report


def _checked(command: Check, job: Job) -> Report:
    """Raise an error with all problems of a run's layout, or print that there are none."""
    from jaxpar.analysis.layout.explain import check_report

    report = _explained(command, job)
    check_report(report, _layout(command, job), strict=command.strict, max_replicated=command.max_replicated)
    say(f"{report.headline()}: {len(report.rows)} tensors, no problems", *report.notes)
    return report


def _compiled(command: Check, topology: str) -> int:
    """Check a run's layout, compile its step for a topology, and print whether it fits, its cost, and suggestions."""
    from rich.console import Console

    from jaxpar.sharding.hardware.topology import Topology

    parsed = Topology.parse(topology)
    job = _job(command)
    layout = _checked(dataclasses.replace(command, json=None, html=None), job)

    from jaxpar.analysis.checkup.checkup import check_up
    from jaxpar.analysis.checkup.html import page
    from jaxpar.app.model_facts import about

    options = job.step_options() | {"compiler_options": job.compiler_options(parsed.platform)}
    run = (job.layout(parsed.devices), job.make_model, job.tx, job.loss_fn, job.batch_spec())
    with Console(stderr=True).status(f"compiling for {topology}; a large model takes minutes ..."):
        found = check_up(parsed, *run, about=about(job), imbalance=command.imbalance, **options)
    if found.program is not None:
        say(f"compiled for {topology} ({found.program.device_kind}) in {found.program.compile_cpu_seconds:.0f} CPU s")
    print(found.to_text(terminal_width()), end="")
    write_output("--json", command.json, found.to_json)
    write_output("--html", command.html, lambda: page(found, f"{job.name} on {topology}", layout._repr_html_()))
    if found.program is not None:
        write_output("--hlo", command.hlo, found.program.as_text)
    elif command.hlo is not None:
        print(f"HLO file {command.hlo}: not written, because no program was compiled")
    same = _golden(command.golden, found) if command.golden is not None else True
    return 0 if found.fits and same else 1


def _golden(file: Path, found: Checkup) -> bool:
    """Compare a checkup with a golden file, or write a missing file; returns whether they agree."""
    from jaxpar.analysis.checkup.golden import against, facts_of, to_text

    if found.program is None or found.audit is None:
        print(f"golden file {file}: not compared, because no program was compiled")
        return False
    facts = facts_of(found.audit, found.topology, found.program.versions)
    if not file.exists():
        write_output("--golden", file, lambda: to_text(facts))
        print(f"golden file {file}: written")
        return True
    changes = against(file, facts)
    print(f"golden file {file}: {'DIFFERS' if changes else 'no difference'}", *changes, sep="\n  ")
    return not changes
