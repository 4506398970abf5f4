"""``Schedule``: a pipeline's work as data, which can be checked, simulated, tabulated and drawn without a device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxpar.errors import ScheduleError
from jaxpar.schedules.orders import KINDS, Op, Orders, Pieces
from jaxpar.schedules.simulate import simulate
from jaxpar.schedules.table import Keeps, Table, table_of
from jaxpar.schedules.ticks import Ticks, pack


@dataclass(frozen=True)
class Schedule:
    """Who does what, in which order.

    Attributes:
      name: what :func:`jaxpar.schedule` was asked for.
      pieces: stages, chunks a stage, and which piece of the model lies where.
      microbatches: how many; with sequence chunks, of all chunks.
      orders: for each stage its operations.
      fused: a tick may hold a forward and a backward.
      split: backwards are of inputs alone, those of weights are operations of their own (W).
      forward_only: there are no backwards.
    """

    name: str
    pieces: Pieces
    microbatches: int
    orders: Orders
    fused: bool = True
    split: bool = False
    forward_only: bool = False

    @property
    def stages(self) -> int:
        return self.pieces.stages

    @functools.cached_property
    def ticks(self) -> Ticks:
        """Operations packed into ticks.

        Raises:
          ScheduleError: the orders wait for each other.
        """
        return pack(self.name, self.pieces, self.orders, self.fused, self.forward_only)

    @functools.cached_property
    def stash(self) -> tuple[int, ...]:
        """For each stage how many forwards' inputs are kept at the most, in microbatches of one chunk."""
        result = []
        for stage, order in enumerate(self.orders):
            live = most = 0
            for op in order:
                live += op.kind == "F"
                most = max(most, live)
                live -= op.kind == "B"
            result.append(1 if self.forward_only else most)
        return tuple(result)

    @property
    def bubble(self) -> float:
        """The part of the time that a stage stands still; a tick lasts as long as all kinds of operations in it together."""
        return simulate(self).bubble

    def simulate(self, costs: Mapping[str, float] | None = None, how: Literal["ticks", "stages"] = "ticks") -> float:
        """How long it lasts, in units of ``costs``; see :func:`jaxpar.schedules.simulate.simulate`."""
        return simulate(self, costs, how).time

    def table(self, keeps: Keeps = "input") -> Table:
        """The numbers that an executor reads."""
        return table_of(self, keeps)

    def validate(self) -> Schedule:
        """This schedule, if every microbatch meets every piece once, in order, and nothing waits for ever.

        Raises:
          ScheduleError: naming the stage and the operation.
        """
        wanted = [*("F" if self.forward_only else "FB"), *("W" if self.split else "")]
        for stage, order in enumerate(self.orders):
            seen: set[Op] = set()
            for op in order:
                if (
                    op.kind not in wanted
                    or op.microbatch not in range(self.microbatches)
                    or op.chunk not in range(self.pieces.chunks)
                ):
                    self._fail(
                        f"stage {stage} is to do {op}, but there are microbatches 0 to {self.microbatches - 1}, chunks 0 to "
                        f"{self.pieces.chunks - 1} and the kinds {', '.join(wanted)}"
                    )
                if op in seen:
                    self._fail(f"stage {stage} is to do {op} twice")
                seen.add(op)
            for m in range(self.microbatches):
                for chunk in range(self.pieces.chunks):
                    for kind in wanted:
                        if Op(kind, m, chunk) not in seen:
                            self._fail(f"stage {stage} never does {Op(kind, m, chunk)}")
            place = {op: at for at, op in enumerate(order)}
            for op in order:
                for before in KINDS[: KINDS.index(op.kind)]:
                    earlier = Op(before, op.microbatch, op.chunk)
                    if place.get(earlier, -1) > place[op]:
                        self._fail(f"stage {stage} does {op} before {earlier}")
        self.ticks  # noqa: B018 (waits are found by packing)
        return self

    def _fail(self, text: str) -> None:
        raise ScheduleError(
            f"schedule {self.name!r}: {text}. Remedy: each stage does each operation once, F before B before W."
        )
