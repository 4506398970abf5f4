"""``Membership``: the servers, the workers and the owners of one epoch. Every change makes the next epoch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxpar.parameter_server.pieces import ParamPiece, ParamSpec


@dataclass(frozen=True)
class WorkerSpan:
    """The steps of a worker: from ``first``, and before ``last`` if it has left."""

    worker: int
    first: int = 0
    last: int | None = None

    def __contains__(self, step: int) -> bool:
        return self.first <= step and (self.last is None or step < self.last)


@dataclass(frozen=True)
class Membership:
    """The members of an epoch.

    Attributes:
      epoch: counts the changes.
      servers: the numbers of the servers.
      spans: the steps of all workers, also of those that have left, by worker.
      pieces: everything that servers hold.
      owners: the server of each piece, by its key.
    """

    epoch: int
    servers: tuple[int, ...]
    spans: tuple[WorkerSpan, ...]
    pieces: tuple[ParamPiece, ...]
    owners: Mapping[str, int]

    def expected(self, step: int) -> list[int]:
        """Returns the workers whose pushes make up a step, in the order in which these are summed."""
        return sorted(span.worker for span in self.spans if step in span)

    @property
    def active(self) -> list[WorkerSpan]:
        """The workers that have not left."""
        return [span for span in self.spans if span.last is None]

    def first(self, worker: int) -> int:
        """Returns the first step of a worker."""
        return next((span.first for span in self.spans if span.worker == worker), 0)

    def params(self) -> dict[str, ParamSpec]:
        """Returns the parameters that the pieces make up."""
        found: dict[str, ParamSpec] = {}
        for piece in self.pieces:
            rows = piece.stop if piece.spec.shape else None
            old = found.get(piece.name)
            if old is None or (rows is not None and rows > old.shape[0]):
                shape = piece.spec.shape if rows is None else (rows, *piece.spec.shape[1:])
                found[piece.name] = replace(piece.spec, shape=shape)
        return found

    def of_server(self, server: int) -> list[ParamPiece]:
        """Returns the pieces of a server."""
        return [piece for piece in self.pieces if self.owners[piece.key] == server]

    def to_json(self) -> str:
        """Returns the membership as text, for :func:`from_json`."""
        spans = [[s.worker, s.first, s.last] for s in self.spans]
        pieces = [piece.to_list() for piece in self.pieces]
        return json.dumps(
            {
                "epoch": self.epoch,
                "servers": list(self.servers),
                "spans": spans,
                "pieces": pieces,
                "owners": dict(self.owners),
            }
        )


def from_json(text: str) -> Membership:
    """Returns the membership that :meth:`Membership.to_json` wrote."""
    data: dict[str, Any] = json.loads(text)
    pieces = tuple(map(ParamPiece.from_list, data["pieces"]))
    spans = tuple(WorkerSpan(*span) for span in data["spans"])
    return Membership(data["epoch"], tuple(data["servers"]), spans, pieces, data["owners"])


def with_span(spans: Sequence[WorkerSpan], new: WorkerSpan) -> tuple[WorkerSpan, ...]:
    """Returns the spans with that of one worker added or replaced."""
    return tuple(sorted([*(s for s in spans if s.worker != new.worker), new], key=lambda span: span.worker))
