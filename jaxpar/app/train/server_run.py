"""``jaxpar train --servers 2 --workers 4``: a run whose parameters are on servers."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from jaxpar.app.config import Loaded, RunConfig, load_run
from jaxpar.app.console import RunConsole
from jaxpar.app.launch.exit_codes import ExitCode
from jaxpar.app.server_config import ServerSettings, server_config
from jaxpar.app.train.options import LaunchOptions, set_up_devices
from jaxpar.app.train.output_folder import OutputFolder
from jaxpar.errors import LaunchError

if TYPE_CHECKING:
    from jaxpar.app.job import Job
    from jaxpar.parameter_server import ServerConfig, ServerRunResult, TrainingProgram


def with_servers(loaded: Loaded, options: LaunchOptions) -> bool:
    """Whether a run has parameter servers.

    Raises:
      LaunchError: options of processes that are no workers are set too.
    """
    if loaded.config.parallel.parameter_server is None:
        return False
    for name in ("processes", "coordinator", "process_count", "process_id", "ray"):
        if getattr(options, name):
            raise LaunchError(
                f"--{name.replace('_', '-')} is for processes that share one model, but this run has parameter servers "
                "and workers. Remedy: leave it out; --workers N sets the number of workers."
            )
    return True


def go(file: Path, settings: Sequence[str], loaded: Loaded) -> int:
    """Train with servers and workers; returns the exit status.

    Args:
      file, settings: the configuration, as each process reads it.
      loaded: the same, read.

    Raises:
      JaxparError: the configuration is not one of servers, Ray cannot be reached, or what a worker raised.
    """
    table = loaded.config.parallel.parameter_server or ServerSettings()
    config = server_config(table)
    console = RunConsole()
    with OutputFolder(loaded.config.output, console.print), _in_cluster(table, config, console):
        return _train(file, settings, loaded, config, console)


@contextmanager
def _in_cluster(table: ServerSettings, config: ServerConfig, console: Console) -> Iterator[None]:
    """Be in the run's Ray cluster: before JAX is imported, so that a wrong address is reported soon."""
    if table.cluster != "ray":
        yield
        return
    from jaxpar.parameter_server.ray_start import joined

    where = table.address or os.environ.get("RAY_ADDRESS")
    console.print("ray starts on this machine" if where is None else f"ray joins {where}")
    with joined(table.address, table.resources.get("CPU", 1) * config.workers):
        import jax

        jax.config.update("jax_platforms", "cpu")  # accelerators are for the workers
        yield


def _train(file: Path, settings: Sequence[str], loaded: Loaded, config: ServerConfig, console: Console) -> int:
    from jaxpar.parameter_server import ServerRun

    run, table = loaded.config, loaded.config.parallel.parameter_server or ServerSettings()
    load = functools.partial(job_program, str(file.absolute()), tuple(settings), config)
    resume = run.checkpoint is not None and run.checkpoint.resume != "never"
    place: dict[str, Any] = {"cluster": table.cluster, "address": table.address, "worker_resources": table.resources}
    place |= {"folder": Path(run.output) / "parameter_server", "resume": resume}
    with ServerProgress(run, config, console) as progress:
        with ServerRun(load, config, steps=run.train.steps, on_report=progress.add, **place) as going:
            result = going.wait()
        progress.conclude(result)
    return ExitCode.FINISHED


def job_program(file: str, settings: Sequence[str], config: ServerConfig) -> TrainingProgram:
    """Returns what a run's configuration trains; called in each process.

    A server of a mode without rounds updates once for each push, so the schedule counts the steps of all workers.
    """
    loaded = load_run(file, settings)
    if not config.in_rounds:
        optimizer, steps = loaded.config.optimizer, loaded.config.train.steps
        scaled = dataclasses.replace(
            optimizer,
            warmup=optimizer.warmup * config.workers,
            decay_steps=(optimizer.decay_steps or steps) * config.workers,
        )
        loaded = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, optimizer=scaled))
    set_up_devices(loaded.config, None)
    import jaxpar as jp
    from jaxpar.app.job import make_job

    job = make_job(loaded)
    ps = jp.parameter_server
    run = loaded.config
    return ps.TrainingProgram(
        layout=job.layout,
        make_model=job.make_model,
        loss_fn=job.loss_fn,
        tx=job.tx,
        batches=functools.partial(worker_batches, job),
        seed=run.train.seed,
        step_options=job.step_options(),
        heldout=functools.partial(heldout_batches, job),
        eval_loss_fn=job.eval_loss_fn,
        eval_every=run.train.eval_every,
        finish=functools.partial(store, job),
    )


