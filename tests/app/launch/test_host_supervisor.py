"""Tests the hosts of an elastic run with killed supervisors: the next host leads, and never two at a time."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from jaxpar.app.launch import leader
from jaxpar.app.launch.leader import Deposed, Lead, Record, Watch, newest
from jaxpar.app.launch.process_group import BIND, Local, free_port
from jaxpar.app.launch.protocol import Wire, listen
from jaxpar.app.launch.successor import Heir
from jaxpar.errors import LaunchError

ROOT = Path(__file__).parents[3]
CHILD = """
import json, os, sys, time
rank, total, parent, folder = int(sys.argv[1]), int(sys.argv[2]), os.getppid(), sys.argv[5]
def say(**message): os.write(int(os.environ["JAXPAR_BEATS"]), (json.dumps(message) + "\\n").encode())
def stay():
    while os.getppid() == parent and not os.path.exists(folder + "/end"): time.sleep(0.02)
say(step=31)
print(*sys.argv[1:5], flush=True)
if total >= %d or os.path.exists(folder + "/more"): stay()
"""
HOST = """
import sys
from pathlib import Path
from jaxpar.app.launch import host_supervisor as member, leader as leading, protocol as wire, successor as heir
from jaxpar.app.launch.process_group import Local
from jaxpar.app.launch.supervisor import Policy
first, total, address, folder, child = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
wire.SILENT, member._GATHER, leading.RENEW = 3.0, 3.0, 0.25
hear = heir.Heir.hear
def noting(self, told):
    hear(self, told)
    (Path(folder) / "said" / f"heirs-{first}").write_text(" ".join(str(one) for one, _ in self.news.heirs))
heir.Heir.hear = noting
command = lambda again: lambda *place: [sys.executable, "-S", "-c", child, *map(str, place), str(again), folder]
local = Local(Path(folder) / str(first), coordinator=address, console=False, append=True, grace=0.2)
tell = lambda line: print(line, flush=True)
sys.exit(member.Member(local, command, first, 1, total, address, Policy(restart_delay=0.0, elastic=True), \
lambda: 7, folder=Path(folder) / "leader", tell=tell,
                       patience=30.0, allowance=1.5, fence=1.0).run())
"""


class Hosts:
    """Supervisors of one process each, each a separate program."""

    def __init__(self, folder: Path, total: int):
        self.folder, self._total, self._child = folder, total, CHILD % total
        self.address = f"127.0.0.1:{free_port()}"
        self.running: dict[int, subprocess.Popen[str]] = {}
        (folder / "said").mkdir()

    def start(self, *firsts: int) -> None:
        for first in firsts:
            words = [
                sys.executable,
                "-S",
                "-c",
                HOST,
                str(first),
                str(self._total),
                self.address,
                str(self.folder),
                self._child,
            ]
            with (self.folder / "said" / str(first)).open("a") as out:
                env = {**os.environ, "PYTHONPATH": str(ROOT)}
                self.running[first] = subprocess.Popen(words, stdout=out, stderr=out, env=env, text=True)

    def said(self, first: int) -> list[str]:
        """Returns the printed lines, with standby addresses as ``HEIR`` and one text for all connection errors."""
        text = (self.folder / "said" / str(first)).read_text().replace(self.address, "FIRST")
        text = re.sub(r"\((Connection reset by peer|Broken pipe)\)", "(the connection was closed)", text)
        return re.sub(r"127\.0\.0\.1:\d+", "HEIR", text).splitlines()

    def log(self, first: int) -> list[str]:
        """Returns what the supervisor's processes printed."""
        files = sorted((self.folder / str(first)).glob("*.log"), key=lambda file: file.stat().st_mtime_ns)
        return [line for file in files for line in file.read_text().splitlines()]

    def kill(self, *firsts: int) -> None:
        for first in firsts:
            self.running[first].kill()
        for first in firsts:
            self.running.pop(first).wait()

    def until(self, what: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not what():
            assert time.monotonic() < end, {first: self.said(first) for first in range(self._total)}
            time.sleep(0.02)

    def ready(self, *heirs: int) -> None:
        """Waits until all processes run and each host knows the order of succession."""
        self.until(lambda: all(self.log(first) for first in self.running if len(self.running) == self._total))
        known, wanted = [self.folder / "said" / f"heirs-{first}" for first in heirs], " ".join(map(str, heirs))
        self.until(lambda: all(file.exists() and file.read_text() == wanted for file in known))

    def end(self) -> dict[int, int]:
        return {first: process.wait(60) for first, process in self.running.items()}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[[int], Hosts]]:
    made: list[Hosts] = []

    def make(total: int) -> Hosts:
        made.append(Hosts(tmp_path, total))
        return made[-1]

    yield make
    for process in made[-1].running.values():
        process.kill()
        process.wait()


