"""The data of a schedule: what the tables, the simulator, the checks and the pictures read."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from jaxpar.parallel.pipeline.schedules.orders import KINDS, Kind, Orders, Pieces
from jaxpar.parallel.pipeline.schedules.ticks import Ticks, pack


@dataclass(frozen=True)
class ScheduleSpec:
    """The orders of all stages, and what follows from them; see :class:`jaxpar.parallel.pipeline.schedules.schedule.Schedule`."""

    name: str
    pieces: Pieces
    microbatches: int
    orders: Orders = field(repr=False)
    fused: bool = True
    split: bool = False
    forward_only: bool = False
    sequence_chunks: int = 1

    @property
    def stages(self) -> int:
        return self.pieces.stages

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of operations that each stage does."""
        return KINDS[:1] if self.forward_only else KINDS if self.split else KINDS[:2]

    @functools.cached_property
    def ticks(self) -> Ticks:
        """Operations packed into ticks.

        Raises:
          ScheduleError: the orders wait for each other.
        """
        return pack(self.name, self.pieces, self.orders, self.fused, self.sequence_chunks)

    @functools.cached_property
    def stash(self) -> tuple[int, ...]:
        """For each stage how many forwards' inputs are kept at the most, in microbatches of one chunk."""
        return self._kept("B")

    @functools.cached_property
    def held(self) -> tuple[int, ...]:
        """For each stage how many microbatches it has anything of at the most: the stash, and where backwards are split what waits for W."""
        return self._kept("W" if self.split else "B")

    def _kept(self, until: Kind) -> tuple[int, ...]:
        result = []
        for order in self.orders:
            live = most = 0
            for op in order:
                live += op.kind == "F"
                most = max(most, live)
                live -= op.kind == until
            result.append(1 if self.forward_only else most)
        return tuple(result)
