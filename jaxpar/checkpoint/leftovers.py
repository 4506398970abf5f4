"""What kills and damage leave in a run's folder beside its steps: why a restore passes it over, and what it recovers.

A save of step ``N`` writes ``N.unfinished``, the manifest last and after everything else is synced. It then renames an
older ``N`` to ``N.replaced``, and ``N.unfinished`` to ``N``. A kill between these leaves no ``N``, but its data. A
deletion first renames ``N`` to ``N.deleted``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from jaxpar.checkpoint.verify import STEP, incomplete, names_in, problems_of
from jaxpar.utils.durable import sync_folder

UNFINISHED, REPLACED, DELETED = ".unfinished", ".replaced", ".deleted"
"""Suffixes of the folder that a save writes into, of the checkpoint that it replaces, and of one that is deleted."""
_NAME = re.compile(rf"({STEP.pattern})(\.[a-z]+)?")


@dataclass(frozen=True)
class Leftover:
    """An entry of a run's folder that is named like a step but is none.

    Attributes:
      name: its name in the run's folder.
      step: the step in its name.
      suffix: the rest of its name; empty if it has the name of a step.
      reason: why it is not restored, as a sentence.
      complete: whether it has a manifest, so that it may be the only copy of its step; its data is not verified.
    """

    name: str
    step: int
    suffix: str
    reason: str
    complete: bool

    def newer_than(self, step: int) -> bool:
        """Whether a restore of ``step`` passes this over."""
        return self.step > step or (self.step == step and self.suffix == UNFINISHED)


def leftovers_in(folder: str | os.PathLike[str]) -> list[Leftover]:
    """Returns what a restore passes over, newest first.

    Raises:
      CheckpointError: the folder exists but cannot be read.
    """
    root = Path(folder)
    found = [one for name in names_in(root) if (one := _leftover(root, name)) is not None]
    return sorted(found, key=lambda one: (one.step, one.name), reverse=True)


def _leftover(root: Path, name: str) -> Leftover | None:
    match = _NAME.fullmatch(name)
    suffix = match[2] or "" if match else "?"
    if match is None or suffix not in ("", UNFINISHED, REPLACED, DELETED):
        return None
    step, problem = int(match[1]), incomplete(root / name)
    if (not suffix and problem is None) or not os.path.lexists(root / name):  # another process may have renamed it
        return None
    reasons = {
        UNFINISHED: f"is complete, but its save was killed before it was renamed to {step}.",
        REPLACED: f"is the previous checkpoint of step {step}; the save that was replacing it was killed.",
        DELETED: "was being deleted.",
    }
    reason = problem or f"{root / name} {reasons[suffix]}"
    if suffix == UNFINISHED and reason.endswith(" is missing."):
        reason = f"{root / name} is incomplete: its save was killed or has not ended."
    return Leftover(name, step, suffix, reason, problem is None)


def verified_reason(root: Path, one: Leftover) -> str:
    """Returns the reason of a leftover after reading every byte of it, if it has a manifest."""
    problems = problems_of(root / one.name, step=one.step) if one.complete and one.suffix != DELETED else []
    return f"{root / one.name} is damaged: {' '.join(problems)}" if problems else one.reason


def recover(folder: Path) -> list[str]:
    """Recover every step that a kill left without its name, in a folder that no other run uses.

    Returns:
      One text for each recovered step.

    Raises:
      OSError: the folder cannot be written to.
      CheckpointError: the folder cannot be read.
    """
    steps = sorted({one.step for one in leftovers_in(folder) if one.complete})
    return [text for step in steps if (text := recover_one(folder / str(step), step))]


def recover_one(target: Path, step: int | None = None) -> str:
    """Recover the checkpoint ``target`` if a kill left it without its name, and every byte of it is intact.

    The save that was killed is preferred to the checkpoint that it was replacing.

    Returns:
      A text that names what was recovered; empty if nothing was.
    """
    if os.path.lexists(target):
        return ""
    for suffix, what in ((UNFINISHED, "a complete save that was killed"), (REPLACED, "the previous checkpoint")):
        found = target.with_name(target.name + suffix)
        if incomplete(found) is None and not problems_of(found, step=step):
            os.rename(found, target)
            sync_folder(target.parent)
            return f"{target} is recovered from {found.name}, {what}; every byte of it is intact."
    return ""
