"""The data of a schedule that the tables, the simulator, the checks and the pictures read."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from jaxpar.parallel.pipeline.schedules.orders import KINDS, Kind, Orders, Pieces
from jaxpar.parallel.pipeline.schedules.ticks import Ticks, pack


@dataclass(frozen=True)
class ScheduleSpec:
    """The orders of all stages and the properties that follow from them.

    :class:`jaxpar.parallel.pipeline.schedules.schedule.Schedule` documents the attributes.
    """

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
        """The number of stages."""
        return self.pieces.stages

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of operations that each stage does."""
        return KINDS[:1] if self.forward_only else KINDS if self.split else KINDS[:2]

    @functools.cached_property
    def ticks(self) -> Ticks:
        """The operations packed into ticks.

        Raises:
          ScheduleError: the orders deadlock.
        """
        return pack(self.name, self.pieces, self.orders, self.fused, self.sequence_chunks)

    @functools.cached_property
    def stash(self) -> tuple[int, ...]:
        """For each stage, the largest number of forward inputs stored at a time, in microbatches of one chunk."""
        return self._kept("B")

    @functools.cached_property
    def held(self) -> tuple[int, ...]:
        """For each stage, the largest number of microbatches with any stored data.

        This is the stash and, with split backwards, the microbatches whose W is pending.
        """
        return self._kept("W" if self.split else "B")

    def _kept(self, until: Kind) -> tuple[int, ...]:
        """Counts, for each stage, the most forwards whose operation ``until`` is still pending."""
        result = []
        for order in self.orders:
            live = most = 0
            for op in order:
                live += op.kind == "F"
                most = max(most, live)
                live -= op.kind == until
            result.append(1 if self.forward_only else most)
        return tuple(result)
