"""The training loop: what ``jaxpar train`` runs, from the layout summary to the loss curve."""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import jaxpar as jp
from jaxpar.checkpoint.managing import Restored
from jaxpar.data import Text, batches, bigram_entropy, eval_batches, load_text
from jaxpar.errors import ConfigError, DivergedError
from jaxpar.inspect.compare import first_nonfinite
from jaxpar.inspect.report import show_bytes
from jaxpar.launch import heartbeat
from jaxpar.topology import platform_of
from jaxpar.train.job import BATCH_DIMS, Job
from jaxpar.train.metrics import MetricsWriter, draw_loss, output_of, peak_flops
from jaxpar.train.progress import StepLine
from jaxpar.train.saving import Saver, here


@dataclass
class Summary:
    """What a run ended with. Losses in nats per token, times in seconds, ``mfu`` as a fraction or ``None``, ``skipped`` in a row at the end."""

    steps: int = 0
    losses: list[float] = field(default_factory=list)
    evals: list[tuple[int, float]] = field(default_factory=list)
    step_times: list[float] = field(default_factory=list)
    bigram: float = math.nan
    tokens_per_second: float = math.nan
    mfu: float | None = None
    compile_seconds: float = 0.0
    seconds: float = 0.0
    interrupted: bool = False
    skipped: int = 0

    @property
    def heldout(self) -> float:
        """The last held-out loss."""
        return self.evals[-1][1] if self.evals else math.nan

    def latest(self) -> dict[str, float]:
        """What is known of the last step, as far as it is finite: its loss, and the held-out one if it was looked for."""
        found = {"loss": self.losses[-1]} if self.losses else {}
        if self.evals and self.evals[-1][0] == self.steps:
            found["heldout_loss"] = self.evals[-1][1]
        return {name: value for name, value in found.items() if math.isfinite(value)}


def train(job: Job, console: Console) -> Summary:
    """Run a job: print the layout, train, evaluate on held-out text, write metrics, checkpoints and ``loss.png``.

    Args:
      job: what to run, on all devices that jax sees.
      console: where progress and summary go.

    Returns:
      What was printed at the end. Ctrl-C ends the run after the step it is in, and everything is written as for a full
      run; a second Ctrl-C ends it at once.

    Raises:
      LayoutError: the layout does not fit; raised before anything is compiled.
      ConfigError, DataError: the run's data cannot feed its model.
      DivergedError: too many steps in a row were not finite.
      CheckpointError: the run was to go on from a checkpoint, and cannot.
    """
    began = time.perf_counter()
    config, layout, text = job.config, job.layout(), load_text(job.config.data.source)
    if text.vocab > job.model.vocab:
        raise ConfigError(
            f"model: vocab is {job.model.vocab}, but the text has {text.vocab} different tokens. Remedy: a vocab of at "
            f"least {text.vocab}."
        )
    # Held-out batches and layout are checked before the first compile.
    held = eval_batches(text.heldout, max_batches=config.train.eval_batches, **_cut(job, layout))
    _introduce(job, layout, text, console)
    summary = Summary(bigram=bigram_entropy(text.heldout))
    folder = output_of(config.output)
    with _stop_on_interrupt() as stopped, Saver(job, layout, console) as saver, ExitStack() as opened:
        flight = _flight(job, layout)
        found = saver.restore(None if flight is None else flight.state)
        writer = opened.enter_context(MetricsWriter(folder, None if found is None else found.step))
        _run(job, layout, text, held, summary, writer, console, stopped, opened, saver, found, flight)
    summary.interrupted = stopped()
    summary.seconds = time.perf_counter() - began
    _conclude(summary, folder, console, saver)
    return summary


