"""Checks a schedule's table by executing it with labels instead of tensors.

The check uses only the numbers of the table, the meaning of its fields and the list of operations to do. It does not
read orders, ticks or slot allocations, so it is independent of the code that made the table.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple, Never

from jaxpar.errors import ScheduleError
from jaxpar.parallel.pipeline.schedules.spec import ScheduleSpec
from jaxpar.parallel.pipeline.schedules.table import ALL, FIELDS, ActivationCheckpointing, Table


class Label(NamedTuple):
    """Identifies a tensor by its role, its microbatch and its piece.

    ``what`` is ``input``, ``residuals``, ``cotangent`` or ``own`` (the data that a split backward stores for its W).
    With sequence chunks it is also ``carry``, as the chunks up to this one have written it, or ``back``, the carry's
    cotangent from the later chunks down to this one.
    """

    what: str
    microbatch: int
    piece: int

    def __str__(self) -> str:
        return f"the {self.what} of microbatch {self.microbatch} at piece {self.piece}"


def replay(schedule: ScheduleSpec, table: Table, activation_checkpointing: ActivationCheckpointing = "full") -> None:
    """Executes a table with labels and checks each read and write.

    Args:
      schedule: the schedule of the table.
      table: its table.
      activation_checkpointing: the mode for which the table was made.

    Raises:
      ScheduleError: a slot that is read holds another tensor, a live tensor is overwritten, a tensor is received that
        was not sent, or an operation is missing or done twice. The message has the tick, the stage and the slot.
    """
    _Replay(schedule, table, activation_checkpointing).run()


class _Replay:
    def __init__(self, schedule: ScheduleSpec, table: Table, activation_checkpointing: ActivationCheckpointing):
        self.schedule, self.table, self.activation_checkpointing = schedule, table, activation_checkpointing
        self.pieces, self.stages = schedule.pieces, schedule.pieces.stages
        self.recomputes = activation_checkpointing == "full" and not schedule.forward_only
        # One slot past the end of a buffer stands for tensors that nothing reads.
        self.buffers: dict[str, list[list[Label | None]]] = {
            name: [[None] * size for _ in range(self.stages)] for name, size in table.sizes.items()
        }
        self.done: dict[tuple[str, int, int], int] = {}
        self.now = 0

    def run(self) -> None:
        sent: list[Label | None] = [None] * self.stages
        slots, microbatch = self.table.first
        for stage, slot in enumerate(slots.tolist()):
            self.write("act", stage, slot, Label("input", microbatch, 0))
        numbers = zip(self.table.stages.tolist(), self.table.ticks.tolist(), strict=True)
        for self.now, (rows, every) in enumerate(numbers):
            row = [dict(zip(FIELDS, fields, strict=True)) for fields in rows]
            shared = dict(zip(ALL, every, strict=True))
            self.check_ends("drain", shared["drain"], sent, Label("cotangent", shared["drain"], -1))
            forwards = [self.forward(stage, fields) for stage, fields in enumerate(row)]
            last = Label("input", shared["head"], self.pieces.count)
            self.check_ends("head", shared["head"], forwards, last)
            self.arrivals("cot", row, sent)
            for stage, fields in enumerate(row):
                head = last._replace(what="cotangent", piece=self.pieces.count - 1)
                self.write("cot", stage, fields["cot_head"], head if forwards[stage] == last else None)
            sent = [self.backward(stage, fields) for stage, fields in enumerate(row)]
            for stage, fields in enumerate(row):
                self.weights(stage, fields)
                fed = shared["feed"] < self.schedule.microbatches
                self.write("cot", stage, fields["cot_self"], self.passed("cot_self", sent, stage))
                self.write("act", stage, fields["act_feed"], Label("input", shared["feed"], 0) if fed else None)
                self.write("act", stage, fields["act_self"], self.passed("act_self", forwards, stage))
            self.arrivals("act", row, forwards)
        self.check_ends("drain", self.table.last, sent, Label("cotangent", self.table.last, -1))
        self.complete()

    def arrivals(self, buffer: str, row: list[dict[str, int]], sent: list[Label | None]) -> None:
        """Writes the tensors from previous stages (``down``) and next stages (``up``)."""
        for stage, fields in enumerate(row):
            for way, other in (("down", stage - 1), ("up", stage + 1)):
                name = f"{buffer}_{way}"
                self.write(buffer, stage, fields[name], self.passed(name, sent, other % self.stages), name)

    def passed(self, channel: str, sent: list[Label | None], stage: int) -> Label | None:
        return sent[stage] if channel in self.table.channels else None

    def check_ends(self, name: str, microbatch: int, made: list[Label | None], expected: Label) -> None:
        """Checks that tensors leave the pipeline exactly when the table says so."""
        ends = {"drain": -1, "head": self.pieces.count}[name]
        leaving = [label for label in made if label is not None and label.piece == ends]
        if leaving != ([expected] if microbatch < self.schedule.microbatches else []):
            self.fail(f"{name} is {microbatch}, but {', '.join(map(str, leaving)) or 'nothing'} leaves the pipeline")

    def forward(self, stage: int, fields: dict[str, int]) -> Label | None:
        residuals = result = None
        if fields["f_on"]:
            m, piece = self.started("F", stage, fields)
            self.read("act", stage, fields["f_input"], Label("input", m, piece), not self.recomputes)
            if fields["f_last"] != (piece + 1 == self.pieces.count):
                self.fail(f"stage {stage}: f_last is {fields['f_last']} at piece {piece} of {self.pieces.count}")
            if self.activation_checkpointing == "none" and not self.schedule.forward_only:
                residuals = Label("residuals", m, piece)
            result = Label("input", m, piece + 1)
            self.carried("carry", stage, fields["f_carry"], m, piece, forward=True)
        self.write("res", stage, fields["f_residuals"], residuals)
        return result

    def backward(self, stage: int, fields: dict[str, int]) -> Label | None:
        own = result = None
        if fields["b_on"]:
            m, piece = self.started("B", stage, fields)
            self.read("cot", stage, fields["b_cotangent"], Label("cotangent", m, piece), True)
            if self.activation_checkpointing == "full":
                self.read("act", stage, fields["b_input"], Label("input", m, piece), True)
            else:
                self.read("res", stage, fields["b_residuals"], Label("residuals", m, piece), True)
            if fields["b_first"] != (piece == 0):
                self.fail(f"stage {stage}: b_first is {fields['b_first']} at piece {piece}")
            own = Label("own", m, piece) if self.schedule.split else None
            result = Label("cotangent", m, piece - 1)
            chunks = self.schedule.sequence_chunks
            if chunks > 1:  # it reads the carry of all chunks of its sequence
                all_chunks = Label("carry", m - m % chunks + chunks - 1, piece)
                self.read("carry", stage, fields["b_carry"], all_chunks, m % chunks == 0)
            self.carried("back", stage, fields["b_back"], m, piece, forward=False)
        self.write("own", stage, fields["b_own"], own)
        return result

    def carried(self, buffer: str, stage: int, slot: int, m: int, piece: int, *, forward: bool) -> None:
        """Reads the carry or its cotangent from the chunk done before, and writes its own if another chunk reads it."""
        parts = self.schedule.sequence_chunks
        at = m % parts if forward else parts - 1 - m % parts
        if parts == 1:
            return
        if at:
            self.read(buffer, stage, slot, Label(buffer, m - 1 if forward else m + 1, piece), True)
        if at + 1 < parts or (forward and not self.schedule.forward_only):
            self.write(buffer, stage, slot, Label(buffer, m, piece))

    def weights(self, stage: int, fields: dict[str, int]) -> None:
        if fields["w_on"]:
            m, piece = self.started("W", stage, fields)
            self.read("own", stage, fields["w_own"], Label("own", m, piece), True)

    def started(self, kind: str, stage: int, fields: dict[str, int]) -> tuple[int, int]:
        """Marks an operation as done, checks the order of sequence chunks, and returns its microbatch and piece."""
        lower, chunks = kind.lower(), self.schedule.sequence_chunks
        m, piece = fields[f"{lower}_microbatch"], self.pieces.piece(stage, fields[f"{lower}_chunk"])
        if (kind, m, piece) in self.done:
            self.fail(f"stage {stage} does {kind} of microbatch {m} at piece {piece} again")
        self.done[kind, m, piece] = self.now
        other = {"F": m - 1 if m % chunks else m, "B": m + 1 if (m + 1) % chunks else m, "W": m}[kind]
        if (kind, other, piece) not in self.done:
            self.fail(f"stage {stage} does {kind} of sequence chunk {m} at piece {piece} before that of {other}")
        return m, piece

    def read(self, buffer: str, stage: int, slot: int, expected: Label, last: bool) -> None:
        slots = self.buffers[buffer][stage]
        found = slots[slot] if slot in range(len(slots)) else None
        if found != expected:
            self.fail(f"stage {stage} reads {found or 'nothing'} from {buffer} {slot}, not {expected}")
        if last:
            slots[slot] = None

    def write(self, buffer: str, stage: int, slot: int, label: Label | None, channel: str = "") -> None:
        slots = self.buffers[buffer][stage]
        if slot == len(slots):
            return
        if slot not in range(len(slots)) or label is None:
            self.fail(
                f"stage {stage} writes {label or 'a tensor that no stage sent'} to {buffer} "
                f"{slot}{channel and f' by {channel}'}"
            )
        if slots[slot] is not None:
            self.fail(f"stage {stage} writes {label} to {buffer} {slot}, which still holds {slots[slot]}")
        slots[slot] = label

    def complete(self) -> None:
        expected = itertools.product(self.schedule.kinds, range(self.schedule.microbatches), range(self.pieces.count))
        if missing := set(expected) ^ set(self.done):
            kind, m, piece = min(missing)
            problem = "is not part of the schedule" if (kind, m, piece) in self.done else "is never done"
            self.fail(f"{kind} of microbatch {m} at piece {piece} {problem}")
        for buffer, stages in self.buffers.items():
            for stage, slots in enumerate(stages):
                for slot, label in enumerate(slots):
                    if label is not None:
                        self.fail(f"stage {stage} still holds {label} in {buffer} {slot}")

    def fail(self, text: str) -> Never:
        raise ScheduleError(
            f"schedule {self.schedule.name!r}, activation checkpointing {self.activation_checkpointing!r}, tick "
            f"{self.now} of its table: {text}. Remedy: use the table that Schedule.table() returns."
        )
