"""Save and restore a run's checkpoints as its configuration says."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape

import jaxpar as jp
from jaxpar.app.job import Job
from jaxpar.app.train.spikes import LossWatch, SkippedBatches
from jaxpar.app.train_config import BestConfig
from jaxpar.checkpoint.manager import CheckpointManager, Restored
from jaxpar.checkpoint.manifest import DISK, NAME
from jaxpar.data.examples import BatchIterator
from jaxpar.data.loader import Stream
from jaxpar.errors import CheckpointError, ConfigError, DamagedError, DataError
from jaxpar.training.disk_step import DiskOffloadedStep
from jaxpar.utils.checks import shown
from jaxpar.utils.multihost import gather

_IGNORED_KEYS = ("checkpoint", "generate", "output", "cpu_devices", "supervise")
"""Configuration keys that do not affect the results."""

DATA = "data"
"""The entry of a manifest's metadata for what identifies the data of a run."""

type MakeMetadata = Callable[[], Mapping[str, Any]]


class Saver(AbstractContextManager["Saver"]):
    """A run's checkpoints, as a context manager; does nothing if the configuration has no ``checkpoint``.

    Args:
      job, layout: the run.
      console: receives messages about checkpoints.

    Raises:
      ConfigError: settings contradict each other, or ``resume`` is ``never`` and the folder holds another run's steps.
      CheckpointError: another run holds the folder.
    """

    def __init__(self, job: Job, layout: jp.Layout, console: Console):
        self._job, self._layout, self._console = job, layout, console
        self._manager: CheckpointManager | None = None
        self._postponed = False
        self.saves, self.pause = 0, 0.0
        """Number of saves that were started, and the longest time in seconds that the run was paused by one."""
        self.unsaved = ""
        """The text of the error of a run whose last step could not be saved."""
        config = job.config.checkpoint
        if config is None:
            return
        _check_best(job)
        best = config.best or BestConfig()
        directory = config.directory or f"{job.config.output}/checkpoints"
        names = ("keep", "save_interval_steps", "save_interval_minutes")
        numbers: dict[str, Any] = {name: getattr(config, name) for name in names}
        ranking = best.mode if config.best else None
        self._manager = CheckpointManager(directory, **numbers, best=ranking, keep_best=best.keep, tell=self._tell)
        if config.resume == "never" and (steps := self._manager.steps()):
            self._manager.close()
            raise ConfigError(
                f"checkpoint: resume is never, but {directory} has steps {steps} of another run. Remedy: another "
                "directory, or resume: auto."
            )

    @property
    def active(self) -> bool:
        """Whether the run keeps checkpoints."""
        return self._manager is not None

    @property
    def directory(self) -> Path | None:
        """The folder of the run's checkpoints."""
        return None if self._manager is None else self._manager.directory

    def restore(self, like: Any = None) -> Restored | None:
        """Restore the newest undamaged step with this run's layout, if there is one and ``resume`` allows it.

        Args:
          like: the abstract state, if it differs from that of :func:`jaxpar.abstract_state`.

        Raises:
          CheckpointError: ``resume`` is ``required`` and there is no step; all steps are damaged; or the step is of
            another model, or beyond the run's last step.
        """
        config, job = self._job.config.checkpoint, self._job
        if self._manager is None or config is None or config.resume == "never":
            return None
        found = self._manager.restore_latest(self._like(like))
        if found is None:
            if config.resume == "required":
                raise CheckpointError(
                    f"checkpoint: resume is required, but {self._manager.directory} has no checkpoint. Remedy: set "
                    "checkpoint.directory to that of the run to resume, or resume: auto."
                )
            return None
        if found.step > job.config.train.steps:
            raise CheckpointError(
                f"checkpoint: {self._manager.directory} is at step {found.step}, beyond "
                f"train.steps={job.config.train.steps}. Remedy: increase train.steps, or use another directory."
            )
        self._console.print(f"resumed from step {found.step} of {escape(str(self._manager.directory))}")
        for line in config_changes(found.manifest.metadata.get("config"), config_values(job)):
            self._console.print(escape(line))
        return found

    def disk(self, found: Restored | None) -> Path | None:
        """The folder with the disk-offloaded optimizer state of a restored step, if there is one."""
        if found is None or self._manager is None or self._job.config.parallel.offload.optimizer != "disk":
            return None
        return self._manager.directory / str(found.step) / DISK

    def manifest_of(self, found: Restored) -> Path:
        """The manifest of a restored step."""
        return Path(self.directory or "") / str(found.step) / NAME

    @property
    def overdue(self) -> bool:
        """Whether this process's clock says that it is time to save."""
        return self._manager is not None and self._manager.overdue

    def after(
        self, step: int, state: jp.TrainState, metadata: MakeMetadata, runner: Any, *, overdue: bool, failing: bool
    ) -> None:
        """Save the state after ``step`` if a save is due; while steps are ``failing``, postpone it."""
        if self._manager is None:
            return
        self._postponed |= self._manager.due(step, overdue=overdue)
        if self._postponed and not failing:
            self.save(step, state, metadata(), runner)

    def last(self, step: int, state: jp.TrainState, metadata: MakeMetadata, runner: Any) -> None:
        """Save the state after ``step``, unless it is saved already, and wait until the checkpoint is complete.

        A save that fails is retried once; if that fails too, ``unsaved`` says what is lost.
        """
        if self._manager is None:
            return
        self._manager.wait()
        for _ in range(2):
            if self._manager.saved != step:
                self.save(step, state, metadata(), runner)
                self._manager.wait()
        if self._manager.saved != step:
            newest = self._manager.latest()
            missing = step - (newest or 0)
            saved = "no step is saved" if newest is None else f"the newest saved step is {newest}"
            lost = f"{saved}, so {missing} {'step is' if missing == 1 else 'steps are'} missing"
            self.unsaved = (
                f"checkpoint: step {step}, the last of this run, could not be saved in {self._manager.directory}; "
                f"{lost}. Remedy: correct the cause above, then start the run again with checkpoint: {{resume: auto}}."
            )

    def roll_back(self, like: Any, before: int) -> Restored | None:
        """Restore the newest undamaged step before ``before`` and delete the steps after it; ``None`` if there is none.

        Raises:
          CheckpointError: there are such steps, but all are damaged.
        """
        if self._manager is None:
            return None
        found = self._manager.restore_latest(self._like(like), before=before)
        if found is not None:
            self._manager.forget(found.step)
        return found

    def save(self, step: int, state: jp.TrainState, metadata: Mapping[str, Any], runner: Any) -> None:
        """Start to save a step, replacing an earlier save of it."""
        if self._manager is None:
            return
        began = time.perf_counter()
        self.saves += self._manager.save(
            step,
            jp.lora.without_frozen(state),
            layout=self._layout,
            metric=_metric(self._job, metadata),
            metadata={**metadata, "config": config_values(self._job), "name": self._job.name},
            disk=runner if isinstance(runner, DiskOffloadedStep) else None,
        )
        self._postponed = False
        self.pause = max(self.pause, time.perf_counter() - began)

    def _like(self, like: Any) -> Any:
        job = self._job
        if like is not None:
            return like
        return jp.lora.without_frozen(jp.abstract_state(self._layout, job.make_model, job.tx, job.precision))

    def __exit__(self, *_: object) -> None:
        if self._manager is not None:
            self._manager.close()

    def _tell(self, text: str) -> None:
        self._console.print(f"[bold]{escape(text)}[/]")


