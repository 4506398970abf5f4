"""``jaxpar train`` as a single process, as one of several, or as their supervisor (also for ``jaxpar generate``)."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from jaxpar.app.config import Loaded, RunConfig, load_run
from jaxpar.app.launch import device_assignment, heartbeat
from jaxpar.app.launch.cluster_detection import Cluster, detect
from jaxpar.app.launch.exit_codes import ExitCode, end_process, exit_code, last_line, report, signal_code
from jaxpar.app.launch.join import ProcessPlace, place_of
from jaxpar.app.launch.peers import Cause
from jaxpar.app.launch.process_group import Local, ProcessGroup
from jaxpar.app.launch.supervisor import Policy, Supervisor
from jaxpar.app.train.next_commands import next_commands, shown
from jaxpar.app.train.options import LaunchOptions, set_up_devices
from jaxpar.app.train.output_folder import OutputFolder
from jaxpar.app.train.server_run import go as go_with_servers
from jaxpar.app.train.server_run import with_servers
from jaxpar.checkpoint.verify import steps_in
from jaxpar.errors import ConfigError, JaxparError, LaunchError
from jaxpar.parallel.zero.stages import Zero
from jaxpar.utils.terminal import terminal_width

if TYPE_CHECKING:
    from jaxpar.app.train.summary import Summary


@dataclass(frozen=True)
class Task:
    """The command that the processes of a group run, and how it is supervised.

    Attributes:
      verb, words: the subcommand of ``jaxpar``, and its arguments after the settings.
      batch: rows that the processes divide; ``None`` for the configuration's batch, 0 if any number of processes will
        do.
      logs: folder of their logs; by default in the run's output.
      stdin: standard input of process 0.
      tell: called with each line for the user.
    """

    verb: str = "train"
    words: tuple[str, ...] = ()
    batch: int | None = None
    logs: Path | None = None
    stdin: IO[bytes] | None = None
    tell: Callable[[str], None] = print


def profile_settings(text: str) -> list[str]:
    """Returns the settings of ``--profile START:COUNT``.

    Raises:
      ConfigError: it is not two numbers.

    >>> profile_settings("10:3")
    ['train.profile.start=10', 'train.profile.steps=3']
    """
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        raise ConfigError(
            f"--profile must be START:COUNT, the first step and the number of steps, got {text!r}. Remedy: such as "
            "--profile 10:3."
        )
    return [f"train.profile.start={match[1]}", f"train.profile.steps={match[2]}"]


def go(config: Path, settings: Sequence[str], options: LaunchOptions) -> int:
    """Train, or supervise processes that train; returns the exit status.

    Args:
      config: the run's YAML file.
      settings: changes to it, as ``a.b=c``.
      options: the command line's options about processes.

    Raises:
      LaunchError: processes cannot be started or found, or devices cannot be divided among them.
      JaxparError: as :func:`jaxpar.app.train.loop.train`.
    """
    servers = {name: getattr(options, name) for name in ("servers", "workers")}
    counts = [f"parallel.parameter_server.{name}={count}" for name, count in servers.items() if count is not None]
    settings = [*settings, *counts]
    loaded = load_run(config, settings)
    if heartbeat.connect():
        return _train(loaded, options)
    if with_servers(loaded, options):
        return go_with_servers(config, settings, loaded)
    policy = policy_of(loaded.config)
    count = options.processes if options.processes is not None else loaded.config.supervise.processes
    if count is None and not options.ray:
        status = _train(loaded, options)
        if status == ExitCode.FINISHED and options.process_count is None:
            lines = next_commands(config, settings, loaded.config)
            print(shown(lines, terminal_width()))
        return status
    return supervise(config, settings, loaded, options, policy, 1 if count is None else count, Task())


def _train(loaded: Loaded, options: LaunchOptions) -> int:
    """Train in this process, which may be one of several."""
    cluster = place_of(options.coordinator, options.process_count, options.process_id)
    with nullcontext() if cluster is None and not heartbeat.listened() else reporting():
        return _train_here(loaded, cluster)


def _train_here(loaded: Loaded, cluster: ProcessPlace | Cluster | None) -> int:
    from jaxpar.app.console import RunConsole

    console = RunConsole()
    set_up_devices(loaded.config, cluster)
    from jaxpar.app.job import make_job
    from jaxpar.app.train.compile import leave
    from jaxpar.app.train.loop import train

    job = make_job(loaded)
    if cluster is not None:
        console.print(f"launch  {cluster}")
    summary = train(job, console)
    status = _status(summary, loaded.config)
    if summary.left:
        if not heartbeat.listened():
            print(last_line(status))
        leave(status)
    return status


def _status(summary: Summary, config: RunConfig) -> ExitCode:
    """The exit status of a run that has saved all that it was to save."""
    if config.checkpoint is None and summary.lost_records:
        return ExitCode.NOT_SAVED
    if not summary.signal or summary.steps >= config.train.steps:
        return ExitCode.FINISHED
    if summary.step_times and config.checkpoint is None:
        return ExitCode.NOT_SAVED
    return signal_code(summary.signal)


@contextmanager
def reporting() -> Iterator[None]:
    """Report an error, also to the supervisor if there is one, and end the process immediately.

    A normal exit would block: jax waits minutes for the other processes, which wait for this one.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (the process ends here)
        status = exit_code(error)
        unexpected = not isinstance(error, JaxparError | KeyboardInterrupt)
        heartbeat.raised(error, again=unexpected or status in (ExitCode.RETRYABLE, ExitCode.NOT_SAVED))
        if unexpected and heartbeat.listened():  # standard error is a log
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            report(error)
        if not heartbeat.listened():
            print(last_line(status), file=sys.stderr)
        end_process(status)


