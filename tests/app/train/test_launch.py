"""Tests ``jaxpar train --processes``: what it refuses, and a run of two processes that loses one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from interpreters import python
from listening_sockets import listening_sockets

from jaxpar.app.cli import main
from jaxpar.app.launch.cluster_detection import detect
from jaxpar.app.launch.exit_codes import ExitCode
from jaxpar.checkpoint.verify import check, steps_in

LAYOUTS = Path(__file__).parents[3] / "configs" / "layouts"
RUN: dict[str, Any] = {
    "model": {"family": "llama", "preset": "tiny", "layers": 1, "embed": 16, "heads": 2, "head_dim": 8, "mlp": 24},
    "layout": str(LAYOUTS / "fsdp.yaml"),
    "data": {"source": "synthetic", "batch": 4, "seq": 16},
    "train": {"steps": 4, "eval_every": 4, "eval_batches": 1},
}


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """``refused(*words, **changes)`` returns the error of a command that starts nothing."""
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def run(*words: str, **changes: Any) -> str:
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump({**RUN, "cpu_devices": 8, "output": str(tmp_path / "run"), **changes}))
        assert main(["train", str(file), *words]) == ExitCode.CONFIGURATION
        assert not (tmp_path / "run").exists()
        *lines, last = capsys.readouterr().err.splitlines()
        assert last == "exit 2: the configuration or the command line is wrong"
        return "\n".join(lines)

    return run


def test_what_cannot_be_shared_out_is_refused(refused: Any) -> None:
    assert refused("--processes", "0") == "LaunchError: --processes must be at least 1, got 0."
    assert refused("--processes", "16") == (
        "LaunchError: 16 processes are requested, but there are 8 simulated devices. Remedy: set --processes to one of "
        "1, 2, 4, 8."
    )
    assert refused("--processes", "3") == (
        "LaunchError: 8 simulated devices cannot be divided evenly over 3 processes. Remedy: set --processes to one of "
        "1, 2, 4, 8, or use a multiple of 3 devices."
    )
    assert refused("--processes", "2", data={**RUN["data"], "batch": 12}) == (
        "LaunchError: 2 processes of 4 devices: a batch of 12 rows cannot be divided by the 8 devices of its axes. "
        "Remedy: another number of processes, mesh or batch."
    )
    allowance = refused("--processes", "2", supervise={"step_timeout": 0})
    assert allowance == "ConfigError: supervise.step_timeout must be above 0 seconds, got 0."
    restarts = refused(supervise={"processes": 2, "restarts": -1})
    assert restarts == "ConfigError: supervise.restarts must be at least 0, got -1."


def test_hosts_and_launchers_that_contradict_it_are_refused(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused("--processes", "2", "--process-count", "4") == (
        "LaunchError: --processes 2 with --process-count 4 and --process-id 0 starts only some of the processes, so "
        "the others run on other hosts. Remedy: --coordinator HOST:PORT, an address of process 0's host."
    )
    two = ("--coordinator", "127.0.0.1:1", "--process-count", "4", "--process-id", "3", "--processes", "2")
    assert refused(*two) == "LaunchError: --processes 2 starting at --process-id 3 exceeds --process-count 4."
    assert refused("--coordinator", "127.0.0.1:1") == (
        "LaunchError: --coordinator 127.0.0.1:1 is given, but --process-count, --process-id are not. Remedy: pass all "
        "three, or --processes N, which starts the processes here."
    )
    slurm = {"JOB_ID": "1", "STEP_NODELIST": "n1", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert refused("--processes", "2") == (
        "LaunchError: --processes 2 would start a separate run in each of the 2 processes of Slurm; this is process 1. "
        "Remedy: leave --processes out, because Slurm starts all processes; or pass --coordinator, --process-count and "
        "--process-id to define the ranks of these processes."
    )
    monkeypatch.delenv("SLURM_PROCID")
    assert refused().startswith(
        "LaunchError: Slurm: SLURM_NTASKS is 2, but SLURM_PROCID is not set, so this process cannot determine its rank."
    )


def test_ray_that_is_not_installed_is_named(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert refused("--processes", "2", "--ray", data={**RUN["data"], "batch": 8}) == (
        "MissingExtraError: starting processes on a Ray cluster needs the package 'ray', which is not installed. "
        "Remedy: pip install 'jaxpar[ray]'."
    )


def test_the_supervisor_itself_needs_no_jax() -> None:
    python("import sys, jaxpar.app.cli, jaxpar.app.train.launch, jaxpar.app.launch.ray; sys.exit('jax' in sys.modules)")


@pytest.mark.slow
def test_one_of_two_is_killed_and_the_other_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of two processes is lost, and elastic training resumes as one. None imports from the current folder."""
    assert detect(os.environ) is None
    (tmp_path / "queue.py").write_text("raise SystemExit('a module of the current folder was imported')")
    monkeypatch.chdir(tmp_path)
    # The test does not depend on compiler optimizations.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
    output, file = tmp_path / "run", tmp_path / "run.yaml"
    changes = {
        "train": {"steps": 3000, "eval_every": 3000, "eval_batches": 1},
        "checkpoint": {"save_interval_steps": 10},
    }
    supervise = {"processes": 2, "restart_delay": 0, "elastic": True, "restarts": 1}
    file.write_text(yaml.safe_dump({**RUN, "cpu_devices": 2, "output": str(output), "supervise": supervise, **changes}))
    (output / "logs").mkdir(parents=True)
    (output / "logs/process-1.log").write_text("an earlier attempt\n")
    ended = threading.Event()
    ranks: dict[int, int] = {}
    coordinators: list[str] = []
    sockets: list[list[tuple[str, int]]] = []

    def kill() -> None:
        while not steps_in(output / "checkpoints"):
            if ended.wait(0.05):
                return
        for pid in (int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal()):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if str(file) in words and words[-3] == "--process-id":
                ranks[int(words[-2])], coordinators[:] = pid, [words[words.index("--coordinator") + 1]]
        sockets.extend(listening_sockets(pid) for pid in (os.getpid(), ranks[0], ranks[1]))
        os.kill(ranks[1], signal.SIGKILL)
        # After more than 20 further steps, the remaining run receives SIGINT.
        at = steps_in(output / "checkpoints")[-1]
        while (steps_in(output / "checkpoints") or [0])[-1] <= at + 20:
            if ended.wait(0.05):
                return
        os.kill(os.getpid(), signal.SIGINT)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        status = main(["train", str(file)])
    finally:
        ended.set()
        killer.join()
    screen = capfd.readouterr().out
    logs = {log.name: log.read_text() for log in (output / "logs").glob("*.log")}
    assert status == ExitCode.INTERRUPTED, (screen, logs)
    assert screen.endswith("\nexit 130: stopped by Ctrl-C, and saved\n")
    # The ports of docs/reference/ports.md: the supervisor opens none, process 0 its coordinator, and each one Gloo's.
    supervisor, first, second = sockets
    gloo = socket.gethostbyname(socket.gethostname())
    assert supervisor == [] and [host for host, _ in second] == [gloo]
    (coordinator,) = [(host, port) for host, port in first if f"{host}:{port}" == coordinators[0]]
    assert coordinator[0] == "127.0.0.1" and [host for host, port in first if port != coordinator[1]] == [gloo]
    found = re.search(r"^process 1 of 2 was killed by SIGKILL after step (\d+)$", screen, re.MULTILINE)
    assert found is not None, (screen, logs)
    again = re.search(r"^restart 1 of 1 in 0 s: 1 process from step (\d+)$", screen, re.MULTILINE)
    assert again is not None and 10 <= int(again[1]) <= int(found[1])
    assert "data 2 = 2 devices (cpu)" in screen and f"resumed from step {again[1]} of {output}/checkpoints" in screen
    assert "SIGINT: stopping the processes" in screen and "stopped by Ctrl-C" in screen
    assert re.search(r"^done after 1 restart in \d+ s, 2 processes became 1:$", screen, re.MULTILINE)
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [record["step"] for record in records if "loss" in record]
    assert losses == list(range(1, losses[-1] + 1)) and losses[-1] > int(found[1])  # no step twice, none missing
    assert check(output / "checkpoints" / str(losses[-1])).step == losses[-1]
    assert logs["process-1.log"].startswith("an earlier attempt\n")
    assert "process 1 of 2, coordinator 127.0.0.1:" in logs["process-1.log"]