def _check_best(job: Job) -> None:
    """Raise an error if saved steps cannot have the metric by which the best are ranked."""
    config = job.config.checkpoint
    if config is None or config.best is None or config.best.metric == "loss":
        return
    if job.data is not None and not job.data.has_heldout:
        raise ConfigError(
            f"checkpoint: best ranks by heldout_loss, but {job.data.name} holds nothing out. Remedy: metric: loss, or "
            "an argument `split` of the factory."
        )


def _metric(job: Job, metadata: Mapping[str, Any]) -> float | None:
    """The value by which steps are ranked, if this step has it."""
    config = job.config.checkpoint
    if config is None or config.best is None:
        return None
    value = metadata.get("metrics", {}).get(config.best.metric)
    return None if value is None else float(value)


@contextmanager
def naming(manifest: str | os.PathLike[str]) -> Iterator[None]:
    """Let errors about values of a manifest's ``metadata`` begin with the manifest's name."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{manifest}: metadata: position: {error}") from error
    except DamagedError as error:
        raise DamagedError(f"{manifest}: metadata: {error}") from error


def resume(metadata: Mapping[str, Any], stream: Stream, watch: LossWatch) -> SkippedBatches:
    """Move the data and the loss watch to where a saved step was.

    Args:
      metadata: of the step's manifest, as :meth:`Saver.save` received it.
      stream: the batches of this run.
      watch: its loss watch.

    Returns:
      The batches that the run had skipped, and its rollbacks.

    Raises:
      DataError: the position in the data is malformed, or of other data.
      DamagedError: another value is malformed.
    """
    stream.set_state(for_this_process(metadata.get("position", {}), stream))
    watch.resume(metadata)
    return SkippedBatches.of(metadata)


def check_data(
    manifest: str | os.PathLike[str], metadata: Mapping[str, Any], identity: Callable[[], Mapping[str, Any]]
) -> None:
    """Raise an error unless the data of a saved step is that of this run, also what the position says nothing about.

    Args:
      manifest: of the step.
      metadata: of the manifest. Without ``data``, which earlier releases did not save, nothing is compared.
      identity: of this run's data (:class:`jaxpar.app.train.run_data.RunData`).
    """
    saved = metadata.get(DATA)
    if saved is None:
        return
    if not isinstance(saved, Mapping):
        raise DamagedError(f"{manifest}: metadata: {DATA} must be a mapping, got {shown(saved)}.")
    here = identity()
    changes = [
        f"{shown(name)[1:-1]} was {shown(saved[name])}, is now {here.get(name, 'absent')!r}"
        for name in saved
        if saved[name] != here.get(name, "absent")
    ]
    if changes:
        raise DataError(
            f"{manifest}: metadata: {DATA}: this run has other data than the one that saved it: {'; '.join(changes)}. "
            "Remedy: the same data; or another output, to start from the beginning."
        )


def for_this_process(position: Any, stream: Stream) -> Any:
    """Adapt a saved data position to this process.

    Positions in examples by number are shared by all processes; those of iterators are one for each process.
    """
    fingerprint = position.get("fingerprint") if isinstance(position, Mapping) else None
    if not isinstance(fingerprint, Mapping):
        return position  # `set_state` rejects it
    positions = position.get("positions")
    if isinstance(positions, list):  # one for each process
        index = jax.process_index()
        own = {"position": positions[index]} if index < len(positions) else {}
        return {name: value for name, value in position.items() if name != "positions"} | own
    own = stream.get_state().get("fingerprint", {})
    process = {name: own[name] for name in ("process_count", "process_index") if name in fingerprint and name in own}
    return {**position, "fingerprint": {**fingerprint, **process}}


def for_all_processes(stream: Stream, position: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a position to save, with those of all processes if the stream is an iterator. All processes call it."""
    if not isinstance(stream, BatchIterator) or jax.process_count() == 1:
        return position
    every = gather(json.dumps(position["position"]).encode())
    return {**position, "positions": [json.loads(text) for text in every]}


def config_values(job: Job) -> dict[str, Any]:
    """The run's configuration and layout, as JSON values."""
    config = {key: value for key, value in asdict(job.config).items() if key not in _IGNORED_KEYS}
    return dict(_json({**config, "layout": job.layout_data}))


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    odd = isinstance(value, float) and not math.isfinite(value)
    return str(value) if odd or not isinstance(value, str | int | float | bool | None) else value


def config_changes(was: Any, now: Mapping[str, Any]) -> Iterator[str]:
    """A line for each key whose value differs from the run that saved."""
    before, after = flatten(was), flatten(now)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{key} was {before.get(key)}, is now {after.get(key)}"


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested mappings by their keys, such as ``train.steps``."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return found
