"""A small training run under the supervisor of ``jaxpar train``, for benchmarks that kill its processes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from benchmarks.shared.paths import LAYOUTS
from benchmarks.shared.processes import environment, pid_of_rank

STEP_TIMEOUT = 15.0
"""Seconds without a step after which the supervisor reports a process."""
RESTART_SECONDS = 30.0
"""Goal: most seconds from a kill to the next step, without the compile."""
STEPS = 100_000


class Run:
    """A supervised run, and the lines that it prints with their times.

    Args:
      folder: folder for the configuration and the output.
      processes: number of processes; ``words`` may start only some of them.
      words: arguments of ``jaxpar train``.
      supervise: entries of the table ``supervise`` of the configuration.
    """

    def __init__(self, folder: Path, processes: int, words: tuple[str, ...] = (), **supervise: object):
        self.folder, self.lines = folder, list[tuple[float, str]]()
        folder.mkdir(exist_ok=True)
        config = {
            "model": {
                "family": "llama",
                "preset": "tiny",
                "layers": 1,
                "embed": 16,
                "heads": 2,
                "head_dim": 8,
                "mlp": 24,
            },
            "layout": str(LAYOUTS / "fsdp.yaml"),
            "cpu_devices": processes,
            "data": {"source": "synthetic", "batch": 4 * processes, "seq": 16},
            "train": {"steps": STEPS, "eval_every": STEPS, "eval_batches": 1},
            "checkpoint": {"save_interval_steps": 20},
            "supervise": {"step_timeout": STEP_TIMEOUT, "restarts": 1000, "restart_delay": 1.0, **supervise},
            "output": str(folder / "run"),
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        words = words or ("--processes", str(processes))
        command = [sys.executable, "-m", "jaxpar.app.cli", "train", str(folder / "run.yaml"), *words]
        env = environment(PYTHONUNBUFFERED="1")
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def child(self, rank: int) -> int:
        """Return the process id of a rank."""
        pid = pid_of_rank(self.folder / "run.yaml", rank)
        if pid is None:
            raise SystemExit(f"process {rank} does not run:\n" + "\n".join(line for _, line in self.lines[-20:]))
        return pid

    def step(self) -> int:
        """Return the last recorded step."""
        try:
            lines = (self.folder / "run/metrics.jsonl").read_text().splitlines()
            return max(json.loads(line)["step"] for line in lines if line.endswith("}"))
        except (OSError, ValueError):
            return 0

    def progress(self, steps: int = 25) -> None:
        """Wait until ``steps`` more steps are recorded."""
        start = self.step()
        self.until(lambda: self.step() > start + steps, "progress")

    def until(self, ready: Callable[[], bool], what: str, limit: float = 900) -> float:
        """Wait until ``ready()``; return the time."""
        end = time.monotonic() + limit
        while not ready():
            if time.monotonic() > end or self.process.poll() is not None:
                raise SystemExit(f"waited in vain for {what}:\n" + "\n".join(line for _, line in self.lines[-20:]))
            time.sleep(0.02)
        return time.monotonic()

    def find(self, pattern: str, after: int) -> tuple[float, str] | None:
        """Return the time and text of the first line from index ``after`` that matches."""
        return next(((at, line) for at, line in self.lines[after:] if re.search(pattern, line)), None)

    def end(self) -> None:
        """Stop the supervisor, which stops its children."""
        for _ in range(2):  # The second SIGTERM stops immediately. Two without a pause would merge into one.
            self.process.send_signal(signal.SIGTERM)
            time.sleep(1)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def stepping(run: Run, before: int) -> tuple[float, float]:
    """Wait for a step of a restarted run; return its time and the compile seconds. Ignores lines before ``before``."""
    file = run.folder / "run/metrics.jsonl"
    run.until(lambda: run.find(r"^compiled in", before) is not None, "the compile")
    found = run.find(r"^compiled in ([\d.]+)", before)
    assert found is not None
    size = file.stat().st_size
    again = run.until(lambda: file.stat().st_size > size, "a step")
    return again, float(found[1].split()[2])
