"""What each stage of a pipeline does, in its order: pure data, made by name.

A model of ``chunks * stages`` pieces of layers goes over the stages, chunk by chunk. ``loop`` gives piece g to stage g mod stages (Narayanan
et al. 2021, arXiv:2104.04473); ``v`` goes down the stages with the first chunk and back up with the second, so that the first stage
has the first and the last piece (Qi et al. 2024, arXiv:2405.15362).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "W")
"""Forward; backward, of inputs alone where W follows; gradients of weights."""

Placement = Literal["loop", "v"]


class Op(NamedTuple):
    """One piece of work of one stage; with sequence chunks ``microbatch`` counts those, ``microbatch * sequence_chunks + chunk``."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + ("" if self.chunk == 0 else f".{self.chunk}")


def parse(text: str) -> Op | None:
    """An operation as it prints, ``F0`` or ``B3.1``; None if this is none.

    >>> parse("B3.1"), parse("B3.")
    (Op(kind='B', microbatch=3, chunk=1), None)
    """
    found = re.fullmatch(r"([FBW])([0-9]+)(?:\.([0-9]+))?", text)
    return None if found is None else Op(found[1], int(found[2]), int(found[3] or 0))  # type: ignore[arg-type]


type Orders = tuple[tuple[Op, ...], ...]


@dataclass(frozen=True)
class Pieces:
    """Where the pieces of a model lie: ``stages`` devices, ``chunks`` pieces on each."""

    stages: int
    chunks: int = 1
    placement: Placement = "loop"

    @property
    def count(self) -> int:
        return self.stages * self.chunks

    def piece(self, stage: int, chunk: int) -> int:
        """The number of a stage's chunk among all pieces of the model, 0 for the first layers."""
        backward = self.placement == "v" and chunk % 2 == 1
        return chunk * self.stages + (self.stages - 1 - stage if backward else stage)

    def place(self, piece: int) -> tuple[int, int]:
        """Stage and chunk of a piece."""
        chunk, at = divmod(piece, self.stages)
        return (self.stages - 1 - at if self.placement == "v" and chunk % 2 == 1 else at), chunk


def gpipe(stages: int, microbatches: int) -> Orders:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""
    forward = tuple(Op("F", m) for m in range(microbatches))
    return (forward + tuple(Op("B", m) for m in range(microbatches)),) * stages


def looped(stages: int, microbatches: int, chunks: int, group: int) -> Orders:
    """Forward and backward in turn, as soon as they can be, of ``chunks`` pieces a stage.

    Microbatches go in groups: a stage does one chunk for all of a group, then the next chunk. A forward and a backward share a tick, so the
    pipeline is full in every tick but the first and last. With groups of ``stages`` it is depth first (Narayanan et al. 2021,
    arXiv:2104.04473), with one group breadth first (Lamy-Poirier 2022, arXiv:2211.05953).
    """
    forward = [Op("F", m, c) for m, c in _grouped(microbatches, chunks, group)]
    backward = [Op("B", m, chunks - 1 - c) for m, c in _grouped(microbatches, chunks, group)]
    # The forward of the first microbatch reaches the last piece after so many ticks of the last stage.
    ahead = forward.index(Op("F", 0, chunks - 1))
    return tuple(_merged(forward, backward, ahead + 2 * (stages - 1 - stage)) for stage in range(stages))


def one_forward_one_backward(stages: int, microbatches: int, sequence_chunks: int, fused: bool) -> Orders:
    """1F1B, of whole sequences or of chunks of them (Sun et al. 2024, arXiv:2406.03488).

    A chunk of a sequence attends to those before it, so backwards of a microbatch go from its last chunk to its first, and begin when all of
    its forwards are done. If a tick holds a forward and a backward (``fused``), a stage is twice as far ahead of the next as it is in the
    textbook's order, where each sends only every second tick.
    """
    units = microbatches * sequence_chunks
    last = [m * sequence_chunks + q for m in range(microbatches) for q in reversed(range(sequence_chunks))]
    forward, backward = [Op("F", unit) for unit in range(units)], [Op("B", unit) for unit in last]
    far = 2 if fused else 1
    ahead = [far * (stages - 1 - stage) + sequence_chunks - 1 for stage in range(stages)]
    return tuple(_merged(forward, backward, each) for each in ahead)


def _grouped(microbatches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    starts = range(0, microbatches, group)
    return [(m, c) for first in starts for c in range(chunks) for m in range(first, min(first + group, microbatches))]


def _merged(forward: Sequence[Op], backward: Sequence[Op], ahead: int) -> tuple[Op, ...]:
    """``ahead`` forwards first, then one of each in turn."""
    ahead = min(ahead, len(forward))
    result = list(forward[:ahead])
    for at, op in enumerate(backward):
        result += [*forward[ahead + at : ahead + at + 1], op]
    return tuple(result)


def deferred(orders: Orders, delays: Sequence[int]) -> Orders:
    """Backwards split in two: W of a backward comes ``delays[stage]`` backwards after it, or at the end."""

    def one(order: tuple[Op, ...], delay: int) -> tuple[Op, ...]:
        due: list[Op] = []
        result: list[Op] = []
        for op in order:
            result.append(op)
            if op.kind == "B":
                due.append(Op("W", op.microbatch, op.chunk))
                if len(due) > delay:
                    result.append(due.pop(0))
        return (*result, *due)

    return tuple(one(order, delay) for order, delay in zip(orders, delays, strict=True))
