"""Tests two supervisors of one run: both report the cause, all processes restart, and a lost host is left out."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from interpreters import wait_for

from jaxpar.app.launch import multi_host_group as hosts_module
from jaxpar.app.launch.follower import Follower
from jaxpar.app.launch.multi_host_group import Hosts
from jaxpar.app.launch.peers import Peer
from jaxpar.app.launch.process_group import Local, free_port
from jaxpar.app.launch.protocol import Wire, listen, meeting_place
from jaxpar.app.launch.supervisor import Policy, Supervisor
from jaxpar.errors import LaunchError

CHILD = """
import json, os, signal, sys, time
rank, total, again = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4] == "True"
def say(**message): os.write(int(os.environ["JAXPAR_BEATS"]), (json.dumps(message) + "\\n").encode())
def stay(): time.sleep(60)
"""


class Two:
    """Supervisors in two threads: one with processes 0 and 1, one with processes 2 and 3."""

    def __init__(self, folder: Path, script: str, patience: float = 20.0, **policy: float | bool):
        self.lines: tuple[list[str], list[str]] = ([], [])
        self.status: list[object] = [None, None]
        self.folder, self._words, self.patience = folder, [sys.executable, "-S", "-c", CHILD + script], patience
        self.address = f"127.0.0.1:{free_port()}"
        fits = lambda count: (count // 2 * 2, "" if count % 2 == 0 else f"{count} is odd")
        self.local = Local(folder / "0", coordinator=self.address, grace=0.5, console=False)
        self.hosts = Hosts(self.local, 2, 4, self.address, fits=fits, tell=self.lines[0].append, patience=patience)
        command = lambda *place: self._command(len(self.hosts_runs.causes) > 0)(*place)
        kept = Policy(**{"restart_delay": 0.0, **policy})  # type: ignore[arg-type]
        refit = lambda count: fits(min(count, self.hosts.room))
        self.hosts_runs = Supervisor(self.hosts, command, 4, kept, lambda: 7, refit, tell=self.hosts.say)
        self.threads = [threading.Thread(target=self._decide)]
        self.threads[0].start()

    def _command(self, again: bool) -> Callable[[int, int, str], list[str]]:
        return lambda rank, total, address: [*self._words, str(rank), str(total), address, str(again)]

    def _decide(self) -> None:
        try:
            self.status[0] = self.hosts_runs.run()
        except LaunchError as error:
            self.status[0] = error
        finally:
            self.hosts.close(self.status[0] if isinstance(self.status[0], int) else 1)

    def follow(self) -> Follower:
        """Starts the second host's supervisor."""
        local = Local(self.folder / "1", coordinator=self.address, grace=0.5)
        made = Follower(local, self._command, 2, 2, 4, self.address, tell=self.lines[1].append, patience=self.patience)

        def run() -> None:
            try:
                self.status[1] = made.run()
            except LaunchError as error:
                self.status[1] = error

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()
        return made

    def join(self) -> list[object]:
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive(), self.lines
        return self.status

    def until(self, host: int, pattern: str) -> None:
        end = time.monotonic() + 60
        while not any(re.match(pattern, line) for line in self.lines[host]):
            assert time.monotonic() < end, self.lines
            time.sleep(0.02)


