"""A run of two processes under each of what may restart it (one host, Ray, Slurm), and what happens after each fault.

    uv run --with ray python benchmarks/reliability/scheduler_faults.py [--on host ray slurm] [--faults kill stop]

Each fault hits process 1 of a run of its own. Ray: two Ray daemons on loopback addresses. Slurm: a slurmctld and a
slurmd on loopback (Debian's package slurm-wlm, as root), and ``configs/schedulers/slurm.sbatch``. Prints after how many
seconds the fault is reported, the line that names the cause, after how many seconds the run steps again, and whether
its final state equals that of an undisturbed run bitwise (if it ended with as many processes).

Goals: every run ends with status 0 and the state of the undisturbed run. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from benchmarks.shared.observed_run import ObservedRun, Screen, prepared
from benchmarks.shared.paths import ROOT
from benchmarks.shared.processes import environment, pid_of_rank
from jaxpar.app.launch.process_group import free_port

STEPS, EVERY = 240, 40


class Host:
    """Processes that ``jaxpar train --processes`` starts on this host."""

    words: tuple[str, ...] = ("--processes", "2")
    cause = r"^process(es)? .* of [12] "

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def environment(self) -> dict[str, str]:
        return environment(PYTHONUNBUFFERED="1", JAX_PLATFORMS="cpu")

    def start(self, folder: Path, **changes: Any) -> ObservedRun:
        config = prepared(folder, changes.pop("steps", STEPS), EVERY, **changes)
        with (folder / "screen").open("w") as screen:
            command = [sys.executable, "-m", "jaxpar.app.cli", "train", str(config), *self.words]
            run = subprocess.Popen(command, env=self.environment(), stdout=screen, stderr=subprocess.STDOUT)
        return ObservedRun(folder, Screen(folder / "screen"), run.poll)

    def pid(self, run: ObservedRun) -> int:
        """The process id of process 1."""
        found = pid_of_rank(run.config, 1)
        assert found is not None
        return found


class Ray(Host):
    """Processes on a Ray cluster of two nodes, 127.0.0.2 and 127.0.0.3, with room for one process each."""

    words = ("--ray", "--processes", "2")

    def __enter__(self) -> Self:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2", include_dashboard=False)
        self.second = self.join("127.0.0.3")
        return self

    def __exit__(self, *args: object) -> None:
        self._cluster.shutdown()

    def join(self, address: str) -> Any:
        """Add a node."""
        return self._cluster.add_node(num_cpus=1, node_ip_address=address)

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "RAY_ADDRESS": self._cluster.address}

    def actor(self, run: ObservedRun) -> int:
        """The process id of the actor of process 1, which is its parent."""
        return int(Path(f"/proc/{self.pid(run)}/stat").read_text().rpartition(")")[2].split()[1])

    def daemon(self) -> int:
        """The process id of the Ray daemon of the second node."""
        (found,) = self.second.all_processes["raylet"]
        return int(found.process.pid)


SLURM = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=30
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
SlurmctldPort={control}
SlurmdPort={daemon}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES
"""


