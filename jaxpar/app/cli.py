"""The ``jaxpar`` command line.

::

    jaxpar train | explain | check | verify CONFIG [--set a.b=c]
    jaxpar plan CONFIG --topology v5e:4x4
    jaxpar tensor CONFIG --topology v5e:8x8
    jaxpar generate CONFIG --prompt TEXT
    jaxpar gallery [NAME]
    jaxpar verify-checkpoint DIR
    jaxpar schedule NAME
    jaxpar import DIR OUT | export CKPT DIR
    jaxpar import-mindformers | import-deepspeed | import-megatron FILE OUT.yaml
    jaxpar tokenize SOURCE OUT | verify-tokens FILE
    jaxpar doctor [--checkpoint DIR]

Each command imports jax only when it runs, so ``jaxpar --help`` is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg
from tyro.extras import subcommand_cli_from_dict

from jaxpar import __version__
from jaxpar.app.arguments import Address, Config, File, Flag, Folder, Number, Overrides, Texts
from jaxpar.app.export import ExportCommand
from jaxpar.app.gallery import GalleryCommand
from jaxpar.app.help import help_in_terminal
from jaxpar.app.huggingface import ImportCommand
from jaxpar.app.import_configuration import ImportDeepSpeedCommand, ImportMegatronCommand, ImportMindFormersCommand
from jaxpar.app.launch import heartbeat
from jaxpar.app.launch.exit_codes import ExitCode, last_line, report
from jaxpar.app.layout_commands import Check, Explain
from jaxpar.app.option_effects import check_options
from jaxpar.app.schedule import ScheduleCommand
from jaxpar.app.tensor import TensorCommand
from jaxpar.app.tokenize import TokenizeCommand, VerifyTokensCommand
from jaxpar.errors import did_you_mean
from jaxpar.utils.terminal import say

if TYPE_CHECKING:
    from jaxpar.app.plan import PlanOutputs

Prices = Annotated[
    UseAppendAction[tuple[str, ...]],
    arg(metavar="KIND=DOLLARS", help="dollars for an hour of one chip, such as v5e=1.2"),
]


@dataclass(frozen=True)
class Train:
    """Train a model, with progress, metrics, held-out evaluation and a loss curve at the end.

    Attributes:
      processes: start N processes here, supervise them, and restart them if one fails
      coordinator: address on which process 0 listens (default with --processes: on loopback)
      process_count: number of processes on all hosts
      process_id: rank of this process, or of the first of --processes
      ray: start the processes on a Ray cluster (extra ray)
      profile: write a trace of COUNT steps from the step START, for xprof and TensorBoard
      servers: number of parameter servers (extra ray; default: parallel.parameter_server)
      workers: number of workers that train with parameter servers
    """

    config: Config
    set: Overrides = ()
    processes: Number = None
    coordinator: Address = None
    process_count: Number = None
    process_id: Number = None
    ray: Flag = False
    profile: Annotated[str | None, arg(metavar="START:COUNT", help_behavior_hint="")] = None
    servers: Number = None
    workers: Number = None

    def run(self) -> int:
        from jaxpar.app.train.launch import LaunchOptions, go, profile_settings

        place = self.processes, self.coordinator, self.process_count, self.process_id
        options = LaunchOptions(*place, self.ray, self.servers, self.workers)
        settings = self.set if self.profile is None else (*self.set, *profile_settings(self.profile))
        return go(self.config, settings, options)


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
    set: Overrides = ()
    objective: Literal["time", "memory", "chips", "price"] = "time"
    max_batch: Number = None
    output: File = None
    json: File = None
    picture: File = None
    programs: int = 12
    search: Literal["enumerate", "sharding_propagation", "recursive", "dynamic_programming"] = "enumerate"
    price: Prices = ()
    scale: Annotated[str | None, arg(metavar="LOW:HIGH", help_behavior_hint="")] = None
    scaling: Literal["weak", "strong"] = "weak"
    compile_up_to: int = 0

    def run(self) -> int:
        from jaxpar.app.plan import PlanOptions, PlanOutputs, go

        outputs = PlanOutputs(self.output, self.json, self.picture)
        several = "," in self.topology or bool(self.price)
        if self.scale is None and not several and (self.objective == "time" or self.objective == "memory"):
            options = PlanOptions(self.objective, self.max_batch, self.programs, self.search)
            return go(self.config, self.set, self.topology, options, outputs)
        return self._many(outputs)

    def _many(self, outputs: PlanOutputs) -> int:
        from jaxpar.app.plan_many import go_scale, go_topologies
        from jaxpar.planning.search.scaling import ScaleOptions, scale_sizes
        from jaxpar.planning.search.topologies import Goals, parse_prices

        if self.scale is None:
            goals = Goals(self.objective, parse_prices(self.price), self.programs)
            return go_topologies(self.config, self.set, self.topology, goals, outputs, self.max_batch)
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
    set: Overrides = ()
    steps: int = 3
    bound: float = 1e-5

    def run(self) -> int:
        from jaxpar.app.config import load_run
        from jaxpar.app.console import RunConsole
        from jaxpar.app.train.launch import set_up_devices

        loaded = load_run(self.config, self.set)
        set_up_devices(loaded.config, None)
        from jaxpar.app.job import make_job
        from jaxpar.app.train.verify import verify

        job = make_job(loaded)
        verdict = verify(job, steps=self.steps, bound=self.bound, console=RunConsole())
        return 0 if verdict.passed else 1


@dataclass(frozen=True)
class Generate:
    """Continue prompts with a run's model, on any mesh: --set mesh.model=4 may differ from the training mesh.

    Attributes:
      prompt: text to continue
      prompts: file of further prompts, one per line (.jsonl: a JSON string per line; -: standard input)
      chat: prompts are messages of a user, which data.chat_template (default: that of the tokenizer) renders
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
    chat: Flag = False
    set: Overrides = ()
    checkpoint: Folder = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: Number = None
    top_p: float = 1.0
    seed: int = 0
    cache: Annotated[int | None, arg(metavar="TOKENS", help_behavior_hint="")] = None
    batch: Number = None
    stop: Texts = ()
    int8: Annotated[
        tuple[Literal["weights", "cache"], ...] | None, arg(metavar="weights|cache ...", help_behavior_hint="")
    ] = None
    json: File = None
    explain: Flag = False
    processes: Number = None
    coordinator: Address = None
    process_count: Number = None
    process_id: Number = None

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

    json: Flag = False
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


