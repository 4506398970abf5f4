"""A run's metrics: JSON lines, TensorBoard, trackers, the loss curve; and the peak FLOP/s of the hardware."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.app.train.records import RESERVED, read_records
from jaxpar.app.train.trackers import Tracker
from jaxpar.sharding.hardware.accelerators import of_device
from jaxpar.training.loss import STEP_METRICS
from jaxpar.utils.durable import link_text, open_regular, write_atomically
from jaxpar.utils.extras import import_name
from jaxpar.utils.plotting import new_figure

_NOT_OF_THE_LOSS = STEP_METRICS | {"updated", "weight"}
_SECONDS = 30.0
"""Seconds between two flushes of the TensorBoard file, and before a retry."""


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak dense bf16 FLOP/s of a device kind as jax names it, or ``None`` if it is unknown.

    >>> peak_flops("NVIDIA H100 80GB HBM3") == 989e12, peak_flops("cpu")
    (True, None)
    """
    device = of_device(device_kind)
    return device.bf16 if device else None


def loss_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the scalars among a step's metrics that ``loss_fn`` returned; they block until the step is done.

    The metric ``weight`` is left out, because it says how to average the others. A metric with the name of an entry
    that the run writes itself gets the prefix ``loss/``.

    >>> loss_metrics({"loss": 2.5, "grad_norm": 1.0, "accuracy": jnp.float32(0.5), "mfu": 1, "histogram": jnp.ones(3)})
    {'accuracy': 0.5, 'loss/mfu': 1.0}
    """
    own = {name: x for name, x in metrics.items() if name not in _NOT_OF_THE_LOSS and not jnp.shape(x)}
    values = jax.device_get(own)  # one transfer for all
    return {f"loss/{name}" if name in RESERVED else name: float(value) for name, value in values.items()}


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Appends each record to ``metrics.jsonl`` and its numbers to TensorBoard; a context manager.

    A failing disk does not end the run, not even at its start: the failure is reported, and the records are kept in
    memory until they can be written.

    Args:
      folder: the folder of ``metrics.jsonl`` and ``tensorboard``.
      after: the step from which the run resumes. Records up to it are kept: ``before`` holds them, and ``found`` all
        records of the earlier run that can be read.
      writes: whether this process writes; with several processes only one does, and in the others this class does
        nothing.
      trackers: also receive each record's numbers.
      tell: called with each message for the user.

    Raises:
      MissingExtraError: tensorboardX is not installed, or is a version without the writer of its files.
    """

    def __init__(
        self,
        folder: Path,
        after: int | None = None,
        *,
        writes: bool = True,
        trackers: Sequence[Tracker] = (),
        tell: Callable[[str], None] = print,
    ):
        self.found: list[dict[str, Any]] = []
        self.before: list[dict[str, Any]] = []
        self._file = folder / "metrics.jsonl"
        self._lines: FileIO | None = None
        self._writes, self._tell, self._pending, self._reported = writes, tell, b"", False
        self._trackers = trackers
        self.lost = 0
        """Number of records that could not be written, once the writer is closed."""
        if not writes:
            return
        self._tensorboard = _TensorBoard(folder / "tensorboard", tell)
        if after is not None:
            self.found = read_records(self._file, tell)
            self.before = [record for record in self.found if record["step"] <= after]
        self._flush()

    @property
    def links(self) -> list[str]:
        """Where the trackers show the run."""
        return [tracker.link for tracker in self._trackers]

    def write(self, step: int, **values: float) -> None:
        """Write one record: the step and its values; values that are not finite are written as strings."""
        self.note(step, **{name: value if math.isfinite(value) else str(value) for name, value in values.items()})
        if self._writes:
            self._tensorboard.add(step, values)
            for tracker in self._trackers:
                tracker.log(step, values)

    def note(self, step: int, **values: Any) -> None:
        """Write one record of any JSON values to ``metrics.jsonl`` only."""
        if self._writes:
            self._pending += json.dumps({"step": step, **values}).encode() + b"\n"
            self._flush()

    def _flush(self) -> None:
        """Write everything that is pending, or report why that is not possible."""
        try:
            if self._lines is None:
                self._lines = self._begin()
            while self._pending:
                self._pending = self._pending[self._lines.write(self._pending) :]
            self._reported = False
        except OSError as error:  # a full disk must not end the run
            if not self._reported:
                self._tell(
                    f"metrics: {self._file} cannot be written: {error.strerror}. Records are kept in memory until it "
                    "can be written."
                )
            self._reported = True

    def _begin(self) -> FileIO:
        """Replace the file of the earlier run, so that a crash cannot lose its records, and open it."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, "".join(json.dumps(record) + "\n" for record in self.before))
        return FileIO(open_regular(self._file, os.O_WRONLY | os.O_APPEND), "ab")

    def __exit__(self, *_: object) -> None:
        if not self._writes:
            return
        if self._pending:
            self.lost = self._pending.count(b"\n")
            self._tell(
                f"metrics: {self.lost} records are lost, because {self._file} could not be written "
                "before the run ended."
            )
        if self._lines is not None:
            self._lines.close()
        self._tensorboard.close()
        for tracker in self._trackers:
            tracker.finish()


class _TensorBoard:
    """Writes TensorBoard files directly: on a full disk tensorboardX's thread dies, and its callers block."""

    def __init__(self, folder: Path, tell: Callable[[str], None]):
        load = partial(import_name, extra="train", purpose="writing TensorBoard metrics")
        self._open = load("tensorboardX.event_file_writer", "EventsWriter")
        self._event = load("tensorboardX.proto.event_pb2", "Event")
        self._scalar = load("tensorboardX.summary", "scalar")
        self._folder = folder
        self._events: Any = None
        self._retry = self._flush = 0.0
        if folder.is_symlink():
            tell(
                f"metrics: {folder} is {link_text(folder)}, so nothing is written to it. Remedy: delete the link, or "
                "set output to a folder on the other disk."
            )
            self._retry = math.inf

    def add(self, step: int, values: dict[str, float]) -> None:
        """Write the numbers of a step; if that fails, drop them and start a new file after ``_SECONDS``."""
        now = time.monotonic()
        if now < self._retry:
            return
        try:
            if self._events is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._events = self._open(str(self._folder / "events"))
            for name, value in values.items():
                event = self._event(step=step, wall_time=time.time(), summary=self._scalar(name, value))
                self._events.write_event(event)
            if now >= self._flush:
                self._events.flush()
                self._flush = now + _SECONDS
        except OSError:
            self.close()
            self._retry = now + _SECONDS

    def close(self) -> None:
        """Close the file."""
        events, self._events = self._events, None
        with suppress(OSError):
            if events is not None:
                events.close()