def policy_of(config: RunConfig) -> Policy:
    """Returns the supervision policy of a run's table ``supervise``."""
    table = config.supervise
    return Policy(table.step_timeout, table.compile_timeout, table.restarts, table.restart_delay, table.elastic)


def supervise(
    config: Path,
    settings: Sequence[str],
    loaded: Loaded,
    options: LaunchOptions,
    policy: Policy,
    count: int,
    task: Task,
) -> int:
    """Run ``count`` processes of this run to their end; returns the exit status.

    Args:
      config, settings: as the processes get them.
      loaded: the configuration that these give.
      options: the command line's options about processes.
      policy: when to restart.
      count: number of processes that this host starts.
      task: the command that they run.

    Raises:
      LaunchError: the options contradict each other, or the run cannot be divided among the processes.
    """
    run, total, first = loaded.config, options.process_count or count, options.process_id or 0
    _check_nesting(count, options)
    _check_hosts(count, total, first, options)
    devices = device_assignment.simulated(run.cpu_devices, os.environ)
    real = [] if options.ray else device_assignment.gpus(os.environ)
    each, known = _each(run, count, total, len(real), devices, ray=options.ray)
    batch = run.data.batch if task.batch is None else task.batch
    fits = functools.partial(_misfit, loaded, batch, each=each) if known else lambda count: None
    if (why := fits(total)) is not None:
        raise LaunchError(
            f"{total} processes of {each} devices: {why}. Remedy: another number of "
            f"processes{', mesh or batch' if batch else ' or mesh'}."
        )
    if run.checkpoint is None and policy.restarts:
        print("no checkpoints are kept ('checkpoint' is not set), so a restart begins from step 0")

    causes: list[Cause] = []

    def command(rank: int, total: int, address: str) -> list[str]:
        """The command of a process, at the first start or, if there are causes, again."""
        resume = ["checkpoint.resume=auto"] if run.checkpoint is not None and causes else []
        share = [] if devices is None or real else [f"cpu_devices={each * total}"]
        place = ["--coordinator", address, "--process-id", str(rank)] if total > 1 else []
        sets = [word for one in (*settings, *resume, *share) for word in ("--set", one)]
        words = [sys.executable, "-P", "-m", "jaxpar.app.cli", task.verb, str(config), *sets, *task.words]
        return [*words, "--process-count", str(total), *place]

    over_hosts = total if total != count else None
    if over_hosts is not None:
        if policy.restarts:
            task.tell(
                f"{total - count} of {total} processes run on other hosts, so a failure ends the processes of every "
                "host, and whatever started them restarts them all"
            )
        policy = dataclasses.replace(policy, restarts=None)
    group = _group(run, options, real, each, task, (first, over_hosts))
    latest, refit = functools.partial(_latest, run), functools.partial(device_assignment.refit, each=each, reason=fits)
    supervisor = Supervisor(group, command, count, policy, latest, refit, task.tell, causes, over_hosts)
    # The supervisor of the host with process 0 locks the folder, for all of them and also between two restarts.
    with OutputFolder(run.output, task.tell) if task.verb == "train" and not first else nullcontext():
        return supervisor.run()


