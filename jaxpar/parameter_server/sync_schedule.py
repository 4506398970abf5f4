"""``SyncSchedule``: how many steps each round of local SGD has, and with which step it begins."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import ConfigError
from jaxpar.utils.checks import is_count, shown

SyncEvery = int | dict[int, int]
"""Steps between two exchanges: a number, or for each step from which it changes the number from there on."""


@dataclass(frozen=True)
class SyncSchedule:
    """Rounds: the steps between two exchanges, which may grow during a run.

    Attributes:
      phases: the step from which a number of steps between two exchanges holds, and that number; ascending, the first
        from step 0. A round has the length that holds where it begins, so a phase may begin a little later.
    """

    phases: tuple[tuple[int, int], ...]

    @staticmethod
    def of(sync_every: SyncEvery) -> SyncSchedule:
        """Returns the schedule of a checked value.

        >>> [SyncSchedule.of({0: 1, 3: 5}).first_step(n) for n in range(6)]
        [0, 1, 2, 3, 8, 13]
        """
        phases = sync_every.items() if isinstance(sync_every, Mapping) else [(0, sync_every)]
        return SyncSchedule(tuple(sorted(phases)))

    def first_step(self, round_: int) -> int:
        """Returns the step with which a round begins, which is the number of steps before it."""
        begin = 0
        for (_, every), (after, _) in itertools.pairwise(self.phases):
            rounds = max(-(-(after - begin) // every), 0)
            if round_ < rounds:
                return begin + round_ * every
            begin, round_ = begin + rounds * every, round_ - rounds
        return begin + round_ * self.phases[-1][1]

    def steps_of(self, round_: int) -> range:
        """Returns the steps of a round."""
        return range(self.first_step(round_), self.first_step(round_ + 1))

    def rounds(self, steps: int) -> int:
        """Returns how many rounds end within so many steps.

        >>> SyncSchedule.of({0: 1, 60: 20}).rounds(400)
        77
        """
        low, high = 0, steps  # a round has at least one step
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.first_step(middle) <= steps else (low, middle - 1)
        return low

    def __str__(self) -> str:
        (_, first), *later = self.phases
        start = "every step" if first == 1 else f"every {first} steps"
        return ", ".join([start, *(f"from step {step} on every {every}" for step, every in later)])


def check_sync_every(value: Any) -> None:
    """Raises if a value is no :data:`SyncEvery`.

    Raises:
      ConfigError: the text names the entry.
    """
    key = "parameter_server.sync_every"
    if not isinstance(value, Mapping):
        if not is_count(value, 1):
            raise ConfigError(
                f"{key} must be an integer of at least 1, got {shown(value)}. Remedy: sync_every: 1, or {{0: 1, 60: "
                "20}: from step 60 on every 20 steps."
            )
        return
    for step, every in value.items():
        if not is_count(step, 0):
            raise ConfigError(
                f"{key} has the key {shown(step)}, but its keys are steps, integers of at least 0. Remedy: sync_every: "
                "{0: 1, 60: 20}."
            )
        if not is_count(every, 1):
            raise ConfigError(
                f"{key}[{step}] must be an integer of at least 1, got {shown(every)}. Remedy: the number of steps "
                f"between two exchanges from step {step} on."
            )
    if 0 not in value:
        first = f"the first is of step {min(value):,}" if value else "it is empty"
        raise ConfigError(f"{key} has no entry for step 0; {first}. Remedy: sync_every: {{0: 1, ...}}.")


def check_steps(steps: Any, sync_every: SyncEvery) -> None:
    """Raises if a run does not end with the end of a round.

    Raises:
      ConfigError: the text names the nearest numbers of steps.
    """
    if not is_count(steps):
        raise ConfigError(f"steps must be a positive integer, got {shown(steps)}.")
    schedule = SyncSchedule.of(sync_every)
    rounds = schedule.rounds(steps)
    before, after = schedule.first_step(rounds), schedule.first_step(rounds + 1)
    if before == steps:
        return
    if not isinstance(sync_every, Mapping):
        raise ConfigError(
            f"steps is {steps}, which is not a multiple of sync_every, {sync_every}. Remedy: steps: {before or after}."
        )
    raise ConfigError(
        f"steps is {steps}, but with sync_every ({schedule}) workers exchange after {before} and {after} steps. "
        f"Remedy: steps: {before or after}."
    )
