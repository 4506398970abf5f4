"""``Schedule``: a pipeline's work as data, which can be checked, simulated, tabulated and drawn without a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Never, get_args

from jaxpar.errors import ScheduleError
from jaxpar.parallel.pipeline.schedules.orders import KINDS, Op
from jaxpar.parallel.pipeline.schedules.plot import picture
from jaxpar.parallel.pipeline.schedules.simulate import Timing, simulate
from jaxpar.parallel.pipeline.schedules.spec import ScheduleSpec
from jaxpar.parallel.pipeline.schedules.table import ActivationCheckpointing, Table, table_of
from jaxpar.parallel.pipeline.schedules.text import chart, summary
from jaxpar.parallel.pipeline.schedules.verify import replay


@dataclass(frozen=True)
class Schedule(ScheduleSpec):
    """Who does what, in which order. ``str()`` sums it up, :meth:`show` has every tick as text, :meth:`draw` as a picture.

    Attributes:
      name: what :func:`jaxpar.schedule` was asked for; ``own`` for a user's orders.
      pieces: stages, chunks a stage, and which piece of the model lies where.
      microbatches: how many; with sequence chunks, of all chunks: chunk q of microbatch m is number ``m * sequence_chunks + q``.
      orders: for each stage its operations.
      fused: a tick may hold a forward, a backward and a W.
      split: backwards are of inputs alone, those of weights are operations of their own (W).
      forward_only: there are no backwards.
      sequence_chunks: in how many parts each sequence goes through the pipeline, one after the other.
    """

    @property
    def bubble(self) -> float:
        """The part of the time that a stage stands still; a tick lasts as long as all kinds of operations in it together."""
        return simulate(self).bubble

    def simulate(self, costs: Mapping[str, float] | None = None, timing: Timing = "ticks") -> float:
        """How long it lasts, in units of ``costs``; see :func:`jaxpar.parallel.pipeline.schedules.simulate.simulate`.

        Raises:
          ScheduleError: costs that cannot be.
        """
        return simulate(self, costs, timing).time

    def table(self, activation_checkpointing: ActivationCheckpointing = "full") -> Table:
        """The numbers that an executor reads."""
        return table_of(self, activation_checkpointing)

    def validate(self) -> Schedule:
        """This schedule, if every microbatch meets every piece once, in order, nothing waits for ever, and its tables do what it says.

        The tables are carried out by :func:`jaxpar.parallel.pipeline.schedules.verify.replay`: nothing is read before it was sent, no slot overwritten that
        somebody still reads, no work done twice or never.

        Raises:
          ScheduleError: naming the stage, the operation and, of those that wait for each other, all.
        """
        if len(self.orders) != self.stages:
            self._fail(f"there are orders for {len(self.orders)} stages, but {self.stages} stages", "one order a stage")
        for stage, order in enumerate(self.orders):
            self._check(stage, order)
        self.ticks  # noqa: B018 (waits are found by packing)
        for activation_checkpointing in get_args(ActivationCheckpointing):
            replay(self, self.table(activation_checkpointing), activation_checkpointing)
        return self

    def _check(self, stage: int, order: tuple[Op, ...]) -> None:
        """Each operation of a stage is there once, and after those of the same microbatch that come before it."""
        place: dict[Op, int] = {}
        for at, op in enumerate(order):
            if (
                op.kind not in self.kinds
                or op.microbatch not in range(self.microbatches)
                or op.chunk not in range(self.pieces.chunks)
            ):
                self._fail(
                    f"stage {stage} is to do {op}, but there are microbatches 0 to {self.microbatches - 1}, chunks 0 to "
                    f"{self.pieces.chunks - 1} and the kinds {', '.join(self.kinds)}"
                )
            if op in place:
                self._fail(f"stage {stage} is to do {op} twice")
            place[op] = at
        for m in range(self.microbatches):
            for chunk in range(self.pieces.chunks):
                for kind in self.kinds:
                    if Op(kind, m, chunk) not in place:
                        self._fail(f"stage {stage} never does {Op(kind, m, chunk)}")
        for op, at in place.items():
            for before in KINDS[: KINDS.index(op.kind)]:
                earlier = op._replace(kind=before)
                if place[earlier] > at:
                    self._fail(f"stage {stage} does {op} before {earlier}")

    def _fail(self, text: str, remedy: str = "each stage does each operation once, F before B before W") -> Never:
        raise ScheduleError(f"schedule {self.name!r}: {text}. Remedy: {remedy}.")

    def __str__(self) -> str:
        return summary(self)

    def show(self, width: int = 120) -> str:
        """Every tick as text, a line for each stage, in blocks of at most ``width`` characters."""
        return chart(self, width)

    def draw(self, path: Any = None, *, costs: Mapping[str, float] | None = None, timing: Timing = "ticks") -> Any:
        """A picture of who does what when, time to scale: a matplotlib figure, which shows itself in a notebook.

        Args:
          path: where to save it, if anywhere; the ending says the format.
          costs, timing: as for :meth:`simulate`.

        Raises:
          MissingExtraError: matplotlib is not installed.
          ScheduleError: costs that cannot be.
        """
        return picture(self, path, costs, timing)
