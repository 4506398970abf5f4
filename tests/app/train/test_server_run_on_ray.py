"""``jaxpar train --servers N --workers N`` with Ray, as a command: a small run, and addresses that do not answer."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

LAYOUTS = Path(__file__).parents[3] / "configs" / "layouts"
RUN: dict[str, Any] = {
    "model": {"family": "llama", "preset": "tiny", "layers": 1, "embed": 16, "heads": 2, "head_dim": 8, "mlp": 24},
    "layout": str(LAYOUTS / "fsdp.yaml"),
    "cpu_devices": 2,
    "data": {"source": "synthetic", "batch": 16, "seq": 16},
    "train": {"steps": 4, "eval_every": 2, "eval_batches": 1},
    "checkpoint": {"keep": 1},
}


def _command(folder: Path, **table: Any) -> dict[str, Any]:
    """Arguments of ``subprocess`` for the command, with two servers and two workers."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**RUN, "output": str(folder / "out"), "parallel": {"parameter_server": table}}))
    words = [sys.executable, "-m", "jaxpar.app.cli", "train", str(file), "--servers", "2", "--workers", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"JAX_PLATFORMS": "cpu", "RAY_memory_usage_threshold": "1.0"}  # other processes may fill the memory
    return {"args": words, "env": environment, "text": True}


def _train(folder: Path, seconds: float, **table: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**_command(folder, **table), check=False, capture_output=True, timeout=seconds)


def test_a_run_on_a_ray_of_its_own(tmp_path: Path) -> None:
    found = _train(tmp_path, 400)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.startswith("ray starts on this machine\nservers 2, workers 2, synchronous\nstep 1 of 4  loss ")
    assert found.stdout.endswith("exit 0: finished and saved\n") and not found.stderr
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert len([record for record in records if "loss" in record]) == 4
    assert [record["step"] for record in records if "heldout_loss" in record] == [2, 4]
    assert (tmp_path / "out/checkpoints/4").is_dir()


def test_an_address_that_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    found = _train(tmp_path, 60, address=f"127.0.0.1:{port}")
    assert found.returncode == 75
    assert found.stdout == f"ray joins 127.0.0.1:{port}\n"
    assert found.stderr.startswith(f"LaunchError: no Ray cluster answers at 127.0.0.1:{port}: Connection refused. ")


def test_an_address_that_accepts_and_says_nothing(tmp_path: Path) -> None:
    """The error comes within 30 s after the command has begun to join."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        threading.Thread(target=lambda: [mute.accept() for _ in range(99)], daemon=True).start()
        port = mute.getsockname()[1]
        command = _command(tmp_path, address=f"127.0.0.1:{port}")
        with subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == f"ray joins 127.0.0.1:{port}\n"
            began = time.monotonic()
            error = process.communicate(timeout=120)[1]
            seconds = time.monotonic() - began
    assert process.returncode == 75
    assert re.search(
        rf"^LaunchError: no Ray cluster answers at 127\.0\.0\.1:{port}: it accepts connections, but no Ray answers "
        r"there\. Remedy: the address of a running cluster \(ray start --head\), and RAY_AUTH_MODE=token if it "
        r"requires a token; or leave the address out to start Ray on this machine\.$",
        error,
        re.MULTILINE,
    )
    assert seconds < 30, f"{seconds:.0f} s"
