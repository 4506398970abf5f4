"""What workers and servers send each other: pushes, pulls and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class RowGrads:
    """Gradients ``values`` [n, features] of the rows ``ids`` [n], int64, ascending, of a table."""

    ids: np.ndarray
    values: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.values.nbytes


@dataclass(frozen=True)
class QuantizedDelta:
    """A change in 8 or 4 bits: ``values`` [blocks, bytes] int8, each block times its ``scales`` [blocks] fp32.

    In 4 bits a byte holds two numbers, the first in its lower half.
    """

    values: np.ndarray
    scales: np.ndarray
    shape: tuple[int, ...]
    bits: Literal[8, 4] = 8

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


type Contribution = np.ndarray | RowGrads | QuantizedDelta | None
"""A worker's gradient of a piece; ``None`` from a step that was not finite."""


@dataclass(frozen=True)
class PushRequest:
    """A worker's gradients of one step for one server.

    Attributes:
      worker: its number.
      step: the step's number, which is the push's sequence number.
      epoch: the membership that the worker knows.
      weight: of this worker in the mean of a round; 0 for a step that was not finite.
      grads: by the pieces' keys.
    """

    worker: int
    step: int
    epoch: int
    weight: float
    grads: Mapping[str, Contribution]


@dataclass(frozen=True)
class PullRequest:
    """What a worker reads before a step.

    Attributes:
      worker: its number; ``None`` reads the newest values and never waits.
      step: the step it is about to compute.
      epoch: the membership that it knows.
      keys: the pieces.
      ids: the rows of each sparse piece.
      held: the version of the dense pieces that the worker has. With ``compression`` servers answer with the change
        since then, if that was one update.
    """

    worker: int | None
    step: int
    epoch: int
    keys: tuple[str, ...]
    ids: Mapping[str, np.ndarray] = field(default_factory=dict)
    held: int | None = None


@dataclass(frozen=True)
class ServerAnswer:
    """A server's answer.

    Attributes:
      status: ``done``; ``waiting``: ask again; ``stale``: the epoch has changed, or a change is under way.
      values: what was pulled; with ``compression``, the change of what the worker holds.
      staleness: how many steps the slowest worker was behind the one that pulled.
    """

    status: str
    values: Mapping[str, np.ndarray | QuantizedDelta] = field(default_factory=dict)
    staleness: int = 0


WAITING, STALE, DONE = ServerAnswer("waiting"), ServerAnswer("stale"), ServerAnswer("done")
