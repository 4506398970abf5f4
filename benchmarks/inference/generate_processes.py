"""Generation with several processes: the text equals that of one device, and lost processes end all of them.

    uv run python benchmarks/inference/generate_processes.py [--processes 2] [--only tokens|ends]

``tokens``: the same prompts of different lengths, greedily in fp32, run on one process with one device and on N
processes with two devices each. The layouts shard the batch, the sequence, the heads or the pipeline stages over
processes. Goal: the same text and number of tokens.

``ends``: while text is generated, the last or the first process is killed (SIGKILL), a process of the second of two
hosts is killed, a process is stopped, or the group receives Ctrl-C. Prints seconds from the signal to the line that
reports it, and to the end of all processes. Goal: the expected line and exit status.

Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.shared.paths import LAYOUTS
from benchmarks.shared.processes import environment, pid_of_rank
from jaxpar.app.launch.process_group import free_port

ALLOWANCE = 15.0
PROMPTS = ["a", "def f(x):", "the quick brown fox jumps over the lazy dog", "import os"]
MODEL = {
    "family": "llama",
    "preset": "tiny",
    "layers": 2,
    "embed": 64,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 16,
    "mlp": 96,
}
SPLITS = {
    "data across": ("fsdp_tp.yaml", {"model": 2}),
    "heads across": ("tp.yaml", {"data": 1, "model": -1}),
    "a sequence across": ("ring.yaml", {"context": -1, "data": 1}),
    "stages across": ("pp_tp.yaml", {"pipeline": 2, "data": -1, "model": 2}),
}


def make_checkpoint(folder: Path) -> None:
    """Save a checkpoint of a model with enlarged layers. With initial weights the model repeats one word."""
    import jax
    import optax

    import jaxpar as jp
    from jaxpar.app.config import load_run
    from jaxpar.app.job import make_job

    job = make_job(load_run(folder / "run.yaml"))
    layout = job.layout(jax.devices()[:1])
    params = jp.init(layout, job.make_model, optax.identity()).params
    params["blocks"] = jax.tree.map(lambda w: w * 3, params["blocks"])
    with jp.CheckpointManager(folder / "checkpoints") as manager:
        manager.save(1, {"params": params}, layout=layout)


class Run:
    """A process that generates, and the lines of its standard error with their times."""

    def __init__(self, folder: Path, *words: str, prompts: list[str] = PROMPTS, most: int = 24):
        said = [word for prompt in prompts for word in ("--prompt", prompt)]
        file = ["generate", str(folder / "run.yaml"), "--checkpoint", str(folder / "checkpoints")]
        command = [sys.executable, "-m", "jaxpar.app.cli", *file, *said, "--max-new-tokens", str(most), *words]
        env = environment(JAX_PLATFORMS="cpu")
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.text, self.lines = b"", list[tuple[float, str]]()
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read, self._listen)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while data := os.read(self.process.stdout.fileno(), 4096):
            self.text += data

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line.decode(errors="replace").rstrip()))

    def end(self) -> tuple[int, float]:
        """Wait for the process; return its exit status and the time."""
        status = self.process.wait(600)
        ended = time.monotonic()
        for thread in self._threads:
            thread.join()
        return status, ended

    def streams(self, size: int = 200) -> None:
        """Wait for ``size`` bytes of text."""
        until = time.monotonic() + 300
        while len(self.text) < size:
            if time.monotonic() > until or self.process.poll() is not None:
                raise SystemExit(f"the process generated no text: {self.lines}")
            time.sleep(0.05)

    def when(self, pattern: str) -> float:
        """Return the time of the first line that matches."""
        found = next((at for at, line in self.lines if re.search(pattern, line)), None)
        if found is None:
            raise SystemExit(f"no line matches {pattern!r}: {self.lines}")
        return found


def child(folder: Path, rank: int) -> int:
    """Return the process id of a rank."""
    pid = pid_of_rank(folder / "run.yaml", rank)
    if pid is None:
        raise SystemExit(f"process {rank} does not run")
    return pid


def tokens(folder: Path, count: int) -> bool:
    """Whether all layouts generate the text of one device."""

    def said(name: str, layout: str, mesh: dict[str, int], devices: int, *words: str) -> list[Any]:
        file = folder / f"{name}.jsonl"
        sets = [
            f"layout={LAYOUTS / layout}",
            f"cpu_devices={devices}",
            *(f"mesh.{a}={n}" for a, n in mesh.items()),
        ]
        run = Run(folder, *(word for one in sets for word in ("--set", one)), "--json", str(file), *words)
        status, _ = run.end()
        if status:
            raise SystemExit(f"{name}: exit status {status}: {run.lines}")
        print(f"  {name}: {run.lines[1 if words else 0][1].partition(' on ')[2]}", flush=True)
        return [json.loads(line) for line in file.read_text().splitlines()]

    wanted, good = said("one device", "dp.yaml", {}, 1), True
    for name, (layout, mesh) in SPLITS.items():
        same = said(name, layout, mesh, 2 * count, "--processes", str(count)) == wanted
        print(
            f"{name}, {count} processes: {'the text of one device' if same else 'NOT the text of one device'}",
            flush=True,
        )
        good &= same
    return good


def ends(folder: Path, count: int) -> bool:
    """Kill a process, stop one, interrupt all; return whether each is reported, with the expected exit status."""
    good, group = True, ("--processes", str(count), "--set", f"cpu_devices={count}")
    cases = {
        "the last killed": (
            signal.SIGKILL,
            count - 1,
            rf"^process {count - 1} of {count} was killed by SIGKILL after step \d+$",
            1,
        ),
        "the first killed": (signal.SIGKILL, 0, rf"^process 0 of {count} was killed by SIGKILL after step \d+$", 1),
        f"the last stopped, allowance {ALLOWANCE:g} s": (
            signal.SIGSTOP,
            count - 1,
            rf"^process {count - 1} of {count} has not finished a step .* no sign of life",
            1,
        ),
        "Ctrl-C": (signal.SIGINT, None, r"^stopped by Ctrl-C: \d+ tokens of 1 prompt", 130),
    }
    for name, (number, rank, pattern, status) in cases.items():
        run = Run(folder, *group, prompts=["abc"], most=2000)
        run.streams()
        os.kill(run.process.pid if rank is None else child(folder, rank), number)
        good &= told(name, time.monotonic(), [run], pattern, status)
    address = (
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--process-count",
        "2",
        "--processes",
        "1",
        "--set",
        "cpu_devices=2",
    )
    hosts = [Run(folder, *address, "--process-id", str(rank), prompts=["abc"], most=2000) for rank in range(2)]
    hosts[0].streams()
    os.kill(child(folder, 1), signal.SIGKILL)
    return (
        told(
            "two hosts, the second's process killed",
            time.monotonic(),
            hosts,
            r"^process [01] of 2 ",
            1,
        )
        and good
    )


def told(name: str, at: float, runs: list[Run], pattern: str, wanted: int) -> bool:
    """Print when each supervisor reported a signal and ended; return whether all exit statuses are ``wanted``."""
    good = True
    for run in runs:
        status, ended = run.end()
        print(
            f"{name}: reported after {run.when(pattern) - at:.1f} s, all processes ended after {ended - at:.1f} s, "
            f"exit status {status}",
            flush=True,
        )
        good &= status == wanted
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--only", choices=("tokens", "ends"), help="run this part only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {
            "model": MODEL,
            "layout": str(LAYOUTS / "fsdp.yaml"),
            "data": {"source": "synthetic", "batch": 8, "seq": 16},
            "supervise": {"step_timeout": ALLOWANCE},
            "output": str(folder / "run"),
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        make_checkpoint(folder)
        good = options.only == "ends" or tokens(folder, options.processes)
        good &= options.only == "tokens" or ends(folder, options.processes)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
