"""This process's compiler for CPUs in place of a topology's compiler in another process."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from jaxpar.analysis.compile import ahead_of_time, worker
from jaxpar.analysis.compile.compilers import COMPILERS


def use(monkeypatch: pytest.MonkeyPatch, folder: Path, devices: int) -> list[str]:
    """Every later program for TPUs is compiled for CPUs here; returns the list of the topologies that are asked for."""
    asked: list[str] = []

    def description(name: str, **options: Any) -> SimpleNamespace:
        asked.append(name)
        return SimpleNamespace(devices=jax.devices()[:devices])

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-P", "-m", "jaxpar.analysis.compile.worker"]
        worker.main(command[4])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("JAXPAR_CACHE", str(folder))
    monkeypatch.setitem(COMPILERS, "tpu", replace(COMPILERS["tpu"], lowering="cpu"))
    monkeypatch.setattr(topologies, "get_topology_desc", description)
    monkeypatch.setattr(ahead_of_time, "versions_of", lambda compiler: {"jax": jax.__version__})
    monkeypatch.setattr(ahead_of_time, "subprocess", SimpleNamespace(run=run))
    return asked
