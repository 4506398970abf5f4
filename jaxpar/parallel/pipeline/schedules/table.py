"""A schedule as a table: the work of each stage in each tick, and the buffer slots that it reads and writes.

The buffers of a stage:

  act: inputs of forwards, stored until the backward if that recomputes the forward.
  cot: cotangents for backwards.
  res: residuals that a forward stores for its backward.
  own: data that a split backward stores for its W.
  carry, back: with sequence chunks, the data that the chunks of a microbatch pass to later chunks, and its cotangent.

Each buffer has one extra slot, at its end, for data that nothing reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxpar.parallel.pipeline.schedules.buffer_slots import ARRIVAL, BACKWARD, END, FORWARD, Live, allocate, time
from jaxpar.parallel.pipeline.schedules.spec import ScheduleSpec

ActivationCheckpointing = Literal["full", "none"]
"""Whether a stage stores its input (``full``) or the residuals of its layers (``none``) for the backward."""

FIELDS = (
    "f_on", "f_microbatch", "f_chunk", "f_input", "f_residuals", "f_last",
    "b_on", "b_microbatch", "b_chunk", "b_input", "b_cotangent", "b_residuals", "b_own", "b_first",
    "w_on", "w_microbatch", "w_chunk", "w_own",
    # Where arriving tensors are written: those of forwards at the end of the tick, those of the previous tick's
    # backwards in its middle.
    "act_down", "act_up", "act_self", "act_feed",
    "cot_down", "cot_up", "cot_self", "cot_head",
    # With sequence chunks: one slot for a full microbatch.
    "f_carry", "b_carry", "b_back",
)  # fmt: skip
"""The columns of a stage.

The suffixes name the sender: ``down`` is the previous stage, ``up`` the next stage, ``self`` another chunk of the same
stage, ``feed`` the embedding, and ``head`` the loss.
"""

ALL = ("feed", "head", "drain")
"""The columns of a tick.

