"""Tests the supervisor with processes that crash, hang, stop and are killed; the processes run without JAX."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
from error_texts import raises

from jaxpar.app.launch import heartbeat, peers
from jaxpar.app.launch.exit_codes import ExitCode, exit_code
from jaxpar.app.launch.heartbeat import BEATS, place
from jaxpar.app.launch.peers import Allowance, Peer, cause
from jaxpar.app.launch.process_group import Command, Local, check_free, free_port, split_address
from jaxpar.app.launch.supervisor import Policy, Supervisor
from jaxpar.errors import LaunchError

CHILD = """
import json, os, signal, sys, time
rank, attempt = int(sys.argv[1]), int(sys.argv[2])
def say(**message): os.write(int(os.environ["JAXPAR_BEATS"]), (json.dumps(message) + "\\n").encode())
def die(): time.sleep(0.05); os.kill(os.getpid(), signal.SIGKILL)
def hang():
    while True: say(where="data.py:7", waits=rank != 1); time.sleep(0.1)
"""


class Run:
    """A supervised group of small scripts, and the lines that the supervisor prints."""

    def __init__(self, folder: Path, script: str, count: int = 2, **policy: float | bool | None):
        self.lines: list[str] = []
        self.attempts: list[int] = []
        kept = Policy(**{"restart_delay": 0.0, **policy})  # type: ignore[arg-type]

        def command(rank: int, total: int, address: str) -> list[str]:
            if rank == 0:
                self.attempts.append(total)
            return [sys.executable, "-S", "-c", CHILD + script, str(rank), str(len(self.attempts)), address]

        self.group = Local(folder / "logs", grace=0.5)
        self.supervisor = Supervisor(self.group, command, count, kept, tell=self.lines.append)
        self.folder = folder

    def __call__(self) -> int:
        return self.supervisor.run()


def test_a_group_that_ends_well_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, "say(step=3); print('rank', rank); print('trouble', file=sys.stderr)")
    assert run() == 0 and run.lines == [] and run.attempts == [2]
    assert capfd.readouterr() == ("rank 0\n", "")  # only the output of the first process
    logs = {file.name: file.read_text() for file in (tmp_path / "logs").iterdir()}
    assert logs == {"process-0.log": "trouble\n", "process-1.log": "rank 1\ntrouble\n"}


def test_who_was_killed_is_named_and_the_group_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    script = (
        "say(step=30); say(step=31)\nif attempt == 1:\n  print('last words', flush=True)\n"
        "  die() if rank == 2 else time.sleep(60)"
    )
    run = Run(tmp_path, script, 4)
    run.supervisor.latest = lambda: 30
    assert run() == 0 and run.attempts == [4, 4]
    assert run.lines[:3] == [
        "process 2 of 4 was killed by SIGKILL after step 31",
        "  2| last words",
        "restart 1 of 3 in 0 s: 4 processes from step 30",
    ]
    assert re.fullmatch(r"done after 1 restart in \d+ s:", run.lines[3])
    assert run.lines[4] == "  1. process 2 of 4 was killed by SIGKILL after step 31"


def test_who_hangs_is_named_rather_than_who_waits_for_it(tmp_path: Path) -> None:
    run = Run(tmp_path, "say(phase='compile')\nsay(step=17)\nhang()", step_timeout=3.0, restarts=0)
    assert run() == ExitCode.RETRYABLE
    assert re.fullmatch(
        r"process 1 of 2 has not finished a step for \d+ s \(step_timeout 3 s\), last step 17; is at data.py:7",
        run.lines[0],
    )
    assert run.lines[1:] == ["gave up: no restart is allowed"]


def test_what_is_never_started_again_ends_with_the_cause_alone(tmp_path: Path) -> None:
    """``jaxpar generate`` runs this way; messages of a process to the user come before the cause."""
    script = "time.sleep(0 if rank else 60)\nsay(say='parameters of x')\nsay(step=4)\ndie()"
    run = Run(tmp_path, script, restarts=None)
    assert run() == ExitCode.RETRYABLE and run.attempts == [2]
    assert run.lines == ["parameters of x", "process 1 of 2 was killed by SIGKILL after step 4"]


def test_a_signal_that_all_heed_shows_in_the_exit_status_where_asked(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGINT, lambda *_: (say(say='stopped'), os._exit(0)))\nsay(step=1)\ntime.sleep(60)"
    run = Run(tmp_path, script, restarts=None, signalled=True)

    def soon() -> None:
        while not all(peer.step for peer in run.group.peers) or not run.group.peers:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=soon)
    thread.start()
    assert run() == 128 + signal.SIGINT
    thread.join()
    assert run.lines == ["SIGINT: stopping the processes", "stopped", "stopped"]


def test_process_0_reads_what_it_is_given(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "given").open("wb+") as given:
        given.write("öa\nb".encode())
        given.seek(0)
        run = Run(tmp_path, "print(rank, repr(sys.stdin.read()))")
        run.group._stdin = given
        assert run() == 0
    assert capfd.readouterr().out == "0 'öa\\nb'\n"
    assert (tmp_path / "logs" / "process-1.log").read_text() == "1 ''\n"


def test_who_raised_is_named_with_its_last_words(tmp_path: Path) -> None:
    script = """