def test_the_next_host_leads_and_the_first_one_follows_when_it_returns(hosts: Callable[[int], Hosts]) -> None:
    three = hosts(3)
    (three.folder / "more").touch()
    three.start(0, 1, 2)
    three.ready(1, 2)
    three.kill(0)
    three.until(lambda: len(three.log(1)) == len(three.log(2)) == 2)
    three.start(0)
    three.until((three.folder / "said/heirs-0").exists)
    (three.folder / "end").touch()
    assert three.end() == {0: 0, 1: 0, 2: 0}, [three.said(n) for n in range(3)]
    led = "the supervisor of the host of process 1 leads now, at HEIR (term 2)"
    happened = [
        (
            f"process 0 of 3 was lost with its host 127.0.0.1 (the connection was closed) after step 31; {led}, and 2 "
            f"of 3 processes go on"
        ),
        "restart 1 of 3 in 0 s: 2 processes from step 7",
    ]
    for host, who in ((1, "this host"), (2, "the host that was told to have process 1")):
        lines = three.said(host)
        at = lines.index(happened[0])
        assert lines[at : at + 2] == happened
        lost = next(line for line in lines if "is gone" in line)
        assert lost.endswith(f"so what ran here was ended; unless it comes back within 1.5 s, {who} leads next")
    assert "the supervisor at HEIR (term 2) leads now, so this host follows it" in three.said(2)
    assert three.said(0)[:2] == [
        "the supervisor at HEIR (term 2) did not end in order; whether it still leads is seen in 1.5 s at most",
        "the supervisor at HEIR (term 2) leads this run since process 0's host was lost, so this host follows it",
    ]
    # The coordinator's address has moved, and the processes have new ranks.
    one, two = three.log(1)[-1].split(), three.log(2)[-1].split()
    assert (
        one[:2] == ["0", "2"]
        and two[:2] == ["1", "2"]
        and one[2] == two[2] != three.address
        and one[3] == two[3] == "True"
    )
    assert [
        len(list((three.folder / "leader").glob("[0-9]"))),
        newest(three.folder / "leader").over,  # type: ignore[union-attr]
    ] == [2, 0]


def test_two_hosts_lost_at_once_leave_one(hosts: Callable[[int], Hosts]) -> None:
    three = hosts(3)
    three.start(0, 1, 2)
    three.ready(1, 2)
    three.kill(0, 1)
    assert three.end() == {2: 0}, three.said(2)
    happened = (
        "process 0 of 3 was lost with its host 127.0.0.1 (the connection was closed) after step 31; "
        "the supervisor of the host of process 2 leads now, at HEIR (term 2), and 1 of 3 processes go on, "
        "as 1 more has no host either"
    )
    assert three.said(2)[-4:-2] == [happened, "restart 1 of 3 in 0 s: 1 process from step 7"]
    assert three.log(2)[-1].split()[:2] == ["0", "1"]


def test_a_leader_that_was_stopped_ends_what_it_ran_and_follows(hosts: Callable[[int], Hosts]) -> None:
    two = hosts(2)
    (two.folder / "more").touch()
    two.start(0, 1)
    two.ready(1)
    two.running[0].send_signal(signal.SIGSTOP)
    two.until(lambda: len(two.log(1)) == 2)
    assert "(nothing was heard of it for 3 s)" in two.said(1)[-2]
    two.running[0].send_signal(signal.SIGCONT)
    two.until(lambda: any("has taken the lead" in line for line in two.said(0)))
    two.until(lambda: not _runs(two.folder, ["0", "2"]))
    (two.folder / "end").touch()
    assert two.end() == {0: 0, 1: 0}, two.said(0)
    assert (
        "the supervisor at HEIR (term 2) has taken the lead of this run, so what ran here was ended, and this "
        "host follows"
    ) in two.said(0)


def test_a_leader_lost_before_all_have_come(hosts: Callable[[int], Hosts]) -> None:
    three = hosts(3)
    three.start(0, 1)
    three.ready(1)
    three.kill(0)
    three.until(lambda: any("2 processes are to start" in line for line in three.said(1)))
    three.start(2)
    assert three.end() == {1: 0, 2: 0}, [three.said(n) for n in (1, 2)]
    assert [three.log(n)[-1].split()[:2] + three.log(n)[-1].split()[3:] for n in (1, 2)] == [
        ["0", "2", "False"],
        ["1", "2", "False"],
    ]


