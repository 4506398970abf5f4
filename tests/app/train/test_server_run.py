"""``jaxpar train --servers N --workers N``: configurations that servers do not train, and small runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxpar.app.config import load_run
from jaxpar.app.server_config import ServerSettings, server_config
from jaxpar.app.train.launch import LaunchOptions, go
from jaxpar.app.train.server_run import check_run
from jaxpar.errors import ConfigError, LaunchError

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
    ("settings", "text"),
    [
        (
            ["optimizer.name=one_bit_adam"],
            (
                "optimizer.name: one_bit_adam does not work with parallel.parameter_server, whose servers hold the "
                "optimizer state. Remedy: leave one of them out."
            ),
        ),
        (
            ["train.init_from=x"],
            (
                "train.init_from does not work with parallel.parameter_server, whose servers hold the optimizer state. "
                "Remedy: leave one of them out."
            ),
        ),
        (
            ["data.batch=10"],
            (
                "data.batch=10 is divided among the 4 workers of parallel.parameter_server, and is not a multiple of "
                "4. Remedy: data.batch: 12."
            ),
        ),
    ],
)
def test_runs_that_servers_do_not_train(settings: list[str], text: str, tmp_path: Path) -> None:
    run = load_run(_file(tmp_path), settings).config
    with pytest.raises(ConfigError) as error:
        check_run(run, server_config(ServerSettings(), 2, 4))
    assert str(error.value) == text


def test_bad_numbers_and_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        go(_file(tmp_path), (), LaunchOptions(servers=0))
    assert str(error.value) == (
        "parallel.parameter_server.servers must be an integer of at least 1, got 0. Remedy: servers: 1."
    )
    with pytest.raises(LaunchError) as launch:
        go(_file(tmp_path), (), LaunchOptions(processes=2, workers=2))
    assert str(launch.value) == (
        "--processes is for processes that share one model, but this run has parameter servers and workers. Remedy: "
        "leave it out; --workers N sets the number of workers."
    )


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
