"""Servers and workers as actors of one local Ray: killed with SIGKILL, with typed errors, without traces."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optax
import pytest
import server_cases
from server_cases import nnx_program, one_process, same

from jaxpar.errors import LaunchError, ModelError
from jaxpar.parameter_server import ServerConfig, ServerRun
from jaxpar.parameter_server.ray_start import connect

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # starting Ray takes 15 s; its own warnings


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One Ray with little: 2 CPUs, a small object store."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("RAY_memory_usage_threshold", "1.0")  # what others do on this machine is not its business
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    connect(None, 2, object_store_bytes=100 * 2**20)
    ray.cloudpickle.register_pickle_by_value(server_cases)
    yield
    ray.cloudpickle.unregister_pickle_by_value(server_cases)
    ray.shutdown()
    monkeypatch.undo()


def _run(program: Any, folder: Path, steps: int, **options: Any) -> ServerRun:
    config = ServerConfig(servers=2, workers=2, snapshot_every=5)
    return ServerRun(lambda: program, config, steps=steps, folder=folder, worker_resources={"CPU": 0.5}, **options)


def test_a_server_and_a_worker_that_are_killed_change_no_bit(cluster: None, tmp_path: Path) -> None:
    program, seen = nnx_program(optax.adamw(1e-2)), {0: 0}
    with _run(program, tmp_path, 25, on_report=lambda worker, step, figures: seen.update({worker: step})) as going:
        actors: Any = going.cluster
        victims = [(4, "server-1"), (12, "worker-0")]
        pids = [actors.pid(f"server-{n}") for n in range(2)]
        while going.poll():
            if victims and seen[0] >= victims[0][0]:
                _, name = victims.pop(0)
                os.kill(actors.pid(name), signal.SIGKILL)
        result = going.wait()
        assert not victims and actors.pid("server-0") == pids[0] and actors.pid("server-1") != pids[1]
        pids = [actors.pid(name) for name in ("server-0", "server-1", "worker-0", "worker-1")]
    assert same(result.params, one_process(program, 25, lambda step: [0, 1]))
    assert result.staleness.keys() == {0}
    until = time.monotonic() + 20
    while any(_alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_error_of_a_worker_has_its_type(cluster: None, tmp_path: Path) -> None:
    def broken(model: Any, batch: Any) -> Any:
        return batch["x"]  # no scalar

    program = nnx_program(optax.sgd(0.1), loss_fn=broken)
    with _run(program, tmp_path, 2) as going, pytest.raises(ModelError, match="loss_fn"):
        going.wait()


def test_an_address_that_accepts_and_says_nothing_is_reported_within_30_seconds() -> None:
    ray.shutdown()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        threading.Thread(target=lambda: [mute.accept() for _ in range(9)], daemon=True).start()
        began = time.monotonic()
        with pytest.raises(LaunchError, match="127.0.0.1"):
            connect(f"127.0.0.1:{mute.getsockname()[1]}", 1)
        assert time.monotonic() - began < 30