def worker_batches(job: Job, worker: int, workers: int) -> Callable[[int], Any]:
    """Returns ``step -> batch`` for a worker's rows of the run's batches; steps may only grow, or be repeated."""
    from jaxpar.app.train.run_data import global_stream
    from jaxpar.training.batch import shard_batch

    layout = job.layout()
    stream = global_stream(job, layout, {"process_index": worker, "process_count": workers})
    taken: list[Any] = [-1, None]

    def batch(step: int) -> Any:
        while taken[0] < step:
            taken[:] = [taken[0] + 1, next(stream)]
        return shard_batch(layout, taken[1], job.batch_dims())

    return batch


def heldout_batches(job: Job) -> list[Any]:
    """Returns the run's batches for evaluation, placed."""
    from jaxpar.app.train.run_data import open_data
    from jaxpar.training.batch import shard_batch

    layout = job.layout()
    return [shard_batch(layout, batch, job.batch_dims()) for batch in open_data(job, layout).heldout]


def store(job: Job, state: Any) -> None:
    """Save the final parameters as a checkpoint, if the run keeps any."""
    from jaxpar.checkpoint.manager import CheckpointManager

    table = job.config.checkpoint
    if table is not None:
        with CheckpointManager(table.directory or f"{job.config.output}/checkpoints", keep=table.keep) as manager:
            manager.save(int(state.step), state, layout=job.layout())


class ServerProgress:
    """Prints and records what workers report; a context manager."""

    def __init__(self, run: RunConfig, config: ServerConfig, console: Console):
        from jaxpar.app.train.metrics import MetricsWriter

        self._run, self._config, self._console = run, config, console
        self._writer = MetricsWriter(Path(run.output), None, tell=console.print)
        self._reports: dict[int, dict[int, dict[str, float]]] = {}
        self._began = time.perf_counter()
        bounds = {"stale_synchronous": f", staleness {config.staleness} steps", "local_sgd": f", {config.schedule}"}
        bound = bounds.get(config.mode, "")
        console.print(f"servers {config.servers}, workers {config.workers}, {config.mode}{bound}")

    def add(self, worker: int, step: int, figures: Mapping[str, float]) -> None:
        """Record a worker's figures; the mean loss of a step, when all first workers have reported it."""
        from jaxpar.training.weight_changes import WEIGHTS_CHANGED

        reports = self._reports.setdefault(step, {})
        reports[worker] = {name: figures[name] for name in ("loss", WEIGHTS_CHANGED) if name in figures}
        if "heldout_loss" in figures:
            self._writer.write(step, heldout_loss=figures["heldout_loss"])
            self._console.print(f"step {step}  held-out loss {figures['heldout_loss']:.4f}")
        if len(reports) == self._config.workers:
            names = dict.fromkeys(name for report in reports.values() for name in report)
            means = {name: fmean(r[name] for r in reports.values() if name in r) for name in names}
            mean = means["loss"]
            self._writer.write(step, **means)
            del self._reports[step]
            if step % max(self._run.train.steps // 20, 1) == 0 or step == self._run.train.steps:
                seconds = time.perf_counter() - self._began
                self._console.print(f"step {step} of {self._run.train.steps}  loss {mean:.4f}  {seconds:.0f} s")

    def conclude(self, result: ServerRunResult) -> None:
        """Print the end of a run."""
        steps, seconds = self._run.train.steps, time.perf_counter() - self._began
        if "heldout_loss" in result.finished:
            self._writer.write(steps, heldout_loss=result.finished["heldout_loss"])
        self._console.print(f"\n[bold]done[/]\nsteps             {steps} of each worker in {seconds:.0f} s")
        if "heldout_loss" in result.finished:
            self._console.print(f"held-out loss     {result.finished['heldout_loss']:.4f}")
        for worker, report in sorted(result.reports.items()):
            traffic = report.traffic
            self._console.print(
                f"worker {worker:<11}pushed {traffic.pushed / 2**20:.2f} MiB, pulled {traffic.pulled / 2**20:.2f} MiB, "
                f"staleness at most {traffic.staleness}"
            )
        self._console.print(f"written           {self._run.output}/metrics.jsonl")

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._writer.__exit__(*raised)
