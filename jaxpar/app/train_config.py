"""The configuration of a run's steps and checkpoints: frozen dataclasses, built from YAML with strict checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from jaxpar.app.config_ranges import AboveOne, BatchSize, Count, Natural, Positive
from jaxpar.errors import ConfigError
from jaxpar.utils.checks import Range


@dataclass(frozen=True)
class SpikeConfig:
    """Which losses count as spikes; the run rolls back after ``patience`` consecutive spikes.

    Attributes:
      sigmas: a spike is more than this many standard deviations (estimated from the median absolute deviation) above
        the median of the last good losses; 6 if neither ``sigmas`` nor ``factor`` is set.
      factor: alternatively, a spike is more than this multiple of that median.
      window: number of losses in the median; with fewer, only a loss that is not finite is a spike.
      patience: number of consecutive spikes that triggers a rollback.
    """

    sigmas: Positive | None = None
    factor: AboveOne | None = None
    window: Annotated[int, Range(2, 2**20)] = 50
    patience: Count = 3


@dataclass(frozen=True)
class StragglerConfig:
    """When a process counts as slow.

    Attributes:
      factor: its own time per step (data, bookkeeping) exceeds the median of the others by this factor.
      every: number of steps over which the times are averaged.
    """

    factor: AboveOne = 2.0
    every: Count = 50


@dataclass(frozen=True)
class ProfileConfig:
    """Which steps are traced: ``steps`` of them, from the step ``start``."""

    start: Count = 10
    steps: Count = 3


@dataclass(frozen=True)
class TrainConfig:
    """How long to train, and how often to evaluate.

    Attributes:
      steps: number of steps.
      grad_accum_steps: number of microbatches into which each batch is cut.
      skip_nonfinite: a step whose loss or gradients are not finite changes only the step counter; ``false`` applies it.
      max_consecutive_nonfinite: this many such steps in a row cause a rollback to the newest undamaged checkpoint; the
        run then skips the batches since that checkpoint.
      spike: which losses are spikes, of which too many in a row also cause a rollback; ``{}`` takes the defaults, and
        without it no loss is a spike.
      max_rollbacks: the run stops with an error when it would roll back more often.
      straggler: when a process counts as slow.
      seed: seed of the initial parameters.
      init_from: folder of one checkpoint whose parameters the run starts from, instead of random ones. A run that
        resumes does not read it.
      eval_every: steps between two evaluations.
      eval_batches: batches of held-out data in each evaluation.
      profile: steps of which ``jax.profiler`` writes a trace: ``{start: 10, steps: 3}``.
    """

    steps: Count = 100
    grad_accum_steps: BatchSize = 1
    skip_nonfinite: bool = True
    max_consecutive_nonfinite: Count = 3
    spike: SpikeConfig | None = None
    max_rollbacks: Natural = 3
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    seed: Annotated[int, Range(-(2**31), 2**32 - 1)] = 0  # JAX drops all but 32 bits
    init_from: str | None = None
    eval_every: Count = 50
    eval_batches: Count = 8
    profile: ProfileConfig | None = None


@dataclass(frozen=True)
class BestConfig:
    """Which steps are kept in addition to the newest: the ``keep`` best by ``metric``, also after a restart.

    ``mode: min`` keeps the smallest values, ``max`` the largest.
    """

    metric: Literal["heldout_loss", "loss"] = "heldout_loss"
    mode: Literal["min", "max"] = "min"
    keep: Count = 1


@dataclass(frozen=True)
class CheckpointConfig:
    """Which checkpoints a run keeps, and whether it resumes from them; see :class:`jaxpar.CheckpointManager`.

    Attributes:
      directory: folder of the checkpoints, relative to the current directory; by default ``checkpoints`` in the run's
        output.
      save_interval_steps, save_interval_minutes: save after this many steps or minutes; the last step is always saved.
      keep: number of newest steps to keep.
      best: which steps to keep in addition: ``{metric: heldout_loss, mode: min, keep: 2}``. A step has a held-out loss
        only where ``train.eval_every`` evaluates.
      resume: ``auto`` resumes from the newest undamaged step if there is one, ``required`` raises an error without one,
        ``never`` starts anew.
    """

    directory: str | None = None
    save_interval_steps: Count | None = None
    save_interval_minutes: Positive | None = None
    keep: Count = 3
    best: BestConfig | None = None
    resume: Literal["auto", "never", "required"] = "auto"


def check_checkpoint(checkpoint: CheckpointConfig | None, train: TrainConfig, file: Path) -> None:
    if checkpoint is None:
        return
    every, minutes, best = checkpoint.save_interval_steps, checkpoint.save_interval_minutes, checkpoint.best
    if every is not None and minutes is not None:
        raise ConfigError(
            f"{file}: checkpoint.save_interval_steps={every} and checkpoint.save_interval_minutes={minutes:g} are "
            "mutually exclusive. Remedy: leave one out."
        )
    if best is None or best.metric == "loss" or (every is None and minutes is None):  # then only the last step is saved
        return
    if every is None or math.lcm(every, train.eval_every) > train.steps:
        when = "by the clock" if every is None else f"every {every} steps"
        raise ConfigError(
            f"{file}: checkpoint.best ranks by heldout_loss, which is evaluated every {train.eval_every} steps, but "
            f"checkpoints saved {when} before step {train.steps} may have none. Remedy: save_interval_steps: "
            f"{train.eval_every}, or metric: loss."
        )


def check_spike(spike: SpikeConfig | None, file: Path) -> None:
    if spike is not None and spike.sigmas is not None and spike.factor is not None:
        raise ConfigError(
            f"{file}: train.spike.sigmas={spike.sigmas:g} and train.spike.factor={spike.factor:g} are mutually "
            "exclusive: both define a spike. Remedy: leave one out."
        )


def check_profile(train: TrainConfig, file: Path) -> None:
    """Raise an error if ``train.profile`` traces steps after the last one.

    Raises:
      ConfigError: it names the steps and the file.
    """
    profile = train.profile
    if profile is not None and profile.start + profile.steps - 1 > train.steps:
        raise ConfigError(
            f"{file}: train.profile traces the steps {profile.start} to {profile.start + profile.steps - 1}, but "
            f"train.steps is {train.steps}. Remedy: an earlier start, or fewer steps to trace."
        )