COMMANDS: dict[str, Callable[..., Any]] = {
    "train": Train,
    "explain": Explain,
    "check": Check,
    "plan": PlanCommand,
    "verify": Verify,
    "generate": Generate,
    "verify-checkpoint": VerifyCheckpoint,
    "schedule": ScheduleCommand,
    "import": ImportCommand,
    "export": ExportCommand,
    "tensor": TensorCommand,
    "import-mindformers": ImportMindFormersCommand,
    "import-deepspeed": ImportDeepSpeedCommand,
    "import-megatron": ImportMegatronCommand,
    "tokenize": TokenizeCommand,
    "verify-tokens": VerifyTokensCommand,
    "gallery": GalleryCommand,
    "doctor": Doctor,
}
_DESCRIPTION = "Explained and proven parallelism for Flax models."


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
        say(
            f"unknown command {given[0]!r}.{did_you_mean(given[0], COMMANDS)} The commands are {known}.",
            file=sys.stderr,
        )
        return int(ExitCode.CONFIGURATION)
    with help_in_terminal():
        # It exits after ``--help``, and with 2 if an argument is wrong.
        chosen = subcommand_cli_from_dict(COMMANDS, prog="jaxpar", description=_DESCRIPTION, args=arguments)
    status, out = int(ExitCode.FAILED), sys.stderr
    try:
        check_options(next(name for name, command in COMMANDS.items() if command is type(chosen)), chosen)
        status, out = int(chosen.run()), sys.stdout
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (no command prints a raw traceback)
        status = report(error)
    if isinstance(chosen, Train) and not heartbeat.listened():
        print(last_line(status), file=out)
    return status


if __name__ == "__main__":
    sys.exit(main())