def _run(
    job: Job,
    layout: jp.Layout,
    text: Text,
    held: list[dict[str, np.ndarray]],
    summary: Summary,
    writer: MetricsWriter,
    console: Console,
    stopped: Callable[[], bool],
    opened: ExitStack,
    saver: Saver,
    found: Restored | None,
    flight: _Flight | None,
) -> None:
    """Initialise or go on, compile and step, filling ``summary`` as it goes."""
    config, tokens_a_step = job.config, job.config.data.batch * job.config.data.seq
    device = jax.devices()[0]
    peak = peak_flops(device.device_kind)
    flops_a_step = job.model.flops_per_token(config.data.seq) * tokens_a_step
    stream = batches(text.train, seed=config.data.seed, **_cut(job, layout))
    first = 0 if found is None else _go_on(found, stream, writer, summary)
    heldout = [_put(layout, batch) for batch in held]
    position = stream.get_state() if saver.active else {}
    batch = _put(layout, next(stream))
    heartbeat.doing("compile")
    with console.status("compiling the step ..."):
        started = time.perf_counter()
        state = _first_state(job, layout, found, flight)
        step = opened.enter_context(_step_of(job, layout, state, batch, flight, saver.disk(found)))
        evaluate = jp.eval_step(layout, job.loss_fn, **job.eval_options()).lower(state, heldout[0]).compile()
        summary.compile_seconds = time.perf_counter() - started
    console.print(f"compiled in {summary.compile_seconds:.1f} s")

    def look(number: int) -> None:
        loss = float(np.mean([float(evaluate(state, b)["loss"]) for b in heldout]))
        summary.evals.append((number, loss))
        writer.write(number, heldout_loss=loss)

    with StepLine(console, config.train.steps) as line:
        if not summary.evals:
            look(first)
        for number in range(first + 1, config.train.steps + 1):
            started = time.perf_counter()
            given = batch
            state, metrics = step(state, batch)
            if saver.active:
                position = stream.get_state()  # before the batch of the next step is taken
            if number < config.train.steps:
                batch = _put(layout, next(stream))  # made while the device works
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])  # waits for the step
            seconds = time.perf_counter() - started
            heartbeat.beat(number)
            skipped = _was_skipped(job, metrics, number, console)
            summary.skipped = summary.skipped + 1 if skipped else 0
            if skipped:
                _report_skipped(job, layout, state, given, number, summary.skipped, console)
            summary.steps = number
            summary.losses.append(loss)
            summary.step_times.append(seconds)
            mfu = flops_a_step / seconds / (peak * layout.mesh.size) if peak else None
            rate = tokens_a_step / seconds
            writer.write(
                number, loss=loss, grad_norm=norm, step_seconds=seconds, tokens_per_second=rate, **_maybe("mfu", mfu)
            )
            done, ends = number == config.train.steps, number == config.train.steps or stopped()
            if done and flight is not None:
                state, _ = flight.step.flush(state)  # the last updates, of what is still on its way
            if ends:
                heartbeat.doing("last save")
            if ends or number % config.train.eval_every == 0:
                look(number)
            line.update(number, loss, summary.heldout, rate, seconds, mfu)
            about = {"position": position, "skipped": summary.skipped, "metrics": summary.latest()}
            saver.after(number, state, about, step, last=ends)
            if ends:
                break
    stream.close()
    if not summary.step_times:
        return  # the run had come to its end before
    typical = statistics.median(summary.step_times)
    summary.tokens_per_second = tokens_a_step / typical
    summary.mfu = flops_a_step / typical / (peak * layout.mesh.size) if peak else None


def _first_state(job: Job, layout: jp.Layout, found: Restored | None, flight: _Flight | None) -> Any:
    """Of a checkpoint, of a pipeline that is not emptied, or the initial one."""
    if found is not None:
        return found.state
    if flight is not None:
        return flight.state
    return jp.init(layout, job.make_model, job.tx, seed=job.config.train.seed, precision=job.precision)


def _was_skipped(job: Job, metrics: dict[str, Any], number: int, console: Console) -> bool:
    """Whether a step was skipped that counts against the run."""
    skipped = bool(metrics.get("skipped", False))
    scale, floor = float(metrics.get("loss_scale", 0.0)), job.precision.scale
    if skipped and floor is not None and scale > floor.minimum:
        # Part of finding the scale; below its minimum it would be the run's own fault.
        console.print(f"[bold]step {number} skipped[/]: not finite under a loss scale of {scale:g}")
        return False
    return skipped


def _go_on(found: Restored, stream: Any, writer: MetricsWriter, summary: Summary) -> int:
    """Take up a run where a checkpoint left it: data, records, steps skipped in a row; returns the step it is at."""
    about = found.manifest.about
    stream.set_state(here(about.get("position", {})))
    losses = {record["step"]: float(record["loss"]) for record in writer.before if "loss" in record}
    summary.steps, summary.losses = found.step, [losses.get(i, math.nan) for i in range(1, found.step + 1)]
    summary.evals = [(r["step"], float(r["heldout_loss"])) for r in writer.before if "heldout_loss" in r]
    summary.skipped = int(about.get("skipped", 0))
    return found.step


@dataclass(frozen=True)
class _Flight:
    """A pipeline that is not emptied between steps, and its state before the first."""

    step: jp.AsynchronousStep
    state: Any


