"""Orders packed into ticks: in each tick a stage does at most one operation of each kind, F before B before W."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.errors import ScheduleError
from jaxpar.parallel.pipeline.schedules.orders import KINDS, Op, Orders, Pieces

type Tick = tuple[tuple[Op, ...], ...]
"""For each stage what it does in this tick."""


@dataclass(frozen=True)
class Ticks:
    """The ticks of a schedule, and when each operation comes: (kind, microbatch, piece) → tick."""

    rows: tuple[Tick, ...]
    when: dict[tuple[str, int, int], int]


def needs(op: Op, piece: int, pieces: int, sequence_chunks: int = 1) -> list[tuple[str, int, int]]:
    """What has to be done before an operation of this piece, as (kind, microbatch, piece).

    Of a sequence in chunks, a chunk's forward wants the keys of those before it, and its backward the cotangents of its keys from those after.
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
    """Ticks as early as orders and dependencies allow; what another stage sends is there one tick later.

    Args:
      fused: a tick may hold an F, a B and a W; otherwise one of them.
      sequence_chunks: of each microbatch; see :func:`needs`.

    Raises:
      ScheduleError: the orders wait for each other; the operations that do are named.
    """
    when: dict[tuple[str, int, int], int] = {}
    stage_of: dict[tuple[str, int, int], int] = {}
    at = [0] * pieces.stages
    left = sum(map(len, orders))
    rows: list[Tick] = []

    def ready(op: Op, stage: int, tick: int) -> bool:
        found = needs(op, pieces.piece(stage, op.chunk), pieces.count, sequence_chunks)
        # A result of the same stage can be used in the same tick, of another one in the next.
        return all(key in when and (when[key] < tick or stage_of[key] == stage) for key in found)

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
            raise ScheduleError(_cycle(name, pieces, orders, at, len(rows), when, sequence_chunks))
        left -= sum(map(len, row))
        rows.append(tuple(row))
    return Ticks(tuple(rows), when)


def _cycle(
    name: str,
    pieces: Pieces,
    orders: Orders,
    at: list[int],
    tick: int,
    when: dict[tuple[str, int, int], int],
    sequence_chunks: int,
) -> str:
    """Who waits for whom, round once."""
    waiting = {stage: order[at[stage]] for stage, order in enumerate(orders) if at[stage] < len(order)}
    for_whom: dict[int, tuple[tuple[str, int, int], int]] = {}
    for stage, op in waiting.items():
        missing = next(
            k for k in needs(op, pieces.piece(stage, op.chunk), pieces.count, sequence_chunks) if k not in when
        )
        for_whom[stage] = missing, pieces.place(missing[2])[0]
    stage = next(iter(waiting))
    seen: list[int] = []
    while stage in for_whom and stage not in seen:
        seen.append(stage)
        stage = for_whom[stage][1]
    circle = seen[seen.index(stage) :] if stage in seen else seen

    def says(stage: int) -> str:
        (kind, m, piece), other = for_whom[stage]
        return f"stage {stage} waits at {waiting[stage]} for {Op(kind, m, pieces.place(piece)[1])} of stage {other}"  # type: ignore[arg-type]

    text = ", ".join(map(says, circle))
    return f"schedule {name!r}: in tick {tick} nothing can go on: {text}. Remedy: an order in which one of these comes earlier."
