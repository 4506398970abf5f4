"""A run resumed on another layout or number of devices continues with the same losses and batches.

    uv run python benchmarks/checkpoint/elastic_resume.py [--steps 50]

``jaxpar train`` trains a small Llama (fp32, shuffled text, Adam, clipping, two microbatches) on 8 devices, fully
sharded × tensor parallel, without interruption. Its checkpoint of step 10 is then resumed for ``--steps`` steps on each
of several layouts and numbers of devices, each in a separate process. Prints the largest relative difference of a
step's loss from the uninterrupted run, and whether every batch had the same tokens.

Goals: differences of at most 1e-5, and equal batches. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.shared.paths import LAYOUTS

FIRST, BOUND = 10, 1e-5
RUN: dict[str, Any] = {
    "model": {"family": "llama", "preset": "tiny", "layers": 2, "embed": 64, "heads": 4, "head_dim": 16, "mlp": 96},
    "data": {"source": "synthetic", "batch": 24, "seq": 32},
    "optimizer": {"learning_rate": 1e-3, "warmup": 5},
    "checkpoint": {"save_interval_steps": FIRST, "keep": 1000},
}
FSDP_TP: dict[str, Any] = {"layout": str(LAYOUTS / "fsdp_tp.yaml"), "cpu_devices": 8}
ELSEWHERE: dict[str, dict[str, Any]] = {
    "the same": FSDP_TP,
    "fully sharded, 4 devices": {"layout": str(LAYOUTS / "fsdp.yaml"), "cpu_devices": 4},
    "tensor parallel, 2": {"layout": str(LAYOUTS / "tp.yaml"), "cpu_devices": 2},
    "one device": {"layout": str(LAYOUTS / "dp.yaml"), "cpu_devices": 1},
    "replicated, 3": {"layout": str(LAYOUTS / "dp.yaml"), "cpu_devices": 3},
    "pipeline 2 × fully sharded 4, 8": {
        "layout": str(LAYOUTS / "pp_fsdp.yaml"),
        "cpu_devices": 8,
        "mesh": {"pipeline": 2},
        "parallel": {"pipeline": {"schedule": "1f1b", "microbatches": 2}},
    },
}


class Noted:
    """Batches that log a hash of their tokens, which does not depend on the layout."""

    def __init__(self, stream: Any, file: Path):
        self._stream, self._file = stream, file

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._stream)
        with self._file.open("a") as f:
            f.write(hashlib.sha256(batch["tokens"].tobytes()).hexdigest() + "\n")
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def child(folder: Path) -> int:
    """Run the training of ``folder``."""
    from jaxpar.app.cli import main
    from jaxpar.app.train import run_data

    module: Any = run_data
    made = module.Batches
    module.Batches = lambda *args, **options: Noted(made(*args, **options), folder / "batches")
    return main(["train", str(folder / "run.yaml")])


def run(folder: Path, steps: int, changes: dict[str, Any]) -> tuple[dict[int, float], list[str]]:
    """Train in a process, from a checkpoint in ``folder`` if any; return losses by step and batch hashes."""
    folder.mkdir(exist_ok=True)
    train = {"steps": FIRST + steps, "eval_every": 1000, "eval_batches": 1}
    if "parallel" not in changes:
        train["grad_accum_steps"] = 2
    data = {**RUN, **changes, "train": train, "output": str(folder / "out")}
    (folder / "run.yaml").write_text(yaml.safe_dump(data))
    done = subprocess.run(
        [sys.executable, __file__, "--child", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{folder.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return losses, (folder / "batches").read_text().splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="steps after the checkpoint (default: %(default)s)")
    parser.add_argument("--child", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        return child(options.child)
    with tempfile.TemporaryDirectory() as root:
        whole = Path(root) / "whole"
        losses, order = run(whole, options.steps, FSDP_TP)
        print(f"uninterrupted: 8 devices, loss {losses[1]:.4f} -> {losses[FIRST + options.steps]:.4f}", flush=True)
        good = True
        for i, (name, changes) in enumerate(ELSEWHERE.items()):
            folder = Path(root) / str(i)
            shutil.copytree(whole / f"out/checkpoints/{FIRST}", folder / f"out/checkpoints/{FIRST}")
            found, batches = run(folder, options.steps, changes)
            steps = range(FIRST + 1, FIRST + options.steps + 1)
            worst = max(abs(found[n] - losses[n]) / abs(losses[n]) for n in steps)
            same = batches == order[FIRST:]
            good &= worst <= BOUND and same and list(found) == list(steps)
            print(
                f"{name:32} {options.steps} steps: losses differ by at most {worst:.1e}; "
                f"batches {'are equal' if same else 'DIFFER'}",
                flush=True,
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
