"""Runs of ``jaxpar train`` in processes of their own: starting one, what it has printed, and its losses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


class TrainProcess:
    """A process that trains, in a folder of its own.

    Args:
      folder: holds its configuration, its output in ``run``, and what it prints in ``screen``.
      config: its configuration; a second process in the same folder resumes the first one's run.
      words: further words of its command line.
      variables: changes to its environment.
    """

    def __init__(self, folder: Path, config: dict[str, Any], *words: str, **variables: str):
        folder.mkdir(exist_ok=True)
        self.config, self._metrics, self._screen = folder / "run.yaml", folder / "run/metrics.jsonl", folder / "screen"
        self.config.write_text(yaml.safe_dump({**config, "output": str(folder / "run")}))
        command = [sys.executable, "-P", "-m", "jaxpar.app.cli", "train", str(self.config), *words]
        clean = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
        path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        with self._screen.open("wb") as screen:
            self.process = subprocess.Popen(
                command,
                env={**clean, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **variables},
                stdout=screen,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )

    def screen(self) -> str:
        """Returns what it has printed."""
        return self._screen.read_text(errors="replace")

    def printed(self, pattern: str) -> re.Match[str] | None:
        """Returns the first line that matches."""
        return re.search(pattern, self.screen(), re.MULTILINE)

    def losses(self) -> dict[int, float]:
        """Returns the loss of each recorded step; the last record of a step counts."""
        lines = self._metrics.read_text().splitlines() if self._metrics.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return {record["step"]: record["loss"] for record in records if "loss" in record}

    def reached(self, step: int) -> bool:
        """Returns whether a step is recorded."""
        return step in self.losses()

    def wait_for[T](self, ready: Callable[[], T], seconds: float = 240) -> T:
        """Wait while it runs; returns the first true value of ``ready``."""
        until = time.monotonic() + seconds
        while not (found := ready()):
            assert self.process.poll() is None and time.monotonic() < until, self.screen()
            time.sleep(0.02)
        return found

    def end(self, seconds: float = 240) -> int:
        """Wait until it has ended; returns its exit status."""
        return self.process.wait(seconds)
