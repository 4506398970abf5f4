"""Detect skipped steps and loss spikes, decide on rollbacks, and track the batches that are skipped. Uses no device."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpar.app.train_config import SpikeConfig, TrainConfig
from jaxpar.checkpoint.manifest import REMEDY
from jaxpar.errors import DamagedError
from jaxpar.utils.checks import is_count, shown

_SIGMAS = 6.0
_NORMAL = 1.4826  # median of absolute deviations → standard deviation, for a normal distribution
_MOST = 1 << 48  # of any count in a checkpoint
_FLOOR = 1e-3  # minimum deviation relative to the median, for a loss that does not change


class LossWatch:
    """Judges each step's loss; its state is JSON and is saved with each checkpoint.

    Args:
      max_consecutive_nonfinite: this many consecutive steps that were not finite cause a rollback.
      spike: which losses are spikes, and how many in a row cause a rollback; ``None`` for none.

    >>> watch = LossWatch(2, SpikeConfig(factor=2.0, window=3, patience=1))
    >>> for loss in (1.0, 1.1, 0.9, 1.2, 2.5):
    ...     watch.see(loss)
    >>> watch.trouble, watch.bad, round(watch.bound, 6)
    ('spike', 1, 2.2)
    """

    def __init__(self, max_consecutive_nonfinite: int, spike: SpikeConfig | None = None):
        self._most, self._spike = max_consecutive_nonfinite, spike
        self.bad = self.skipped = self.high = 0
        """Consecutive steps up to the last one: not good; of these, the skipped ones, and the spikes."""
        self.bound = math.inf
        """The loss above which the last step would have been a spike."""
        self._recent: deque[float] = deque(maxlen=spike.window if spike else 1)

    def see(self, loss: float, *, skipped: bool = False, searching: bool = False) -> None:
        """Judge a step.

        Args:
          loss: the loss of the step.
          skipped: whether the step was not finite and changed nothing.
          searching: whether that was expected, as part of finding the loss scale.
        """
        if searching:
            self.skipped = 0
            self.bad = self.high
            return
        self.skipped = self.skipped + 1 if skipped else 0
        self.bound = self._bound()
        high = self._spike is not None and not skipped and not loss <= self.bound  # NaN too
        self.high = self.high + 1 if high else self.high if skipped else 0
        self.bad = self.bad + 1 if skipped or high else 0
        if not self.bad:
            self._recent.append(loss)

    @property
    def trouble(self) -> str | None:
        """``skipped`` or ``spike`` if there were too many in a row, else ``None``."""
        if self.skipped >= self._most:
            return "skipped"
        return "spike" if self._spike is not None and self.high >= self._spike.patience else None

    def state(self) -> dict[str, Any]:
        """The state to save with a checkpoint, as JSON values."""
        counts = {"bad": self.bad, "skipped": self.skipped, "high": self.high}
        return {**counts, "recent": list(self._recent)} if self._spike else counts

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; missing values are as in a new run.

        Raises:
          DamagedError: a value is not one that :meth:`state` returns; nothing is restored then.
        """
        recent = state.get("recent", [])
        if not isinstance(recent, list) or not all(map(_is_loss, recent)):
            raise _malformed("recent", "a list of finite numbers", recent)
        skipped, high = _count(state, "skipped"), _count(state, "high")
        self.skipped, self.high, self.bad = skipped, high, _count(state, "bad", skipped)
        self._recent.clear()
        self._recent.extend(map(float, recent))

    def _bound(self) -> float:
        if self._spike is None:
            return math.inf
        if len(self._recent) < self._spike.window:
            return math.nextafter(math.inf, 0)  # too few losses to judge by, but infinity is always a spike
        middle = statistics.median(self._recent)
        if self._spike.factor is not None:
            return middle * self._spike.factor
        spread = _NORMAL * statistics.median(abs(loss - middle) for loss in self._recent)
        return middle + (self._spike.sigmas or _SIGMAS) * max(spread, _FLOOR * abs(middle))


