"""``AsyncSchedule``: one call's ticks of a pipeline that never empties, as numbers for an executor.

In tick t of a call, counted over the positions of two batches (the one before, then the call's own, M microbatches each), stage s of S does the forward
of position M + t - s and the backward of M + t - 2 (S - 1) + s. So nothing of a call waits for its end, every call does the same, and what is on its
way when it ends is S - 1 microbatches whose loss is to come and 2 (S - 1) whose backwards are not all done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from jaxpar.errors import ScheduleError
from jaxpar.parallel.pipeline.schedules.orders import Pieces
from jaxpar.parallel.pipeline.schedules.table import ALL, FIELDS, ActivationCheckpointing, Table

Asynchronous = Literal["pipedream", "pipedream_2bw"]
ASYNCHRONOUS: tuple[str, ...] = get_args(Asynchronous)
TURNING = {
    "f_input": "act", "b_input": "act", "act_down": "act", "act_feed": "act", "f_residuals": "res", "b_residuals": "res",
}  # fmt: skip
"""Columns of slots in buffers that outlive a call: rings, which a call begins where the one before has stopped."""


@dataclass(frozen=True)
class AsyncSchedule:
    """What stages do in the ticks of one call.

    Attributes:
      name: of the kind.
      stages: devices along ``pipeline``.
      batch: microbatches of a call's batch.
      length: ticks; as many as microbatches, fewer where what is on its way is only finished.

    Raises:
      ScheduleError: a batch of fewer microbatches than a delay of one batch takes.

    >>> one = AsyncSchedule("pipedream_2bw", stages=3, batch=4, length=4).table()
    >>> one.column("f_microbatch").tolist()
    [[4, 3, 2], [5, 4, 3], [6, 5, 4], [7, 6, 5]]
    >>> one.column("b_microbatch").tolist()
    [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    """

    name: str
    stages: int
    batch: int
    length: int
    split: bool = False
    fused: bool = True
    forward_only: bool = False
    sequence_chunks: int = 1

    def __post_init__(self) -> None:
        least = max(2 * (self.stages - 1), 1)
        if self.batch < least:
            raise ScheduleError(
                f"schedule {self.name!r}: {self.batch} microbatches are fewer than {least}: over {self.stages} stages a microbatch's gradient comes "
                f"{2 * (self.stages - 1)} ticks after its forward, and a batch's has to be whole before the next but one begins. Remedy: {least} or more."
            )

    @property
    def pieces(self) -> Pieces:
        return Pieces(self.stages, 1, "loop")

    @property
    def microbatches(self) -> int:
        """Positions: of the batch before, and of the call's own."""
        return 2 * self.batch

    @property
    def delay(self) -> int:
        """In how many ticks a microbatch is back at the first stage."""
        return 2 * (self.stages - 1)

    def flush(self) -> AsyncSchedule:
        """The ticks that finish what is on its way."""
        return AsyncSchedule(self.name, self.stages, self.batch, self.delay)

    def table(self, activation_checkpointing: ActivationCheckpointing = "full") -> Table:
        """The numbers that an executor reads; ``chunk`` is the batch: 0 the one before, 1 the call's own. Slots are those of a call that begins
        its rings at 0: the executor turns them.
        """
        ring, count, nowhere = self.delay + 1, self.stages, self.microbatches
        sizes = {
            "act": ring if activation_checkpointing == "full" else 1,
            "res": ring if activation_checkpointing == "none" else 0,
            "cot": 1,
            "own": 0,
        }
        rows = np.zeros((self.length, count, len(FIELDS)), np.int32)
        view = {name: rows[:, :, at] for at, name in enumerate(FIELDS)}
        stage, tick = np.arange(count)[None], np.arange(self.length)[:, None]
        forward, backward = self.batch + tick - stage, self.batch + tick - self.delay + stage
        slot = lambda buffer, at: at % sizes[buffer] if sizes[buffer] else 0 * at
        first, last = np.broadcast_to(stage == 0, forward.shape), np.broadcast_to(stage == count - 1, forward.shape)
        written: dict[str, np.ndarray | int] = {
            "f_on": 1, "f_microbatch": forward, "f_chunk": forward // self.batch, "f_last": last,
            "f_input": slot("act", forward), "f_residuals": slot("res", forward),
            "b_on": 1, "b_microbatch": backward, "b_chunk": backward // self.batch, "b_first": first,
            "b_input": slot("act", backward), "b_residuals": slot("res", backward), "b_cotangent": 0,
            # A stage gets the forward of its next tick from the one before it, the first what is fed; cotangents in the tick that takes them.
            "act_down": np.where(first, sizes["act"], slot("act", forward + 1)),
            "act_feed": np.where(first, slot("act", forward + 1), sizes["act"]),
            "cot_up": np.where(last, 1, 0), "cot_head": np.where(last, 0, 1),
            "act_up": sizes["act"], "act_self": sizes["act"], "cot_down": 1, "cot_self": 1,
        }  # fmt: skip
        for name, value in written.items():
            view[name][:] = value
        every = np.full((self.length, len(ALL)), nowhere, np.int32)
        at = np.arange(self.length)
        every[:, ALL.index("feed")] = np.where(at + 1 < self.batch, self.batch + at + 1, nowhere)
        every[:, ALL.index("head")] = self.batch + at - (count - 1)
        every[1:, ALL.index("drain")] = (self.batch + at - 1 - self.delay)[1:]
        fed = np.where(np.arange(count) == 0, slot("act", np.full(count, self.batch)), sizes["act"]).astype(np.int32)
        ends = self.batch + self.length - 1 - self.delay if self.length else nowhere
        channels = ("act_down", "cot_up") if count > 1 else ()
        return Table(rows, every, (fed, self.batch), ends, sizes, channels)
