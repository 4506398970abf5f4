"""``ServerShard``: the pieces of one server, and its log. It decides what a push does, and never waits.

Every change is a record in the log before it is applied, and applied before it is acknowledged. Opened again, a shard
replays its log and is in the same state, bit by bit. The clocks of the workers tell a push that is sent again from a
new one: push ``n`` of a worker is applied exactly once, after push ``n - 1``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.errors import ModelError, StateError
from jaxpar.parameter_server.config import ServerConfig
from jaxpar.parameter_server.membership import Membership, from_json
from jaxpar.parameter_server.messages import (
    DONE,
    STALE,
    WAITING,
    PullRequest,
    PushRequest,
    QuantizedDelta,
    RowGrads,
    ServerAnswer,
)
from jaxpar.parameter_server.piece_optimizer import PieceOptimizer
from jaxpar.parameter_server.piece_state import DenseState, PieceState, from_record, new_state
from jaxpar.parameter_server.pieces import SparseTable
from jaxpar.parameter_server.sums import MeanGrad, check_contribution, mean
from jaxpar.parameter_server.update_log import LogRecord, UpdateLog


class ServerShard:
    """A server's pieces.

    Args:
      server: its number.
      folder: its log's folder; what is there is replayed.
      config: the mode, and how often a snapshot replaces the log.
      optimizer: updates the pieces.
      tables: the sparse tables.

    Raises:
      DamagedError: the log is damaged.
    """

    def __init__(
        self,
        server: int,
        folder: Path,
        config: ServerConfig,
        optimizer: PieceOptimizer,
        tables: Sequence[SparseTable] = (),
    ):
        self.server, self._config, self._optimizer = server, config, optimizer
        self._tables = {table.path: table for table in tables}
        self._members: Membership | None = None
        self._held = False
        self._states: dict[str, PieceState] = {}
        self._updates = 0
        self.staleness: Counter[int] = Counter()
        """How often a worker pulled with the slowest one so many steps behind; since the start of this process."""
        self._log = UpdateLog(folder)
        for record in self._log.records():
            self._replay(record)

    @property
    def epoch(self) -> int:
        """The epoch that it knows, -1 before the first."""
        return -1 if self._members is None else self._members.epoch

    # Workers

    def push(self, request: PushRequest) -> ServerAnswer:
        """Take a worker's gradients; ``done`` if all of them are applied and durable.

        Raises:
          ModelError: this server does not hold one of the pieces.
          StateError: the push does not fit a piece, or an earlier one of the worker is missing.
        """
        if (states := self._current(request.epoch, request.grads)) is None:
            return STALE
        fresh = []
        for key, state in states.items():
            clock = self._clock(state, request.worker)
            if request.step > clock:
                raise StateError(
                    f"worker {request.worker} pushed step {request.step} to {key}, but its step {clock} has not "
                    "arrived. Remedy: push the steps of a worker in order."
                )
            if request.step == clock:
                check_contribution(state.piece, request.worker, request.grads[key])
                fresh.append(key)
        if self._config.in_rounds:
            for key in fresh:
                round_ = states[key].pending.setdefault(request.step, {})
                round_[request.worker] = request.weight, request.grads[key]
            self._finish_rounds(fresh)
        elif fresh:
            grads = {key: mean([(float(request.weight > 0), request.grads[key])]) for key in fresh}
            self._write(grads, {key: {request.worker: request.step + 1} for key in fresh})
        done = all(self._clock(state, request.worker) > request.step for state in states.values())
        return DONE if done else WAITING

    def pull(self, request: PullRequest) -> ServerAnswer:
        """Read pieces before a step; ``waiting`` while the mode's bound does not allow that step.

        Raises:
          ModelError: this server does not hold one of the pieces.
        """
        if (states := self._current(request.epoch, request.keys)) is None:
            return STALE
        staleness = 0
        if request.worker is not None:
            slowest = min((self._slowest(state) for state in states.values()), default=request.step)
            staleness = max(request.step - slowest, 0)
            ready = [self._ready(state, request.step) for state in states.values()]
            if not all(ready):
                return WAITING
            self.staleness[staleness] += 1
        values = {key: self._read(key, state, request) for key, state in states.items()}
        return ServerAnswer("done", values, staleness)

    def offer(self, epoch: int, values: Mapping[str, np.ndarray | None]) -> ServerAnswer:
        """Take initial values of the pieces that it should hold and does not; ``None`` for those of tables."""
        if self._members is None or self._held or epoch != self._members.epoch:
            return STALE
        owned = {piece.key: piece for piece in self._members.of_server(self.server)}
        for key, value in values.items():
            if key in owned and key not in self._states:
                state = new_state(owned[key], value, self._optimizer, self._tables)
                self._log.append(state.to_record())
                self._states[key] = state
        return DONE

    def clocks(self, epoch: int, worker: int) -> ServerAnswer:
        """Returns the step of a worker's next push to each piece, or ``waiting`` if pieces have no value yet."""
        if self._members is None or self._held or epoch != self._members.epoch:
            return STALE
        if any(piece.key not in self._states for piece in self._members.of_server(self.server)):
            return WAITING
        found = {key: np.array(self._clock(state, worker)) for key, state in self._states.items()}
        return ServerAnswer("done", found)

    # Changes of the membership

    def hold(self, epoch: int) -> None:
        """Stop pushes and pulls until ``epoch`` begins."""
        if not self._held and epoch > self.epoch:
            self._log.append(LogRecord("hold"))
            self._held = True

    def export(self, key: str) -> LogRecord | None:
        """Returns a held piece, for :meth:`adopt` of another server; ``None`` if it has no value yet."""
        return self._states[key].to_record() if key in self._states else None

    def progress(self) -> dict[str, tuple[int, dict[int, int]]]:
        """Returns the version and the clocks of every piece."""
        return {key: (state.version, dict(state.clocks)) for key, state in self._states.items()}

    def adopt(self, record: LogRecord) -> None:
        """Take a piece from another server; it is durable when this returns."""
        state = from_record(record, self._tables)
        self._log.append(record)
        self._states[state.piece.key] = state

    def activate(self, text: str) -> None:
        """Begin an epoch: forget the pieces of others, and what was pushed and not applied."""
        members = from_json(text)
        if members.epoch < self.epoch or (members.epoch == self.epoch and not self._held):
            return
        self._log.append(LogRecord("members", {"members": text}))
        self._begin(members)

    def snapshot(self) -> None:
        """Replace the log by the present state."""
        records = [] if self._members is None else [LogRecord("members", {"members": self._members.to_json()})]
        records += [LogRecord("hold")] if self._held else []
        self._log.replace([*records, *(state.to_record() for state in self._states.values())])
        self._updates = 0

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    # Inside

    def _current(self, epoch: int, keys: Iterable[str]) -> dict[str, PieceState] | None:
        """The pieces of a request, or ``None`` if it is of another epoch, or a change is under way."""
        if self._members is None or self._held or epoch != self._members.epoch:
            return None
        keys = list(keys)
        missing = [key for key in keys if key not in self._states]
        if missing:
            raise ModelError(
                f"server {self.server} does not hold {', '.join(missing)}; it holds {', '.join(self._states)}. Remedy: "
                "workers and servers must train the same model."
            )
        return {key: self._states[key] for key in keys}

    def _clock(self, state: PieceState, worker: int) -> int:
        assert self._members is not None
        return state.clocks.get(worker, self._members.first(worker))

    def _read(self, key: str, state: PieceState, request: PullRequest) -> np.ndarray | QuantizedDelta:
        """What a pull gets of a piece: with ``compression`` the change, if the worker has the value before."""
        previous = request.worker is not None and self._config.in_rounds and state.version == request.step + 1
        next_to_held = not previous and request.held == state.version - 1
        if next_to_held and isinstance(state, DenseState) and state.delta is not None:
            return state.delta
        return state.read(request.ids.get(key), previous=previous)

    def _slowest(self, state: PieceState) -> int:
        assert self._members is not None
        return min((self._clock(state, span.worker) for span in self._members.active), default=0)

    def _ready(self, state: PieceState, step: int) -> bool:
        if self._config.in_rounds:
            return state.version >= step
        lead = self._config.lead
        return lead is None or self._slowest(state) >= step - lead

    def _finish_rounds(self, keys: Sequence[str]) -> None:
        """Apply the rounds that all of their workers have pushed."""
        assert self._members is not None
        grads: dict[str, MeanGrad] = {}
        clocks: dict[str, dict[int, int]] = {}
        for key in keys:
            state = self._states[key]
            expected, given = self._members.expected(state.version), state.pending.get(state.version, {})
            if expected and all(worker in given for worker in expected):
                grads[key] = mean([given[worker] for worker in expected])
                clocks[key] = dict.fromkeys(expected, state.version + 1)
                del state.pending[state.version]
        if grads:
            self._write(grads, clocks)

    def _write(self, grads: Mapping[str, MeanGrad], clocks: Mapping[str, Mapping[int, int]]) -> None:
        """Log an update of pieces, and apply it."""
        record = _update_record(grads, clocks)
        self._log.append(record)
        self._apply(record)
        self._updates += 1
        if self._updates >= self._config.snapshot_every:
            self.snapshot()

    def _apply(self, record: LogRecord) -> None:
        for i, (key, clocks) in enumerate(record.fields["clocks"]):
            state = self._states[key]
            grad: Any = record.arrays.get(f"grad{i}")
            if f"ids{i}" in record.arrays:
                grad = RowGrads(record.arrays[f"ids{i}"], grad)
            if self._config.in_rounds:
                state.remember(grad)
            if grad is not None and isinstance(state, DenseState) and self._config.delta_bits is not None:
                state.apply_quantized(self._optimizer, grad, self._config.delta_bits)
            elif grad is not None:
                state.apply(self._optimizer, grad)
            state.version += 1
            state.clocks.update({worker: step for worker, step in clocks})

    def _begin(self, members: Membership) -> None:
        self._members, self._held = members, False
        owned = {piece.key for piece in members.of_server(self.server)}
        self._states = {key: state for key, state in self._states.items() if key in owned}
        for state in self._states.values():
            state.pending.clear()

    def _replay(self, record: LogRecord) -> None:
        match record.kind:
            case "members":
                self._begin(from_json(record.fields["members"]))
            case "hold":
                self._held = True
            case "adopt":
                state = from_record(record, self._tables)
                self._states[state.piece.key] = state
            case "update":
                self._apply(record)
                self._updates += 1


def _update_record(grads: Mapping[str, MeanGrad], clocks: Mapping[str, Mapping[int, int]]) -> LogRecord:
    arrays: dict[str, np.ndarray] = {}
    for i, grad in enumerate(grads.values()):
        if isinstance(grad, RowGrads):
            arrays |= {f"ids{i}": grad.ids, f"grad{i}": grad.values}
        elif grad is not None:
            arrays[f"grad{i}"] = grad
    return LogRecord("update", {"clocks": [[key, list(clocks[key].items())] for key in grads]}, arrays)
