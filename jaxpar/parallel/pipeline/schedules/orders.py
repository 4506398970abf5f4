"""The order of operations on each stage, as plain data.

A model is split into ``chunks * stages`` pieces of layers. ``interleaved`` gives piece g to stage g mod stages
(Narayanan et al. 2021, arXiv:2104.04473). ``v`` assigns the first chunk down the stages and the second back up, so that
the first stage has the first and the last piece (Qi et al. 2024, arXiv:2405.15362).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "W")
"""Forward; backward, of inputs only if there is a W; gradients of weights."""

Placement = Literal["interleaved", "v"]


class Op(NamedTuple):
    """One operation of a stage.

    With sequence chunks, ``microbatch`` is ``microbatch * sequence_chunks + chunk``.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + ("" if self.chunk == 0 else f".{self.chunk}")


def parse(text: str) -> Op | None:
    """Parses an operation in its printed form, ``F0`` or ``B3.1``; returns ``None`` if the text is invalid.

    >>> parse("B3.1"), parse("B3.")
    (Op(kind='B', microbatch=3, chunk=1), None)
    """
    found = re.fullmatch(r"([FBW])([0-9]+)(?:\.([0-9]+))?", text)
    return None if found is None else Op(found[1], int(found[2]), int(found[3] or 0))  # type: ignore[arg-type]


type Orders = tuple[tuple[Op, ...], ...]


@dataclass(frozen=True)
class Pieces:
    """The placement of a model's pieces: ``stages`` devices with ``chunks`` pieces each."""

    stages: int
    chunks: int = 1
    placement: Placement = "interleaved"

    @property
    def count(self) -> int:
        """The number of pieces."""
        return self.stages * self.chunks

    def piece(self, stage: int, chunk: int) -> int:
        """Returns the index of a stage's chunk among all pieces of the model, 0 for the first layers."""
        backward = self.placement == "v" and chunk % 2 == 1
        return chunk * self.stages + (self.stages - 1 - stage if backward else stage)

    def place(self, piece: int) -> tuple[int, int]:
        """Returns the stage and the chunk of a piece."""
        chunk, at = divmod(piece, self.stages)
        return (self.stages - 1 - at if self.placement == "v" and chunk % 2 == 1 else at), chunk


def gpipe(stages: int, microbatches: int) -> Orders:
    """Returns all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""
    forward = tuple(Op("F", m) for m in range(microbatches))
    return (forward + tuple(Op("B", m) for m in range(microbatches)),) * stages


def looped(stages: int, microbatches: int, chunks: int, group: int) -> Orders:
    """Returns orders that alternate forwards and backwards, as early as possible, for ``chunks`` pieces on each stage.

    Microbatches are split into groups. A stage does one chunk for all microbatches of a group, then the next chunk. A
    forward and a backward share a tick, so the pipeline is full in all ticks but the first and the last ones. Groups of
    ``stages`` microbatches give a depth-first order (Narayanan et al. 2021, arXiv:2104.04473), a single group a
    breadth-first order (Lamy-Poirier 2022, arXiv:2211.05953).

    Args:
      stages: the number of stages.
      microbatches: the number of microbatches.
      chunks: the number of pieces on each stage.
      group: the number of microbatches in a group.
    """
    forward = [Op("F", m, c) for m, c in _grouped(microbatches, chunks, group)]
    backward = [Op("B", m, chunks - 1 - c) for m, c in _grouped(microbatches, chunks, group)]
    # The number of forwards that the last stage does before the first microbatch reaches the last piece.
    ahead = forward.index(Op("F", 0, chunks - 1))
    return tuple(_merged(forward, backward, ahead + 2 * (stages - 1 - stage)) for stage in range(stages))


def one_forward_one_backward(stages: int, microbatches: int, sequence_chunks: int, fused: bool) -> Orders:
    """Returns 1F1B orders, of full sequences or of sequence chunks (Sun et al. 2024, arXiv:2406.03488).

    A sequence chunk attends to the earlier chunks. The backwards of a microbatch therefore start after all its
    forwards, and run from the last chunk to the first.

    Args:
      stages: the number of stages.
      microbatches: the number of microbatches.
      sequence_chunks: the number of chunks in each sequence.
      fused: a tick holds a forward and a backward. A stage is then twice as far ahead of the next stage as in the
        textbook order, in which each stage sends only every second tick.
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
    """Returns ``ahead`` forwards, then one backward and one forward in turn."""
    ahead = min(ahead, len(forward))
    result = list(forward[:ahead])
    for at, op in enumerate(backward):
        result += [*forward[ahead + at : ahead + at + 1], op]
    return tuple(result)


def deferred(orders: Orders, delays: Sequence[int]) -> Orders:
    """Splits backwards in two: the W of a backward follows ``delays[stage]`` backwards later, or at the end."""

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