@pytest.mark.parametrize("rank", [1, 3])
def test_who_died_on_either_host_is_named_at_both_and_all_start_again(tmp_path: Path, rank: int) -> None:
    script = (
        f"say(step=31)\nif not again:\n  print('last words', flush=True)\n  os.kill(os.getpid(), signal.SIGKILL) if "
        f"rank == {rank} else stay()\nprint(rank, total, sys.argv[3])"
    )
    two = Two(tmp_path, script)
    two.follow()
    assert two.join() == [0, 0], two.lines
    wanted = [
        f"process {rank} of 4 was killed by SIGKILL after step 31",
        f"  {rank}| last words",
        "restart 1 of 3 in 0 s: 4 processes from step 7",
    ]
    assert two.lines[0][:3] == two.lines[1][-5:-2] == wanted
    assert [re.sub(r"\d+ s", "0 s", line) for line in two.lines[0][3:]] == [
        "done after 1 restart in 0 s:",
        f"  1. {wanted[0]}",
    ]
    for each in range(4):
        log = (tmp_path / str(each // 2) / f"process-{each}.log").read_text()
        assert log.splitlines()[-1] == f"{each} 4 {two.address}"


def test_a_host_that_is_lost_is_done_without_if_asked_to(tmp_path: Path) -> None:
    two = Two(tmp_path, "say(step=31)\nstay() if total == 4 else print('alone', total)", elastic=True)
    follower = two.follow()
    wait_for(lambda: len(two.hosts.peers) == 4 and all(peer.step == 31 for peer in two.hosts.peers))
    # It ends immediately, without a message to the other supervisor.
    follower._signals += [signal.SIGTERM, signal.SIGTERM]
    assert two.join() == [0, 1]
    assert two.lines[0][:2] == [
        "process 2 of 4 was lost with its host 127.0.0.1 (the connection was closed) after step 31",
        "restart 1 of 3 in 0 s: 2 processes from step 7",
    ]
    assert (tmp_path / "0/process-0.log").read_text() == "alone 2\n"


def test_a_host_that_is_lost_is_waited_for_and_it_says_what_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "_NOTICE", 0.0)
    two = Two(tmp_path, "say(step=31)\nprint('again', again, flush=True)\nagain or stay()")
    follower = two.follow()
    wait_for(lambda: len(two.hosts.peers) == 4 and all(peer.step == 31 for peer in two.hosts.peers))
    follower._signals += [signal.SIGTERM, signal.SIGTERM]
    waits = (
        "waits 20 s at most for the host of processes 2, 3 of 4; supervise.elastic: true would go on with 2 of the 2 "
        "that have one"
    )
    two.until(0, re.escape(waits))
    two.follow()
    assert two.join() == [0, 0]
    assert (tmp_path / "1/process-3.log").read_text() == "again True\n"


def test_hosts_that_never_come_are_named(tmp_path: Path) -> None:
    two = Two(tmp_path, "", patience=0.3)
    (status, _) = two.join()
    text = (
        "processes 2, 3 of 4 did not come within 0.3 s. Remedy: start their supervisors too, with the same "
        "--coordinator and --process-count."
    )
    assert isinstance(status, LaunchError) and str(status) == text
    two.follow()
    assert str(two.join()[1]) == (
        f"the supervisor of process 0 was not there within 0.3 s: nobody answers at "
        f"127.0.0.1:{meeting_place(two.address)[1]}. Remedy: start it on the coordinator's host, with --process-id 0 "
        f"and the same --process-count; a run that has lost process 0's host is started anew."
    )


def test_whoever_is_none_of_the_run_is_sent_away(tmp_path: Path) -> None:
    two = Two(tmp_path, "say(step=1)\ntime.sleep(1)")
    for hello, why in (
        (
            {"first": 1, "count": 2, "total": 4},
            "processes 1 to 2 of 4 are none of this run's 4, of which 1 have a host",
        ),
        (
            {"first": 0, "count": 1 << 60, "total": 9},
            f"processes 0 to {(1 << 60) - 1} of 9 are none of this run's 4, which has other numbers",
        ),
        ({"start": 1}, "this was no greeting of a supervisor"),
    ):
        wire = Wire(socket.create_connection(meeting_place(two.address)))
        wire.send(**hello)
        assert wait_for(wire.read) == [{"refused": why}]
        wire.close()
    # A malformed message ends only the connection of its sender.
    wire = Wire(socket.create_connection(meeting_place(two.address)))
    wire.send(first=2, count=2, total=4)
    assert wait_for(wire.read) == [{"start": 2, "count": 2, "total": 4, "again": False}]
    wire.send(peers=[{"step": "x"}, 7], tails={})
    wait_for(lambda: wire.read() or wire.gone)
    wire.close()
    two.until(
        0,
        re.escape(
            "process 2 of 4 was lost with its host 127.0.0.1 (it sends what is no message: a process's began "
            "cannot be None)"
        ),
    )
    two.follow()
    assert two.join() == [0, 0]


def test_the_meeting_place_is_one_of_the_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        LaunchError,
        match=(
            r"^--coordinator is 'a:65535', but supervisors meet at the port after it, and there is none\. Remedy: a "
            r"lower port\."
        ),
    ):
        meeting_place("a:65535")
    port = free_port()
    with listen(f"127.0.0.1:{port}") as held:
        assert held.getsockname() == ("127.0.0.1", port + 1)
        text = (
            f"127.0.0.1:{port + 1}, where supervisors meet (the port after the coordinator's), cannot be had: Address "
            f"already in use. Remedy: end the process that holds it, or another --coordinator on this host (process 0 "
            f"runs here)."
        )
        with pytest.raises(LaunchError, match=f"^{re.escape(text)}"):
            listen(f"127.0.0.1:{port}")
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", f"127.0.0.1:{port}")
    with listen(f"elsewhere.invalid:{port}") as held:
        assert held.getsockname() == ("127.0.0.1", port + 1)


def test_what_is_told_of_a_process_is_taken_as_it_was() -> None:
    peer, other = Peer(2, 10.0), Peer(2, 0.0)
    peer.hear({"step": 4}, 12.0)
    peer.code = -9
    other.take(json.loads(json.dumps(peer.told(13.0))), 103.0)
    wanted = Peer(2, 100.0, 4, "step", code=-9)
    wanted.sign = wanted.tick = 102.0
    assert other == wanted
    with pytest.raises(TypeError, match=r"^a process's step cannot be '4'"):
        other.take({**peer.told(1.0), "step": "4"}, 1.0)
