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
    for one in steps:
        said = f"{one.tensors} tensors, {one.bytes / 2**20:.1f} MiB{f', of {one.when}' if one.when else ''}"
        back = f"a restart takes step {best}" if best is not None else "no step is good: begin anew"
        remedy = f"delete it; {back}"
        found.append(
            MachineCheck(
                f"step {one.step}",
                "ok" if one.good else "bad",
                said if one.good else " ".join(one.problems),
                "" if one.good else remedy,
            )
        )
    found += [
        MachineCheck("unfinished", "warn", f"{folder / name}: a save was killed in it", "delete it")
        for name in unfinished_in(folder)
    ]
    return found
