"""Tests the supervisor on local Ray clusters: processes, actors and nodes are lost, and a node joins; needs Ray."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_texts import raises
from run_processes import ROOT, TrainProcess

from jaxpar.app.launch.supervisor import Policy, Supervisor
from jaxpar.errors import LaunchError

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own warnings

CHILD = """
import json, os, signal, sys, time
rank, attempt, total = (int(word) for word in sys.argv[1:4])
def say(**message): os.write(int(os.environ["JAXPAR_BEATS"]), (json.dumps(message) + "\\n").encode())
say(step=5)
if rank == 0: print("attempt", attempt, "of", total, flush=True)
if attempt == 1 and rank == 1: time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)
if attempt == 2 and rank == 1: time.sleep(1); os.kill(os.getppid(), signal.SIGKILL)
if attempt < 3: time.sleep(60)
"""
RUN: dict[str, Any] = {
    "model": {"family": "llama", "preset": "tiny", "layers": 1, "embed": 16, "heads": 2, "head_dim": 8, "mlp": 24},
    "layout": str(ROOT / "configs" / "layouts" / "fsdp.yaml"),
    "data": {"source": "synthetic", "batch": 8, "seq": 16},
    "train": {"steps": 600, "eval_every": 600, "eval_batches": 1},
    "checkpoint": {"save_interval_steps": 20, "keep": 100},
    "supervise": {"restarts": 5, "step_timeout": 60, "elastic": True},
}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from jaxpar.app.launch.ray import RayGroup

    shown: list[str] = []
    os.environ["RAY_AUTH_MODE"] = "disabled"  # which a Ray of its own does not heed
    made = RayGroup(tmp_path_factory.mktemp("run") / "logs", show=shown.append, patience=60)
    made.shown = shown  # type: ignore[attr-defined]
    assert os.environ.pop("RAY_AUTH_MODE") == "token"  # set by Ray
    yield made
    ray.shutdown()


def test_processes_and_actors_that_are_lost_are_named(group: Any) -> None:
    lines: list[str] = []
    attempts: list[int] = []

    def command(rank: int, total: int, address: str) -> list[str]:
        if rank == 0:
            attempts.append(total)
            assert re.fullmatch(r"127\.0\.0\.[12]:\d+", address)
        return [sys.executable, "-S", "-c", CHILD, str(rank), str(len(attempts)), str(total)]

    group._resources = {"CPU": 0.5}
    supervisor = Supervisor(group, command, 2, Policy(restart_delay=0), tell=lines.append)
    assert supervisor.run() == 0 and attempts == [2, 2, 2]
    assert lines[0] == "process 1 of 2 was killed by SIGKILL after step 5"
    assert "process 1 of 2 was lost with its Ray worker after step 5" in lines
    assert "".join(group.shown) == "attempt 1 of 2\nattempt 2 of 2\nattempt 3 of 2\n"


def test_a_cluster_without_a_place_is_said(group: Any) -> None:
    group._resources, group._patience = {"CPU": 1, "moon": 1}, 2.0
    with raises(LaunchError, "'moon': 1"):
        group.start(lambda rank, total, address: [sys.executable, "-c", ""], 2)


@pytest.mark.slow
def test_a_ray_of_its_own_admits_nobody_without_its_token(group: Any) -> None:
    """Its daemons listen on every interface, so this holds whatever ``RAY_AUTH_MODE`` says."""
    address = ray.get_runtime_context().gcs_address
    join = f"import ray; ray.init({address!r}, log_to_driver=False); print('joined')"
    for change, joined in (
        ({"RAY_AUTH_MODE": "token"}, True),
        ({"RAY_AUTH_MODE": "disabled"}, False),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, False),
    ):
        done = subprocess.run(
            [sys.executable, "-c", join], env={**os.environ, **change}, capture_output=True, text=True, check=False
        )
        assert ("joined" in done.stdout) is joined and (done.returncode == 0) is joined, done.stderr


@pytest.mark.slow
def test_a_run_continues_on_the_nodes_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes with room for one process each: one is lost, later another joins; every loss is that of one device."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.delenv("XLA_FLAGS")  # the nodes would inherit the devices of this test session
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2", include_dashboard=False)
        second = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.3")
        config, words = {**RUN, "cpu_devices": 2}, ("--ray", "--processes", "2")
        run = TrainProcess(tmp_path / "ray", config, *words, RAY_ADDRESS=cluster.address)
        run.wait_for(lambda: run.reached(50))
        os.kill(second.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        found = run.wait_for(lambda: run.printed(r"^restart 1 of 5 in 1 s: 1 process from step (\d+)$"))
        assert found and int(found[1]) >= 20
        assert run.printed(r"^process [01] of 2 was lost with its Ray node 127\.0\.0\.3 after step \d+$")
        run.wait_for(lambda: run.printed(rf"(?s)^resumed from step {found[1]} .*^step \d+/600 "))
        cluster.add_node(num_cpus=1, node_ip_address="127.0.0.4")
        os.kill(training(run.config), signal.SIGKILL)
        run.wait_for(lambda: run.printed(r"^restart 2 of 5 in 2 s: 2 processes from step \d+$"))
        assert run.end() == 0, run.screen()
        assert run.printed(r"^process 0 of 1 was killed by SIGKILL after step \d+$")
        assert run.printed(r"^done after 2 restarts in \d+ s:$")
    finally:
        cluster.shutdown()
    alone = TrainProcess(tmp_path / "alone", {**RUN, "cpu_devices": 1})
    assert alone.end() == 0, alone.screen()
    assert list(run.losses()) == list(alone.losses()) == list(range(1, 601))
    np.testing.assert_allclose(list(run.losses().values()), list(alone.losses().values()), rtol=1e-5)


def training(config: Path) -> int:
    """Returns the id of the one process that trains."""
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(config).encode() in words and b"--process-count" in words:
            return int(folder.name)
    raise AssertionError("no process trains")
