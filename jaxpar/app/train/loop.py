"""The training loop: what ``jaxpar train`` runs, from the layout summary to the loss curve."""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.markup import escape

import jaxpar as jp
from jaxpar.analysis.divergence import first_nonfinite
from jaxpar.app.job import Job
from jaxpar.app.launch import heartbeat
from jaxpar.app.train import spikes as watching
from jaxpar.app.train.checkpointing import Saver, here
from jaxpar.app.train.compile import unless_asked
from jaxpar.app.train.goodput import Goodput
from jaxpar.app.train.metrics import MetricsWriter, peak_flops
from jaxpar.app.train.process_sync import Exchange, ProcessStatus, Stragglers
from jaxpar.app.train.programs import StepPrograms, put
from jaxpar.app.train.progress import StepLine
from jaxpar.app.train.signals import Stop, told
from jaxpar.app.train.spikes import LossWatch, Passed
from jaxpar.app.train.summary import Summary, conclude, introduce
from jaxpar.checkpoint.manager import Restored
from jaxpar.data import Text, batches, bigram_entropy, eval_batches, load_text
from jaxpar.errors import CheckpointError, ConfigError, DivergedError


def train(job: Job, console: Console) -> Summary:
    """Run a job: print the layout, train, evaluate on held-out text, write metrics, checkpoints and ``loss.png``.

    Args:
      job: what to run, on all devices that jax sees.
      console: where progress and summary go.

    Returns:
      What was printed at the end. SIGTERM and Ctrl-C end the run after the step it is in, in all of its processes after the same one, and everything is
      written as for a full run (after SIGTERM without a last evaluation and the picture); a second signal ends it at once. In the compile they end it
      at once, with ``left`` set: a thread is still at it, so this process can only be ended (:func:`jaxpar.app.train.compile.leave`).

    Raises:
      LayoutError: the layout does not fit; raised before anything is compiled.
      ConfigError, DataError: the run's data cannot feed its model.
      DivergedError: too many steps in a row were not finite, or spikes, and the run cannot roll back.
      CheckpointError: the run was to go on from a checkpoint, and cannot.
    """
    began = time.perf_counter()
    with Stop() as stop:
        summary, saver = _train(job, console, stop)
    summary.seconds = time.perf_counter() - began
    if not summary.left:
        conclude(summary, Path(job.config.output), console, saver)
    return summary


def _train(job: Job, console: Console, stop: Stop) -> tuple[Summary, Saver]:
    account, config, layout = Goodput(), job.config, job.layout()
    text = load_text(config.data.source)
    if text.vocab > job.model.vocab:
        raise ConfigError(
            f"model: vocab is {job.model.vocab}, but the text has {text.vocab} different tokens. Remedy: a vocab of at "
            f"least {text.vocab}."
        )
    # Held-out batches and layout are checked before the first compile.
    heldout = eval_batches(text.heldout, max_batches=config.train.eval_batches, **_cut(job, layout))
    introduce(job, layout, text, console)
    with Saver(job, layout, console) as saver, StepPrograms(job, layout) as engine:
        with account.spend("restore"):
            found = saver.restore(engine.like)
        after = None if found is None else found.step
        first = jax.process_index() == 0
        with MetricsWriter(Path(config.output), after, writes=first, tell=console.print) as writer:
            run = Run(job, layout, text, engine, saver, writer, account, console, stop)
            return run.go(found, heldout), saver