def _check_hosts(count: int, total: int, first: int, options: LaunchOptions) -> None:
    """Raise an error if this host's options contradict those for all hosts."""
    if options.coordinator is None and (total != count or first):
        raise LaunchError(
            f"--processes {count} with --process-count {total} and --process-id {first} starts only some of the "
            "processes, so the others run on other hosts. Remedy: --coordinator HOST:PORT, an address of process 0's "
            "host."
        )
    if first + count > total:
        raise LaunchError(f"--processes {count} starting at --process-id {first} exceeds --process-count {total}.")
    if not options.ray and device_assignment.has_tpu(os.environ) and count > 1:
        raise LaunchError(
            f"--processes is {count}, but on a TPU host only one process can use the chips. Remedy: --processes 1."
        )


def _each(run: RunConfig, count: int, total: int, real: int, simulated: int | None, *, ray: bool) -> tuple[int, bool]:
    """The number of devices of each process, and whether it is known."""
    placed = run.supervise.resources.get("GPU", run.supervise.resources.get("TPU")) if ray else None
    if placed is not None:
        return int(placed), True
    if real:
        return device_assignment.share(real, count, "GPUs"), True
    return (1, False) if simulated is None else (device_assignment.share(simulated, total, "simulated devices"), True)


def _check_nesting(count: int, options: LaunchOptions) -> None:
    """Raise an error under a launcher's task: each task would start a run of its own."""
    if options.coordinator is not None or options.process_count is not None:
        return
    cluster = detect(os.environ)
    if cluster is not None and cluster.rank is not None:
        raise LaunchError(
            f"--processes {count} would start a separate run in each of the {cluster.count} processes of "
            f"{cluster.name}; this is process {cluster.rank}. Remedy: leave --processes out, because {cluster.name} "
            "starts all processes; or pass --coordinator, --process-count and --process-id to define the ranks of "
            "these processes."
        )


def _misfit(loaded: Loaded, batch: int, count: int, *, each: int) -> str | None:
    optimizer, layout = loaded.config.parallel.optimizer, loaded.layout
    zero = Zero(0) if optimizer is None else Zero(optimizer.stage, "data", fsdp_group_size=optimizer.fsdp_group_size)
    return device_assignment.misfit(count, each, batch, layout["mesh"] or {}, layout["rules"] or {}, zero.mesh)


def _group(
    run: RunConfig, options: LaunchOptions, real: list[str], each: int, task: Task, place: tuple[int, int | None]
) -> ProcessGroup:
    (first, total), coordinator = place, options.coordinator
    logs = task.logs or Path(run.output) / "logs"
    # A run that a scheduler starts again keeps the logs of the attempt that failed.
    append = task.logs is None and run.checkpoint is not None and run.checkpoint.resume != "never"

    def variables(index: int) -> dict[str, str | None]:
        found: dict[str, str | None] = {"PYTHONUNBUFFERED": "1"}
        if "XLA_FLAGS" in os.environ:
            found["XLA_FLAGS"] = device_assignment.without_flag(os.environ["XLA_FLAGS"])
        if real:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(real[index * each : (index + 1) * each])
        return found

    if options.ray:
        from jaxpar.app.launch.ray import RayGroup

        return RayGroup(logs, variables=variables, resources=dict(run.supervise.resources), append=append)
    return Local(
        logs, first=first, total=total, coordinator=coordinator, variables=variables, append=append, stdin=task.stdin
    )


def _latest(run: RunConfig) -> int | None:
    """The newest step that a restart may resume from; its data is not verified."""
    if run.checkpoint is None:
        return None
    steps: list[Any] = steps_in(Path(run.checkpoint.directory or f"{run.output}/checkpoints"))
    return steps[-1] if steps else None
