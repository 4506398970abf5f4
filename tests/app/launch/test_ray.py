"""Tests the supervisor with processes on a local Ray cluster, also where an actor is lost; needs Ray."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

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


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from jaxpar.app.launch.ray import RayGroup

    shown: list[str] = []
    made = RayGroup(tmp_path_factory.mktemp("run") / "logs", show=shown.append, patience=60)
    made.shown = shown  # type: ignore[attr-defined]
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
    text = (
        r"^Ray could not place 2 processes with resources \{'CPU': 1, 'moon': 1\} within 2 s; "
        r"the cluster has \{'CPU': [\d.]+\}\. Remedy: fewer processes, "
    )
    with pytest.raises(LaunchError, match=text):
        group.start(lambda rank, total, address: [sys.executable, "-c", ""], 2)
