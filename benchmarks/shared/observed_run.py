"""A small run of two processes whose screen and steps a benchmark watches, wherever it was started."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.shared.paths import LAYOUTS
from jaxpar.checkpoint.verify import check

CONFIG: dict[str, Any] = {
    "model": {"family": "llama", "preset": "tiny", "layers": 1, "embed": 16, "heads": 2, "head_dim": 8, "mlp": 24},
    "layout": str(LAYOUTS / "fsdp.yaml"),
    "cpu_devices": 2,
    "data": {"source": "synthetic", "batch": 8, "seq": 16},
    "supervise": {"step_timeout": 20, "restarts": 5, "restart_delay": 1},
}


def prepared(folder: Path, steps: int, every: int, **changes: Any) -> Path:
    """Write the configuration of a run of ``steps`` steps, with a checkpoint after ``every``; returns its path."""
    folder.mkdir(parents=True)
    supervise = {**CONFIG["supervise"], **changes.pop("supervise", {})}
    config = {
        **CONFIG,
        "train": {"steps": steps, "eval_every": steps, "eval_batches": 1},
        "checkpoint": {"save_interval_steps": every, "keep": 1000},
        "supervise": supervise,
        "output": str(folder / "run"),
        **changes,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder / "run.yaml"


class Screen:
    """The lines of a file that grows, with the times at which they appeared."""

    def __init__(self, file: Path):
        self.lines, self._file = list[tuple[float, str]](), file
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while not self._file.exists():
            time.sleep(0.05)
        with self._file.open(encoding="utf-8", errors="replace") as file:
            rest = ""
            while True:
                rest += file.readline()
                if rest.endswith("\n"):
                    self.lines.append((time.monotonic(), rest.rstrip()))
                    rest = ""
                else:
                    time.sleep(0.05)

    def find(self, pattern: str, after: float = 0.0) -> tuple[float, str] | None:
        """The first line that matches, of those that appeared after a time."""
        return next(((at, line) for at, line in self.lines if at >= after and re.search(pattern, line)), None)

    def last(self, count: int = 20) -> str:
        """The last lines."""
        return "\n".join(line for _, line in self.lines[-count:])


@dataclass
class ObservedRun:
    """A run: its folder, its screen, and how to learn its exit status (``None`` while it runs)."""

    folder: Path
    screen: Screen
    status: Callable[[], int | None]

    @property
    def config(self) -> Path:
        """Its configuration."""
        return self.folder / "run.yaml"

    def steps(self) -> list[int]:
        """The recorded steps, in the order of their records."""
        try:
            lines = (self.folder / "run" / "metrics.jsonl").read_text().splitlines()
            return [json.loads(line)["step"] for line in lines if line.endswith("}") and '"loss"' in line]
        except (OSError, ValueError):
            return []

    def until(self, ready: Callable[[], Any], what: str, seconds: float = 400) -> float:
        """Wait until ``ready()`` or until the run has ended; returns the time."""
        end = time.monotonic() + seconds
        while not ready() and self.status() is None:
            if time.monotonic() > end:
                raise SystemExit(f"waited {seconds:g} s for {what}:\n{self.screen.last()}")
            time.sleep(0.05)
        return time.monotonic()

    def finish(self, seconds: float = 600) -> int | None:
        """Wait for its end; returns its status."""
        self.until(lambda: False, "the end of the run", seconds)
        return self.status()

    def sums(self, step: int) -> Any:
        """The checksums of a step's state."""
        found = check(self.folder / "run" / "checkpoints" / str(step), step)
        return {path: tensor.sums for path, tensor in found.tensors.items()}
