"""The ``jaxpar`` command line.

::

    jaxpar train | explain | check | verify CONFIG [--set a.b=c]
    jaxpar plan CONFIG --topology v5e:4x4
    jaxpar generate CONFIG --prompt TEXT
    jaxpar verify-checkpoint DIR
    jaxpar schedule NAME
    jaxpar import DIR OUT | export CKPT DIR
    jaxpar import-mindformers | import-deepspeed | import-megatron FILE OUT.yaml
    jaxpar tokenize SOURCE OUT | verify-tokens FILE
    jaxpar doctor [--checkpoint DIR]

Each command imports jax only when it runs, so ``jaxpar --help`` is fast.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional, UseAppendAction, arg

from jaxpar import __version__
from jaxpar.app.export import ExportCommand
from jaxpar.app.huggingface import ImportCommand
from jaxpar.app.import_configuration import ConfigurationCommands
from jaxpar.app.launch import heartbeat
from jaxpar.app.launch.exit_codes import ExitCode, last_line, report
from jaxpar.app.schedule import ScheduleCommand
from jaxpar.app.tokenize import TokenCommands
from jaxpar.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from jaxpar.app.job import Job
    from jaxpar.app.plan import PlanOutputs

Config = Annotated[Path, Positional, arg(metavar="CONFIG", help="YAML file of the run")]
Settings = Annotated[
    UseAppendAction[tuple[str, ...]],
    arg(name="set", metavar="KEY=VALUE", help="change one key, such as train.steps=10"),
]
Prices = Annotated[
    UseAppendAction[tuple[str, ...]],
    arg(metavar="KIND=DOLLARS", help="dollars for an hour of one chip, such as v5e=1.2"),
]
type File = Annotated[Path | None, arg(metavar="FILE")]
type Folder = Annotated[Path | None, arg(metavar="DIR")]
type Number = Annotated[int | None, arg(metavar="N")]
type Address = Annotated[str | None, arg(metavar="HOST:PORT")]
COMMANDS = (
    *("train", "explain", "check", "plan", "verify", "generate", "verify-checkpoint", "schedule", "import", "export"),
    *("import-mindformers", "import-deepspeed", "import-megatron", "tokenize", "verify-tokens", "doctor"),
)
type Texts = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TEXT")]


@dataclass(frozen=True)
class Train:
    """Train a model, with progress, metrics, held-out evaluation and a loss curve at the end.

    Attributes:
      processes: start N processes here, supervise them, and restart them if one fails
      coordinator: address on which process 0 listens (default with --processes: on loopback)
      process_count: number of processes on all hosts
      process_id: rank of this process, or of the first of --processes
      ray: start the processes on a Ray cluster (extra ray)
    """

    config: Config
    set: Settings = ()
    processes: Number = None
    coordinator: Address = None
    process_count: int | None = None
    process_id: int | None = None
    ray: bool = False

    def run(self) -> int:
        from jaxpar.app.train.launch import LaunchOptions, go

        options = LaunchOptions(self.processes, self.coordinator, self.process_count, self.process_id, self.ray)
        return go(self.config, self.set, options)


@dataclass(frozen=True)
class Explain:
    """Show how every tensor of a run is sharded, and why. Needs no devices.

    Attributes:
      devices: number of devices (default: that of the config's mesh)
      json: also write the report as JSON
      html: also write the report as HTML
      topology: trace the step for the chips of this topology, such as v5e:4x4 (adds memory)
    """

    config: Config
    set: Settings = ()
    devices: int | None = None
    json: File = None
    html: File = None
    topology: str | None = None

    def run(self) -> int:
        return _report(self, strict=None)


@dataclass(frozen=True)
class Check(Explain):
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
    max_replicated: float | None = None
    topology: str | None = None
    hlo: File = None
    golden: File = None
    imbalance: float | None = None

    def run(self) -> int:
        if self.imbalance is not None:
            self._check_imbalance(self.imbalance)
        if self.topology is not None:
            return _compiled(self, self.topology)
        return _report(self, strict=self.strict, max_replicated=self.max_replicated)

    def _check_imbalance(self, imbalance: float) -> None:
        from jaxpar.analysis.checkup.imbalance import check_factor

        check_factor(imbalance, "--imbalance")
        if self.topology is None:
            raise ConfigError(
                "--imbalance needs a compiled program. Remedy: add --topology, such as --topology v5e:4x4."
            )


@dataclass(frozen=True)
class PlanCommand:
    """Find the fastest layout of a run on a topology, and compile it. Needs no devices (extra tpu).

    Attributes:
      topology: the hardware, such as v5e:4x4; several with commas are compared; with --scale a kind, such as v5e
      set: a value of the config; of the mesh and of what is planned, the planner keeps it, such as mesh.model=4
      objective: minimize the time of a sequence, the memory of a device, the number of chips, or the price
      max_batch: also try larger batches, up to this one
      output: write the best plan as a configuration that trains
      json: also write the plans as JSON
      picture: draw time against memory to this file (extra plots)
      programs: the largest number of programs to compile
      search: what chooses the mesh and the sharded dims; sharding_propagation derives those that have no rule
      price: dollars for an hour of one chip of a kind
      scale: plan for each power of two of chips in a range, such as 16:8192
      scaling: weak keeps the sequences of each chip, so data.batch is that of the smallest size; strong keeps the batch
      compile_up_to: with --scale: compile sizes up to this many chips; larger ones are estimates
    """

    config: Config
    topology: str
    set: Settings = ()
    objective: Literal["time", "memory", "chips", "price"] = "time"
    max_batch: Number = None
    output: File = None
    json: File = None
    picture: File = None
    programs: int = 12
    search: Literal["enumerate", "sharding_propagation", "recursive", "dynamic_programming"] = "enumerate"
    price: Prices = ()
    scale: Annotated[str | None, arg(metavar="LOW:HIGH")] = None
    scaling: Literal["weak", "strong"] = "weak"
    compile_up_to: int = 0

    def run(self) -> int:
        from jaxpar.app.plan import PlanOptions, PlanOutputs, go

        outputs = PlanOutputs(self.output, self.json, self.picture)
        several = "," in self.topology or bool(self.price)
        if self.scale is None and not several and (self.objective == "time" or self.objective == "memory"):
            options = PlanOptions(self.objective, self.max_batch, self.programs, self.search)
            return go(self.config, self.set, self.topology, options, outputs)
        if self.search != "enumerate":
            raise ConfigError(
                f"--search {self.search} takes one topology and the objective time or memory. Remedy: leave it out."
            )
        return self._many(outputs)

    def _many(self, outputs: PlanOutputs) -> int:
        from jaxpar.app.plan_many import go_scale, go_topologies
        from jaxpar.planning.search.scaling import ScaleOptions, scale_sizes
        from jaxpar.planning.search.topologies import Goals, parse_prices

        if self.scale is None:
            goals = Goals(self.objective, parse_prices(self.price), self.programs)
            return go_topologies(self.config, self.set, self.topology, goals, outputs, max_batch=self.max_batch)
        if self.objective != "time" or self.price or self.max_batch is not None:
            raise ConfigError(
                "--scale minimizes the time, and takes no --objective, --price or --max-batch. Remedy: leave them out."
            )
        sizes = ScaleOptions(scale_sizes(self.scale), self.scaling, self.compile_up_to, self.programs)
        return go_scale(self.config, self.set, self.topology, sizes, outputs)


@dataclass(frozen=True)
class Verify:
    """Check that a run's layout computes the same as one device: loss and gradients, step by step, in fp32.

    Attributes:
      steps: number of steps to compare
      bound: largest allowed relative difference
    """

    config: Config
    set: Settings = ()
    steps: int = 3
    bound: float = 1e-5

    def run(self) -> int:
        from rich.console import Console

        from jaxpar.app.config import load_run
        from jaxpar.app.train.launch import set_up_devices

        loaded = load_run(self.config, self.set)
        set_up_devices(loaded.config, None)
        from jaxpar.app.job import make_job
        from jaxpar.app.train.verify import verify

        job = make_job(loaded)
        verdict = verify(job, steps=self.steps, bound=self.bound, console=Console(highlight=False, soft_wrap=True))
        return 0 if verdict.passed else 1


@dataclass(frozen=True)
class Generate:
    """Continue prompts with a run's model, on any mesh: --set mesh.model=4 may differ from the training mesh.

    Attributes:
      prompt: text to continue
      prompts: file of further prompts, one per line (.jsonl: a JSON string per line; -: standard input)
      checkpoint: folder of the run's checkpoints, of which the newest undamaged one is used, or of one checkpoint
      max_new_tokens: maximum number of tokens to generate for each prompt
      temperature: 0 takes the most likely token; above 0, tokens are sampled
      top_k: sample from the K most likely tokens
      top_p: sample from the most likely tokens with this total probability
      seed: seed of the first prompt; each further prompt gets the next seed
      cache: slots of the cache (default: as many as needed)
      batch: number of prompts in a batch (default: all, at most 16)
      stop: ends the generated text and is not part of it
      int8: store these as 8-bit integers (default: the config's generate)
      json: also write a JSON object for each prompt
      explain: only show how weights and cache would be sharded, and why
      processes: start N processes here, supervise them, and end all of them if one fails
      coordinator: address on which process 0 listens (default with --processes: on loopback)
      process_count: number of processes on all hosts
      process_id: rank of this process, or of the first of --processes
    """

    config: Config
    prompt: Texts = ()
    prompts: File = None
    set: Settings = ()
    checkpoint: Folder = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    cache: Annotated[int | None, arg(metavar="TOKENS")] = None
    batch: int | None = None
    stop: Texts = ()
    int8: tuple[Literal["weights", "cache"], ...] | None = None
    json: File = None
    explain: bool = False
    processes: Number = None
    coordinator: Address = None
    process_count: int | None = None
    process_id: int | None = None

    def run(self) -> int:
        from jaxpar.app.generate.launch import go

        return go(self)


@dataclass(frozen=True)
class Doctor:
    """Check this machine: versions, devices, extras, caches, ports. Exit 1 if something is wrong.

    Attributes:
      json: print JSON
      timeout: seconds to wait for devices
      checkpoint: check a run's checkpoints instead: every byte of every step
    """

    json: bool = False
    timeout: float = 60.0
    checkpoint: Folder = None

    def run(self) -> int:
        from jaxpar.app.doctor import machine

        if self.checkpoint is not None:
            from jaxpar.app.doctor.checkpoints import examine

            checks = examine(self.checkpoint)
        else:
            checks = machine.examine(timeout=self.timeout)
        print(machine.report(checks, as_json=self.json), end="")
        return 1 if machine.worst(checks) == "bad" else 0


@dataclass(frozen=True)
class VerifyCheckpoint:
    """Check every byte of a checkpoint against its manifest; exit 1 on a mismatch. Needs neither devices nor jax.

    Attributes:
      directory: folder of one checkpoint, such as runs/one/checkpoints/100
    """

    directory: Annotated[Path, Positional, arg(metavar="DIR")]

    def run(self) -> int:
        from jaxpar.checkpoint.verify import check

        found = check(self.directory)
        size = f"{found.bytes / 2**20:.2f} MiB"
        print(
            f"{self.directory}: step {found.step}, {len(found.tensors)} tensors, {size}, all bytes match the manifest"
        )
        return 0


def _job(command: Explain) -> Job:
    from jaxpar.app.config import load_run
    from jaxpar.app.job import make_job

    return make_job(load_run(command.config, command.set))


def _report(command: Explain, *, strict: bool | None, **options: Any) -> int:
    from rich.console import Console

    import jaxpar as jp

    if command.devices is not None and command.devices < 1:
        raise ConfigError(f"--devices must be at least 1, got {command.devices}. Remedy: leave it out, or such as 8.")
    job = _job(command)
    if command.topology is None:
        layout = job.layout(job.abstract_devices() if command.devices is None else command.devices)
    else:
        from jaxpar.analysis.compile.ahead_of_time import aim
        from jaxpar.sharding.hardware.topology import Topology

        parsed = Topology.parse(command.topology)
        layout = aim(job.layout(parsed.devices if command.devices is None else command.devices), parsed)
    inputs: dict[str, Any] = {"batch": job.batch_spec(), "loss_fn": job.loss_fn, "step": job.step_options()}
    report = jp.explain(layout, job.make_model, job.tx, **inputs)
    for file, content in ((command.json, report.to_json), (command.html, report._repr_html_)):
        if file is not None:
            file.write_text(content(), encoding="utf-8")
    console = Console(highlight=False, soft_wrap=True)
    if strict is None:
        # rich would cut the table to 80 columns when the output is a pipe.
        console.print(report) if console.is_terminal else print(report.to_text(), end="")
        return 0
    jp.check(layout, job.make_model, job.tx, strict=strict, **inputs, **options)
    console.print(f"{report.headline()}: {len(report.rows)} tensors, no problems")
    for note in report.notes:
        console.print(note)
    return 0


def _compiled(command: Check, topology: str) -> int:
    """Check a run's layout, compile its step for a topology, and print whether it fits, its cost, and suggestions."""
    from jaxpar.sharding.hardware.topology import Topology

    parsed = Topology.parse(topology)
    if command.devices not in (None, parsed.devices):
        raise ConfigError(
            f"--devices {command.devices}, but topology {topology} has {parsed.devices} devices. Remedy: leave "
            "--devices out."
        )
    plain = dataclasses.replace(command, devices=parsed.devices, json=None)
    _report(plain, strict=command.strict, max_replicated=command.max_replicated)

    from jaxpar.analysis.checkup.checkup import check_up
    from jaxpar.analysis.checkup.findings import About
    from jaxpar.analysis.checkup.html import page
    from jaxpar.training.remat import RematPolicy

    job = _job(command)
    tokens = job.tokens or 0  # 0: the batch has no tokens, so neither FLOPs nor seq are known
    seq = tokens // job.config.data.batch
    flops, policy = tokens * job.model.flops_per_token(seq), RematPolicy.of(job.model.remat).policy
    about = About(tokens, flops, job.model.vocab or 0, seq, policy, job.config.parallel.reshard_after_forward)
    options = job.step_options() | {"compiler_options": job.compiler_options(parsed.platform)}
    run = (job.layout(parsed.devices), job.make_model, job.tx, job.loss_fn, job.batch_spec())
    found = check_up(parsed, *run, about=about, imbalance=command.imbalance, **options)
    if found.program is not None:
        print(f"compiled for {topology} ({found.program.device_kind}) in {found.program.compile_cpu_seconds:.0f} CPU s")
    print(found, end="")
    if command.json is not None:
        command.json.write_text(found.to_json(), encoding="utf-8")
    if command.html is not None:  # `_report` has already written the layout report to this file
        layout = command.html.read_text(encoding="utf-8")
        command.html.write_text(page(found, f"{job.name} on {topology}", layout), encoding="utf-8")
    if command.hlo is not None and found.program is not None:
        command.hlo.write_text(found.program.text, encoding="utf-8")
    same = _golden(command.golden, found) if command.golden is not None else True
    return 0 if found.fits and same else 1


def _golden(file: Path, found: Any) -> bool:
    """Compare a checkup with a golden file, or write a missing file; returns whether they agree."""
    from jaxpar.analysis.checkup.golden import against, facts_of, write

    if found.program is None:
        print(f"golden file {file}: not compared, because no program was compiled")
        return False
    facts = facts_of(found.audit, found.topology, found.program.versions)
    if not file.exists():
        write(file, facts)
        print(f"golden file {file}: written")
        return True
    changes = against(file, facts)
    print(f"golden file {file}: {'DIFFERS' if changes else 'no difference'}", *changes, sep="\n  ")
    return not changes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; an error is printed as a short message, never as a traceback.

    ``train`` prints its exit status in the last line.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["--version"]:
        print(f"jaxpar {__version__}")
        return 0
    if given and not given[0].startswith("-") and given[0] not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(
            f"unknown command {given[0]!r}.{did_you_mean(given[0], COMMANDS)} The commands are {known}.",
            file=sys.stderr,
        )
        return int(ExitCode.CONFIGURATION)
    chosen: Any = tyro.cli(
        Train
        | Explain
        | Check
        | Annotated[PlanCommand, tyro.conf.subcommand("plan")]
        | Verify
        | Generate
        | VerifyCheckpoint
        | Annotated[ScheduleCommand, tyro.conf.subcommand("schedule")]
        | Annotated[ImportCommand, tyro.conf.subcommand("import")]
        | Annotated[ExportCommand, tyro.conf.subcommand("export")]
        | ConfigurationCommands
        | TokenCommands
        | Doctor,
        prog="jaxpar",
        description="Explained and proven parallelism for Flax models.",
        args=arguments,
    )
    status, out = int(ExitCode.FAILED), sys.stderr
    try:
        status, out = int(chosen.run()), sys.stdout
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (no command prints a raw traceback)
        status = report(error)
    if isinstance(chosen, Train) and not heartbeat.listened():
        print(last_line(status), file=out)
    return status


if __name__ == "__main__":
    sys.exit(main())
