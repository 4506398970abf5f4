"""Packs orders into ticks: in a tick a stage does at most one operation of each kind, F before B before W."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.errors import ScheduleError
from jaxpar.parallel.pipeline.schedules.orders import KINDS, Op, Orders, Pieces

type Tick = tuple[tuple[Op, ...], ...]
"""For each stage, its operations in this tick."""


@dataclass(frozen=True)
class Ticks:
    """The ticks of a schedule, and the tick of each operation: (kind, microbatch, piece) → tick."""

    rows: tuple[Tick, ...]
    when: dict[tuple[str, int, int], int]


def needs(op: Op, piece: int, pieces: int, sequence_chunks: int = 1) -> list[tuple[str, int, int]]:
    """Returns the operations that an operation depends on, as (kind, microbatch, piece).

    With sequence chunks, a forward also needs the keys of the previous chunk, and a backward the cotangent of its keys
    from the next chunk.

    Args:
      op: the operation.
      piece: its piece of the model.
      pieces: the number of pieces.
      sequence_chunks: the number of chunks in each sequence.
    """
    m = op.microbatch
    if op.kind == "F":
        before = [("F", m - 1, piece)] if m % sequence_chunks else []
        return [*before, *([("F", m, piece - 1)] if piece else [])]
    if op.kind == "W":
        return [("B", m, piece)]
    later = [("B", m + 1, piece)] if (m + 1) % sequence_chunks else []
    after = [("B", m, piece + 1)] if piece + 1 < pieces else []
    return [("F", m, piece), *later, *after]


def pack(name: str, pieces: Pieces, orders: Orders, fused: bool, sequence_chunks: int = 1) -> Ticks:
    """Packs operations into ticks as early as orders and dependencies allow.

    A tensor from another stage arrives one tick after it was sent.

    Args:
      name: of the schedule, for messages.
      pieces: the placement of the model's pieces.
      orders: the operations of each stage.
      fused: a tick may hold an F, a B and a W of a stage; otherwise one of them.
      sequence_chunks: the number of chunks in each sequence; see :func:`needs`.

    Raises:
      ScheduleError: the orders deadlock. The message lists the operations of the cycle.
    """
    when: dict[tuple[str, int, int], int] = {}
    stage_of: dict[tuple[str, int, int], int] = {}
    at = [0] * pieces.stages
    left = sum(map(len, orders))
    rows: list[Tick] = []

    def needed(op: Op, stage: int) -> list[tuple[str, int, int]]:
        return needs(op, pieces.piece(stage, op.chunk), pieces.count, sequence_chunks)

    def ready(op: Op, stage: int, tick: int) -> bool:
        # The same stage can use a result in the same tick, another stage in the next one.
        return all(key in when and (when[key] < tick or stage_of[key] == stage) for key in needed(op, stage))

    while left:
        row: list[tuple[Op, ...]] = []
        for stage, order in enumerate(orders):
            done: list[Op] = []
            while at[stage] < len(order):
                op = order[at[stage]]
                later = not done or (fused and KINDS.index(op.kind) > KINDS.index(done[-1].kind))
                if not later or not ready(op, stage, len(rows)):
                    break
                key = (op.kind, op.microbatch, pieces.piece(stage, op.chunk))
                when[key], stage_of[key] = len(rows), stage
                done.append(op)
                at[stage] += 1
            row.append(tuple(done))
        if not any(row):
            waiting = {stage: order[at[stage]] for stage, order in enumerate(orders) if at[stage] < len(order)}
            missing = {stage: next(k for k in needed(op, stage) if k not in when) for stage, op in waiting.items()}
            raise ScheduleError(
                f"schedule {name!r}: in tick {len(rows)} no stage can proceed: {_cycle(pieces, waiting, missing)}. "
                "Remedy: use an order in which one of these operations comes earlier."
            )
        left -= sum(map(len, row))
        rows.append(tuple(row))
    return Ticks(tuple(rows), when)


def _cycle(pieces: Pieces, waiting: dict[int, Op], missing: dict[int, tuple[str, int, int]]) -> str:
    """Describes a deadlock: the stages of one cycle, the operations at which they wait, and those for which."""
    blocked_on = {stage: pieces.place(key[2])[0] for stage, key in missing.items()}
    stage = next(iter(waiting))
    seen: list[int] = []
    while stage in blocked_on and stage not in seen:
        seen.append(stage)
        stage = blocked_on[stage]
    cycle = seen[seen.index(stage) :] if stage in seen else seen

    def describe(stage: int) -> str:
        kind, m, piece = missing[stage]
        op = Op(kind, m, pieces.place(piece)[1])  # type: ignore[arg-type]
        return f"stage {stage} waits at {waiting[stage]} for {op} of stage {blocked_on[stage]}"

    return ", ".join(map(describe, cycle))
