"""How servers that Ray has lost are reported and found again; actors are objects of this process, so it needs no Ray."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server_cases import named, one_process, same, table_program

from jaxpar.errors import LaunchError, ModelError
from jaxpar.parameter_server import ServerConfig, ray_cluster
from jaxpar.parameter_server.cluster import RunFiles
from jaxpar.parameter_server.controller import Controller
from jaxpar.parameter_server.ray_cluster import RayServer, RayTrainer, RayTransport
from jaxpar.parameter_server.service import Coordinator
from jaxpar.parameter_server.transport import ServerLost


class _ActorError(Exception):
    pass


class _TaskError(Exception):
    def __init__(self, cause: Exception):
        super().__init__("a trace of several lines")
        self.cause = cause


class _Timeout(Exception):
    pass


class _Method:
    """``actor.method.remote(...)`` returns a call, which ``get`` makes."""

    def __init__(self, call: Callable[..., Any]):
        self.remote = lambda *arguments: lambda: call(*arguments)


class _Actors:
    """The part of ray that a transport uses, and actors by name."""

    exceptions = SimpleNamespace(
        RayActorError=_ActorError, RayTaskError=_TaskError, GetTimeoutError=_Timeout, ObjectLostError=_Timeout
    )

    def __init__(self, **actors: Any):
        self.actors, self.sought = actors, list[str]()

    def get_actor(self, name: str, namespace: str) -> Any:
        assert namespace == "run"
        self.sought.append(name)
        if name.replace("-", "_") not in self.actors:
            raise ValueError(f"Failed to look up actor '{name}'.\nIt may have died.")
        actor = self.actors[name.replace("-", "_")]
        return SimpleNamespace(**{n: _Method(getattr(actor, n)) for n in dir(actor) if not n.startswith("_")})

    def get(self, call: Callable[[], Any], timeout: float) -> Any:
        return call()


def _raise(error: Exception) -> Any:
    raise error


def test_a_server_that_is_lost_is_an_answer_and_is_looked_up_again() -> None:
    answers: list[Any] = [_ActorError("The actor died.\nwith a trace"), _Timeout(), "back"]
    one = SimpleNamespace(push=lambda step: _raise(x) if isinstance(x := answers.pop(0), Exception) else (x, step))
    actors = _Actors(server_0=SimpleNamespace(push=lambda step: step + 1), server_1=one)
    transport = RayTransport(actors, "run")
    calls = {number: ("push", (4,)) for number in (0, 1, 2)}
    gone = ServerLost("Failed to look up actor 'server-2'")
    assert transport.ask(calls) == {0: 5, 1: ServerLost("The actor died"), 2: gone}
    assert transport.ask(calls) == {0: 5, 1: ServerLost("_Timeout"), 2: gone}
    actors.actors["server_2"] = actors.actors["server_0"]
    assert transport.ask(calls) == {0: 5, 1: ("back", 4), 2: 5}
    assert [actors.sought.count(f"server-{number}") for number in range(3)] == [1, 3, 3]


def test_an_error_of_a_server_has_its_type() -> None:
    actors = _Actors(server_0=SimpleNamespace(push=lambda: _raise(_TaskError(ModelError("another model")))))
    with pytest.raises(ModelError, match="^another model$"):
        RayTransport(actors, "run").ask({0: ("push", ())})


def test_the_coordinator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [_ActorError("The actor died."), "epoch 3"]
    coordinator = SimpleNamespace(membership=lambda: _raise(x) if isinstance(x := answers.pop(0), Exception) else x)
    actors = _Actors(coordinator=coordinator)
    assert RayTransport(actors, "run").coordinator("membership") == "epoch 3"
    assert actors.sought == ["coordinator"] * 2
    monkeypatch.setattr(ray_cluster, "_PATIENT", 0.0)
    with pytest.raises(LaunchError) as error:
        RayTransport(_Actors(), "run").coordinator("membership")
    assert str(error.value) == "the run's coordinator does not answer: Failed to look up actor 'coordinator'."


def test_a_worker_and_its_server_as_actors_compute_what_one_process_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actors get a folder and a function that makes the program; one that is started again goes on from there."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    config, done = ServerConfig(servers=1, workers=1), list[Any]()
    program = dataclasses.replace(table_program(12, 12, sparse=False), finish=done.append)
    place = str(tmp_path), lambda: program, config
    coordinator = Coordinator(str(RunFiles(tmp_path).membership))
    actors = _Actors(coordinator=coordinator, server_0=RayServer(0, *place))
    monkeypatch.setitem(sys.modules, "ray", actors)
    Controller(RayTransport(actors, "run"), config).begin(program.pieces(config))
    report = RayTrainer(0, *place, "run").run(2)
    assert list(report.losses) == [0, 1] and coordinator.take_reports()[1][:2] == (0, 2)
    actors.actors["server_0"].call("close")
    actors.actors["server_0"] = RayServer(0, *place)
    trainer = RayTrainer(0, *place, "run")
    assert list(trainer.run(5).losses) == [2, 3, 4] and trainer.finish(5) == {}
    assert same(named(done[0].params), one_process(program, 5, lambda step: [0]))
    assert trainer.pid() == actors.actors["server_0"].pid() == os.getpid()