def draw_loss(
    path: Path,
    losses: Sequence[float],
    evals: Sequence[tuple[int, float]],
    lines: dict[str, float],
    title: str,
    ylabel: str = "loss (nats per token)",
) -> None:
    """Draw the loss curve as a PNG.

    Args:
      path: the file.
      losses: training loss of steps 1, 2, ...
      evals: (step, held-out loss) pairs.
      lines: horizontal lines to draw, label → loss.
      title: the picture's title.
      ylabel: the label of the loss, with its unit.

    Raises:
      MissingExtraError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    figure = new_figure("drawing the loss curve", figsize=(8, 4.5), layout="constrained")
    ax = figure.subplots()
    ax.plot(range(1, len(losses) + 1), losses, color="tab:blue", alpha=0.45, linewidth=1, label="training loss")
    if evals:
        ax.plot(*zip(*evals, strict=True), color="tab:blue", marker="o", label="held-out loss")
    for (label, value), color in zip(lines.items(), ("tab:red", "tab:gray", "tab:green"), strict=False):
        ax.axhline(value, color=color, linestyle="--", linewidth=1, label=f"{label} {value:.3f}")
    ax.set(xlabel="step", ylabel=ylabel, title=title)
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)
    new = path.with_name(f"{path.stem}.new{path.suffix}")
    new.unlink(missing_ok=True)  # never write through a symbolic link
    figure.savefig(new, dpi=130)
    new.replace(path)
