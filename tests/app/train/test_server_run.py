"""``jaxpar train --servers N --workers N``: configurations that servers do not train, and small runs."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from error_texts import raises

import jaxpar as jp
from jaxpar.app.config import load_run
from jaxpar.app.console import RunConsole
from jaxpar.app.job import make_job
from jaxpar.app.optimizer_config import learning_rate
from jaxpar.app.server_config import ServerSettings
from jaxpar.app.train.launch import LaunchOptions, go
from jaxpar.app.train.server_run import _in_cluster, heldout_batches, job_program, worker_batches
from jaxpar.checkpoint.manager import CheckpointManager
from jaxpar.errors import ConfigError, LaunchError
from jaxpar.parameter_server import ServerConfig

LAYOUTS = Path(__file__).parents[3] / "configs" / "layouts"
RUN: dict[str, Any] = {
    "model": {"family": "llama", "preset": "tiny", "layers": 1, "embed": 16, "heads": 2, "head_dim": 8, "mlp": 24},
    "layout": str(LAYOUTS / "fsdp.yaml"),
    "cpu_devices": 8,
    "data": {"source": "synthetic", "batch": 16, "seq": 16},
    "train": {"steps": 4, "eval_every": 2, "eval_batches": 1},
}


def _file(folder: Path, **changes: Any) -> Path:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**RUN, "output": str(folder / "out"), **changes}))
    return file


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (["optimizer.name=one_bit_adam"], "optimizer.name"),
        (["train.init_from=x"], "train.init_from"),
        (["data.batch=10"], "data.batch"),
    ],
)
def test_runs_that_servers_do_not_train(settings: list[str], name: str, tmp_path: Path) -> None:
    file = _file(tmp_path)
    with raises(ConfigError, name):  # every command reads the configuration so
        load_run(file, [*settings, "parallel.parameter_server={servers: 2, workers: 4}"])
    with raises(ConfigError, name):
        go(file, settings, LaunchOptions(servers=2, workers=4))


def test_bad_numbers_and_options(tmp_path: Path) -> None:
    with raises(ConfigError, "run.yaml", "parameter_server: servers must"):
        go(_file(tmp_path), (), LaunchOptions(servers=0))
    with raises(LaunchError, "--processes", "share"):
        go(_file(tmp_path), (), LaunchOptions(processes=2, workers=2))


LINEAR = """
import jax.numpy as jnp, numpy as np

def make(key):
    return {"w": jnp.arange(3, dtype=jnp.float32)}

def loss(model, batch):
    return ((batch["x"] @ model["w"] - batch["y"]) ** 2).mean()

def points(split):
    x = np.random.default_rng(split == "train").standard_normal((48, 3)).astype(np.float32)
    return {"x": x, "y": x[:, 0]}