class Run:
    """A run at work: its state, the batch to come, and those who look after it."""

    def __init__(
        self,
        job: Job,
        layout: jp.Layout,
        text: Text,
        engine: StepPrograms,
        saver: Saver,
        writer: MetricsWriter,
        account: Goodput,
        console: Console,
        stop: Stop,
    ):
        asked = job.config.train
        self._job, self._layout, self._engine, self._saver, self._writer = job, layout, engine, saver, writer
        self._account, self._console, self._stop = account, console, stop
        self._watch, self._passed = LossWatch(asked.max_consecutive_nonfinite, asked.spike), Passed()
        self._exchange, self._stragglers, self._tally = Exchange(), Stragglers(asked.straggler), Tally(account)
        self._stream = batches(text.train, seed=job.config.data.seed, **_cut(job, layout))
        self._rate = _rates(job, layout)
        self._state: Any = None
        self._batch: Any = None
        self._position: dict[str, Any] = {}
        self._signal, self._overdue = 0, False  # as all processes know them
        self._where = ""  # the numbers of the last skipped step stopped to be finite
        self.summary = Summary(bigram=bigram_entropy(text.heldout))

    def go(self, found: Restored | None, heldout: list[dict[str, np.ndarray]]) -> Summary:
        """Initialise or go on, compile and step to the end; the summary."""
        summary, account, steps = self.summary, self._account, self._job.config.train.steps
        number = 0 if found is None else self._take_up(found)
        self._heldout = [put(self._layout, batch) for batch in heldout]
        self._take_batch()
        heartbeat.doing("compile")
        with self._console.status("compiling the step ..."), account.spend("compile"):
            started = time.perf_counter()
            summary.signal = unless_asked(lambda quiet: self._compile(found, quiet), self._exchange, self._stop)
            summary.compile_seconds = time.perf_counter() - started
        if summary.signal:
            return self._leave(number)
        self._console.print(f"compiled in {summary.compile_seconds:.1f} s")
        # Only the first of several processes has the records: it must not do what the others do not.
        if found is None or (not summary.evals and jax.process_count() == 1):
            self._evaluate(number)
        self._writer.note(number, **account.record())
        self._tally.start()
        with StepLine(self._console, steps) as line:
            while number < steps and not self._signal:
                number += 1
                loss, seconds = self._step(number)
                self._hear(number)
                line.update(number, loss, summary.heldout, *self._rate(seconds))
                if self._watch.trouble:
                    number = self._roll_back(number, loss)
                elif number < steps and not self._signal:
                    self._look_after(number)
            if summary.step_times:  # else the run had come to its end before
                self._finish(number)
        self._stream.close()
        summary.signal, summary.goodput = self._signal, account.record()
        self._writer.note(number, **summary.goodput)
        return summary

    def _compile(self, found: Restored | None, quiet: Callable[[], None]) -> None:
        """The first state and the programs; ``quiet`` when devices have nothing more to do."""
        self._state = self._engine.first_state(None if found is None else found.state)
        jax.block_until_ready(self._state)
        quiet()
        self._engine.compile(self._state, self._batch, self._heldout[0], self._saver.disk(found))

    def _leave(self, number: int) -> Summary:
        """End before the first step: what is on disk is all there is."""
        summary, where = self.summary, self._saver.directory
        safe = (
            f"step {number} lies in {escape(str(where))}" if number else "no step was made, so there is nothing to save"
        )
        self._console.print(f"[bold]stopped by {told(summary.signal)}[/] in the compile: {safe}")
        summary.left = self._stop.late = True
        self._stream.close()
        return summary

    def _take_up(self, found: Restored) -> int:
        """Go on where a checkpoint left the run: data, records, what was bad in a row; returns the step it is at."""
        about, summary, records = found.manifest.metadata, self.summary, self._writer.before
        self._stream.set_state(here(about.get("position", {})))
        self._watch.take_up(about)
        self._passed = Passed.of(about)
        self._account.take_up(self._writer.found, found.step)
        losses = {record["step"]: float(record["loss"]) for record in records if "loss" in record}
        evals = {record["step"]: float(record["heldout_loss"]) for record in records if "heldout_loss" in record}
        summary.losses = [losses.get(i, math.nan) for i in range(1, found.step + 1)]
        summary.steps, summary.evals = found.step, sorted(evals.items())
        self._tell_passed()
        return found.step

    def _take_batch(self) -> None:
        """The next batch, and the position before it, which is that of the state so far."""
        if self._saver.active:
            self._position = self._stream.get_state()
        self._batch = put(self._layout, next(self._stream))

    def _step(self, number: int) -> tuple[float, float]:
        """One step, its record and what is to be thought of it; its loss, and how many seconds it took."""
        steps, summary = self._job.config.train.steps, self.summary
        with self._account.spend("steps"):
            started = time.perf_counter()
            if self._batch is None:
                self._take_batch()  # after the last step came to nothing
            given, self._batch = self._batch, None
            self._state, metrics = self._engine.step(self._state, given)
            sent = time.perf_counter()
            if number < steps:
                self._take_batch()  # made while the device works
            elif self._saver.active:
                self._position = self._stream.get_state()
            taken, idle = time.perf_counter(), metrics["loss"].is_ready()
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])  # waits for the step
            ended = time.perf_counter()
        heartbeat.beat(number)
        seconds = ended - started
        stalled = self._tally.step(seconds, taken - sent, ended - taken, idle=idle)
        self._account.count_step(number, seconds, stalled)
        self._judge(number, loss, metrics, given)
        summary.steps = number
        summary.losses.append(loss)
        summary.step_times.append(seconds)
        rate, mfu = self._rate(seconds)[0], self._rate(seconds)[2]
        self._writer.write(
            number,
            loss=loss,
            grad_norm=norm,
            step_seconds=seconds,
            data_seconds=stalled,
            elapsed=self._account.wall(),
            tokens_per_second=rate,
            **({} if mfu is None else {"mfu": mfu}),
        )
        return loss, seconds

    def _judge(self, number: int, loss: float, metrics: dict[str, Any], given: Any) -> None:
        """Whether a step was skipped, or is a spike: counted, and told."""
        job, watch, console = self._job, self._watch, self._console
        skipped, floor = bool(metrics.get("skipped", False)), job.precision.scale
        scale = float(metrics["loss_scale"]) if skipped and floor is not None else 0.0
        # Part of finding the scale; below its minimum it would be the run's own fault.
        searching = skipped and floor is not None and scale > floor.minimum
        watch.see(loss, skipped=skipped, searching=searching)
        self.summary.skipped = watch.skipped
        if searching:
            console.print(f"[bold]step {number} skipped[/]: not finite under a loss scale of {scale:g}")
        elif skipped:
            self._where = first_nonfinite(self._layout, self._state, given, job.loss_fn, job.precision)
            console.print(f"[bold]step {number} skipped[/]: not finite, first in {escape(self._where)}")
        elif watch.bad:
            console.print(f"[bold]step {number} is a spike[/]: its loss is {loss:.4g}, above {watch.bound:.4g}")

    def _hear(self, number: int) -> None:
        """Take what the processes tell each other, where this is a step to do so."""
        news = self._exchange.after_step(lambda: self._tally.news(self._stop.asked, self._saver.overdue))
        self._overdue = news is not None and news[0].overdue
        if news is None:
            return
        self._tally.heard()
        self._signal = max(one.signal for one in news)
        self._stop.late = bool(self._signal)
        slow, among = self._stragglers.add(news), self._stragglers
        if slow is None:
            return
        self.summary.own_times, self.summary.slow = among.own, slow
        self._writer.note(number, own_seconds=among.own, waited_seconds=among.waited, slow=slow)
        for rank in slow:
            if rank not in among.told:
                others = statistics.median([*among.own[:rank], *among.own[rank + 1 :]])
                self._console.print(
                    f"[bold]process {rank} is slow[/]: it spends {among.own[rank] * 1e3:.0f} ms of its own in a step, the others {others * 1e3:.0f} ms, "
                    f"and they wait for it"
                )
        among.told = set(slow)

    def _roll_back(self, number: int, loss: float) -> int:
        """Go back to the newest good checkpoint, and pass over the batches since; returns its step.

        Raises:
          DivergedError: there is none, or it happened too often.
        """
        watch, saver, asked, summary = self._watch, self._saver, self._job.config.train, self.summary
        first, what = number - watch.bad + 1 - self._engine.late, watching.told(watch, number, loss, self._where)
        found, cause = None, None
        if saver.active and self._passed.rollbacks < asked.max_rollbacks:
            heartbeat.doing("restore")
            self._state = None  # its memory is wanted
            with self._account.spend("restore"):
                try:
                    found = saver.roll_back(self._engine.like, first)
                except CheckpointError as error:
                    cause = error
                if found is not None:
                    self._engine.rewind(found.state, saver.disk(found))
        if found is None:
            text = watching.hopeless(what, watch, self._passed, asked, first=first, checkpoints=saver.active)
            raise DivergedError(text) from cause
        self._state, to, about = found.state, found.step, found.manifest.metadata
        span = self._passed.roll_back(number, to, about)
        watch.take_up(about)
        lost = self._account.lose(to)
        del summary.losses[to:]
        summary.steps, summary.evals = to, [pair for pair in summary.evals if pair[0] <= to]
        self._writer.note(number, rollback_to=to, passed=list(span), why=what, lost_seconds=lost)
        self._console.print(
            f"[bold]rolled back from step {number} to {to}[/]: {escape(what)} Batches {span[0]} to {span[1]} are passed over."
        )
        self._tell_passed()
        # At once, so that a kill does not bring the same batches back.
        with self._account.spend("checkpoint"):
            saver.save(to, self._state, self._about(), self._engine.step)
        return to

    def _look_after(self, number: int) -> None:
        """What is done every so many steps."""
        if number % self._job.config.train.eval_every == 0:
            self._evaluate(number)
            self._writer.note(number, **self._account.record())
        with self._account.spend("checkpoint"):
            failing = self._watch.bad > 0
            self._saver.after(
                number, self._state, self._about, self._engine.step, overdue=self._overdue, failing=failing
            )

    def _finish(self, number: int) -> None:
        """Save the last state; then, unless the machine is about to be taken away, evaluate it."""
        summary = self.summary
        heartbeat.doing("last save")
        if number == self._job.config.train.steps:
            self._state = self._engine.flush(self._state)
            self._evaluate_once(number)  # first: its checkpoint may be kept for this
        with self._account.spend("checkpoint"):
            self._saver.last(number, self._state, self._about, self._engine.step)
        if self._signal != signal.SIGTERM:
            self._evaluate_once(number)
        summary.tokens_per_second, _, summary.mfu = self._rate(statistics.median(summary.step_times))

    def _evaluate_once(self, number: int) -> None:
        if not self.summary.evals or self.summary.evals[-1][0] != number:
            self._evaluate(number)

    def _evaluate(self, number: int) -> None:
        with self._account.spend("evaluation"):
            loss = self._engine.evaluate(self._state, self._heldout)
        self.summary.evals.append((number, loss))
        self._writer.write(number, heldout_loss=loss)

    def _about(self) -> dict[str, Any]:
        """What a run that goes on must know."""
        metrics = self.summary.latest()
        return {"position": self._position, "metrics": metrics, **self._watch.state(), **self._passed.state()}

    def _tell_passed(self) -> None:
        self.summary.rollbacks, self.summary.passed = self._passed.rollbacks, self._passed.ranges


