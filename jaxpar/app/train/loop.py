"""The training loop of ``jaxpar train``, from the layout summary to the loss curve."""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape

import jaxpar as jp
from jaxpar.analysis.divergence import first_nonfinite
from jaxpar.app.adapted import check_digest
from jaxpar.app.job import Job
from jaxpar.app.launch import heartbeat
from jaxpar.app.model_facts import step_flops
from jaxpar.app.train import spikes
from jaxpar.app.train.checkpointing import DATA, Saver, check_data, for_all_processes, naming, resume
from jaxpar.app.train.compile import run_until_signal
from jaxpar.app.train.goodput import Goodput
from jaxpar.app.train.lost_updates import LostUpdates
from jaxpar.app.train.metrics import MetricsWriter, loss_metrics, peak_flops
from jaxpar.app.train.output_folder import OutputFolder
from jaxpar.app.train.process_sync import ProcessStatus, StatusExchange, Stragglers
from jaxpar.app.train.profile import Profiler
from jaxpar.app.train.programs import StepPrograms
from jaxpar.app.train.progress import Rate, StepLine
from jaxpar.app.train.run_data import Identity, RunData, open_data
from jaxpar.app.train.signals import Stop, signal_name
from jaxpar.app.train.spikes import LossWatch, SkippedBatches
from jaxpar.app.train.summary import Summary, conclude, introduce
from jaxpar.app.train.trackers import open_trackers
from jaxpar.checkpoint.manager import Restored
from jaxpar.errors import CheckpointError, DivergedError, UnsavedError
from jaxpar.models.llama import LlamaConfig
from jaxpar.training.batch import row_share, shard_batch
from jaxpar.training.weight_changes import WEIGHTS_CHANGED
from jaxpar.utils.multihost import settled


def train(job: Job, console: Console) -> Summary:
    """Run a job: print the layout, train, evaluate on held-out text, write metrics, checkpoints and ``loss.png``.

    SIGTERM and Ctrl-C end the run after the current step, in all processes after the same step. Everything is then
    written as after a full run, except that SIGTERM skips the last evaluation and the picture. A second signal ends the
    process immediately. During the compile a signal ends the run immediately, with ``left`` set: a thread is still
    compiling, so the caller must end the process with :func:`jaxpar.app.train.compile.leave`.

    Args:
      job: the run; it uses all devices that jax sees.
      console: receives progress and summary.

    Returns:
      The summary that was printed at the end.

    Raises:
      LayoutError: the layout does not fit; raised before anything is compiled.
      ConfigError, DataError: the run's data does not fit its model, or its output can never be written.
      DivergedError: too many consecutive steps were not finite or were spikes, and the run cannot roll back.
      CheckpointError: the run must resume from a checkpoint and cannot.
      LaunchError: another run writes to the output folder.
      UnsavedError: the last step cannot be saved, or a second Ctrl-C ended the run before it was.
    """
    began = time.perf_counter()
    with Stop() as stop:
        try:
            summary, saver = _train(job, console, stop)
        except KeyboardInterrupt:
            raise UnsavedError("ended by a second Ctrl-C, before the last step was saved.") from None
    summary.seconds = time.perf_counter() - began
    if not summary.left:
        conclude(summary, Path(job.config.output), console, saver)
    if saver.unsaved:
        raise UnsavedError(saver.unsaved)
    return summary


def _train(job: Job, console: Console, stop: Stop) -> tuple[Summary, Saver]:
    # The supervisor has locked the folder for its processes.
    writes = jax.process_index() == 0 and not heartbeat.listened()
    output: AbstractContextManager[Any] = settled(
        lambda: OutputFolder(job.config.output, console.print) if writes else nullcontext()
    )
    with output:
        return _train_in_output(job, console, stop)


def _train_in_output(job: Job, console: Console, stop: Stop) -> tuple[Summary, Saver]:
    account, config, layout = Goodput(), job.config, job.layout()
    # Report errors in held-out batches and layout before the first compile.
    data = open_data(job, layout)
    introduce(job, layout, data, console)
    with Saver(job, layout, console) as saver, StepPrograms(job, layout) as engine:
        with account.spend("restore"):
            found = saver.restore(engine.like)
        after = None if found is None else found.step
        first = jax.process_index() == 0
        trackers = open_trackers(config, job.name, console.print) if first else []
        with MetricsWriter(Path(config.output), after, writes=first, trackers=trackers, tell=console.print) as writer:
            summary = Run(job, layout, data, engine, saver, writer, account, console, stop).go(found)
        summary.lost_records = writer.lost
        return summary, saver