"""
OWN: dict[str, Any] = {
    "model": {"factory": "linear_points:make", "loss": "linear_points:loss"},
    "data": {"factory": "linear_points:points", "batch": 16},
    "rules": {"features": None},
    "optimizer": {"name": "sgd", "learning_rate": 0.2, "warmup": 2, "clip_norm": None},
    "train": {"steps": 3, "eval_every": 2, "eval_batches": 2},
    "checkpoint": {"keep": 1},
}


@pytest.fixture
def linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The configuration of a run with a model of three numbers, beside its module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "linear_points.py").write_text(LINEAR)
    yield _file(tmp_path, **OWN, parallel={"parameter_server": {"cluster": "threads"}})
    sys.modules.pop("linear_points", None)


def _gradient(w: np.ndarray, batch: Any) -> np.ndarray:
    x, y = np.asarray(batch["x"], np.float64), np.asarray(batch["y"], np.float64)
    return np.asarray(2 * (x @ w - y) @ x / len(y))


def _loss(w: np.ndarray, batch: Any) -> float:
    return float(((np.asarray(batch["x"], np.float64) @ w - np.asarray(batch["y"])) ** 2).mean())


def test_a_run_of_any_model_is_that_of_one_process(
    linear: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGD by hand on the run's whole batches: parameters, losses, held-out losses, and what is printed and saved."""
    assert go(linear, (), LaunchOptions(servers=2, workers=2)) == 0
    job = make_job(load_run(linear))
    read, heldout = worker_batches(job, 0, 1), heldout_batches(job)
    w, losses, evals = np.arange(3.0), [], {}
    for step in range(3):
        batch = read(step)
        losses.append(_loss(w, batch))
        w = w - float(learning_rate(job.config.optimizer, 3)(step)) * _gradient(w, batch)
        evals[step + 1] = float(np.mean([_loss(w, batch) for batch in heldout]))
    assert read(2) is not None and len(heldout) == 2  # a step may be read again
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [r["loss"] for r in records if "loss" in r] == pytest.approx(losses, rel=1e-5)
    found = {record["step"]: record["heldout_loss"] for record in records if "heldout_loss" in record}
    assert found == {step: pytest.approx(evals[step], rel=1e-5) for step in (2, 3)}
    like = jp.abstract_state(job.layout(), job.make_model, optax.set_to_zero())  # servers have the optimizer's state
    with CheckpointManager(tmp_path / "out/checkpoints") as manager:
        saved = manager.restore(3, like)
    np.testing.assert_allclose(np.asarray(saved.state.params["w"]), w, rtol=1e-5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "servers 2, workers 2, synchronous"
    assert [re.sub(r" \d+ s$", " 0 s", line) for line in lines if re.match(r"step \d", line)] == [
        f"step 1 of 3  loss {losses[0]:.4f}  0 s",
        f"step 2  held-out loss {evals[2]:.4f}",
        f"step 2 of 3  loss {losses[1]:.4f}  0 s",
        f"step 3 of 3  loss {losses[2]:.4f}  0 s",
    ]
    assert lines[-4:] == [
        f"held-out loss     {evals[3]:.4f}",
        "worker 0          pushed 0.00 MiB, pulled 0.00 MiB, staleness at most 0",
        "worker 1          pushed 0.00 MiB, pulled 0.00 MiB, staleness at most 0",
        f"written           {tmp_path}/out/metrics.jsonl",
    ]


def test_the_schedule_of_a_mode_without_rounds_counts_the_steps_of_all_workers(linear: Path) -> None:
    """A server updates once for each push, so three workers stretch warmup and decay by three."""
    rate = lambda program, step: float(program.tx.update({"w": np.float32(1)}, _counted(program.tx, step))[0]["w"])
    one, three = (
        job_program(str(linear), (), ServerConfig(mode, workers=3)) for mode in ("synchronous", "asynchronous")
    )
    assert [rate(three, 3 * step) for step in (0, 1, 2, 3)] == pytest.approx([rate(one, step) for step in (0, 1, 2, 3)])
    assert rate(one, 1) == pytest.approx(-0.1) and rate(three, 1) == pytest.approx(-0.1 / 3)


def _counted(tx: Any, step: int) -> Any:
    """The state of an optimizer after so many updates."""
    state = tx.init({"w": np.float32(0)})
    return jax.tree.map(
        lambda x: jnp.full_like(x, step) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.integer) else x, state
    )


def test_a_run_says_which_ray_it_is_in(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A Ray that this process is in already stays in use; the address is tried in any case."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for table in (ServerSettings(), ServerSettings(address=address)):
            with _in_cluster(table, ServerConfig(), RunConsole()):
                pass
    with pytest.raises(LaunchError, match="Connection refused"), _in_cluster(table, ServerConfig(), RunConsole()):
        pass
    assert capsys.readouterr().out == f"ray starts on this machine\n{2 * f'ray joins {address}\n'}"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["synchronous", "local_sgd"])
def test_a_run_of_the_command_line(mode: str, tmp_path: Path) -> None:
    table = {"mode": mode, "cluster": "threads", **({"sync_every": 2} if mode == "local_sgd" else {})}
    file = _file(tmp_path, parallel={"parameter_server": table}, checkpoint={"keep": 1})
    assert go(file, (), LaunchOptions(servers=2, workers=2)) == 0
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == (2 if mode == "local_sgd" else 4) and losses[-1] < losses[0]
    assert [record["step"] for record in records if "heldout_loss" in record] == [2, 4]
    assert (tmp_path / "out/checkpoints/4").is_dir()


@pytest.mark.slow
def test_ray_is_imported_only_by_a_run() -> None:
    code = "import sys, jaxpar.app.cli, jaxpar.app.train.launch; print(sorted({'ray', 'jax'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    code = "import sys, jaxpar; jaxpar.parameter_server.ServerRun; print('ray' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