if rank == 1:
    print("Traceback ...", file=sys.stderr)
    say(raised="ValueError: no such thing", again=True)
    os._exit(1)
say(raised="JaxRuntimeError: UNAVAILABLE: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:1", again=True)
os._exit(1)
"""
    run = Run(tmp_path, script, restarts=2)
    assert run() == ExitCode.GAVE_UP and run.attempts == [2, 2, 2]
    assert run.lines == [
        "process 1 of 2 raised before its first step: ValueError: no such thing",
        "  1| Traceback ...",
        "restart 1 of 2 in 0 s: 2 processes from step 0, because there is no checkpoint",
        "process 1 of 2 raised before its first step: ValueError: no such thing",
        "  1| Traceback ...",
        "  1| Traceback ...",
        "restart 2 of 2 in 0 s: 2 processes from step 0, because there is no checkpoint",
        "process 1 of 2 raised before its first step: ValueError: no such thing",
        "  1| Traceback ...",
        "  1| Traceback ...",
        "  1| Traceback ...",
        "gave up: 2 restarts were allowed",
    ]


def test_an_error_that_would_come_again_is_not_tried_again(tmp_path: Path) -> None:
    run = Run(tmp_path, "say(raised='ConfigError: no', again=False); os._exit(2)", 1)
    assert run() == ExitCode.CONFIGURATION and run.attempts == [1]
    assert run.lines == [
        "process 0 of 1 raised before its first step: ConfigError: no",
        "gave up: a restart would fail with the same error",
    ]


def test_of_several_hosts_each_names_its_processes_by_their_rank_of_all(tmp_path: Path) -> None:
    """Ranks 2 and 3 of 4; another host runs the others, so nothing is restarted here."""
    lines: list[str] = []
    script = CHILD + "say(step=5)\nif rank == 3: die()\ntime.sleep(60)"
    command = lambda rank, total, address: [sys.executable, "-S", "-c", script, str(rank), "1", f"{address} {total}"]
    group = Local(tmp_path, first=2, total=4, coordinator="127.0.0.1:1234", grace=0.5)
    assert Supervisor(group, command, 2, Policy(restarts=None), tell=lines.append, total=4).run() == ExitCode.RETRYABLE
    assert lines == ["process 3 of 4 was killed by SIGKILL after step 5"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["process-2.log", "process-3.log"]


def test_elastic_goes_on_with_those_that_remain_and_fit(tmp_path: Path) -> None:
    run = Run(tmp_path, "if attempt == 1:\n  die() if rank == 3 else time.sleep(60)", 4, elastic=True)
    asked: list[int] = []
    run.supervisor.refit = lambda count: (
        asked.append(count),  # type: ignore[func-returns-value]
        (2, "3 do not fit; 2 processes would"),
    )[1]
    assert run() == 0 and run.attempts == [4, 2] and asked == [3]
    assert run.lines[1:3] == [
        "3 do not fit; 2 processes would",
        "restart 1 of 3 in 0 s: 2 processes from step 0, because there is no checkpoint",
    ]
    assert re.fullmatch(r"done after 1 restart in \d+ s, 4 processes became 2:", run.lines[3])


def test_elastic_gives_up_where_nothing_fits_and_keeps_who_only_raised(tmp_path: Path) -> None:
    run = Run(tmp_path, "die()", 1, elastic=True)
    run.supervisor.refit = lambda count: (0, f"{count} remain")
    assert run() == ExitCode.RETRYABLE and run.lines[1:] == [
        "0 remain",
        "gave up: no number of the remaining processes fits",
    ]
    raising = Run(tmp_path, "sys.exit(attempt == 1 and rank == 1 and 3)", 2, elastic=True)
    assert raising() == 0 and raising.attempts == [2, 2]
    assert raising.lines[0] == "process 1 of 2 ended with exit status 3 before its first step"


def test_elastic_takes_as_many_as_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Ray, where nodes leave and join."""
    run = Run(tmp_path, "if attempt < 3:\n  die() if rank == 0 else time.sleep(60)", 4, elastic=True)
    rooms, given = [1, 4], []
    monkeypatch.setattr(
        run.group, "room", lambda remaining, requested: (given.append((remaining, requested)), rooms.pop(0))[1]
    )
    assert run() == 0 and run.attempts == [4, 1, 4] and given == [(3, 4), (0, 4)]
    assert re.fullmatch(r"done after 2 restarts in \d+ s:", run.lines[-3])