class Run:
    """A run in progress: its state, the next batch, and the objects that watch and record it."""

    def __init__(
        self,
        job: Job,
        layout: jp.Layout,
        data: RunData,
        engine: StepPrograms,
        saver: Saver,
        writer: MetricsWriter,
        account: Goodput,
        console: Console,
        stop: Stop,
    ):
        config = job.config.train
        self._job, self._layout, self._engine, self._saver, self._writer = job, layout, engine, saver, writer
        self._account, self._console, self._stop = account, console, stop
        self._watch, self._passed = LossWatch(config.max_consecutive_nonfinite, config.spike), SkippedBatches()
        self._exchange, self._stragglers = StatusExchange(), Stragglers(config.straggler)
        self._timer, self._lost = StepTimer(account), LostUpdates(job, console.print)
        self._profiler = Profiler(config.profile, Path(job.config.output), console.print)
        self._data, self._stream, self._rate = data, data.stream, _rates(job, layout)
        self._share = row_share(layout, job.batch_dims())
        self._state: Any = None
        self._batch: Any = None
        self._position: dict[str, Any] = {}
        self._signal, self._overdue = 0, False  # from the last exchange, so equal in all processes
        self._loss_metrics: dict[str, float] = {}  # of the last step
        self._first_nonfinite = ""  # where the last skipped step was first not finite
        self.summary = Summary(bigram=data.bigram, unit="examples" if job.tokens is None else "tokens")
        self.summary.loss_unit = " nats per token" if isinstance(job.model, LlamaConfig) else ""

    def go(self, found: Restored | None) -> Summary:
        """Initialize or resume, compile, and step to the end; returns the summary.

        Args:
          found: the checkpoint to resume from, if any.
        """
        summary, account, steps = self.summary, self._account, self._job.config.train.steps
        number = 0 if found is None else self._resume(found)
        self._heldout = [self._put(batch) for batch in self._data.heldout]
        self._take_batch()
        heartbeat.begin("compile")
        with self._console.status("compiling the step ..."), account.spend("compile"):
            started = time.perf_counter()
            summary.signal = run_until_signal(lambda quiet: self._compile(found, quiet), self._exchange, self._stop)
            summary.compile_seconds = time.perf_counter() - started
        if summary.signal:
            return self._leave(number)
        self._console.print(f"compiled in {summary.compile_seconds:.1f} s")
        # With several processes only process 0 has the records, but all must take the same branch.
        if found is None or (not summary.evals and jax.process_count() == 1):
            self._evaluate(number)
        self._writer.note(number, **account.record())
        self._timer.start()
        with StepLine(self._console, steps, summary.unit) as line:
            while number < steps and not self._signal:
                number += 1
                self._profiler.before(number)
                loss, seconds = self._step(number)
                self._profiler.after(number)
                self._exchange_status(number)
                line.update(number, loss, summary.heldout, seconds, self._rate(seconds), self._loss_metrics)
                if self._watch.trouble:
                    number = self._roll_back(number, loss)
                elif number < steps and not self._signal:
                    self._evaluate_and_save(number)
            if summary.step_times:  # empty if the run was already complete
                self._finish(number)
        self._profiler.close()
        summary.links = [*self._profiler.written, *self._writer.links]
        self._stream.close()
        summary.signal, summary.goodput = self._signal, account.record()
        self._writer.note(number, **summary.goodput)
        return summary

    def _compile(self, found: Restored | None, quiet: Callable[[], None]) -> None:
        """Make the first state and compile the programs; call ``quiet`` once the devices are idle."""
        self._state = self._engine.first_state(None if found is None else found.state)
        if found is not None and self._job.lora is not None:
            own, source = self._engine.metadata, self._job.config.train.init_from
            check_digest(found.manifest.metadata, own, self._saver.manifest_of(found), source)
        jax.block_until_ready(self._state)
        quiet()
        heldout = self._heldout[0] if self._heldout else None
        self._engine.compile(self._state, self._batch, heldout, self._saver.disk(found))

    def _leave(self, number: int) -> Summary:
        """End the run during the compile, when nothing new needs to be saved."""
        summary, saved = self.summary, "no step was run, so there is nothing to save"
        if number:
            saved = f"step {number} is saved in {escape(str(self._saver.directory))}"
        self._console.print(f"[bold]stopped by {signal_name(summary.signal)}[/] during the compile: {saved}")
        summary.left = self._stop.late = True
        self._stream.close()
        return summary

    def _resume(self, found: Restored) -> int:
        """Resume the data position, the records and the loss watch from a checkpoint; returns its step.

        Raises:
          DataError, DamagedError: a value in the manifest is malformed or of another run; the text names both.
        """
        metadata, summary, records = found.manifest.metadata, self.summary, self._writer.before
        with naming(self._saver.manifest_of(found)):
            self._passed = resume(metadata, self._stream, self._watch)
        check_data(self._saver.manifest_of(found), metadata, lambda: self._identity)
        self._account.resume(self._writer.found, found.step)
        losses = {record["step"]: float(record["loss"]) for record in records if "loss" in record}
        evals = {record["step"]: float(record["heldout_loss"]) for record in records if "heldout_loss" in record}
        summary.losses = [losses.get(i, math.nan) for i in range(1, found.step + 1)]
        summary.steps, summary.evals = found.step, sorted(evals.items())
        self._summarize_skipped()
        return found.step

    def _take_batch(self) -> None:
        """Load the next batch, and remember the data position before it, which belongs to the current state."""
        if self._saver.active:
            self._position = self._stream.get_state()
        self._batch = self._put(next(self._stream))

    def _put(self, batch: Any) -> Any:
        return shard_batch(self._layout, batch, self._job.batch_dims(), self._share)

    def _step(self, number: int) -> tuple[float, float]:
        """Run one step, record it, and check its loss; returns the loss and the seconds that the step took."""
        steps, summary = self._job.config.train.steps, self.summary
        with self._account.spend("steps"):
            started = time.perf_counter()
            if self._batch is None:
                self._take_batch()  # after a rollback from the last step
            batch, self._batch = self._batch, None
            self._state, metrics = self._engine.step(self._state, batch)
            sent = time.perf_counter()
            if number < steps:
                self._take_batch()  # overlaps with the device's work
            elif self._saver.active:
                self._position = self._stream.get_state()
            batch_ready, idle = time.perf_counter(), metrics["loss"].is_ready()
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])  # blocks until the step is done
            self._loss_metrics = loss_metrics(metrics)
            ended = time.perf_counter()
        heartbeat.beat(number)
        seconds = ended - started
        stalled = self._timer.step(seconds, batch_ready - sent, ended - batch_ready, idle=idle)
        self._account.count_step(number, seconds, stalled)
        changed = self._changed(number, metrics)
        self._judge(number, loss, metrics, batch)
        summary.steps = number
        summary.losses.append(loss)
        summary.step_times.append(seconds)
        rate, mfu = self._rate(seconds)
        values = {"loss": loss, "grad_norm": norm, "step_seconds": seconds, "data_seconds": stalled}
        values |= {"elapsed": self._account.wall(), f"{summary.unit}_per_second": rate}
        values |= {} if mfu is None else {"mfu": mfu}
        self._writer.write(number, **{**self._loss_metrics, **changed, **values})
        return loss, seconds

    def _changed(self, number: int, metrics: dict[str, Any]) -> dict[str, float]:
        """The share of the weights of 16 bits that a step changed, if there are any."""
        if WEIGHTS_CHANGED not in metrics:
            return {}
        share = float(metrics[WEIGHTS_CHANGED])
        self._lost.see(number, share, skipped=bool(metrics.get("skipped", False)))
        return {WEIGHTS_CHANGED: share}

    def _judge(self, number: int, loss: float, metrics: dict[str, Any], batch: Any) -> None:
        """Count and report a step that was skipped or is a spike."""
        job, watch, console = self._job, self._watch, self._console
        skipped, floor = bool(metrics.get("skipped", False)), job.precision.scale
        scale = float(metrics["loss_scale"]) if skipped and floor is not None else 0.0
        # Overflows are expected while the loss scale is being found. At its minimum the run itself has diverged.
        searching = skipped and floor is not None and scale > floor.minimum
        watch.see(loss, skipped=skipped, searching=searching)
        self.summary.skipped = watch.skipped
        if searching:
            console.print(f"[bold]step {number} skipped[/]: not finite under a loss scale of {scale:g}")
        elif skipped:
            self._first_nonfinite = first_nonfinite(self._layout, self._state, batch, job.loss_fn, job.precision)
            console.print(f"[bold]step {number} skipped[/]: not finite, first in {escape(self._first_nonfinite)}")
        elif watch.bad:
            console.print(f"[bold]step {number} is a spike[/]: its loss is {loss:.4g}, above {watch.bound:.4g}")

    def _exchange_status(self, number: int) -> None:
        """Exchange status with the other processes, in the steps where an exchange is due."""
        statuses = self._exchange.after_step(lambda: self._timer.take_status(self._stop.number, self._saver.overdue))
        self._overdue = statuses is not None and statuses[0].overdue
        if statuses is None:
            return
        self._timer.count_exchange()
        self._signal = max(one.signal for one in statuses)
        self._stop.late = bool(self._signal)
        slow, stragglers = self._stragglers.add(statuses), self._stragglers
        if slow is None:
            return
        self.summary.own_times, self.summary.slow = stragglers.own, slow
        self._writer.note(number, own_seconds=stragglers.own, waited_seconds=stragglers.waited, slow=slow)
        for rank in slow:
            if rank not in stragglers.reported:
                others = statistics.median([*stragglers.own[:rank], *stragglers.own[rank + 1 :]])
                self._console.print(
                    f"[bold]process {rank} is slow[/]: it spends {stragglers.own[rank] * 1e3:.0f} ms per step outside "
                    f"of the device, the others {others * 1e3:.0f} ms, and they wait for it"
                )
        stragglers.reported = set(slow)

    def _roll_back(self, number: int, loss: float) -> int:
        """Restore the newest undamaged checkpoint and skip the batches since; returns its step.

        Raises:
          DivergedError: there is no such checkpoint, or the run was rolled back too often.
          DamagedError: a value in the checkpoint's manifest is malformed.
        """
        watch, saver, config, summary = self._watch, self._saver, self._job.config.train, self.summary
        first = number - watch.bad + 1 - self._engine.late
        trouble = spikes.describe_trouble(watch, number, loss, self._first_nonfinite)
        found, cause = None, None
        if saver.active and self._passed.rollbacks < config.max_rollbacks:
            heartbeat.begin("restore")
            frozen = jp.lora.frozen_params(self._state) if self._job.lora else None
            self._state = None  # frees its memory for the restored state
            with self._account.spend("restore"):
                try:
                    found = saver.roll_back(self._engine.like, first)
                except CheckpointError as error:
                    cause = error
                if found is not None:
                    self._engine.rewind(found.state, saver.disk(found))
        if found is None:
            text = spikes.give_up_message(trouble, watch, self._passed, config, first=first, checkpoints=saver.active)
            raise DivergedError(text) from cause
        to, metadata = found.step, found.manifest.metadata
        self._state = self._engine.with_frozen(found.state, frozen)
        with naming(saver.manifest_of(found)):
            span = self._passed.roll_back(number, to, metadata)
            watch.resume(metadata)
        lost = self._account.lose(to)
        del summary.losses[to:]
        summary.steps, summary.evals = to, [pair for pair in summary.evals if pair[0] <= to]
        self._writer.note(number, rollback_to=to, passed=list(span), why=trouble, lost_seconds=lost)
        self._console.print(
            f"[bold]rolled back from step {number} to {to}[/]: {escape(trouble)} Batches {span[0]} to {span[1]} are "
            "skipped."
        )
        self._summarize_skipped()
        # Save now, so that a restart after a kill does not repeat the bad batches.
        with self._account.spend("checkpoint"):
            saver.save(to, self._state, self._metadata(), self._engine.step)
        return to

    def _evaluate_and_save(self, number: int) -> None:
        """Evaluate and save, in the steps where they are due."""
        if number % self._job.config.train.eval_every == 0:
            self._evaluate(number)
            self._writer.note(number, **self._account.record())
        with self._account.spend("checkpoint"):
            when = {"overdue": self._overdue, "failing": self._watch.bad > 0}
            self._saver.after(number, self._state, self._metadata, self._engine.step, **when)

    def _finish(self, number: int) -> None:
        """Save the last state; evaluate it unless SIGTERM says that the machine is about to be taken away."""
        summary = self.summary
        self._lost.end()
        heartbeat.begin("last save")
        if number == self._job.config.train.steps:
            self._state = self._engine.flush(self._state)
            self._evaluate(number)  # before the save, which ranks the step by this loss
        with self._account.spend("checkpoint"):
            self._saver.last(number, self._state, self._metadata, self._engine.step)
        if self._signal != signal.SIGTERM:
            self._evaluate(number)
        summary.per_second, summary.mfu = self._rate(statistics.median(summary.step_times))

    def _evaluate(self, number: int) -> None:
        """Evaluate the state after a step, unless that is done already, or nothing is held out."""
        if not self._heldout or (self.summary.evals and self.summary.evals[-1][0] == number):
            return
        with self._account.spend("evaluation"):
            loss = self._engine.evaluate(self._state, self._heldout)
        self.summary.evals.append((number, loss))
        self._writer.write(number, heldout_loss=loss)

    def _metadata(self) -> dict[str, Any]:
        """The metadata of a checkpoint, from which a run resumes."""
        metrics = self.summary.latest()
        position = for_all_processes(self._stream, self._position)
        state = {**self._watch.state(), **self._passed.state(), **self._engine.metadata}
        return {"position": position, DATA: self._identity, "metrics": metrics, **state}

    @cached_property
    def _identity(self) -> Identity:
        return self._data.identity()

    def _summarize_skipped(self) -> None:
        self.summary.rollbacks, self.summary.passed = self._passed.rollbacks, self._passed.ranges


