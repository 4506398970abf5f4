"""Processes on Ray: their worker, the nodes that answer, and errors; a module with a few functions stands for Ray."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from error_texts import raises

from jaxpar.app.launch import ray as ray_group
from jaxpar.app.launch.peers import Peer
from jaxpar.app.launch.ray import RayGroup, RayWorker
from jaxpar.errors import LaunchError


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A Ray that runs; tests add what it says."""
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    module = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "ray", module)
    return module


@pytest.fixture
def group(ray: SimpleNamespace, tmp_path: Path) -> RayGroup:
    return RayGroup(tmp_path / "logs", patience=30)


def test_the_nodes_that_answer_have_room(group: Any, ray: SimpleNamespace) -> None:
    """A node that Ray still takes for alive, but that refuses a connection, has none."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as closed:
        ports = [listener.getsockname()[1] for listener in (server, closed)]
        closed.close()
        alive = {"Alive": True, "NodeManagerAddress": "127.0.0.1", "Resources": {"CPU": 5.0, "GPU": 2.0}}
        nodes = [{**alive, "NodeManagerPort": port} for port in ports] + [{"Alive": False}]
        ray.nodes = lambda: nodes
        for resources, room in (({"CPU": 1}, 4), ({"CPU": 2}, 2), ({"CPU": 1, "GPU": 2}, 1)):
            group._resources = resources
            assert group.room(1, 4) == room
        group._resources, group._patience = {"TPU": 4}, 0.0
        assert group.room(1, 4) == 0


def test_the_nodes_of_silent_processes_are_tried(
    group: Any, ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that refuses a connection is lost; one that does not answer is only named."""
    node = {"Alive": True, "NodeManagerAddress": "127.0.0.5", "NodeManagerPort": 1}
    nodes = [{**node, "NodeID": "a"}, {**node, "NodeID": "b", "NodeManagerAddress": "127.0.0.6"}]

    def connect(address: tuple[str, int], timeout: float) -> Any:
        raise ConnectionRefusedError if address == ("127.0.0.5", 1) else TimeoutError

    ray.nodes = lambda: nodes
    monkeypatch.setattr(socket, "create_connection", connect)
    group.peers = [Peer(0, 0.0), Peer(1, 0.0), Peer(2, 8.0)]
    group._nodes, group._pending = dict(enumerate("aba")), dict.fromkeys(range(3))
    group._probe(10.0)
    assert [peer.lost for peer in group.peers] == ["was lost with its Ray node 127.0.0.5", None, None]
    assert group.peers[1].silent == "and its Ray node 127.0.0.6 does not answer" and list(group._pending) == [1, 2]
    nodes.clear()
    group._probe(10.5)  # within a second of the last time
    assert group.peers[1].lost is None
    group._probe(11.5)
    assert group.peers[1].lost == "was lost with its Ray node "  # Ray no longer knows it


