"""A supervised run of N processes restarts after one of them is killed or stopped.

    uv run python benchmarks/chaos.py --processes N

Kills processes with SIGKILL, then stops processes with SIGSTOP, every second time during a save. Prints seconds from
the signal to the supervisor's line that names the process, and to the first step after the restart. Compile time of the
restart, as the run prints it, is listed separately.

Goals: ``AGAIN`` seconds from SIGKILL to the next step; a stopped process named within ``ALLOWANCE`` seconds of the last
step.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
ALLOWANCE, AGAIN, STEPS = 15.0, 30.0, 100_000


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
            "layout": str(ROOT / "configs/layouts/fsdp.yaml"),
            "cpu_devices": processes,
            "data": {"source": "synthetic", "batch": 4 * processes, "seq": 16},
            "train": {"steps": STEPS, "eval_every": STEPS, "eval_batches": 1},
            "checkpoint": {"save_interval_steps": 20},
            "supervise": {"step_timeout": ALLOWANCE, "restarts": 1000, "restart_delay": 1.0, **supervise},
            "output": str(folder / "run"),
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        words = words or ("--processes", str(processes))
        command = [sys.executable, "-m", "jaxpar.app.cli", "train", str(folder / "run.yaml"), *words]
        # Fast compiles: the benchmark measures everything else.
        flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "XLA_FLAGS": flags, "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def child(self, rank: int) -> int:
        """Return the process id of a rank."""
        for pid in (int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal()):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            ours = str(self.folder / "run.yaml").encode() in words and b"--processes" not in words
            if ours and b"--process-id" in words and words[words.index(b"--process-id") + 1] == str(rank).encode():
                return pid
        raise SystemExit(f"process {rank} is not there:\n" + "\n".join(line for _, line in self.lines[-20:]))

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
                raise SystemExit(f"{what} did not come:\n" + "\n".join(line for _, line in self.lines[-20:]))
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


def hit(run: Run, rank: int, number: signal.Signals, *, in_save: bool) -> tuple[float, float, float, str]:
    """Signal a process and wait for the restart.

    Returns:
      Seconds until the process is named, seconds until the run steps again, seconds spent compiling in between, and the
      line that names the process.
    """
    before = len(run.lines)
    run.progress()
    child = run.child(rank)
    if in_save:  # the other processes would wait ten minutes for this one's part of the save
        run.until(lambda: any((run.folder / "run/checkpoints").glob("*.unfinished")), "a save")
    os.kill(child, number)
    sent = time.monotonic()
    run.until(lambda: run.find(r"^restart ", before) is not None, "a restart")
    named = run.find(rf"^process(es)? .*{rank}.* of ", before)
    assert named is not None
    again, compiling = stepping(run, before)
    return named[0] - sent, again - sent, compiling, named[1]


def stepping(run: Run, before: int) -> tuple[float, float]:
    """Wait for a step of a restarted run; return its time and the compile seconds. Ignores lines before ``before``."""
    file = run.folder / "run/metrics.jsonl"
    run.until(lambda: run.find(r"^compiled in", before) is not None, "the compile")
    found = run.find(r"^compiled in ([\d.]+)", before)
    assert found is not None
    size = file.stat().st_size
    again = run.until(lambda: file.stat().st_size > size, "a step")
    return again, float(found[1].split()[2])


def processes(count: int, trials: int, dice: random.Random, root: Path) -> list[str]:
    """Kill and stop processes, ``trials`` times each; return a line per signal with the result and the goal."""
    run, lines = Run(root / "processes", count), list[str]()
    try:
        run.until(lambda: run.step() > 20, "the first steps")
        for number in (signal.SIGKILL, signal.SIGSTOP):
            ranks = [dice.randrange(count) for _ in range(trials)]
            results = [hit(run, rank, number, in_save=trial % 2 == 1) for trial, rank in enumerate(ranks)]
            named, again = max(r[0] for r in results), max(r[1] - r[2] for r in results)
            right = sum(f"process {rank} of {count}" in r[3] for rank, r in zip(ranks, results, strict=True))
            compiles = ", ".join(f"{r[2]:.0f}" for r in results)
            limit = ALLOWANCE + 1 if number == signal.SIGSTOP else AGAIN
            good = right == trials and named <= limit and (number == signal.SIGSTOP or again <= AGAIN)
            wanted = (
                f"wanted: {AGAIN:g} s"
                if number == signal.SIGKILL
                else f"wanted: named within {ALLOWANCE:g} s of the last step"
            )
            lines.append(
                f"{number.name}, {count} processes: {right} of {trials} named, after {named:.1f} s at most; stepping "
                f"again after {again:.1f} s at most, without "
                f"compiles of {compiles} s ({wanted}): {'as wanted' if good else 'NOT as wanted'}"
            )
            lines += [f"  {r[3]}" for r in results]
            print(*lines[-1 - trials :], sep="\n", flush=True)
    finally:
        run.end()
    return lines