def test_a_restart_that_cannot_start_its_processes_counts_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, "die() if attempt == 1 else None", 1)
    start, errors = run.group.start, [OSError(111, "refused")]

    def sometimes(command: Command, count: int) -> None:
        if run.attempts and errors:
            raise LaunchError("Ray could not place 1 process.") from errors.pop()
        start(command, count)

    monkeypatch.setattr(run.group, "start", sometimes)
    assert run() == 0 and run.attempts == [1, 1]
    assert run.lines[1:4] == [
        "restart 1 of 3 in 0 s: 1 process from step 0, because there is no checkpoint",
        "the processes could not be started again: Ray could not place 1 process.",
        "restart 2 of 3 in 0 s: 1 process from step 0, because there is no checkpoint",
    ]

    def never(command: Command, count: int) -> None:
        raise LaunchError("no such folder.")

    monkeypatch.setattr(run.group, "start", never)
    with pytest.raises(LaunchError, match=r"^no such folder\.$"):
        run()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_its_save_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    script = """
def save(number, frame):
    time.sleep(0.3)
    open(f"{os.environ['FOLDER']}/saved-{rank}", "w").close()
    sys.exit(85)
signal.signal(signal.SIGTERM, save); signal.signal(signal.SIGINT, save)
say(step=1)
open(f"{os.environ['FOLDER']}/ready-{rank}", "w").close()
time.sleep(60)
"""
    run = Run(tmp_path, script)
    run.group._variables = lambda rank: {"FOLDER": str(tmp_path)}

    def send() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    assert run() == ExitCode.STOPPED
    sender.join()
    assert run.lines == [f"{number.name}: stopping the processes"] and run.attempts == [2]
    assert sorted(file.name for file in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


def test_after_a_signal_nothing_is_started_again_and_a_second_one_ends_all(tmp_path: Path) -> None:
    run = Run(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); say(step=1); time.sleep(60)")

    def send() -> None:
        while not all(peer.step == 1 for peer in run.group.peers) or len(run.group.peers) < 2:
            time.sleep(0.01)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)

    sender = threading.Thread(target=send)
    sender.start()
    assert run() == ExitCode.NOT_SAVED
    sender.join()
    assert run.lines == ["SIGTERM: stopping the processes", "ended immediately by a second signal"]
    assert run.attempts == [2]


