"""Servers and workers as actors: lost, started again, found again, in errors. They are objects of this process."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from error_texts import raises
from ray_actors import ActorError, Actors, ActorUnavailable, TaskError, Timeout
from server_cases import one_process, same, table_program

from jaxpar.errors import DamagedError, LaunchError, ModelError
from jaxpar.parameter_server import ServerConfig, ServerRun, ray_cluster
from jaxpar.parameter_server.cluster import RunFiles
from jaxpar.parameter_server.ray_cluster import RayCluster, RayTrainer, RayTransport
from jaxpar.parameter_server.transport import ServerLost


def _raise(error: Exception) -> Any:
    raise error


def test_a_server_that_is_lost_is_an_answer_and_is_looked_up_again() -> None:
    answers: list[Any] = [ActorError("The actor died.\nwith a trace"), Timeout(), "back"]
    one = SimpleNamespace(push=lambda step: _raise(x) if isinstance(x := answers.pop(0), Exception) else (x, step))
    actors = Actors(server_0=SimpleNamespace(push=lambda step: step + 1), server_1=one)
    transport = RayTransport(actors, "run")
    calls = {number: ("push", (4,)) for number in (0, 1, 2)}
    gone = ServerLost("Failed to look up actor 'server-2'")
    assert transport.ask(calls) == {0: 5, 1: ServerLost("The actor died"), 2: gone}
    assert transport.ask(calls) == {0: 5, 1: ServerLost("Timeout"), 2: gone}
    actors.actors["server-2"] = actors.actors["server-0"]
    assert transport.ask(calls) == {0: 5, 1: ("back", 4), 2: 5}
    assert [actors.sought.count(f"server-{number}") for number in range(3)] == [1, 3, 3]


def test_an_error_of_a_server_has_its_type() -> None:
    actors = Actors(server_0=SimpleNamespace(push=lambda: _raise(TaskError(ModelError("another model")))))
    with pytest.raises(ModelError, match="^another model$"):
        RayTransport(actors, "run").ask({0: ("push", ())})


def test_the_coordinator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [ActorError("The actor died."), "epoch 3"]
    coordinator = SimpleNamespace(membership=lambda: _raise(x) if isinstance(x := answers.pop(0), Exception) else x)
    actors = Actors(coordinator=coordinator)
    assert RayTransport(actors, "run").coordinator("membership") == "epoch 3"
    assert actors.sought == ["coordinator"] * 2
    monkeypatch.setattr(ray_cluster, "_PATIENT", 0.0)
    with raises(LaunchError, "coordinator", "answer"):
        RayTransport(Actors(), "run").coordinator("membership")


def _cluster(
    ray: Actors, folder: Path, monkeypatch: pytest.MonkeyPatch, resources: Any = None, **config: Any
) -> RayCluster:
    monkeypatch.setitem(sys.modules, "ray", ray)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    load: Any = lambda: table_program(12, 12, sparse=False)
    return RayCluster(
        RunFiles(folder), load, ServerConfig(**config), address=None, worker_resources=resources or {"CPU": 1}
    )


def test_a_run_whose_worker_is_lost_ends_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray is told about each actor, and that all of them are ended; the worker is lost in its second step."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    program, ray = table_program(12, 12, sparse=False), Actors()
    lost: list[Exception] = [ActorUnavailable("restarting"), ActorError("killed")]

    def batches(worker: int, workers: int) -> Any:
        read = program.batches(worker, workers)
        return lambda step: _raise(lost.pop()) if step == 1 and lost else read(step)

    monkeypatch.setitem(sys.modules, "ray", ray)
    config = ServerConfig(servers=2, workers=1, max_restarts=1)
    load = lambda: dataclasses.replace(program, batches=batches)
    where: Any = {"folder": tmp_path, "cluster": "ray", "worker_resources": {"CPU": 2, "GPU": 1, "TPU": 4}}
    with ServerRun(load, config, steps=3, **where) as going:
        result = going.wait()
        assert isinstance(going.cluster, RayCluster) and going.cluster.pid("server-1") == os.getpid()
    assert not lost and same(result.params, one_process(program, 3, lambda step: [0]))
    (namespace,) = {options.pop("namespace") for options in ray.options.values()}
    assert namespace.startswith("jaxpar-")
    (path,) = {options.pop("runtime_env")["env_vars"]["PYTHONPATH"] for options in ray.options.values()}
    assert path.split(os.pathsep) == [folder for folder in sys.path if folder]
    server = {"num_cpus": 0, "max_concurrency": 64, "max_restarts": 1}
    assert ray.options == {
        "coordinator": {"num_cpus": 0, "max_restarts": -1},
        "server-0": server,
        "server-1": server,
        "worker-0": {"num_cpus": 2, "num_gpus": 1, "resources": {"TPU": 4}, "max_concurrency": 2, "max_restarts": 1},
    }
    assert not ray.actors  # all were ended


def test_workers_that_are_lost_too_often_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Actors()
    cluster = _cluster(ray, tmp_path, monkeypatch, max_restarts=1)
    monkeypatch.setattr(RayTrainer, "run", lambda self, steps: _raise(ActorError("killed")))
    assert cluster.ended(0.0) == {}  # nobody runs yet
    cluster.launch_worker(3, 9)
    assert cluster.ended(0.0) == {}  # it is started again
    with raises(LaunchError, "workers were"):
        cluster.ended(0.0)
    cluster.stop_worker(3)
    assert list(ray.actors) == ["coordinator"]


@pytest.mark.parametrize(
    ("error", "kind", "name"),
    [
        (Timeout(), LaunchError, "CPU"),
        (TaskError(DamagedError("the log")), DamagedError, "the log"),
        (ActorError("The actor died:\nTraceback\nOSError: no disk\n"), LaunchError, "OSError"),
    ],
)
def test_a_server_that_does_not_start(
    error: Exception, kind: type[Exception], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "RayServer", _Silent)
    monkeypatch.setattr(_Silent, "error", error)
    with raises(kind, name):
        _cluster(Actors(), tmp_path, monkeypatch, patience=0.1).launch_server(0)


@pytest.mark.parametrize(
    ("error", "kind", "name"),
    [
        (ActorError("restarting"), LaunchError, "worker-0"),
        (TaskError(ModelError("another model")), ModelError, "another model"),
    ],
)
def test_a_worker_that_does_not_finish(
    error: Exception, kind: type[Exception], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "RayTrainer", _Silent)
    monkeypatch.setattr(_Silent, "error", error)
    cluster = _cluster(Actors(), tmp_path, monkeypatch, patience=0.1)
    cluster.launch_worker(0, 2)
    with raises(kind, name):
        cluster.finish(0, 2)


class _Silent:
    """An actor whose methods fail."""

    error: Exception = ActorError("lost")

    def __init__(self, *arguments: Any):
        pass

    def pid(self) -> int:
        raise self.error

    def run(self, steps: int) -> Any:
        raise self.error

    def finish(self, steps: int) -> Any:
        raise self.error