@dataclass
class SkippedBatches:
    """The batches that a run skipped, and the number of its rollbacks.

    Attributes:
      ranges: ranges of batch numbers in the stream, counted from 1, inclusive.
      rollbacks: number of rollbacks.
    """

    ranges: list[list[int]] = field(default_factory=list)
    rollbacks: int = 0

    @property
    def count(self) -> int:
        """Number of batches."""
        return sum(last - first + 1 for first, last in self.ranges)

    def roll_back(self, step: int, to: int, saved: Mapping[str, Any]) -> tuple[int, int]:
        """Record a rollback and return the first and last batch of the range that is skipped.

        Args:
          step: the step that the run rolls back from.
          to: the step that it restores.
          saved: the state that was saved with that step.

        Raises:
          DamagedError: ``saved`` is malformed, or has batches that this run did not skip.

        >>> passed = SkippedBatches()
        >>> passed.roll_back(9, 6, {})
        (7, 9)
        >>> passed.roll_back(8, 6, passed.state())  # steps 7 and 8 had batches 10 and 11
        (7, 11)
        >>> passed
        SkippedBatches(ranges=[[7, 11]], rollbacks=2)
        """
        last = step + self.count
        before = SkippedBatches.of(saved)
        if before.count > self.count:
            raise _malformed("passed", f"at most the {self.count} batches that this run skipped", saved.get("passed"))
        first = to + before.count + 1
        self.ranges, self.rollbacks = _joined([*before.ranges, [first, last]]), self.rollbacks + 1
        return next((a, b) for a, b in self.ranges if a <= first <= b)

    def state(self) -> dict[str, Any]:
        """The ranges and rollbacks as JSON values."""
        return {"passed": [list(pair) for pair in self.ranges], "rollbacks": self.rollbacks}

    @staticmethod
    def of(state: Mapping[str, Any]) -> SkippedBatches:
        """Restore a saved state.

        Raises:
          DamagedError: a value is not one that :meth:`state` returns.
        """
        found, last = state.get("passed", []), 0
        ranges: list[Any] = found if isinstance(found, list) else [None]
        for pair in ranges:
            pair_of_counts = isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair))
            if not pair_of_counts or not last < pair[0] <= pair[1]:
                raise _malformed("passed", "a list of ranges [first, last] of batches, in order", found)
            last = pair[1]
        return SkippedBatches([list(pair) for pair in ranges], _count(state, "rollbacks"))


def _count(state: Mapping[str, Any], key: str, default: int = 0) -> int:
    if not _is_count(value := state.get(key, default)):
        raise _malformed(key, f"an integer from 0 to {_MOST:,}", value)
    return int(value)


def _is_count(value: Any) -> bool:
    return is_count(value, 0) and value <= _MOST


def _is_loss(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return is_count(value, -_MOST) and value <= _MOST


def _malformed(key: str, kind: str, value: Any) -> DamagedError:
    return DamagedError(f"{key} must be {kind}, got {shown(value)}. {REMEDY}")


def _joined(ranges: Iterable[list[int]]) -> list[list[int]]:
    """Merge ranges that touch."""
    found: list[list[int]] = []
    for first, last in ranges:
        if found and first <= found[-1][1] + 1:
            found[-1] = [found[-1][0], last]
        else:
            found.append([first, last])
    return found


def describe_trouble(watch: LossWatch, number: int, loss: float, where: str) -> str:
    """Describe the trouble after step ``number``; ``where`` says where the step was first not finite."""
    if watch.trouble == "skipped":
        return f"{_steps(watch.skipped, number)} not finite, first in {where}."
    return (
        f"{_steps(watch.high, number)} {'spikes' if watch.high > 1 else 'a spike'}: the loss is {loss:.4g}, above "
        f"{watch.bound:.4g}."
    )


def _steps(count: int, number: int) -> str:
    return f"{count} steps in a row, up to step {number}, were" if count > 1 else f"step {number} was"


def give_up_message(
    what: str, watch: LossWatch, passed: SkippedBatches, config: TrainConfig, *, first: int, checkpoints: bool
) -> str:
    """The error message of a run that cannot roll back.

    Args:
      what: the trouble, as a sentence.
      watch, passed, config: the state and settings of the run.
      first: the first bad step.
      checkpoints: whether the run keeps checkpoints.
    """
    kept = "No update was applied" if watch.trouble == "skipped" else "The updates were applied"
    remedies = ["a smaller optimizer.learning_rate, or a clip_norm"]
    if watch.trouble == "skipped":
        remedies.append(f"train.max_consecutive_nonfinite={config.max_consecutive_nonfinite} allows more of them")
    else:
        remedies.append("a larger train.spike.sigmas, factor or patience")
    if not checkpoints:
        back = "the run keeps no checkpoints to roll back to"
        remedies.append("checkpoint: {save_interval_steps: 100}, to roll back and skip these batches")
    elif passed.rollbacks >= config.max_rollbacks:
        times = f"{passed.rollbacks} time{'s' * (passed.rollbacks != 1)}"
        back = f"the run was rolled back {times}, as often as train.max_rollbacks={config.max_rollbacks} allows"
    else:
        back = f"there is no undamaged checkpoint before step {first} to roll back to"
        remedies.append("a smaller checkpoint.save_interval_steps")
    return f"{what} {kept}, and {back}. Remedy: {'; '.join(remedies)}."