def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    script = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\nprint(child.pid, file=sys.stderr, flush=True)\n"
        "say(step=1)\nsys.exit(2)"
    )
    run = Run(tmp_path, script, 1, restarts=0)
    assert run() == ExitCode.CONFIGURATION
    pid = int((tmp_path / "logs/process-0.log").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(500):
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                raise ProcessLookupError
            time.sleep(0.01)


def test_whose_supervisor_is_gone_ends(tmp_path: Path) -> None:
    read, write = os.pipe()
    script = (
        "import signal, sys, time\nfrom jaxpar.app.launch import heartbeat\nheartbeat.TICK = 0.05\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nassert heartbeat.connect()\nheartbeat.begin('x')\n"
        "heartbeat.beat(3)\ntime.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", script], pass_fds=(write,), env={**os.environ, BEATS: str(write)})
    os.close(write)
    said = b""
    while b'{"where": "<string>:8", "waits": false}' not in said:  # where its main thread sleeps
        more = os.read(read, 4096)
        assert more, said  # The child has ended.
        said += more
    os.close(read)
    assert child.wait(120) == 7
    assert [line for line in said.splitlines() if b"where" not in line] == [b'{"phase": "x"}', b'{"step": 3}']


def test_an_error_is_told_by_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(heartbeat, "_say", lambda **message: said.append(message))
    heartbeat.raised(ValueError("\n one\ntwo"), again=True)
    heartbeat.raised(KeyboardInterrupt(), again=False)
    heartbeat.raised(ValueError("x" * 999), again=True)
    assert said[:2] == [{"raised": "ValueError: one", "again": True}, {"raised": "KeyboardInterrupt", "again": False}]
    assert len(str(said[2])) < 350
    heartbeat.say("y" * 5000)
    assert said[3] == {"say": "y" * 3000}


def test_where_a_process_is_is_where_the_thread_at_work_is() -> None:
    there, go_on = threading.Event(), threading.Event()

    def a_step() -> None:
        heartbeat.at_work()
        there.set()
        go_on.wait()

    def names(frame: FrameType | None) -> list[str]:
        return [] if frame is None else [frame.f_code.co_name, *names(frame.f_back)]

    thread = threading.Thread(target=a_step)
    thread.start()
    there.wait()
    assert "a_step" in names(heartbeat._at())
    go_on.set()
    thread.join()
    assert test_where_a_process_is_is_where_the_thread_at_work_is.__name__ in names(heartbeat._at())


def test_where_a_process_is_leaves_jax_out() -> None:
    class Frame:
        def __init__(self, file: str, line: int, back: Frame | None = None):
            self.f_code, self.f_lineno, self.f_back = SimpleNamespace(co_filename=file), line, back

    loop = Frame("/home/jaxpar/src/jaxpar/app/train/loop.py", 7)
    inside = Frame("/x/site-packages/jax/_src/array.py", 1, Frame("/x/site-packages/jaxlib/b.py", 2, loop))
    assert place(inside) == ("jaxpar/app/train/loop.py:7", True)  # type: ignore[arg-type]
    assert place(loop) == ("jaxpar/app/train/loop.py:7", False)  # type: ignore[arg-type]
    assert place(Frame("/home/me/own.py", 3, loop)) == ("own.py:3", False)  # type: ignore[arg-type]


def made(*changes: dict[str, object]) -> list[Peer]:
    found = []
    for rank, fields in enumerate(changes):
        peer = Peer(rank, 0.0)
        for name, value in fields.items():
            setattr(peer, name, value)
        found.append(peer)
    return found


