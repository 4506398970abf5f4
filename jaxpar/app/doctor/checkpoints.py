"""``jaxpar doctor --checkpoint DIR``: verify each step of a run's checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

from jaxpar.app.doctor.machine import MachineCheck
from jaxpar.checkpoint.leftovers import DELETED, Leftover, leftovers_in, verified_reason
from jaxpar.checkpoint.verify import Health, health
from jaxpar.errors import CheckpointError


def examine(folder: Path) -> list[MachineCheck]:
    """Verify every byte of each step; return a check for each step and for what a restore passes over.

    Raises:
      CheckpointError: the folder is neither a checkpoint nor has one.
    """
    leftovers = leftovers_in(folder)
    try:
        steps = list(health(folder))
    except CheckpointError:
        if not leftovers:
            raise
        steps = []
    best = max((one.step for one in steps if one.good), default=None)
    restart = f"a restart resumes from step {best}" if best is not None else "no step is undamaged: start anew"
    return [*(_of_step(one, restart) for one in steps), *(_of_leftover(folder, one, restart) for one in leftovers)]


def _of_step(one: Health, restart: str) -> MachineCheck:
    if not one.good:
        return MachineCheck(f"step {one.step}", "bad", " ".join(one.problems), f"delete it; {restart}")
    contents = f"{one.tensors} tensors, {one.bytes / 2**20:.1f} MiB{f', of {one.when}' if one.when else ''}"
    return MachineCheck(f"step {one.step}", "ok", contents)


def _of_leftover(folder: Path, one: Leftover, restart: str) -> MachineCheck:
    reason = verified_reason(folder, one)
    if not one.suffix:
        return MachineCheck(f"step {one.step}", "bad", reason, f"delete it; {restart}")
    lost = not os.path.lexists(folder / str(one.step)) and one.complete and one.suffix != DELETED
    remedy = "the next start of the run recovers it" if lost and reason == one.reason else "delete it"
    return MachineCheck("leftover", "warn", reason, remedy)