They are the microbatch that enters the pipeline for the next tick, the one whose loss is computed, and the one whose
input cotangent leaves the pipeline. The number of microbatches stands for none.
"""

_BUFFERS = {"input": "act", "cotangent": "cot", "residuals": "res", "own": "own", "carry": "carry", "back": "back"}
CHANNELS = ("act_down", "act_up", "act_self", "cot_down", "cot_up", "cot_self")


@dataclass(frozen=True, eq=False)
class Table:
    """The numbers that an executor reads.

    Attributes:
      stages: int32 [ticks, stages, fields], in the order of ``FIELDS``.
      ticks: int32 [ticks, 3], in the order of ``ALL``.
      first: the slots [stages] for the input that enters before the first tick, and its microbatch.
      last: the microbatch whose input cotangent leaves the pipeline after the last tick; the number of microbatches if
        there is none.
      sizes: buffer → number of slots, on the stage that needs most.
      channels: those of ``CHANNELS`` that the schedule uses.
    """

    stages: np.ndarray
    ticks: np.ndarray
    first: tuple[np.ndarray, int]
    last: int
    sizes: dict[str, int]
    channels: tuple[str, ...]

    def column(self, name: str) -> np.ndarray:
        """Returns a field as [ticks, stages]."""
        return self.stages[:, :, FIELDS.index(name)]


def table_of(schedule: ScheduleSpec, activation_checkpointing: ActivationCheckpointing = "full") -> Table:
    """Returns the table of a schedule, for an executor that stores inputs (``full``) or residuals (``none``)."""
    return _Writer(schedule, activation_checkpointing).table()


class _Writer:
    def __init__(self, schedule: ScheduleSpec, activation_checkpointing: ActivationCheckpointing):
        self.schedule, self.activation_checkpointing = schedule, activation_checkpointing
        self.pieces, self.packed = schedule.pieces, schedule.ticks
        self.length = len(self.packed.rows)
        self.slots: dict[str, list[dict]] = {}
        self.sizes: dict[str, int] = {}
        self._allocate()

    def _tick(self, kind: str, microbatch: int, piece: int) -> int:
        return self.packed.when[kind, microbatch, piece]

    def _arrives(self, kind: str, microbatch: int, piece: int) -> int:
        """Returns when the input of an operation is written, by a neighbour or from outside of the pipeline."""
        if kind == "F":
            return time(self._tick("F", microbatch, piece - 1) if piece else self._tick("F", microbatch, 0) - 1, END)
        if piece + 1 < self.pieces.count:
            same = self.pieces.place(piece)[0] == self.pieces.place(piece + 1)[0]
            sent = self._tick("B", microbatch, piece + 1)
            # A stage does one backward per tick, so it reads a cotangent of its own in a later tick.
            return time(sent, END) if same else time(sent + 1, ARRIVAL)
        return time(self._tick("F", microbatch, piece), ARRIVAL)

    def _allocate(self) -> None:
        schedule, forward_only = self.schedule, self.schedule.forward_only
        lives: dict[str, list[list[Live]]] = {
            name: [[] for _ in range(self.pieces.stages)] for name in _BUFFERS.values()
        }
        for microbatch in range(schedule.microbatches):
            for piece in range(self.pieces.count):
                stage, chunk = self.pieces.place(piece)
                key = microbatch, chunk
                forward = self._tick("F", microbatch, piece)
                backward = forward if forward_only else self._tick("B", microbatch, piece)
                recomputes = self.activation_checkpointing == "full" and not forward_only
                last = time(backward, BACKWARD) if recomputes else time(forward, FORWARD)
                lives["act"][stage].append(Live(self._arrives("F", microbatch, piece), last, key))
                if forward_only:
                    continue
                lives["cot"][stage].append(Live(self._arrives("B", microbatch, piece), time(backward, BACKWARD), key))
                if self.activation_checkpointing == "none":
                    lives["res"][stage].append(Live(time(forward, FORWARD), time(backward, BACKWARD), key))
                if schedule.split:
                    done = time(self._tick("W", microbatch, piece), END)
                    lives["own"][stage].append(Live(time(backward, BACKWARD), done, key))
        if schedule.sequence_chunks > 1:
            self._carries(lives)
        for name, stages in lives.items():
            found = [allocate(stage) for stage in stages]
            self.slots[name] = [slots for _, slots in found]
            self.sizes[name] = max(count for count, _ in found)

    def _carries(self, lives: dict[str, list[list[Live]]]) -> None:
        """Adds the lives of carries and their cotangents.

        A carry lives from the first forward of its microbatch to the backward of the first chunk, which is the last
        one. Its cotangent lives from the microbatch's first backward to that one.
        """
        parts = self.schedule.sequence_chunks
        for first in range(0, self.schedule.microbatches, parts):
            for piece in range(self.pieces.count):
                stage, chunk = self.pieces.place(piece)
                begin, key = time(self._tick("F", first, piece), FORWARD), (first // parts, chunk)
                if self.schedule.forward_only:
                    end = time(self._tick("F", first + parts - 1, piece), FORWARD)
                else:
                    end = time(self._tick("B", first, piece), BACKWARD)
                    last = time(self._tick("B", first + parts - 1, piece), BACKWARD)
                    lives["back"][stage].append(Live(last, end, key))
                lives["carry"][stage].append(Live(begin, end, key))

    def table(self) -> Table:
        stages = np.zeros((self.length, self.pieces.stages, len(FIELDS)), np.int32)
        ticks = np.full((self.length, len(ALL)), self.schedule.microbatches, np.int32)
        self.view = {name: stages[:, :, at] for at, name in enumerate(FIELDS)}
        self.all = {name: ticks[:, at] for at, name in enumerate(ALL)}
        for name, column in self.view.items():
            buffer = _BUFFERS.get(name[2:], name[:3])
            if buffer in self.sizes:
                column[:] = self.sizes[buffer]
        self.first = np.full(self.pieces.stages, self.sizes["act"], np.int32), 0
        self.last = self.schedule.microbatches
        self.channels: set[str] = set()
        for tick, row in enumerate(self.packed.rows):
            for stage, ops in enumerate(row):
                for op in ops:
                    getattr(self, f"_{op.kind.lower()}")(tick, stage, op.microbatch, op.chunk)
        channels = tuple(name for name in CHANNELS if name in self.channels)
        return Table(stages, ticks, self.first, self.last, self.sizes, channels)

    def _set(self, tick: int, stage: int, **values: int) -> None:
        for name, value in values.items():
            self.view[name][tick, stage] = value

    def _slot(self, buffer: str, stage: int, microbatch: int, chunk: int) -> int:
        return int(self.slots[buffer][stage].get((microbatch, chunk), self.sizes[buffer]))

    def _of_sequence(self, stage: int, m: int, chunk: int, *names: str) -> dict[str, int]:
        """Returns the slots of the microbatch to which a sequence chunk belongs."""
        return self._slots(stage, m // self.schedule.sequence_chunks, chunk, *names)

    def _slots(self, stage: int, m: int, chunk: int, *names: str) -> dict[str, int]:
        return {name: self._slot(_BUFFERS[name[2:]], stage, m, chunk) for name in names}

    def _f(self, tick: int, stage: int, m: int, chunk: int) -> None:
        piece = self.pieces.piece(stage, chunk)
        last, slots = piece + 1 == self.pieces.count, self._slots(stage, m, chunk, "f_input", "f_residuals")
        slot = slots["f_input"]
        slots |= self._of_sequence(stage, m, chunk, "f_carry")
        self._set(tick, stage, f_on=1, f_microbatch=m, f_chunk=chunk, f_last=last, **slots)
        if piece == 0 and tick == 0:
            self.first[0][stage] = slot
            self.first = self.first[0], m
        elif piece == 0:
            self._set(tick - 1, stage, act_feed=slot)
            self.all["feed"][tick - 1] = m
        if last:
            self.all["head"][tick] = m
            if not self.schedule.forward_only:
                self._set(tick, stage, cot_head=self._slot("cot", stage, m, chunk))
        else:
            self._send("act", tick, stage, piece + 1, m)

    def _b(self, tick: int, stage: int, m: int, chunk: int) -> None:
        piece = self.pieces.piece(stage, chunk)
        slots = self._slots(stage, m, chunk, "b_input", "b_cotangent", "b_residuals", "b_own")
        slots |= self._of_sequence(stage, m, chunk, "b_carry", "b_back")
        self._set(tick, stage, b_on=1, b_microbatch=m, b_chunk=chunk, **slots)
        if piece == 0:
            self._set(tick, stage, b_first=1)
            if tick + 1 < self.length:
                self.all["drain"][tick + 1] = m
            else:
                self.last = m
        else:
            self._send("cot", tick, stage, piece - 1, m)

    def _w(self, tick: int, stage: int, m: int, chunk: int) -> None:
        self._set(tick, stage, w_on=1, w_microbatch=m, w_chunk=chunk, w_own=self._slot("own", stage, m, chunk))

    def _send(self, buffer: str, tick: int, stage: int, piece: int, m: int) -> None:
        """Sets the slot of a result on its receiver: in this tick or, for a cotangent to another stage, in the next."""
        to, chunk = self.pieces.place(piece)
        # With 2 stages the modulus takes the way back of a ``v`` for a wrap-around.
        down = (to - stage) % self.pieces.stages == 1 and not (self.pieces.placement == "v" and to < stage)
        way = "self" if to == stage else "down" if down else "up"
        at = tick + 1 if buffer == "cot" and way != "self" else tick
        self._set(at, to, **{f"{buffer}_{way}": self._slot(buffer, to, m, chunk)})
        self.channels.add(f"{buffer}_{way}")
