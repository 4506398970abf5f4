"""Checks of a run's configuration that need more than one key, or that only some commands would meet."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpar.app.data_config import check_blend
from jaxpar.app.server_config import check_run, server_config
from jaxpar.errors import ConfigError, prefixed

if TYPE_CHECKING:
    from jaxpar.app.config import CheckpointConfig, RunConfig, SpikeConfig, TrainConfig


def check(config: RunConfig, file: Path) -> None:
    """Raises an error for values that only some commands use, or that contradict each other, so that all refuse them.

    Raises:
      ConfigError: it names the keys.
    """
    check_blend(config.data, file)
    _check_spike(config.train.spike, file)
    _check_checkpoint(config.checkpoint, config.train, file)
    if config.parallel.parameter_server is not None:
        with prefixed(f"{file}: "):
            check_run(config, server_config(config.parallel.parameter_server))


def _check_checkpoint(checkpoint: CheckpointConfig | None, train: TrainConfig, file: Path) -> None:
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


def _check_spike(spike: SpikeConfig | None, file: Path) -> None:
    if spike is not None and spike.sigmas is not None and spike.factor is not None:
        raise ConfigError(
            f"{file}: train.spike.sigmas={spike.sigmas:g} and train.spike.factor={spike.factor:g} are mutually "
            "exclusive: both define a spike. Remedy: leave one out."
        )
