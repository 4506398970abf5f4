"""Manage the checkpoints of a run: one folder per step; a restart gets the newest undamaged one."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax

from jaxpar.checkpoint.leftovers import DELETED, UNFINISHED, Leftover, leftovers_in, recover, verified_reason
from jaxpar.checkpoint.manifest import Manifest, read
from jaxpar.checkpoint.restore import restore
from jaxpar.checkpoint.save import Saving, begin
from jaxpar.checkpoint.verify import check, incomplete, steps_in
from jaxpar.errors import CheckpointError, ConfigError, DamagedError
from jaxpar.sharding.layout import Layout
from jaxpar.utils.durable import Lock, is_permanent, refuse_address, remove
from jaxpar.utils.multihost import gather, settled

RETRY = 30.0
"""Seconds after which a failed save is retried."""


@dataclass(frozen=True)
class Restored:
    """A restored state, its step, and its manifest (``manifest.metadata`` holds the metadata given to ``save``)."""

    state: Any
    step: int
    manifest: Manifest


class CheckpointManager(AbstractContextManager["CheckpointManager"]):
    """A folder of checkpoints, locked while the manager is open; use it as a context manager.

    A save that fails (full disk, folder not writable) is reported through ``tell`` and retried later. It does not end
    the run, and earlier checkpoints remain. A step counts only once its manifest exists, and the manifest is written
    last, so a killed save or an unrelated folder is never mistaken for a checkpoint. A step that a kill left complete
    but without its name is recovered when the manager opens the folder, and reported through ``tell``.

    Every process of a run creates the manager and calls :meth:`restore_latest`; process 0 locks and recovers the
    folder, and lists what is in it for all of them.

    Args:
      directory: folder of the run's checkpoints; created if missing. It may be a symbolic link; nothing follows one
        below it.
      keep: number of newest steps to keep; ``None`` keeps all. The best steps are kept in addition.
      save_interval_steps: :meth:`due` returns true every ``save_interval_steps`` steps.
      save_interval_minutes: :meth:`due` returns true once this many minutes have passed since the last save.
      best: ``min`` or ``max`` of the ``metric`` given to :meth:`save`; of equal values the oldest step is best. The
        manifest stores the metric, so the ranking survives a restart.
      keep_best: number of best steps to keep.
      asynchronous: write in the background; a save first waits for the previous one.
      verify: read the files back and compare them with the arrays in memory.
      tell: called with each message for the user; by default it issues a warning.

    Raises:
      CheckpointError: another run holds the folder, or it can never be written to.
      DamagedError: ``lock`` in the folder is a symbolic link, which might lead out of it, or no regular file.
      ConfigError: an argument is invalid.

    >>> import tempfile, jax, jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as folder, CheckpointManager(folder, keep=2) as manager:
    ...     for step in (1, 2, 3):
    ...         _ = manager.save(step, {"w": jnp.ones(4) * step})
    ...     found = manager.restore_latest({"w": jax.ShapeDtypeStruct((4,), "float32")})
    ...     manager.steps(), found.step, found.state["w"].tolist()
    ([2, 3], 3, [3.0, 3.0, 3.0, 3.0])
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        save_interval_steps: int | None = None,
        save_interval_minutes: float | None = None,
        best: Literal["min", "max"] | None = None,
        keep_best: int = 1,
        asynchronous: bool = True,
        verify: bool = True,
        tell: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=3),
    ):
        numbers: dict[str, float | None] = {"keep": keep, "save_interval_steps": save_interval_steps}
        numbers |= {"save_interval_minutes": save_interval_minutes, "keep_best": keep_best}
        check_numbers("CheckpointManager", numbers)
        if best not in (None, "min", "max"):
            raise ConfigError(f"CheckpointManager: best must be 'min' or 'max', got {best!r}.")
        self._given = os.fspath(directory)
        self.directory = Path(os.path.abspath(directory))
        self._keep, self._best, self._keep_best = keep, best, keep_best
        self._every, self._minutes = save_interval_steps, save_interval_minutes
        self._asynchronous, self._verify, self._tell = asynchronous, verify, tell
        self._lock: Lock | None = None
        self._saving: tuple[int, Saving] | None = None
        self.saved: int | None = None
        """The last step that this manager saved completely; call :meth:`wait` first."""
        self._bad: set[int] = set()
        self._last, self._retry = time.monotonic(), float("inf")
        settled(self._open)

    def steps(self) -> list[int]:
        """Returns the steps that have a manifest, oldest first; their data is not verified."""
        return steps_in(self.directory)

    def latest(self) -> int | None:
        """Returns the newest of :meth:`steps`, or ``None``."""
        return next(reversed(self.steps()), None)

    def paths(self) -> frozenset[str]:
        """Returns the paths of the tensors of the newest step whose manifest is intact; none if there is no step."""
        for step in reversed(self.steps()):
            with contextlib.suppress(CheckpointError):
                return frozenset(self._read(step).tensors)
        return frozenset()

    def best(self) -> int | None:
        """Returns the step with the best metric; ``None`` if ``best`` is not set or no step has a metric."""
        return next(iter(self._ranked()), None)

    def due(self, step: int, *, overdue: bool | None = None) -> bool:
        """Returns whether to save after ``step``: by step count, by the clock, or to retry a failed save.

        Args:
          step: the number of the last step.
          overdue: overrides this process's :attr:`overdue`. All processes must save the same steps, so with several
            processes pass the value of process 0.
        """
        if self._saving is not None and self._saving[1].done:
            self.wait()
        if self.overdue if overdue is None else overdue:
            return True
        return self._every is not None and step % self._every == 0

    @property
    def overdue(self) -> bool:
        """Whether this process's clock says that it is time to save or to retry."""
        now = time.monotonic()
        return now >= self._retry or (self._minutes is not None and now - self._last >= self._minutes * 60)

    def save(
        self,
        step: int,
        state: Any,
        *,
        layout: Layout | None = None,
        metric: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        disk: Any = None,
    ) -> bool:
        """Returns whether the save of a step has succeeded so far; if ``asynchronous``, once the state is copied.

        Args:
          step: the number of the step, which names the folder.
          state, layout, metadata, disk: as for :func:`jaxpar.save`.
          metric: the value that ``best`` ranks steps by.

        Returns:
          Whether everything has succeeded so far. A failure is reported through ``tell``, and :meth:`due` returns true
          when it is time to retry.

        Raises:
          CheckpointError: the state cannot be saved at all; errors of the disk never raise.
        """
        self.wait()
        self._last = time.monotonic()
        entries = {**(metadata or {}), **({} if metric is None else {"metric": metric})}
        try:
            self._acquire_lock()
            folder = self.directory / str(step)
            saving = begin(folder, state, step=step, layout=layout, metadata=entries, disk=disk, verify=self._verify)
            self._saving = step, saving
        except OSError as error:
            if isinstance(error, CheckpointError) and not isinstance(error.__cause__, OSError):
                raise
            self._failed(step, str(error))
            return False
        return True if self._asynchronous else self.wait()

    def wait(self) -> bool:
        """Returns whether the pending save succeeded, after it has ended; true if there is none."""
        if self._saving is None:
            return True
        (step, saving), self._saving = self._saving, None
        try:
            saving.wait()
        except CheckpointError as error:
            self._failed(step, str(error))
            return False
        self._retry, self.saved = float("inf"), step
        self._bad.discard(step)
        try:
            self._clear(step)
        except CheckpointError as error:  # extra steps do no harm
            self._tell(f"checkpoint: {error}")
        return True

    def restore(
        self, step: int, like: Any, *, only: Sequence[str] = (), rename: Mapping[str, str] | None = None
    ) -> Restored:
        """Returns the state and the manifest of one step, after waiting for a pending save.

        Args:
          step: one of :meth:`steps`.
          like, only, rename: as for :func:`jaxpar.restore`.

        Raises:
          CheckpointError, DamagedError: as for :func:`jaxpar.restore`.
        """
        self.wait()
        return Restored(restore(self._folder(step), like, only=only, rename=rename, step=step), step, self._read(step))

    def restore_latest(
        self, like: Any, *, only: Sequence[str] = (), rename: Mapping[str, str] | None = None, before: int | None = None
    ) -> Restored | None:
        """Returns the newest undamaged step. All processes call it, and all get the same step.

        Everything newer that is passed over is reported with its reason, in one message through ``tell``.

        Args:
          like, only, rename: as for :func:`jaxpar.restore`.
          before: consider only steps before this one.

        Returns:
          ``None`` if there is no step.

        Raises:
          CheckpointError: the newest undamaged step is of another model.
          DamagedError: there are steps, but all are damaged.
        """
        self.wait()
        steps, leftovers = self._choices(before)
        damaged: list[tuple[int, str]] = []
        for step in reversed(steps):
            try:
                found = settled(functools.partial(self._restore_intact, step, like, only, rename))
            except DamagedError as error:
                self._bad.add(step)
                damaged.append((step, str(error)))
                continue
            if passed := _newest_first(damaged, [one for one in leftovers if one.newer_than(step)]):
                self._tell(f"checkpoint: falling back to step {step}, the newest intact step: {passed}")
            return found
        passed = _newest_first(damaged, leftovers)
        if bad := sorted({*steps, *(one.step for one in leftovers if not one.suffix)}):
            raise DamagedError(
                f"{self.directory}: all steps {bad} are damaged: {passed} Remedy: restore them from a copy, or delete "
                "them to start anew."
            )
        if passed:
            self._tell(f"checkpoint: {self.directory} has no step to restore: {passed}")
        return None

    def forget(self, after: int) -> None:
        """Delete the steps after ``after``, which a run that rolls back discards; failures are reported by ``tell``."""
        self.wait()
        if self.saved is not None and self.saved > after:
            self.saved = None
        if jax.process_index() == 0:
            for one in leftovers_in(self.directory):  # first: a later start recovers them if there is no such step
                if one.step > after and one.suffix:
                    remove(self.directory / one.name)
            for step in self.steps():
                if step > after:
                    self._delete(self.directory / str(step))

    def close(self) -> None:
        """Wait for the pending save, then release the folder's lock."""
        try:
            self.wait()
        finally:
            self._release_lock()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> None:
        """Lock the folder and recover its steps, in process 0."""
        try:
            self._acquire_lock()
            for text in recover(self.directory) if self._lock is not None else []:
                self._tell(f"checkpoint: {text}")
        except CheckpointError:
            self._release_lock()
            raise
        except OSError as error:
            if is_permanent(error):
                raise CheckpointError(
                    f"checkpoint: {self.directory!s:.200}: {error.strerror}. Remedy: a directory that can be "
                    "written to."
                ) from error
            self._failed(None, f"{self.directory} cannot be written: {error.strerror}.")

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _choices(self, before: int | None) -> tuple[list[int], list[Leftover]]:
        """The steps, oldest first, and the leftovers, newest first, as process 0 sees them."""
        found = json.loads(gather(settled(self._listing))[0])
        leftovers = [Leftover(**one) for one in found["leftovers"]]
        if before is None:
            return found["steps"], leftovers
        return [step for step in found["steps"] if step < before], [one for one in leftovers if one.step < before]

    def _listing(self) -> bytes:
        if jax.process_index() != 0:
            return b""
        steps, found = self.steps(), leftovers_in(self.directory)
        whole = [one for one in found if one.complete and (one.suffix == UNFINISHED or one.step not in steps)]
        reasons = {one: verified_reason(self.directory, one) for one in whole}
        return json.dumps(
            {"steps": steps, "leftovers": [asdict(replace(one, reason=reasons.get(one, one.reason))) for one in found]}
        ).encode()

    def _restore_intact(self, step: int, like: Any, only: Sequence[str], rename: Mapping[str, str] | None) -> Restored:
        """Restore a step of which every process has checked what it reads."""
        if jax.process_count() > 1:
            # A process reads only its own pieces. Each checks every byte, so that all choose the same step.
            check(self._folder(step), step)
        return self.restore(step, like, only=only, rename=rename)

    def _folder(self, step: int) -> Path:
        """The folder of a step.

        Raises:
          DamagedError: it is a symbolic link.
        """
        folder = self.directory / str(step)
        if folder.is_symlink():
            raise DamagedError(str(incomplete(folder)))
        return folder

    def _read(self, step: int) -> Manifest:
        return read(self._folder(step))

    def _acquire_lock(self) -> None:
        if self._lock is None and jax.process_index() == 0:
            refuse_address(self._given)
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = Lock(self.directory, CheckpointError, DamagedError)

    def _failed(self, step: int | None, text: str) -> None:
        self._retry = time.monotonic() + RETRY
        last = f"Step {self.saved} is kept" if self.saved is not None else "Earlier checkpoints are kept"
        what = "checkpoint" if step is None else f"checkpoint of step {step} not saved"
        self._tell(f"{what}: {text} {last}; the next attempt is in {RETRY:g} s.")

    def _ranked(self) -> list[int]:
        """The steps that have a metric, best first; empty if ``best`` is not set."""
        if self._best is None:
            return []
        found = [(value, step) for step in self.steps() if (value := self._metric(step)) is not None]
        sign = 1 if self._best == "min" else -1
        return [step for _, step in sorted(found, key=lambda pair: (sign * pair[0], pair[1]))]

    def _metric(self, step: int) -> float | None:
        try:
            value = self._read(step).metadata.get("metric")
            return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
        except (CheckpointError, OverflowError):
            return None

    def _clear(self, newest: int) -> None:
        """Delete old steps that are not to be kept, and the leftovers of killed saves."""
        if jax.process_index() != 0:
            return
        for one in leftovers_in(self.directory):
            # What is complete may be the only copy of a step that is newer than the one just saved.
            if one.suffix and (one.step <= newest or not one.complete or one.suffix == DELETED):
                remove(self.directory / one.name)
        if self._keep is None:
            return
        good = [step for step in self.steps() if step <= newest and step not in self._bad]
        kept = {*good[-self._keep :], *self._ranked()[: self._keep_best]}
        for step in self.steps():
            if step < min(good[-self._keep :]) and step not in kept:
                self._delete(self.directory / str(step))

    def _delete(self, folder: Path) -> None:
        """Rename the folder, then delete it, so that a partly deleted folder is never mistaken for a step."""
        aside = folder.with_name(folder.name + DELETED)
        remove(aside)
        try:
            os.rename(folder, aside)
        except OSError as error:
            self._tell(f"checkpoint: {folder} cannot be deleted: {error.strerror}.")
        remove(aside)


def _newest_first(damaged: Sequence[tuple[int, str]], leftovers: Sequence[Leftover]) -> str:
    """The problems of damaged steps and the reasons of leftovers, newest first, as one text."""
    problems = [*damaged, *((one.step, one.reason) for one in leftovers)]
    return " ".join(text for _, text in sorted(problems, key=lambda problem: -problem[0]))


def check_numbers(where: str, numbers: Mapping[str, float | None]) -> None:
    """Check how many steps to keep and when to save.

    Args:
      where: what has these settings; the text of an error begins with it.
      numbers: the settings by the names that the user knows; ``None`` for one that is not set.

    Raises:
      ConfigError: a number is not above 0, or both intervals are set.
    """
    for name, value in numbers.items():
        kind = int | float if name == "save_interval_minutes" else int
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind) or value <= 0):
            raise ConfigError(f"{where}: {name} must be a number above 0, got {value!r}.")
    if numbers["save_interval_steps"] is not None and numbers["save_interval_minutes"] is not None:
        raise ConfigError(
            f"{where}: save_interval_steps and save_interval_minutes are mutually exclusive. Remedy: remove one."
        )
