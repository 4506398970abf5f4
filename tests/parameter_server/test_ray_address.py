"""Joining and starting a Ray cluster: what Ray is called with, retries, and errors; needs no Ray."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from error_texts import raises

from jaxpar.errors import LaunchError
from jaxpar.parameter_server import ray_start
from jaxpar.parameter_server.ray_start import connect, joined


def test_an_address_that_does_not_answer_is_reported_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with raises(LaunchError, "no Ray", "Connection"):
        connect(f"127.0.0.1:{port}", 1)
    with raises(LaunchError, "nowhere"):
        connect("nowhere", 1)


@pytest.fixture
def with_init(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """``with_init(init)`` puts a module ``ray`` in place that can only start and end; returns what it was called with.

    A call of ``shutdown`` is an empty entry.
    """
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def place(init: Callable[[], None] = lambda: None, *, started: bool = False) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def called(**options: Any) -> None:
            calls.append(options)
            init()

        module = SimpleNamespace(is_initialized=lambda: started, init=called, shutdown=lambda: calls.append({}))
        monkeypatch.setitem(sys.modules, "ray", module)
        return calls

    return place


@pytest.fixture
def address() -> Iterator[str]:
    """An address that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_cluster_is_joined_and_left(with_init: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, join = with_init(), {"log_to_driver": False, "logging_level": "ERROR"}
    with joined(address, 2):
        assert calls == [{"address": address, **join}]
        assert os.environ["RAY_AUTH_MODE"] == "disabled"  # as the cluster has it
    assert calls[1:] == [{}]
    monkeypatch.setenv("RAY_ADDRESS", address)
    calls = with_init()
    with pytest.raises(KeyboardInterrupt), joined(None, 2):
        raise KeyboardInterrupt
    assert calls == [{"address": address, **join}, {}]
    calls = with_init(started=True)
    with joined(address, 2):
        assert connect(None, 9)[1] is False
    assert not calls  # who had joined before leaves it, too


def test_an_address_where_no_ray_answers(with_init: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_version() -> None:
        raise RuntimeError("Version mismatch: the cluster has 1.0.\nSee the manual.")

    with_init(other_version)
    with raises(LaunchError, "no Ray", "1.0") as error:
        connect(address, 1)
    assert isinstance(error.value.__cause__, RuntimeError)
    end = threading.Event()
    with_init(lambda: end.wait(60) and None)
    monkeypatch.setattr(ray_start, "_JOIN", 0.1)
    monkeypatch.setattr(ray_start, "_LEAST", 0.1)
    with raises(LaunchError, "no Ray", "accepts"):
        connect(address, 1)
    end.set()


@pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")
def test_a_start_that_fails_is_tried_again_without_its_daemons(with_init: Any) -> None:
    """Ray fails twice and leaves a process each time; a process that ran before goes on."""
    wait = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    daemons: list[subprocess.Popen[bytes]] = []

    def fail_twice() -> None:
        if len(daemons) < 2:
            daemons.append(subprocess.Popen(wait))
            raise ValueError(f"daemon {len(daemons)} has not registered.\n")

    with subprocess.Popen(wait) as before:
        calls = with_init(fail_twice)
        with joined(None, 1000):
            assert len(calls) == 5 and calls[1] == calls[3] == {}  # ended after each failure
            assert "RAY_AUTH_MODE" not in os.environ  # so that a token is required
        assert calls[5:] == [{}]
        near = {"address": "local", "_node_ip_address": "127.0.0.2", "include_dashboard": False}
        common = {"num_cpus": 1000, "log_to_driver": False, "logging_level": "ERROR"}
        assert calls[0] == calls[2] == calls[4] == {**near, **common}
        for daemon in daemons:
            assert not os.path.exists(f"/proc/{daemon.pid}")
            daemon.wait()
        assert before.poll() is None
        before.send_signal(signal.SIGKILL)
    calls = with_init()
    connect(None, 0.5, object_store_bytes=2**20)
    assert calls[0]["object_store_memory"] == 2**20 and calls[0]["num_cpus"] == os.cpu_count()


def test_a_start_that_always_fails(with_init: Any) -> None:
    def fail() -> None:
        raise ValueError

    calls = with_init(fail)
    with raises(LaunchError, "ValueError"):
        connect(None, 1)
    assert len(calls) == 6