def _runs(folder: Path, place: list[str]) -> bool:
    """Returns whether a process with this rank and total runs below the folder."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = file.read_bytes().decode(errors="replace").split("\0")
            if words[-2:-1] == [str(folder)] and "-c" in words and words[4:6] == place:
                return True
    return False


def test_only_one_can_take_a_term_and_who_has_an_older_one_learns_of_it(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") is None
    one = Lead.claim(tmp_path, None, "a:1", 0)
    assert one is not None and Lead.claim(tmp_path, None, "b:1", 1) is None
    one.check(now=True)
    two = Lead.claim(tmp_path, newest(tmp_path), "b:1", 1)
    assert two is not None and two.record.term == 2
    with pytest.raises(Deposed, match=r"^the supervisor at b:1 \(term 2\) has taken the lead of this run$"):
        one.check(now=True)
    one.end(0)  # This says nothing about the newer term.
    found = newest(tmp_path)
    assert found is not None and (found.term, found.over) == (2, None)
    two.end(1)
    assert newest(tmp_path).over == 1  # type: ignore[union-attr]
    (tmp_path / "3").write_text("[" * 100_000)
    (tmp_path / "x4").write_text("{}")
    assert newest(tmp_path) == Record(3)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "leader"
    text = (
        f"{folder}, where the host that leads keeps its term, cannot be written: Not a directory. Remedy: an output "
        f"folder that every host can write, or supervise.elastic: false."
    )
    with pytest.raises(LaunchError, match=f"^{re.escape(text)}$"):
        Lead.claim(folder, None, "a:1", 0)


def test_nobody_takes_over_from_who_lives_and_each_heir_waits_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "RENEW", 0.02)
    first = f"127.0.0.1:{free_port()}"
    lead, now = Lead.claim(tmp_path, None, first, 0), [0.0]
    assert lead is not None
    met = listen(first)
    wire = Wire(_connected())
    heirs = [Heir(tmp_path, n, clock=lambda: now[0]) for n in (2, 4)]
    for heir in heirs:
        assert heir.reserve(wire, first).startswith("127.0.0.1:") and heir.claim() is None  # It has no news yet.
        heir.hear({"term": 1})  # This is no news of a leader.
        assert heir.news is None
        order = [[one.first, one.at] for one in heirs]
        told = {
            "at": first,
            "places": 2,
            "count": 6,
            "own": 2,
            "causes": ["one"],
            "hosts": [[2, 2], [4, 2]],
            "heirs": order,
        }
        heir.hear({"term": 1, "mark": "of another folder", **told})
        now[0] += 1
        assert not heir.sees() and not heir.blind()
        now[0] += 30
        blind = (
            "this host could not go on without process 0's: it does not see process 0's file in {}. Remedy: an output "
            "folder that all hosts share"
        )
        assert [heir.blind(), heir.blind()] == [blind.format(tmp_path), ""]
        heir.hear({"term": 1, "mark": lead.record.mark, **told})
        now[0] += 1
        assert heir.sees() and not heir.sees()
    for heir in heirs:
        heir.lose()
    end = time.monotonic() + 30
    while not all(heir.unseen for heir in heirs):
        assert [heir.claim() for heir in heirs] == [None, None] and time.monotonic() < end
    now[0] += 100
    time.sleep(0.1)
    assert [heir.claim() for heir in heirs] == [None, None]  # The leader lives, as its file shows.
    lead.end()  # without a message
    for heir in heirs:
        heir.lose()
    now[0] += 5.1
    assert heirs[1].claim() is None
    taken = heirs[0].claim()
    assert taken is not None and (taken.record.term, taken.record.at) == (2, heirs[0].at)
    now[0] += 5.1
    assert heirs[1].claim() is None and heirs[1].others(first).at == heirs[0].at  # type: ignore[union-attr]
    assert heirs[1].over is None
    taken.end(3)
    assert Heir(tmp_path, 6).over is None  # It knows no run that could have ended.
    assert heirs[1].over == 3 and heirs[1].others(first) is None
    with heirs[0].take() as held:
        assert held.getsockname() == ("127.0.0.1", int(heirs[0].at.rpartition(":")[2]) + 1)
    heirs[1].close()
    wire.close()
    met.close()


def test_storage_that_is_out_of_reach_makes_nobody_gone(tmp_path: Path) -> None:
    now = [0.0]
    watch = Watch(tmp_path, lambda: now[0])
    now[0] = 7.0
    assert watch.look() is None and watch.still == 7
    tmp_path.rmdir()
    tmp_path.touch()  # no longer a folder
    assert watch.look() is None and watch.still == 0 and not watch.live
    tmp_path.unlink()


def test_a_coordinator_that_moves_takes_its_bind_address_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BIND, "0.0.0.0:1234")
    local = Local(tmp_path, coordinator="10.0.0.1:1234", console=False)
    code = f"import os, sys; print(sys.argv[1], os.environ['{BIND}'])"
    for at in ("10.0.0.1:1234", "10.0.0.2:4321"):
        local.move(at)
        local.start(lambda rank, total, address: [sys.executable, "-S", "-c", code, address], 1, first=1, total=2)
        while local.peers[0].code is None:
            local.poll(0.1)
        local.end()
    assert local.log(1).read_text() == "10.0.0.1:1234 0.0.0.0:1234\n10.0.0.2:4321 0.0.0.0:4321\n"


def _connected() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = socket.create_connection(server.getsockname())
        server.accept()[0].close()
        return made
