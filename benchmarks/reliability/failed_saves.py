"""Runs whose storage fails: the exit status, the last line, and what is still there afterwards.

    uv run python benchmarks/reliability/failed_saves.py [--tree DIR] [FAULT ...]

Each fault happens to a real ``jaxpar train`` on a file system of its own (``unshare`` and tmpfs, so Linux only), of
5 MiB where a disk is to be full; a checkpoint has 3 MiB.

Goal: the exit status that docs/reference/exit_codes.md gives, and no raw traceback. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.shared.paths import LAYOUTS, ROOT
from jaxpar.checkpoint.verify import steps_in

RUN = {
    "model": {"family": "llama", "preset": "tiny", "layers": 1, "embed": 128, "heads": 2, "head_dim": 64, "mlp": 256},
    "layout": str(LAYOUTS / "fsdp.yaml"),
    "cpu_devices": 1,
    "data": {"source": "synthetic", "batch": 2, "seq": 16},
    "train": {"steps": 6, "eval_every": 100, "eval_batches": 1},
    "checkpoint": {"save_interval_steps": 2},
}


@dataclass(frozen=True)
class Fault:
    """What happens to a run on the folder ``disk``, and how the run must end."""

    happens: Callable[[Path, Path], subprocess.CompletedProcess[str]]
    status: int
    steps: list[int]


def train(
    disk: Path, tree: Path, *settings: str, stop: Callable[[], bool] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``jaxpar train`` with its output in ``disk``; SIGTERM follows once ``stop`` returns true."""
    config = disk.parent / "run.yaml"
    config.write_text(yaml.safe_dump({**RUN, "output": str(disk / "out")}))
    command = [sys.executable, "-m", "jaxpar.app.cli", "train", str(config), *(f"--set={one}" for one in settings)]
    environ = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryFile("w+") as screen:  # on another disk
        run = subprocess.Popen(
            command, env=environ, stdout=screen, stderr=subprocess.STDOUT, text=True, cwd=disk.parent
        )
        if stop is not None:
            while not stop() and run.poll() is None:
                time.sleep(0.05)
            run.send_signal(signal.SIGTERM)
        run.wait(300)
        screen.seek(0)
        return subprocess.CompletedProcess(command, run.returncode, screen.read())


def fill(disk: Path) -> None:
    """Leave no byte free."""
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def full_disk(disk: Path, tree: Path) -> subprocess.CompletedProcess[str]:
    return train(disk, tree)


def read_only_checkpoints(disk: Path, tree: Path) -> subprocess.CompletedProcess[str]:
    kept = disk / "out/checkpoints"
    kept.mkdir(parents=True)
    subprocess.run(["mount", "--bind", kept, kept], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", kept], check=True)
    return train(disk, tree)


def sigterm_on_a_full_disk(disk: Path, tree: Path) -> subprocess.CompletedProcess[str]:
    def saved() -> bool:
        if not steps_in(disk / "out/checkpoints"):
            return False
        fill(disk)
        return True

    return train(disk, tree, "train.steps=100000", "train.eval_every=100000", stop=saved)


def _finished(disk: Path, tree: Path) -> None:
    found = train(disk, tree, "train.steps=2")
    assert found.returncode == 0, found.stdout


def damaged_metrics(disk: Path, tree: Path) -> subprocess.CompletedProcess[str]:
    _finished(disk, tree)
    with (disk / "out/metrics.jsonl").open("ab") as file:
        file.write(b"\xff\n")
    return train(disk, tree, "train.steps=2")


def full_at_the_start(disk: Path, tree: Path) -> subprocess.CompletedProcess[str]:
    _finished(disk, tree)
    fill(disk)
    return train(disk, tree, "train.steps=2")


def read_only_output(disk: Path, tree: Path) -> subprocess.CompletedProcess[str]:
    _finished(disk, tree)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    return train(disk, tree, "train.steps=2")


def lock_that_is_a_link(disk: Path, tree: Path) -> subprocess.CompletedProcess[str]:
    precious = disk.parent / "precious"
    precious.write_text("precious")
    (disk / "out/checkpoints").mkdir(parents=True)
    (disk / "out/checkpoints/lock").symlink_to(precious)
    found = train(disk, tree, "train.steps=2")
    if precious.read_text() != "precious":
        found.stdout += "\nTHE TARGET OF THE LINK WAS CHANGED\n"
    return found


FAULTS = {
    "full_disk": Fault(full_disk, 74, [2]),
    "read_only_checkpoints": Fault(read_only_checkpoints, 74, []),
    "sigterm_on_a_full_disk": Fault(sigterm_on_a_full_disk, 74, [2]),
    "damaged_metrics": Fault(damaged_metrics, 0, [2]),
    "full_at_the_start": Fault(full_at_the_start, 0, [2]),
    "read_only_output": Fault(read_only_output, 0, [2]),
    "lock_that_is_a_link": Fault(lock_that_is_a_link, 1, []),
}
MOUNTED = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o size=5m none "$0" && exec "$@"']


def inside(name: str, disk: Path, tree: Path) -> int:
    """Let one fault happen on the file system ``disk``, and print a row about it."""
    fault = FAULTS[name]
    found, steps = fault.happens(disk, tree), steps_in(disk / "out/checkpoints")
    lines = [line for line in found.stdout.splitlines() if line.strip()]
    raw, changed = "Traceback (most recent" in found.stdout, "THE TARGET" in found.stdout
    good = found.returncode == fault.status and not raw and not changed and steps == fault.steps
    what = f"{' raw traceback,' if raw else ''}{' a file outside was changed,' if changed else ''} steps {steps}"
    print(f"{'pass' if good else 'FAIL'}  {name}: exit {found.returncode},{what}: {lines[-1][:110]}", flush=True)
    return not good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of {', '.join(FAULTS)} (default: all)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout whose jaxpar runs (default: this one)")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        return inside(options.inside[0], Path(options.inside[1]), options.tree)
    failed = 0
    for name in options.faults or FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            disk = Path(folder) / "disk"
            disk.mkdir()
            command = [sys.executable, __file__, "--inside", name, str(disk), "--tree", str(options.tree)]
            failed += subprocess.run([*MOUNTED, str(disk), *command], check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
