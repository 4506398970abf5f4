"""The processes that ``jaxpar`` starts for a run: their environment and their process ids."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.shared.paths import ROOT

FAST_COMPILES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""XLA flags for benchmarks that measure everything but the compiled programs."""


def environment(**more: str) -> dict[str, str]:
    """Return environment variables for a process that imports this repository's jaxpar and compiles fast."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "XLA_FLAGS": FAST_COMPILES, "PYTHONPATH": paths, **more}


def pid_of_rank(config: Path, rank: int) -> int | None:
    """Return the process id of a rank of the run that ``config`` configures, or ``None`` if there is none."""
    for pid in (int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        ours = str(config).encode() in words and b"--processes" not in words  # a supervisor has --processes
        if ours and b"--process-id" in words and words[words.index(b"--process-id") + 1] == str(rank).encode():
            return pid
    return None
