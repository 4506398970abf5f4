"""``ServerClient``: a worker's view of the servers. It cuts and joins parameters, and repeats unanswered calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxpar.errors import LaunchError, ModelError
from jaxpar.parameter_server.config import DeltaBits
from jaxpar.parameter_server.membership import Membership, from_json
from jaxpar.parameter_server.messages import (
    Contribution,
    PullRequest,
    PushRequest,
    QuantizedDelta,
    RowGrads,
    ServerAnswer,
)
from jaxpar.parameter_server.pieces import ParamPiece, Params, SparseTable, server_params
from jaxpar.parameter_server.quantized_deltas import add, dequantize, quantize
from jaxpar.parameter_server.transport import ServerCall, ServerLost, Transport

_PAUSE = 0.1
"""Seconds before a server that is gone, or that changes its members, is asked again."""


@dataclass
class Traffic:
    """What a worker sent and received, in bytes, and the largest staleness that it met, in steps."""

    pushed: int = 0
    pulled: int = 0
    staleness: int = 0


class ServerClient:
    """Pulls and pushes the parameters of one worker.

    Args:
      transport: reaches the servers.
      worker: the worker's number.
      model: the parameters of its model, by path.
      tables: those of which it uses rows.
      patience: seconds to wait for a server that is gone.

    Raises:
      ModelError: the servers hold other parameters.
      LaunchError: no membership was published.
    """

    def __init__(
        self,
        transport: Transport,
        worker: int,
        model: Params,
        tables: Sequence[SparseTable] = (),
        patience: float = 120.0,
    ):
        self._transport, self.worker, self._patience = transport, worker, patience
        self._members = self._membership()
        self.traffic = Traffic()
        self.residuals: dict[str, np.ndarray] = {}
        """The rounding errors of the last push that was rounded, by piece."""
        self._held: tuple[int, dict[str, np.ndarray]] | None = None
        check_model(server_params(model, tables), self._members.params(), f"worker {worker}")

    @property
    def pieces(self) -> tuple[ParamPiece, ...]:
        """Everything that the servers hold."""
        return self._members.pieces

    def start(self, values: Callable[[], Mapping[str, np.ndarray]]) -> int:
        """Offers initial values to servers that have none; returns the step of this worker's next push.

        Args:
          values: returns the initial values of the dense parameters; called if this worker is the first one.
        """
        if self.worker == min(span.worker for span in self._members.active):
            made = values()

            def offers(members: Membership) -> dict[int, ServerCall]:
                return {
                    server: ("call", ("offer", members.epoch, self._own(members.of_server(server), made)))
                    for server in members.servers
                }

            self._until_done(offers)
        clocks = self._until_done(
            lambda members: {server: ("clocks", (members.epoch, self.worker)) for server in members.servers}
        )
        steps = [int(np.asarray(step)) for answer in clocks.values() for step in answer.values.values()]
        return min(steps, default=self._members.first(self.worker))

    def pull(
        self, step: int | None, ids: Mapping[str, np.ndarray] | None = None, *, bits: DeltaBits | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the parameters for a step, waiting for other workers as the mode asks; the newest without a step.

        Args:
          step: the number of the step.
          ids: the rows of each table, ascending int64; tables without rows are left out.
          bits: receive so many bits of each number of the change since the step before, if that was pulled so too.
        """
        rows = ids or {}
        held, before = self._held if bits and self._held is not None else (None, {})

        def request(members: Membership) -> dict[int, ServerCall]:
            found: dict[int, ServerCall] = {}
            for server in members.servers:
                parts = {p.key: _rows_of(p, rows.get(p.name)) for p in members.of_server(server)}
                parts = {key: part for key, part in parts.items() if key in dense or part is not None}
                ids = {key: part for key, part in parts.items() if part is not None}
                worker = None if step is None else self.worker
                if parts:
                    pull = PullRequest(worker, step or 0, members.epoch, tuple(parts), ids, held)
                    found[server] = "pull", (pull,)
            return found

        dense = {piece.key for piece in self._members.pieces if not piece.spec.sparse}
        answers = self._until_done(request)
        found = {key: value for answer in answers.values() for key, value in answer.values.items()}
        self.traffic.pulled += sum(value.nbytes for value in found.values())
        values = {key: add(before[key], x) if isinstance(x, QuantizedDelta) else x for key, x in found.items()}
        if bits and step is not None:
            self._held = step, values
        found_staleness = max((answer.staleness for answer in answers.values()), default=0)
        self.traffic.staleness = max(self.traffic.staleness, found_staleness)
        return _joined(self._members.pieces, values)

    def push(
        self,
        step: int,
        grads: Mapping[str, np.ndarray | RowGrads] | None,
        *,
        weight: float = 1.0,
        bits: DeltaBits | None = None,
        prepared: Callable[[], None] = lambda: None,
    ) -> None:
        """Push the gradients of a step; they are applied and durable when this returns.

        Args:
          step: the step's number.
          grads: of each parameter; ``None`` for a step that was not finite.
          weight: of this worker in the mean.
          bits: send so many bits of each number; by default all.
          prepared: called before anything is sent.
        """
        sent: dict[str, Contribution] = {}
        for piece in self._members.pieces:
            part = None if grads is None else _part(piece, grads[piece.name])
            sent[piece.key] = part if bits is None else self._rounded(piece.key, part, bits)
        prepared()
        self.traffic.pushed += sum(x.nbytes for x in sent.values() if x is not None)

        def request(members: Membership) -> dict[int, ServerCall]:
            found: dict[int, ServerCall] = {}
            for server in members.servers:
                own = {piece.key: sent[piece.key] for piece in members.of_server(server)}
                if own:
                    push = PushRequest(self.worker, step, members.epoch, 0.0 if grads is None else weight, own)
                    found[server] = "push", (push,)
            return found

        self._until_done(request)

    def _rounded(self, key: str, part: Contribution, bits: DeltaBits) -> Contribution:
        if not isinstance(part, np.ndarray):
            return part
        exact = part.astype(np.float32) + self.residuals.get(key, np.float32(0))
        delta = quantize(exact, bits)
        self.residuals[key] = exact - dequantize(delta)
        return delta

    def _own(self, pieces: Sequence[ParamPiece], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray | None]:
        parts = {p.key: None if p.spec.sparse else _part(p, values[p.name]) for p in pieces}
        return {key: part for key, part in parts.items() if part is None or isinstance(part, np.ndarray)}

    def _membership(self) -> Membership:
        text = self._transport.coordinator("membership")
        if text is None:
            raise LaunchError("no servers were started for this run. Remedy: start the servers before the workers.")
        return from_json(text)

    def _until_done(self, request: Callable[[Membership], dict[int, ServerCall]]) -> dict[int, ServerAnswer]:
        """The answers of all servers that a request needs; it is made again for each new membership."""
        calls = request(self._members)
        done: dict[int, ServerAnswer] = {}
        lost_since: float | None = None
        while calls:
            answers = self._transport.ask(calls)
            lost = {server: answer for server, answer in answers.items() if isinstance(answer, ServerLost)}
            good = {server: answer for server, answer in answers.items() if server not in lost}
            if any(answer.status == "stale" for answer in good.values()):
                time.sleep(_PAUSE)
                self._members = self._membership()
                calls, done = request(self._members), {}
                continue
            ready = {server: answer for server, answer in good.items() if answer.status == "done"}
            done |= ready
            calls = {server: call for server, call in calls.items() if server not in ready}
            lost_since = (lost_since or time.monotonic()) if lost else None
            if lost_since is not None:
                if (members := self._membership()).epoch != self._members.epoch:  # it may have left
                    self._members, calls, done, lost_since = members, request(members), {}, None
                    continue
                self._check_patience(lost, time.monotonic() - lost_since)
                time.sleep(_PAUSE)
        return done

    def _check_patience(self, lost: Mapping[int, ServerLost], seconds: float) -> None:
        if seconds > self._patience:
            server, answer = next(iter(lost.items()))
            raise LaunchError(
                f"server {server} has not answered worker {self.worker} for {seconds:.0f} s: {answer.why}. Remedy: "
                "look into the server's log, or raise parameter_server.patience."
            )


