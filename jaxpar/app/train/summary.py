"""The reports of a run before its first step and after its last."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape

import jaxpar as jp
from jaxpar.analysis.units import show_bytes
from jaxpar.app.job import Job
from jaxpar.app.train import goodput
from jaxpar.app.train.checkpointing import Saver
from jaxpar.app.train.metrics import draw_loss
from jaxpar.app.train.run_data import RunData
from jaxpar.app.train.signals import signal_name
from jaxpar.errors import MissingExtraError
from jaxpar.training.model import build_shapes


@dataclass
class Summary:
    """The results of a run.

    Attributes:
      steps: the last step.
      losses: training loss of steps 1, 2, ..., for a built-in model in nats per token.
      evals: (step, held-out loss) pairs.
      step_times: seconds of each step of this process.
      bigram: the bigram entropy of the held-out text, in nats per token; NaN without a text.
      unit: what is counted in a batch: ``tokens``, or ``examples`` if there are no tokens.
      loss_unit: the unit of the loss; empty if it is not known.
      per_second: tokens or examples per second of the median step.
      mfu: model FLOP utilization as a fraction, ``None`` if the peak is unknown.
      compile_seconds, seconds: duration of the compile, and of everything.
      signal: the signal that ended the run, or 0.
      left: whether the run ended before its first step.
      skipped: number of consecutive skipped steps at the end.
      rollbacks: number of rollbacks.
      passed: ranges of batches that were skipped by rollbacks.
      own_times: each process's own seconds per step.
      slow: the processes that slowed down the others at the end.
      links: what was written besides the usual files: folders of traces, addresses of trackers.
      lost_records: number of records of metrics that could not be written.
      goodput: the record of :class:`jaxpar.app.train.goodput.Goodput`.
    """

    steps: int = 0
    losses: list[float] = field(default_factory=list)
    evals: list[tuple[int, float]] = field(default_factory=list)
    step_times: list[float] = field(default_factory=list)
    bigram: float = math.nan
    unit: str = "tokens"
    loss_unit: str = " nats per token"
    per_second: float = math.nan
    mfu: float | None = None
    compile_seconds: float = 0.0
    seconds: float = 0.0
    signal: int = 0
    left: bool = False
    skipped: int = 0
    rollbacks: int = 0
    passed: list[list[int]] = field(default_factory=list)
    own_times: list[float] = field(default_factory=list)
    slow: list[int] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    lost_records: int = 0
    goodput: dict[str, Any] = field(default_factory=dict)

    @property
    def heldout(self) -> float:
        """The last held-out loss."""
        return self.evals[-1][1] if self.evals else math.nan

    def latest(self) -> dict[str, float]:
        """The finite metrics of the last step: its loss, and its held-out loss if it was evaluated."""
        found = {"loss": self.losses[-1]} if self.losses else {}
        if self.evals and self.evals[-1][0] == self.steps:
            found["heldout_loss"] = self.evals[-1][1]
        return {name: value for name, value in found.items() if math.isfinite(value)}


def introduce(job: Job, layout: jp.Layout, data: RunData, console: Console) -> None:
    """Check the layout and print the mesh, the bytes on each device, and the data.

    Raises:
      LayoutError: the layout does not fit.
    """
    inputs: dict[str, Any] = {"batch": job.batch_spec(), "loss_fn": job.loss_fn, "step": job.step_options()}
    report = jp.check(layout, job.make_model, job.tx, strict=False, **inputs)
    total, params = report.total(), report.total("params")
    console.print(f"[bold]{job.name}[/]  {report.headline()} ({jax.devices()[0].device_kind})")
    console.print(f"model   {escape(describe_model(job, params.tensors))}")
    console.print(
        f"memory  {show_bytes(total.bytes)} of parameters and optimizer state, {show_bytes(total.device_bytes)} on "
        f"each device ({total.copies:.2f} copies, {total.replicated:.1%} of the bytes replicated on every device)"
    )
    console.print(f"{data.title}    {escape(data.line)}")
    for line in report.remarks():
        console.print(line)


def describe_model(job: Job, tensors: int) -> str:
    """Returns a line about the model; ``tensors`` is the number of its trained arrays."""
    table, model = job.config.model, job.model
    name = f"{table.get('family', table.get('factory'))}, {model.params:,} parameters"
    if job.lora is None:
        return f"{name} in {tensors} tensors, {model.dtype} compute"
    count = sum(leaf.size for leaf in jax.tree.leaves(build_shapes(job.make_model).params))
    return (
        f"{name}, frozen, {model.dtype} compute; {count:,} parameters in adapters of {tensors // 2} arrays of weights "
        f"(rank {job.lora.rank}, alpha {job.lora.alpha:g})"
    )


def conclude(summary: Summary, folder: Path, console: Console, saver: Saver) -> None:
    """Print the summary and draw the loss curve, except after SIGTERM, when the machine may soon be taken away."""
    hurry, stopped_by = summary.signal == signal.SIGTERM, signal_name(summary.signal) if summary.signal else ""
    picture = "" if hurry else f", {folder}/loss.png"
    if not hurry and jax.process_index() == 0:
        speed = f", {_rate(summary)}" if summary.step_times else ""
        lines = {} if math.isnan(summary.bigram) else {"held-out bigram entropy": summary.bigram}
        label = f"loss ({summary.loss_unit.strip()})" if summary.loss_unit else "loss"
        try:
            curve = (folder / "loss.png", summary.losses, summary.evals, lines)
            draw_loss(*curve, title=f"{summary.steps} steps{speed}", ylabel=label)
        except (OSError, ImportError) as error:  # neither a full disk nor a broken package must end the run
            why = error.strerror if isinstance(error, OSError) else error
            missing = isinstance(error, MissingExtraError)
            console.print(escape(str(error) if missing else f"{folder}/loss.png cannot be written: {why}"))
            picture = ""
    console.print()
    unsaved = ", but the last step is not saved" if saver.unsaved else ""
    console.print(f"[bold]stopped by {stopped_by}[/]{unsaved}" if stopped_by else f"[bold]done[/]{unsaved}")
    if stopped_by and not saver.active:
        console.print("nothing was saved, because the configuration has no checkpoint: key")
    console.print(
        f"steps             {summary.steps} in {summary.seconds:.0f} s (compile {summary.compile_seconds:.0f} s)"
    )
    _speed(summary, console)
    if summary.losses:
        # Of the steps before a resume only process 0 knows the losses.
        first = next((loss for loss in summary.losses if not math.isnan(loss)), math.nan)
        console.print(f"training loss     {first:.4f} -> {summary.losses[-1]:.4f}{summary.loss_unit}")
    if summary.evals:
        console.print(f"held-out loss     {summary.heldout:.4f}{summary.loss_unit}")
        if not math.isnan(summary.bigram):
            verdict = "below" if summary.heldout < summary.bigram else "above"
            verdict = (
                f"the model ends {verdict} their entropy"
                if summary.loss_unit
                else "the lowest cross entropy of a bigram model"
            )
            console.print(f"held-out bigrams  {summary.bigram:.4f} nats per token: {verdict}")
    if summary.rollbacks:
        console.print(f"rollbacks         {summary.rollbacks}; batches {ranges(summary.passed)} were skipped")
    if saver.active:
        console.print(f"checkpoints       {saver.saves} in {saver.directory}; longest pause {saver.pause * 1e3:.0f} ms")
    console.print(f"written           {folder}/metrics.jsonl, {folder}/tensorboard{picture}")
    for link in summary.links:
        console.print(f"{'':<18}{escape(link)}")


def _speed(summary: Summary, console: Console) -> None:
    """Print speed, MFU and goodput."""
    if summary.step_times:
        console.print(f"speed             {_rate(summary)} (median step)")
    if summary.mfu is not None:
        console.print(f"MFU               {summary.mfu:.1%}")
    console.print(f"goodput           {goodput.describe(summary.goodput)}")
    for rank, seconds in enumerate(summary.own_times):
        late = ": the others wait for it" if rank in summary.slow else ""
        console.print(f"process {rank:<10}{seconds * 1e3:.1f} ms per step outside of the device{late}")


def _rate(summary: Summary) -> str:
    return f"{summary.per_second:,.{0 if summary.per_second >= 10 else 2}f} {summary.unit}/s"


def ranges(passed: list[list[int]]) -> str:
    """Returns ranges of batches as text.

    >>> ranges([[7, 11], [20, 20]])
    '7 to 11, 20'
    """
    return ", ".join(f"{first} to {last}" if last > first else f"{first}" for first, last in passed)