def test_a_ray_that_cannot_be_reached_or_started(
    ray: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        calls.append(options)
        raise ConnectionError("Could not find any running instance.\nTry again." if len(calls) == 1 else "")

    ray.is_initialized, ray.init = lambda: False, init
    near = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
    own = {"address": "local", "_node_ip_address": near, "include_dashboard": False}
    for why, options in (("Could", own), ("ConnectionError", {})):
        with raises(LaunchError, why):
            RayGroup(tmp_path)
        assert calls[-1] == {"log_to_driver": False, **options}
        assert ("RAY_AUTH_MODE" in os.environ) is (options == {})  # a Ray of its own requires a token
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


CHILD = """
import json, os, sys, time
os.write(int(os.environ["JAXPAR_BEATS"]), json.dumps({"step": 5}).encode() + b"\\n")
print(os.getcwd(), os.environ["COLOR"], sys.argv[1:], flush=True)
time.sleep(60)
"""


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``workers(rank, again=False)``: a worker of two, in the folder ``here``."""
    made: list[RayWorker] = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()

    def make(rank: int, *, again: bool = False) -> RayWorker:
        variables = {"COLOR": "blue", "PATH": None}
        made.append(RayWorker(rank, 2, str(tmp_path / "logs"), str(tmp_path / "here"), variables, again=again))
        return made[-1]

    yield make
    for worker in made:
        worker.end()


def _until(worker: RayWorker, ready: Any) -> tuple[dict[str, Any], str]:
    """The state of its process once that is ready, and what was printed up to there."""
    text = ""
    for _ in range(300):
        state, new = worker.poll(0.1)
        text += new
        if ready(state, text):
            return state, text
    raise AssertionError((state, text))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_runs_a_process_and_hands_on_its_state(rank: int, workers: Any, tmp_path: Path) -> None:
    """Only the output of process 0 is handed on, each part once; a log of an earlier attempt is kept, and not shown."""
    worker, command = workers(rank), [sys.executable, "-S", "-c", CHILD]
    worker.start([*command, "first"])
    line = f"{tmp_path / 'here'} blue ['{{}}']"
    state, text = _until(
        worker, lambda state, text: state["step"] == 5 and (worker.tail(1) if rank else text.endswith("\n"))
    )
    assert text == ("" if rank else line.format("first") + "\n") and state["rank"] == rank
    assert 0 <= state["sign"] < 30 and worker.tail(3) == [line.format("first")]  # an age, for another clock
    assert worker.poll(0.0)[1] == ""
    worker.pass_on(signal.SIGTERM)
    assert _until(worker, lambda state, text: state["code"] is not None)[0]["code"] == -signal.SIGTERM
    again = workers(rank, again=True)
    again.start([*command, "second"])
    _, text = _until(again, lambda state, text: again.tail(9)[1:] and (rank or text))
    assert text == ("" if rank else line.format("second") + "\n")
    assert again.tail(9) == [line.format("first"), line.format("second")]


def test_a_worker_names_a_free_address_of_its_node(workers: Any, ray: SimpleNamespace) -> None:
    ray.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "node7")
    address, node = workers(0).address()
    host, port = re.fullmatch(r"(.+):(\d+)", address).groups()  # type: ignore[union-attr]
    assert (host, node) == ("127.0.0.1", "node7")
    socket.create_server((host, int(port))).close()


class _ActorError(Exception):
    pass


class _Timeout(Exception):
    pass


class _Member:
    """An actor whose methods return, or raise, what was given for them."""

    def __init__(self, **answers: Any):
        self._answers, self.asked = answers, list[tuple[Any, ...]]()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.asked.append((name, *arguments))
            answer = self._answers.get(name)
            return lambda: answer  # for ``get``

        return SimpleNamespace(remote=call)


def _get(refs: Any, timeout: float | None = None) -> Any:
    if isinstance(refs, list):
        return [_get(ref) for ref in refs]
    if isinstance(answer := refs(), Exception):
        raise answer
    return answer


def _with_members(ray: SimpleNamespace, members: list[_Member]) -> list[dict[str, Any]]:
    """Lets Ray make these actors; returns the options and arguments of each."""
    made: list[dict[str, Any]] = []

    def remote(kind: type) -> Any:
        assert kind is RayWorker

        def make(*arguments: Any, again: bool) -> _Member:
            made.append({"options": options, "arguments": arguments, "again": again})
            return members[len(made) - 1]

        options: dict[str, Any] = {}
        return SimpleNamespace(options=lambda **given: (options.update(given), SimpleNamespace(remote=make))[1])

    ray.remote, ray.get, ray.killed = remote, _get, []
    ray.kill = ray.killed.append
    ray.wait = lambda refs, num_returns, timeout: (refs, [])
    ray.exceptions = SimpleNamespace(RayActorError=_ActorError, RayError=_ActorError, GetTimeoutError=_Timeout)
    ray.cluster_resources = lambda: {"CPU": 1.0, "node:10.0.0.1": 1.0, "memory": 5e9}
    return made


def _start(group: RayGroup) -> list[tuple[int, int, str]]:
    commands: list[tuple[int, int, str]] = []
    group.start(lambda *place: (commands.append(place), [f"run{place[0]}"])[1], 2)
    return commands


def test_processes_get_the_environment_and_the_address_of_the_first(
    ray: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(ray_group._CARRIED)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_FLAGS", "--a")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--b")
    members = [
        _Member(address=("10.0.0.1:5", "a"), poll=({"rank": 0, "step": 7, "tick": 0.0}, "step 7\n"), tail=["x", "y"]),
        _Member(address=("10.0.0.2:6", "b"), poll=_ActorError(), printed="not process 0"),
    ]
    shown: list[str] = []
    made = _with_members(ray, members)
    resources = {"CPU": 2, "GPU": 1, "TPU-v5e": 4}
    group: Any = RayGroup(
        tmp_path, variables=lambda rank: {"XLA_FLAGS": f"--r{rank}"}, resources=resources, show=shown.append
    )
    assert _start(group) == [(0, 2, "10.0.0.1:5"), (1, 2, "10.0.0.1:5")]
    placed = {"scheduling_strategy": "SPREAD", "max_concurrency": 1, "resources": {"TPU-v5e": 4}}
    for rank, (member, actor) in enumerate(zip(members, made, strict=True)):
        assert actor["options"] == {**placed, "num_cpus": 2, "num_gpus": 1} and not actor["again"]
        variables = {"XLA_FLAGS": f"--r{rank}", "LIBTPU_INIT_ARGS": "--b"}
        assert actor["arguments"] == (rank, 2, str(tmp_path), os.getcwd(), variables)
        assert member.asked == [("address",), ("start", [f"run{rank}"])]
    ray.nodes = lambda: [{"NodeID": "b", "Alive": False, "NodeManagerAddress": "10.0.0.2"}]
    group.poll(0.0)
    assert group.peers[0].step == 7 and shown == ["step 7\n"]
    assert group.peers[1].lost == "was lost with its Ray node 10.0.0.2"
    assert group.tail(0, 2) == ["x", "y"] and group.tail(1, 2) == []
    members[0]._answers["tail"] = _ActorError()
    assert group.tail(0, 2) == []
    group.pass_on(signal.SIGTERM)
    assert members[0].asked[-1] == ("pass_on", signal.SIGTERM) and members[1].asked[-1] == ("poll", 0.0)
    members[0]._answers["printed"] = "last words\n"
    group.end()
    assert shown == ["step 7\n", "last words\n"] and ray.killed == members[:1]
    group.poll(0.0)  # of nobody
    assert group.tail(0, 2) == []


@pytest.mark.parametrize(
    ("first", "name"),
    [
        (_Timeout(), "CPU"),
        (_ActorError("a trace\nRuntimeError: no disk\n"), "RuntimeError"),
    ],
)
def test_processes_that_are_not_placed_or_started(
    first: Exception, name: str, group: RayGroup, ray: SimpleNamespace
) -> None:
    members = [_Member(address=first), _Member(address=("10.0.0.2:6", "b"))]
    _with_members(ray, members)
    with raises(LaunchError, name):
        _start(group)
    assert ray.killed == members