def check_model(model: Params, servers: Params, what: str) -> None:
    """Raises if a model's parameters are not those that the servers hold, compared by name, shape and dtype.

    Raises:
      ModelError: they differ; the text names the first parameters.
    """
    problems = [f"{name} {spec}: no server holds it" for name, spec in model.items() if name not in servers]
    problems += [f"{name} {spec}: it is missing" for name, spec in servers.items() if name not in model]
    problems += [
        f"{name} {spec}: the servers hold {servers[name]}"
        for name, spec in model.items()
        if name in servers and (spec.shape, spec.dtype) != (servers[name].shape, servers[name].dtype)
    ]
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ModelError(
            f"{what} has another model than the servers: {'; '.join(problems[:4])}{more}. Remedy: the same model "
            "configuration for all workers, or another folder for this run."
        )


def _rows_of(piece: ParamPiece, ids: np.ndarray | None) -> np.ndarray | None:
    """The rows that a sparse piece holds, or ``None`` if there are none of them (or the piece is dense)."""
    if ids is None or not piece.spec.sparse:
        return None
    first, last = np.searchsorted(ids, [piece.start, piece.stop])
    return ids[first:last] if last > first else None


def _part(piece: ParamPiece, grad: np.ndarray | RowGrads) -> np.ndarray | RowGrads:
    if isinstance(grad, RowGrads):
        first, last = np.searchsorted(grad.ids, [piece.start, piece.stop])
        return RowGrads(grad.ids[first:last], grad.values[first:last])
    return grad[piece.start : piece.stop] if piece.spec.shape else grad


def _joined(pieces: Sequence[ParamPiece], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameters by name; of a table the rows that were pulled, in order."""
    parts: dict[str, list[np.ndarray]] = {}
    for piece in pieces:
        if piece.key in values:
            parts.setdefault(piece.name, []).append(values[piece.key])
        elif piece.spec.sparse:
            parts.setdefault(piece.name, []).append(np.zeros((0, piece.spec.shape[1]), jnp.dtype(piece.spec.dtype)))
    return {name: found[0] if len(found) == 1 else np.concatenate(found) for name, found in parts.items()}
