"""``Schedule``: the work of a pipeline as data, to check, simulate, tabulate and draw without a device."""

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
    """Which stage does which operation, in which order.

    ``str()`` returns a summary, :meth:`show` every tick as text, and :meth:`draw` a picture.

    Attributes:
      name: the name given to :func:`jaxpar.pipeline.schedule`, or ``own`` for custom orders.
      pieces: the numbers of stages and of chunks per stage, and which stage has which piece of the model.
      microbatches: the number of microbatches; with sequence chunks, the number of all their chunks. Chunk q of
        microbatch m has the number ``m * sequence_chunks + q``.
      orders: for each stage, its operations in order.
      fused: a tick may hold a forward, a backward and a W (gradients of weights).
      split: backwards compute only the cotangents of inputs; gradients of weights are separate operations (W).
      forward_only: there are no backwards.
      sequence_chunks: the number of chunks into which each sequence is split. They pass the pipeline one after the
        other.

    >>> import jaxpar as jp
    >>> one = jp.pipeline.schedule("1f1b", stages=2, microbatches=3)
    >>> print(one.show())
    tick     0   1      2      3      4
    stage 0  F0  F1     F2 B0  B1     B2
    stage 1  ·   F0 B0  F1 B1  F2 B2  ·
    """

    @property
    def bubble(self) -> float:
        """The idle fraction of a stage's time, if a tick lasts as long as all kinds of operations in it together."""
        return simulate(self).bubble

    def simulate(self, costs: Mapping[str, float] | None = None, timing: Timing = "ticks") -> float:
        """Returns the duration in units of ``costs``; see :func:`jaxpar.parallel.pipeline.schedules.simulate.simulate`.

        Raises:
          ScheduleError: ``costs`` or ``timing`` is invalid.
        """
        return simulate(self, costs, timing).time

    def table(self, activation_checkpointing: ActivationCheckpointing = "full") -> Table:
        """Returns the table that an executor reads.

        Args:
          activation_checkpointing: as for :class:`jaxpar.Pipeline`.

        Raises:
          ScheduleError: the orders deadlock.
        """
        return table_of(self, activation_checkpointing)

    def forwards(self) -> Schedule:
        """Returns the forwards of this schedule in its order, on full sequences, with the same placement of pieces.

        >>> import jaxpar as jp
        >>> one = jp.pipeline.schedule("zb_h1", stages=4, microbatches=8).forwards()
        >>> len(one.ticks.rows), one.forward_only
        (11, True)
        """
        if self.forward_only:
            return self
        parts = self.sequence_chunks
        first = lambda op: op.kind == "F" and not op.microbatch % parts
        of_sequence = lambda op: op._replace(microbatch=op.microbatch // parts)
        orders = tuple(tuple(map(of_sequence, filter(first, order))) for order in self.orders)
        return Schedule(self.name, self.pieces, self.microbatches // parts, orders, forward_only=True)

    def validate(self) -> Schedule:
        """Returns this schedule after checking it.

        Every microbatch must pass every piece once, in order, without deadlock, and the tables must do the same work.
        :func:`jaxpar.parallel.pipeline.schedules.verify.replay` executes the tables: nothing is read before it was
        sent, no slot is overwritten before its last read, and no operation is missing or done twice.

        Raises:
          ScheduleError: reports the stage and the operation, or all operations of a deadlock.
        """
        if len(self.orders) != self.stages:
            self._fail(
                f"there are orders for {len(self.orders)} stages, but the schedule has {self.stages}",
                "give one order per stage",
            )
        for stage, order in enumerate(self.orders):
            self._check(stage, order)
        self.ticks  # noqa: B018 (packing finds deadlocks)
        for activation_checkpointing in get_args(ActivationCheckpointing):
            replay(self, self.table(activation_checkpointing), activation_checkpointing)
        return self

    def _check(self, stage: int, order: tuple[Op, ...]) -> None:
        """Checks that a stage does each operation once, and in the order F, B, W for each microbatch and chunk."""
        place: dict[Op, int] = {}
        for at, op in enumerate(order):
            if (
                op.kind not in self.kinds
                or op.microbatch not in range(self.microbatches)
                or op.chunk not in range(self.pieces.chunks)
            ):
                self._fail(
                    f"stage {stage} has the operation {op}, but there are only microbatches 0 to "
                    f"{self.microbatches - 1}, chunks 0 to {self.pieces.chunks - 1} and the kinds "
                    f"{', '.join(self.kinds)}"
                )
            if op in place:
                self._fail(f"stage {stage} does {op} twice")
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

    def _fail(self, text: str, remedy: str = "each stage must do each operation once, F before B before W") -> Never:
        raise ScheduleError(f"schedule {self.name!r}: {text}. Remedy: {remedy}.")

    def __str__(self) -> str:
        return summary(self)

    def show(self, width: int = 120) -> str:
        """Returns every tick as text, one line per stage, in blocks of at most ``width`` characters.

        Raises:
          ScheduleError: the orders deadlock.
        """
        return chart(self, width)

    def draw(self, path: Any = None, *, costs: Mapping[str, float] | None = None, timing: Timing = "ticks") -> Any:
        """Returns a matplotlib figure of the operations of each stage over time; a notebook displays it.

        Args:
          path: the file to write, or ``None``. Its suffix selects the format.
          costs, timing: as for :meth:`simulate`.

        Raises:
          MissingExtraError: matplotlib is not installed.
          ScheduleError: ``costs`` or ``timing`` is invalid.
        """
        return picture(self, path, costs, timing)
