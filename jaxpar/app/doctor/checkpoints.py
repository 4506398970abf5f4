"""``jaxpar doctor --checkpoint DIR``: verify each step of a run's checkpoints."""

from __future__ import annotations

from pathlib import Path

from jaxpar.app.doctor.machine import MachineCheck
from jaxpar.checkpoint.verify import health, unfinished_in


def examine(folder: Path) -> list[MachineCheck]:
    """Verify every byte of each step; return a check for each step and for each unfinished save.

    Raises:
      CheckpointError: the folder is neither a checkpoint nor has one.
    """
    found, steps = [], list(health(folder))
    best = max((one.step for one in steps if one.good), default=None)
    restart = f"a restart resumes from step {best}" if best is not None else "no step is undamaged: start anew"
    for one in steps:
        if one.good:
            contents = f"{one.tensors} tensors, {one.bytes / 2**20:.1f} MiB{f', of {one.when}' if one.when else ''}"
            found.append(MachineCheck(f"step {one.step}", "ok", contents))
        else:
            remedy = f"delete it; {restart}"
            found.append(MachineCheck(f"step {one.step}", "bad", " ".join(one.problems), remedy))
    found += [
        MachineCheck("unfinished", "warn", f"{folder / name}: left by an interrupted save", "delete it")
        for name in unfinished_in(folder)
    ]
    return found
