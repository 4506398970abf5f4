"""``AsyncSchedule``: the ticks of one call of a pipeline that never drains, as a table for an executor.

A call counts positions over two batches of M microbatches each: the previous batch, then its own. In tick t of a call,
stage s of S does the forward of position M + t - s and the backward of position M + t - 2 (S - 1) + s. The pipeline
therefore stays full from call to call, and all calls run the same ticks. When a call ends, S - 1 microbatches have no
loss yet, and the backwards of 2 (S - 1) microbatches are incomplete.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpar.errors import ScheduleError
from jaxpar.parallel.pipeline.schedules.orders import Pieces
from jaxpar.parallel.pipeline.schedules.table import ALL, FIELDS, ActivationCheckpointing, Table

ASYNCHRONOUS = ("pipedream", "pipedream_2bw")
TURNING = {
    "f_input": "act", "b_input": "act", "act_down": "act", "act_feed": "act", "f_residuals": "res",
    "b_residuals": "res",
}  # fmt: skip
"""The columns whose slots are in buffers that outlive a call, each with its buffer.

These buffers are rings: a call continues where the previous call stopped.
"""


@dataclass(frozen=True)
class AsyncSchedule:
    """The work of the stages in the ticks of one call.

    Attributes:
      name: ``pipedream`` or ``pipedream_2bw``.
      stages: the number of devices along ``pipeline``.
      batch: the number of microbatches in a call's batch.
      length: the number of ticks: ``batch``, or fewer if the call only finishes the microbatches in flight.

    Raises:
      ScheduleError: the batch has too few microbatches for a delay of one batch.

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
                f"schedule {self.name!r}: {self.batch} microbatches are fewer than {least}: with {self.stages} "
                f"stages, a microbatch's gradient arrives {2 * (self.stages - 1)} ticks after its forward pass, and "
                "the gradient of a batch must be complete before the batch after the next one begins. Remedy: use "
                f"{least} or more."
            )

    @property
    def pieces(self) -> Pieces:
        """One piece of the model on each stage."""
        return Pieces(self.stages, 1, "interleaved")

    @property
    def microbatches(self) -> int:
        """The number of positions: the microbatches of the previous batch and of the call's own batch."""
        return 2 * self.batch

    @property
    def delay(self) -> int:
        """The number of ticks between a microbatch's forward and its backward on the first stage."""
        return 2 * (self.stages - 1)

    def flush(self) -> AsyncSchedule:
        """Returns the ticks that finish the microbatches in flight."""
        return AsyncSchedule(self.name, self.stages, self.batch, self.delay)

    def table(self, activation_checkpointing: ActivationCheckpointing = "full") -> Table:
        """Returns the table that an executor reads.

        The column ``chunk`` is the batch: 0 for the previous batch, 1 for the call's own. Slots assume that the rings
        start at 0; the executor rotates them.
        """
        ring, count, unused = self.delay + 1, self.stages, self.microbatches
        full = activation_checkpointing == "full"
        sizes = {"act": ring if full else 1, "res": 0 if full else ring, "cot": 1, "own": 0}
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
            # A stage receives the input of its next forward at the end of a tick, from the previous stage or, on the
            # first stage, from outside of the pipeline. It receives a cotangent in the tick that uses it.
            "act_down": np.where(first, sizes["act"], slot("act", forward + 1)),
            "act_feed": np.where(first, slot("act", forward + 1), sizes["act"]),
            "cot_up": np.where(last, 1, 0), "cot_head": np.where(last, 0, 1),
            "act_up": sizes["act"], "act_self": sizes["act"], "cot_down": 1, "cot_self": 1,
        }  # fmt: skip
        for name, value in written.items():
            view[name][:] = value
        every = np.full((self.length, len(ALL)), unused, np.int32)
        at = np.arange(self.length)
        every[:, ALL.index("feed")] = np.where(at + 1 < self.batch, self.batch + at + 1, unused)
        every[:, ALL.index("head")] = self.batch + at - (count - 1)
        every[1:, ALL.index("drain")] = (self.batch + at - 1 - self.delay)[1:]
        fed = np.where(np.arange(count) == 0, slot("act", np.full(count, self.batch)), sizes["act"]).astype(np.int32)
        ends = self.batch + self.length - 1 - self.delay if self.length else unused
        channels = ("act_down", "cot_up") if count > 1 else ()
        return Table(rows, every, (fed, self.batch), ends, sizes, channels)