@pytest.mark.parametrize(
    ("states", "now", "text", "gone"),
    [
        ([{"code": -6, "step": 3}, {"code": -9, "step": 3}], 1,
         "process 1 of 2 was killed by SIGKILL after step 3", (1,)),
        ([{"code": 0}, {"lost": "was lost with its node"}], 1,
         "process 1 of 2 was lost with its node before its first step", (1,)),
        ([{"code": -6, "step": 3}, {"step": 3}], 1,
         "process 0 of 2 was ended by SIGABRT after step 3, as jax ends one that has lost a peer", ()),
        # One process is stopped; JAX ends the others because of it.
        ([{"code": -6, "step": 3}, {"step": 3, "phase": "step", "tick": 1.0}], 12,
         (
             "process 1 of 2 has not finished a step for 12 s (step_timeout 60 s), last step 3; no sign of life for "
             "11 s, as of a process that is stopped"
         ), (1,)),
        ([{"code": -6, "step": 3}, {"step": 3, "phase": "step", "tick": 1.0, "silent": "and its node is away"}], 12,
         (
             "process 1 of 2 has not finished a step for 12 s (step_timeout 60 s), last step 3; no sign of life for "
             "11 s, and its node is away"
         ), (1,)),
        ([{"tick": 601.0}, {"phase": "compile", "tick": 601.0, "sign": 300.0}], 601,
         "process 0 of 2 has not ended its start for 601 s (compile_timeout 600 s)", ()),
        ([{"step": 4, "phase": "step", "tick": 70.0}, {"step": 3, "phase": "step", "tick": 70.0}], 70,
         "process 1 of 2 has not finished a step for 70 s (step_timeout 60 s), last step 3", ()),
        ([{"step": 4, "phase": "step", "tick": 70.0, "waits": True, "where": "loop.py:1"}] * 2, 70,
         (
             "processes 0, 1 of 2 have not finished a step for 70 s (step_timeout 60 s), last step 4; waits for its "
             "peers at loop.py:1"
         ), ()),
        ([{"step": 4, "phase": "step", "tick": 50.0, "sign": 50.0}, {"code": 0}], 60, None, ()),
    ],
)  # fmt: skip
def test_the_cause_is_told_from_what_follows(
    states: list[dict[str, object]], now: float, text: str | None, gone: tuple[int, ...]
) -> None:
    found = cause(made(*states), len(states), Allowance(60, 600), now)
    assert (None if found is None else found.text) == text
    assert found is None or found.gone == gone


def test_a_peer_hears_what_it_knows() -> None:
    peer = Peer(0, 5.0)
    peer.hear({"strange": 1}, 6.0)
    peer.hear({"step": "x"}, 7.0)
    assert (peer.tick, peer.sign, peer.step, peers.SILENT) == (7.0, 5.0, None, 10.0)


def test_addresses_and_ports(tmp_path: Path) -> None:
    for address in ("host", ":1", "host:0", "host:70000", "host:x"):
        with raises(LaunchError, "--coordinator", "127.0.0.1:1234"):
            split_address(address)
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with raises(LaunchError, "coordinator's address"):
            check_free(address)
    check_free(f"127.0.0.1:{free_port()}")
    with raises(LaunchError, "/no/such"):
        Local(tmp_path).start(lambda rank, total, address: ["/no/such"], 1)
    (tmp_path / "file").touch()
    with raises(LaunchError, "file/logs"):
        Local(tmp_path / "file/logs").start(lambda rank, total, address: ["true"], 1)


def test_no_log_is_written_or_read_through_a_link(tmp_path: Path) -> None:
    logs, dear = tmp_path / "logs", tmp_path / "dear"
    logs.mkdir()
    dear.write_text("dear")
    group = Local(logs, console=False)
    for plant, name in (
        (lambda: group.log(0).symlink_to(dear), str(dear)),
        (lambda: group.log(0).symlink_to("../new"), "'../new'"),
        (lambda: os.mkfifo(group.log(0)), "regular file"),
    ):
        plant()
        with raises(LaunchError, "logs/process-0.log", name) as error:
            group.start(lambda rank, total, address: ["true"], 1)
        assert exit_code(error.value) is ExitCode.CONFIGURATION and group.tail(0, 5) == []
        group.log(0).unlink()
    logs.rmdir()
    logs.symlink_to(tmp_path, target_is_directory=True)
    with raises(LaunchError, "/logs", "which"):
        group.start(lambda rank, total, address: ["true"], 1)
    assert dear.read_text() == "dear" and sorted(file.name for file in tmp_path.iterdir()) == ["dear", "logs"]