def _flight(job: Job, layout: jp.Layout) -> _Flight | None:
    """That of a run, if it has such a pipeline."""
    if not isinstance(job.pipeline, jp.Asynchronous):
        return None
    step = jp.AsynchronousStep(layout, job.loss_fn, **job.step_options())
    state = jp.init(layout, job.make_model, job.tx, seed=job.config.train.seed, precision=job.precision)
    data = job.config.data
    nothing = {name: np.zeros((data.batch // jax.process_count(), data.seq), np.int32) for name in job.batch_names()}
    return _Flight(step, step.start(state, _put(layout, nothing)))


@contextmanager
def _step_of(
    job: Job,
    layout: jp.Layout,
    state: Any,
    batch: Any,
    flight: _Flight | None = None,
    restore: Path | None = None,
) -> Iterator[Callable[..., Any]]:
    """The compiled step, which may hold a folder on disk for as long as the run lasts, restored from another one."""
    options = job.compiler_options(platform_of(layout.mesh))
    if job.config.parallel.offload.optimizer == "disk":
        with jp.DiskStep(layout, job.loss_fn, state, restore=restore, **job.step_options()) as step:
            step.compile(state, batch, options)
            yield step
    elif flight is not None:
        yield flight.step.lower(state, batch).compile(options)
    else:
        yield jp.train_step(layout, job.loss_fn, **job.step_options()).lower(state, batch).compile(options)


def _report_skipped(
    job: Job, layout: jp.Layout, state: jp.TrainState, batch: Any, number: int, in_a_row: int, console: Console
) -> None:
    """Say where a skipped step's numbers stopped to be finite; end the run where too many were skipped in a row."""
    where = first_nonfinite(layout, state, batch, job.loss_fn, job.precision)
    console.print(f"[bold]step {number} skipped[/]: not finite, first in {where}")
    most = job.config.train.max_skipped
    if in_a_row >= most:
        raise DivergedError(
            f"{in_a_row} steps in a row, up to step {number}, were not finite, first in {where}. Nothing of them was kept. Remedy: a "
            f"smaller optimizer.learning_rate or a clip_norm; train.max_skipped={most} allows more of them."
        )


def _maybe(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: value}


def _cut(job: Job, layout: jp.Layout) -> dict[str, Any]:
    """How text becomes batches, in this process."""
    data = job.config.data
    return {
        "batch": data.batch,
        "seq": data.seq,
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
        **job.reading(layout),
    }


def _put(layout: jp.Layout, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jp.put(layout, x, *BATCH_DIMS, path=f"batch/{name}") for name, x in batch.items()}


def _introduce(job: Job, layout: jp.Layout, text: Text, console: Console) -> None:
    """What will run and where, checked: the mesh, the bytes on each device, the text."""
    report = jp.check(
        layout,
        job.make_model,
        job.tx,
        batch=job.batch_spec(),
        loss_fn=job.loss_fn,
        step=job.step_options(),
        strict=False,
    )
    total, params = report.total(), report.total("params")
    config = job.config
    console.print(f"[bold]{job.name}[/]  {report.headline()} ({jax.devices()[0].device_kind})")
    console.print(
        f"model   {config.model['family']}, {job.model.params:,} parameters in {params.tensors} tensors, "
        f"{job.model.dtype} compute"
    )
    console.print(
        f"memory  {show_bytes(total.bytes)} of parameters and optimizer state, {show_bytes(total.device_bytes)} on each "
        f"device ({total.copies:.2f} copies, {total.replicated:.1%} of the bytes whole on every device)"
    )
    console.print(
        f"text    {text.name}: {text.train.size:,} tokens to train on, {text.heldout.size:,} held out "
        f"({text.heldout_files} of {text.files} files); batch {config.data.batch} × {config.data.seq} tokens"
    )
    for line in report.remarks():
        console.print(line)


def _conclude(summary: Summary, folder: Path, console: Console, saver: Saver) -> None:
    """One screen at the end, and the picture."""
    speed = f", {summary.tokens_per_second:,.0f} tokens/s" if summary.step_times else ""
    title = f"{summary.steps} steps{speed}"
    draw_loss(folder / "loss.png", summary.losses, summary.evals, {"held-out bigram entropy": summary.bigram}, title)
    verdict = "below" if summary.heldout < summary.bigram else "above"
    console.print()
    console.print("[bold]stopped by Ctrl-C[/]" if summary.interrupted else "[bold]done[/]")
    console.print(
        f"steps             {summary.steps} in {summary.seconds:.0f} s (compile {summary.compile_seconds:.0f} s)"
    )
    if summary.step_times:
        console.print(f"speed             {summary.tokens_per_second:,.0f} tokens/s (median step)")
    if summary.mfu is not None:
        console.print(f"MFU               {summary.mfu:.1%}")
    if summary.losses:
        console.print(f"training loss     {summary.losses[0]:.4f} -> {summary.losses[-1]:.4f} nats per token")
    console.print(f"held-out loss     {summary.heldout:.4f} nats per token")
    console.print(f"held-out bigrams  {summary.bigram:.4f} nats per token: the model ends {verdict} their entropy")
    if saver.active:
        console.print(
            f"checkpoints       {saver.saves} in {saver.directory}; the longest pause {saver.pause * 1e3:.0f} ms"
        )
    console.print(f"written           {folder}/metrics.jsonl, {folder}/tensorboard, {folder}/loss.png")


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag that the loop reads between steps; the handler then gives way, so that a second one interrupts."""
    asked: list[int] = []

    def handle(number: int, frame: Any) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)