class Slurm(Host):
    """A job of two tasks in a Slurm of one node."""

    cause = r"^process \d+ on .*: status "

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="slurm"))
        for name in ("state", "spool"):
            (self._folder / name).mkdir()
        host = os.uname().nodename.partition(".")[0]
        text = SLURM.format(host=host, folder=self._folder, control=free_port(), daemon=free_port())
        (self._folder / "slurm.conf").write_text(text)
        os.environ["SLURM_CONF"] = str(self._folder / "slurm.conf")
        self._daemons = [
            subprocess.Popen([name, "-D"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for name in ("slurmctld", "slurmd")
        ]
        while "idle" not in subprocess.run(["sinfo"], capture_output=True, text=True, check=False).stdout:
            time.sleep(0.5)
        return self

    def __exit__(self, *args: object) -> None:
        subprocess.run(["scancel", "--user=root"], check=False)
        time.sleep(3)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(30)
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, folder: Path, **changes: Any) -> ObservedRun:
        config, log = prepared(folder, changes.pop("steps", STEPS), EVERY, **changes), folder / "screen"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = ["sbatch", "--parsable", "--nodes=1", "--ntasks-per-node=2", f"--output={log}"]
        sent = subprocess.run(
            [*command, str(ROOT / "configs" / "schedulers" / "slurm.sbatch"), str(config)],
            env={**self.environment(), "PATH": path},
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
        self.job = sent.stdout.strip()
        return ObservedRun(folder, Screen(log), self._status)

    def _status(self) -> int | None:
        shown = subprocess.run(
            ["scontrol", "show", "job", self.job], capture_output=True, text=True, check=False
        ).stdout
        state = re.search(r"JobState=(\w+)", shown)
        code = re.search(r"ExitCode=(\d+)", shown)
        if state is None or code is None or state[1] in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING"):
            return None
        return int(code[1])

    def pid(self, run: ObservedRun) -> int:
        """The process id of the task of rank 1."""
        for folder in Path("/proc").iterdir():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(run.config).encode() in words and b"SLURM_PROCID=1" in variables and b"python" in words[0]:
                return int(folder.name)
        raise SystemExit("process 1 does not run")


def _kill(engine: Any, run: ObservedRun) -> None:
    os.kill(engine.pid(run), signal.SIGKILL)


def _stop(engine: Any, run: ObservedRun) -> None:
    os.kill(engine.pid(run), signal.SIGSTOP)


def _actor(engine: Any, run: ObservedRun) -> None:
    os.kill(engine.actor(run), signal.SIGKILL)


def _daemon(engine: Any, run: ObservedRun) -> None:
    os.kill(engine.daemon(), signal.SIGKILL)


def _preempt(engine: Any, run: ObservedRun) -> None:
    subprocess.run(["scancel", "--signal=TERM", engine.job], check=True)


FAULTS: dict[str, tuple[str, Callable[[Any, ObservedRun], None], tuple[type[Host], ...]]] = {
    "kill": ("process 1 killed (SIGKILL)", _kill, (Host, Ray, Slurm)),
    "stop": ("process 1 stopped (SIGSTOP)", _stop, (Host, Ray, Slurm)),
    "actor": ("actor of process 1 killed", _actor, (Ray,)),
    "preempt": ("SIGTERM to the job's tasks", _preempt, (Slurm,)),
    "daemon": ("Ray daemon of one node killed, elastic; then a node joins", _daemon, (Ray,)),
}


def resumed(engine: Host, run: ObservedRun, sent: float) -> tuple[float, str, float]:
    """Wait until a run steps again; returns when the fault was reported, by which line, and when it stepped."""
    # A resumed run repeats the steps after its checkpoint, so the records get fewer or the step goes back.
    run.until(lambda: run.screen.find(r"^resumed from step", sent), "the next attempt")
    after = time.monotonic()
    seen = len(run.steps())
    again = run.until(lambda: len(run.steps()) > seen, "a step", 120)
    found = run.screen.find(engine.cause, sent)
    assert found is not None and again >= after, run.screen.last()
    return found[0], found[1], again


def measure(engine: Host, name: str, root: Path, want: Any) -> bool:
    """Hit a run, print what happens; returns whether it ends as the undisturbed run does."""
    title, hit, _ = FAULTS[name]
    changes: dict[str, Any] = {}
    if name == "daemon":  # long enough for two restarts
        changes = {"supervise": {"elastic": True}, "steps": 10 * STEPS}
    run = engine.start(root / f"{type(engine).__name__}-{name}", **changes)
    run.until(lambda: (run.steps() or [0])[-1] > EVERY + 5, "the first steps")
    sent = time.monotonic()
    hit(engine, run)
    reported, line, again = resumed(engine, run, sent)
    print(
        f"{type(engine).__name__}: {title}: reported after {reported - sent:.1f} s; steps again after "
        f"{again - sent:.1f} s; {line}",
        flush=True,
    )
    if name == "daemon":
        return _grow(engine, run)
    status = run.finish()
    same = status == 0 and run.sums(STEPS) == want
    print(f"      ended with status {status}, final state {'equals bitwise' if same else 'DIFFERS'}", flush=True)
    return same


def _grow(engine: Any, run: ObservedRun) -> bool:
    """A node joins; after the next failure the run has both its processes again."""
    engine.second = engine.join("127.0.0.4")
    found = pid_of_rank(run.config, 0)
    sent = time.monotonic()
    if found is None:  # a single process has no rank on its command line
        found = next(
            int(p.name)
            for p in Path("/proc").iterdir()
            if p.name.isdecimal() and str(run.config).encode() in _words(p) and b"--process-count" in _words(p)
        )
    os.kill(found, signal.SIGKILL)
    _, line, again = resumed(engine, run, sent)
    status = run.finish()
    counts = [text for _, text in run.screen.lines if text.startswith("restart ")]
    print(f"      {line}: steps again after {again - sent:.1f} s; ended with status {status}", *counts, sep="\n      ")
    return status == 0 and ": 1 process from" in counts[0] and ": 2 processes from" in counts[1]


def _words(process: Path) -> list[bytes]:
    try:
        return (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines: dict[str, type[Host]] = {"host": Host, "ray": Ray, "slurm": Slurm}
    parser.add_argument("--on", nargs="+", choices=engines, default=list(engines), help="what restarts the runs")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="default: all")
    options = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        whole = Host().start(root / "undisturbed")
        if whole.finish() != 0:
            raise SystemExit(whole.screen.last())
        want = whole.sums(STEPS)
        for name in options.on:
            with engines[name]() as engine:
                for fault in options.faults:
                    if engines[name] in FAULTS[fault][2]:
                        good &= measure(engine, fault, root, want)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
