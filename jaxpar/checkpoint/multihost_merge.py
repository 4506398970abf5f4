"""Merge the checksums of all processes in process 0, through files in the checkpoint's shared folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax

from jaxpar.checkpoint.manifest import TensorRecord
from jaxpar.checkpoint.validate import opened
from jaxpar.errors import CheckpointError
from jaxpar.utils.durable import write_atomically

_TIMEOUT = 600.0  # seconds
type Files = dict[str, tuple[int, int]]


def gather(here: Path, tensors: dict[str, TensorRecord], files: Files) -> tuple[dict[str, TensorRecord], Files]:
    """Merge every piece's checksum and file in process 0; the others wait until the save is complete.

    Returns:
      In process 0 the records and files of all processes; in the others, the arguments.

    Raises:
      CheckpointError: another process did not finish within 600 s.
    """
    rank, count = jax.process_index(), jax.process_count()
    if count == 1:
        return tensors, files
    if rank:
        mine = {"sums": {path: tensor.sums for path, tensor in tensors.items()}, "files": files}
        write_atomically(here / f"part.{rank}", json.dumps(mine))
        _wait(lambda: not here.exists(), f"{here}: process 0 did not finish the checkpoint")
        return tensors, files
    for other in range(1, count):
        part = here / f"part.{other}"
        _wait(part.exists, f"{here}: process {other} did not finish its part")
        with opened(here, part.name) as f:
            found = json.loads(f.readall())
        part.unlink()
        files |= {name: (size, total) for name, (size, total) in found["files"].items()}
        for path, theirs in found["sums"].items():
            both = zip(tensors[path].sums, theirs, strict=True)
            tensors[path] = replace(tensors[path], sums=tuple(max(pair) for pair in both))
    return tensors, files


def _wait(ready: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + _TIMEOUT
    while not ready():
        if time.monotonic() > until:
            raise CheckpointError(f"{what} within {_TIMEOUT:g} s after this process did.")
        time.sleep(0.02)