class Tally:
    """Where the time of this process's steps went, since it was last asked; times in seconds."""

    def __init__(self, account: Goodput):
        self._account = account
        self._busy = math.inf  # what the device takes for a step, as far as it is known
        self.start()

    def start(self) -> None:
        """Count from now on."""
        self._account.wall()
        self._steps, self._own, self._waited, self._seconds = 0, 0.0, 0.0, 0.0
        self._other = self._account.spent["other"]

    def step(self, seconds: float, batch: float, waited: float, *, idle: bool) -> float:
        """Count a step in which the next batch was made, and then the device was waited for unless it stood ``idle`` already; how long it stood."""
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        self._own, self._waited = self._own + batch, self._waited + waited
        if not idle:
            self._busy = min(self._busy, seconds)
            return 0.0
        return max(batch - self._busy, 0.0) if math.isfinite(self._busy) else batch

    def heard(self) -> None:
        """An exchange is over, which took as long as the slowest took to come to it: no time of this process's own."""
        self._account.wall()
        other = self._account.spent["other"]
        self._waited, self._other = self._waited + other - self._other, other

    def news(self, signal: int, overdue: bool) -> ProcessStatus:
        """What the others should know; begins anew."""
        self._account.wall()
        own = self._own + self._account.spent["other"] - self._other
        found = ProcessStatus(signal, overdue, self._steps, own, self._waited, self._seconds)
        self.start()
        return found


def _rates(job: Job, layout: jp.Layout) -> Callable[[float], tuple[float, float, float | None]]:
    """Tokens a second, seconds and MFU of a step that took so many seconds."""
    data, peak = job.config.data, peak_flops(jax.devices()[0].device_kind)
    tokens, flops = data.batch * data.seq, job.model.flops_per_token(data.seq) * data.batch * data.seq

    def rate(seconds: float) -> tuple[float, float, float | None]:
        return tokens / seconds, seconds, flops / seconds / (peak * layout.mesh.size) if peak else None

    return rate


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
