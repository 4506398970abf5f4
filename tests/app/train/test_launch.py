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
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from interpreters import python
from listening_sockets import listening_sockets

from jaxpar.app.cli import main
from jaxpar.app.config import RunConfig
from jaxpar.app.launch.cluster_detection import detect
from jaxpar.app.launch.exit_codes import ExitCode
from jaxpar.app.train import launch
from jaxpar.app.train.launch import LaunchOptions
from jaxpar.app.train_config import CheckpointConfig, TrainConfig
from jaxpar.checkpoint.manifest import NAME as MANIFEST
from jaxpar.checkpoint.verify import check, steps_in
from jaxpar.errors import ConfigError

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
    assert refused("--processes", "0").startswith("ConfigError: train: --processes must be from 1 to ")
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
    assert "run.yaml: supervise: step_timeout must be above 0, at most 1e+38, got 0. Remedy: use a" in allowance
    restarts = refused(supervise={"processes": 2, "restarts": -1})
    assert "run.yaml: supervise: restarts must be from 0 to 2,147,483,647, got -1. Remedy: use a number" in restarts


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


def test_chips_and_nodes_that_options_contradict_are_refused(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.device_assignment, "has_tpu", lambda variables: True)
    assert refused("--processes", "2", data={**RUN["data"], "batch": 8}) == (
        "LaunchError: --processes is 2, but on a TPU host only one process can use the chips. Remedy: --processes 1."
    )
    place = ("--coordinator", "127.0.0.1:1", "--process-count", "2", "--process-id", "0")
    assert refused("--ray", "--processes", "2", *place) == (
        "ConfigError: train: --ray has no effect with --coordinator. Remedy: leave it or --coordinator out."
    )
    resources = {"resources": {"CPU": 1, "GPU": 4}}
    assert refused("--ray", "--processes", "3", supervise=resources, data={**RUN["data"], "batch": 8}) == (
        "LaunchError: 3 processes of 4 devices: a batch of 8 rows cannot be divided by 3 processes. Remedy: another "
        "number of processes, mesh or batch."
    )


class _Supervised:
    """What a supervisor was made with; it runs nothing."""

    def __init__(self, group: Any, command: Any, count: int, policy: Any, latest: Any, *more: Any):
        self.group, self.command, self.count, self.policy, self.latest = group, command, count, policy, latest
        self.refit, self.tell, self.causes, self.total = more
        _Supervised.last = self

    last: Any = None

    def run(self) -> int:
        return 7


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``supervised(options, **changes)``: what ``jaxpar train`` supervises on a host with four GPUs."""
    monkeypatch.setattr(launch, "Supervisor", _Supervised)
    monkeypatch.setattr(launch.device_assignment, "gpus", lambda variables: ["0", "1", "GPU-c", "3"])
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8")

    def start(options: LaunchOptions, **changes: Any) -> Any:
        file = tmp_path / "run.yaml"
        data = {**RUN["data"], "batch": 8}
        file.write_text(yaml.safe_dump({**RUN, "data": data, "output": str(tmp_path / "run"), **changes}))
        assert launch.go(file, ["train.steps=9"], options) == 7
        return _Supervised.last

    return start


def test_the_gpus_of_a_host_are_shared_out(supervised: Any, tmp_path: Path) -> None:
    """Each process sees its GPUs; a restart, and only that, resumes."""
    last = supervised(LaunchOptions(processes=2), checkpoint={"resume": "never", "directory": str(tmp_path / "kept")})
    assert [last.group._variables(index) for index in range(2)] == [
        {"PYTHONUNBUFFERED": "1", "XLA_FLAGS": "--xla_a=1", "CUDA_VISIBLE_DEVICES": gpus} for gpus in ("0,1", "GPU-c,3")
    ]
    place = ["--process-count", "2", "--coordinator", "127.0.0.1:9", "--process-id", "1"]
    file, words = str(tmp_path / "run.yaml"), [sys.executable, "-P", "-m", "jaxpar.app.cli", "train"]
    assert last.command(1, 2, "127.0.0.1:9") == [*words, file, "--set", "train.steps=9", *place]
    last.causes.append(None)
    again = [*words, file, "--set", "train.steps=9", "--set", "checkpoint.resume=auto", "--process-count", "1"]
    assert last.command(0, 1, "127.0.0.1:9") == again
    why = "3 processes x 2 devices = 6 devices do not fit: a batch of 8 rows cannot be divided by 3 processes. "
    assert last.refit(3) == (2, why + "2 processes would fit")
    assert last.latest() is None and last.total is None
    (tmp_path / "kept/12").mkdir(parents=True)
    (tmp_path / "kept/12" / MANIFEST).touch()
    assert last.latest() == 12


def test_of_several_hosts_nobody_restarts_alone(supervised: Any, capsys: pytest.CaptureFixture[str]) -> None:
    last = supervised(LaunchOptions(processes=2, coordinator="node0:9", process_count=4, process_id=2))
    assert last.policy.restarts is None and last.total == 4 and last.latest() is None
    assert capsys.readouterr().out == (
        "no checkpoints are kept ('checkpoint' is not set), so a restart begins from step 0\n"
        "2 of 4 processes run on other hosts, so a failure ends the processes of every host, and whatever started them "
        "restarts them all\n"
    )


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ConfigError("data.batch is wrong."), 2, "ConfigError: data.batch is wrong.\nexit 2: the configuration or "),
        (KeyboardInterrupt(), 130, "exit 130: "),
        (ZeroDivisionError("x"), 1, "ZeroDivisionError: x"),
    ],
)
def test_an_error_of_one_of_several_processes_ends_it_with_its_status(
    error: BaseException, status: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raised: list[tuple[BaseException, bool]] = []
    monkeypatch.setattr(launch.heartbeat, "raised", lambda error, *, again: raised.append((error, again)))

    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(launch, "end_process", end)
    with pytest.raises(SystemExit) as ended, launch.reporting():
        raise error
    assert ended.value.code == status and text in capsys.readouterr().err
    assert raised == [(error, isinstance(error, ZeroDivisionError))]  # only that may not come again


@pytest.mark.parametrize(
    ("signal_number", "steps", "kept", "status"),
    [
        (0, 3, True, ExitCode.FINISHED),
        (signal.SIGTERM, 4, True, ExitCode.FINISHED),  # it came in the last step
        (signal.SIGTERM, 3, True, ExitCode.STOPPED),
        (signal.SIGINT, 3, True, ExitCode.INTERRUPTED),
        (signal.SIGTERM, 3, False, ExitCode.NOT_SAVED),
        (signal.SIGHUP, 3, True, ExitCode.STOPPED),
    ],
)
def test_the_status_of_a_run_that_a_signal_ended(signal_number: int, steps: int, kept: bool, status: ExitCode) -> None:
    summary: Any = SimpleNamespace(signal=signal_number, steps=steps, step_times=[0.1], lost_records=0)
    config = RunConfig(model={}, train=TrainConfig(steps=4), checkpoint=CheckpointConfig() if kept else None)
    assert launch._status(summary, config) is status


def test_a_run_without_checkpoints_whose_metrics_are_lost_is_not_saved() -> None:
    summary: Any = SimpleNamespace(signal=0, steps=4, step_times=[0.1], lost_records=2)
    for kept, status in ((False, ExitCode.NOT_SAVED), (True, ExitCode.FINISHED)):
        config = RunConfig(model={}, train=TrainConfig(steps=4), checkpoint=CheckpointConfig() if kept else None)
        assert launch._status(summary, config) is status


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