class StepTimer:
    """Where this process's steps spent their time since the last exchange, in seconds."""

    def __init__(self, account: Goodput):
        self._account = account
        self._busy = math.inf  # the shortest step in which the device was not idle
        self.start()

    def start(self) -> None:
        """Reset all counts."""
        self._account.wall()
        self._steps, self._own, self._waited, self._seconds = 0, 0.0, 0.0, 0.0
        self._other = self._account.spent["other"]

    def step(self, seconds: float, batch: float, waited: float, *, idle: bool) -> float:
        """Count a step in which this process made the next batch and then waited for the device.

        Args:
          seconds: the duration of the step.
          batch: the time to make the next batch.
          waited: the time spent waiting for the device.
          idle: whether the device had already finished when the batch was ready.

        Returns:
          The estimated seconds that the device stood idle.
        """
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        self._own, self._waited = self._own + batch, self._waited + waited
        if not idle:
            self._busy = min(self._busy, seconds)
            return 0.0
        return max(batch - self._busy, 0.0) if math.isfinite(self._busy) else batch

    def count_exchange(self) -> None:
        """Count the time of an exchange as waiting, because it lasts until the slowest process joins it."""
        self._account.wall()
        other = self._account.spent["other"]
        self._waited, self._other = self._waited + other - self._other, other

    def take_status(self, signal: int, overdue: bool) -> ProcessStatus:
        """Returns the status to send to the other processes, and reset all counts."""
        self._account.wall()
        own = self._own + self._account.spent["other"] - self._other
        found = ProcessStatus(signal, overdue, self._steps, own, self._waited, self._seconds)
        self.start()
        return found


def _rates(job: Job, layout: jp.Layout) -> Callable[[float], Rate]:
    """A function from the seconds of a step to tokens (or else examples) per second, and MFU if the FLOPs are known."""
    data, model, peak = job.config.data, job.model, peak_flops(jax.devices()[0].device_kind)
    count = data.batch if job.tokens is None else job.tokens
    flops = step_flops(job) if isinstance(model, LlamaConfig) else None

    def rate(seconds: float) -> Rate:
        return count / seconds, flops / seconds / (peak * layout.mesh.size) if peak and flops else None

    return rate
