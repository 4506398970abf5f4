"""Each number of a configuration: a run takes it, or every command refuses it with the same error."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from numeric_keys import VALUES, numeric_keys, with_value
from rich.console import Console

import jaxpar as jp
from jaxpar.app.cli import main
from jaxpar.app.config import load_run
from jaxpar.app.job import Job, make_job
from jaxpar.app.server_config import server_config
from jaxpar.app.train.checkpointing import Saver
from jaxpar.app.train.launch import policy_of
from jaxpar.app.train.process_sync import Stragglers
from jaxpar.app.train.spikes import LossWatch
from jaxpar.errors import JaxparError

COMMANDS = ("explain", "check", "verify", "train", "generate")
CHOSEN = {
    "checkpoint.keep": 0,
    "checkpoint.save_interval_steps": -5,
    "supervise.step_timeout": 0,
    "parallel.parameter_server.servers": -7,
    "optimizer.learning_rate": 0,
    "optimizer.final_lr_ratio": -3,
    "optimizer.options.{x}": 7,
    "generate.weights.group": 0,
    "parallel.reshard_after_forward": -5,
}
"""Values that only some commands refused."""


def file_of(folder: Path, key: str, value: Any) -> Path:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**with_value(key, value), "output": str(folder / "run")}))
    return file


def use(job: Job) -> None:
    """Makes what a run makes from its numbers after the configuration is read."""
    config = job.config
    policy_of(config)
    LossWatch(config.train.max_consecutive_nonfinite, config.train.spike)
    Stragglers(config.train.straggler)
    if config.parallel.parameter_server is not None:
        server_config(config.parallel.parameter_server)
    layout = job.layout(jax.devices()[: job.abstract_devices()])
    with Saver(job, layout, Console(file=io.StringIO())):
        pass
    sized = any(isinstance(size, int) for size in vars(job.fusion).values())  # which the compiler of CPUs does not take
    if not sized and not isinstance(job.pipeline, jp.pipeline.Asynchronous):
        jp.train_step(layout, job.loss_fn, **job.step_options())


def taken_or_refused(folder: Path, values: tuple[Any, ...]) -> tuple[int, int]:
    """How many values runs take, and how many are refused, after all that is made from those that are taken."""
    counts = [0, 0]
    for key in numeric_keys():
        for value in values:
            file = file_of(folder, key, value)
            try:
                job = make_job(load_run(file))
                job.layout(job.abstract_devices())
            except JaxparError:
                counts[1] += 1
                continue
            counts[0] += 1
            use(job)
    return counts[0], counts[1]


def test_what_a_configuration_takes_a_run_can_use(tmp_path: Path) -> None:
    taken, refused = taken_or_refused(tmp_path, (-5,))
    assert taken < 10 and refused > 100


@pytest.mark.slow
def test_what_a_configuration_takes_a_run_can_use_for_all_values(tmp_path: Path) -> None:
    taken, refused = taken_or_refused(tmp_path, VALUES)
    assert taken + refused == len(VALUES) * len(numeric_keys()) and taken > 100


def errors_of(folder: Path, key: str, value: Any, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The different errors of all commands."""
    file, errors = file_of(folder, key, value), set()
    for command in COMMANDS:
        words = ["--prompt", "a"] if command == "generate" else []
        assert main([command, str(file), *words]) == 2, (command, key, value)
        errors.add(capsys.readouterr().err.partition("\nexit 2: ")[0].rstrip())  # a line that `train` adds
    return errors


@pytest.mark.parametrize("key", CHOSEN)
def test_every_command_refuses_with_the_same_error(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(errors_of(tmp_path, key, CHOSEN[key], capsys)) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_every_command_refuses_every_wrong_number_with_the_same_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in numeric_keys():
        for value in VALUES:
            file = file_of(tmp_path, key, value)
            try:
                make_job(load_run(file))
            except JaxparError:
                if not key.startswith("parallel.pipeline"):  # `generate` needs no schedule
                    assert len(errors_of(tmp_path, key, value, capsys)) == 1, (key, value)
