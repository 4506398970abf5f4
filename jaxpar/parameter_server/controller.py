"""``Controller``: starts a membership and changes it while a run goes on.

A change holds all servers, moves pieces, publishes the next epoch, and lets the servers go on. Each part may be done
twice, so a change whose process was killed is simply made again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxpar.errors import ConfigError, LaunchError
from jaxpar.parameter_server.assignment import assign, with_server, without_server
from jaxpar.parameter_server.config import ServerConfig
from jaxpar.parameter_server.membership import Membership, WorkerSpan, from_json, with_span
from jaxpar.parameter_server.pieces import ParamPiece
from jaxpar.parameter_server.transport import ServerLost, Transport

type PieceProgress = dict[str, tuple[int, dict[int, int]]]
"""Version and clocks of each piece."""


class Controller:
    """Changes the membership of a run.

    Args:
      transport: reaches servers and coordinator.
      config: the run's configuration.
    """

    def __init__(self, transport: Transport, config: ServerConfig):
        self._transport, self._config = transport, config

    @property
    def members(self) -> Membership:
        """The present membership."""
        text = self._transport.coordinator("membership")
        if text is None:
            raise LaunchError("this run has no members yet. Remedy: Controller.begin first.")
        return from_json(text)

    def begin(self, pieces: Sequence[ParamPiece]) -> Membership:
        """Start the first epoch, or go on with that of a run that was ended."""
        text = self._transport.coordinator("membership")
        if text is None:
            servers = tuple(range(self._config.servers))
            spans = tuple(WorkerSpan(worker) for worker in range(self._config.workers))
            members = Membership(0, servers, spans, tuple(pieces), assign(pieces, servers))
        else:
            old = from_json(text)
            members = replace(old, epoch=old.epoch + 1)
        self._publish(members)
        return members

    def add_server(self, server: int) -> Membership:
        """Let a server that has started join; pieces move to it."""
        old = self.members
        owners = with_server(old.owners, old.pieces, server)
        servers = tuple(sorted({*old.servers, server}))
        return self._change(replace(old, epoch=old.epoch + 1, servers=servers, owners=owners))

    def remove_server(self, server: int) -> Membership:
        """Move a server's pieces to the others; then it can be ended."""
        old = self.members
        if server not in old.servers:
            raise ConfigError(f"server {server} is no member; the servers are {', '.join(map(str, old.servers))}.")
        left = tuple(other for other in old.servers if other != server)
        owners = without_server(old.owners, old.pieces, server, left)
        return self._change(replace(old, epoch=old.epoch + 1, servers=left, owners=owners))

    def add_worker(self, worker: int) -> Membership:
        """Let a worker join, from the first step that no piece has begun; then it can be started."""
        old = self.members
        self._hold(old)
        progress = self._progress(old)
        if self._config.in_rounds:
            first = max((version for version, _ in progress.values()), default=0)
        else:
            clocks = [c.get(span.worker, span.first) for _, c in progress.values() for span in old.active]
            first = min(clocks, default=0)
        spans = with_span(old.spans, WorkerSpan(worker, first))
        return self._change(replace(old, epoch=old.epoch + 1, spans=spans))

    def remove_worker(self, worker: int) -> Membership:
        """Let a worker leave, after the last of its steps that all pieces contain. Nobody waits for it any more."""
        old = self.members
        span = next((span for span in old.active if span.worker == worker), None)
        if span is None:
            active = ", ".join(str(span.worker) for span in old.active)
            raise ConfigError(f"worker {worker} is no active member; the workers are {active}.")
        if len(old.active) == 1:
            raise ConfigError(f"worker {worker} is the last one. Remedy: add a worker first, or end the run.")
        self._hold(old)
        last = min((c.get(worker, span.first) for _, c in self._progress(old).values()), default=span.first)
        return self._change(
            replace(old, epoch=old.epoch + 1, spans=with_span(old.spans, replace(span, last=max(last, span.first))))
        )

    def _change(self, new: Membership) -> Membership:
        old = self.members
        self._hold(old)
        for piece in old.pieces:
            source, target = old.owners[piece.key], new.owners[piece.key]
            if source != target:
                record = self._ask({source: ("export", (piece.key,))})[source]
                if record is not None:
                    self._ask({target: ("adopt", (record,))})
        self._publish(new, also=old.servers)
        return new

    def _publish(self, members: Membership, also: Sequence[int] = ()) -> None:
        self._transport.coordinator("publish", members.to_json())
        self._ask({server: ("activate", (members.to_json(),)) for server in {*members.servers, *also}})

    def _hold(self, members: Membership) -> None:
        self._ask({server: ("hold", (members.epoch + 1,)) for server in members.servers})

    def _progress(self, members: Membership) -> PieceProgress:
        found: PieceProgress = {}
        for progress in self._ask({server: ("progress", ()) for server in members.servers}).values():
            found |= progress
        return found

    def _ask(self, calls: Mapping[int, tuple[str, tuple[Any, ...]]]) -> dict[int, Any]:
        """The answers of all servers; those that are gone are waited for."""
        pending, found = dict(calls), {}
        until = time.monotonic() + self._config.patience
        while pending:
            answers = self._transport.ask({server: ("call", (name, *rest)) for server, (name, rest) in pending.items()})
            for server, answer in answers.items():
                if not isinstance(answer, ServerLost):
                    found[server] = answer
                    del pending[server]
                elif time.monotonic() > until:
                    raise LaunchError(
                        f"server {server} has not answered for {self._config.patience:g} s: {answer.why}. Remedy: look "
                        "into its log, or raise parameter_server.patience."
                    )
            if pending:
                time.sleep(0.1)
        return found
