"""What runs in the processes of servers: a shard behind a lock, and the record of who is a member."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpar.parameter_server.messages import PullRequest, PushRequest, ServerAnswer
from jaxpar.parameter_server.server_shard import ServerShard
from jaxpar.utils.durable import write_atomically

_WAIT = 2.0
"""Seconds after which a request that waits for other workers is answered with ``waiting``."""


class ServerService:
    """A shard that many threads call. Pushes and pulls wait for other workers, for a bounded time.

    Args:
      open_shard: opens the shard.
    """

    def __init__(self, open_shard: Callable[[], ServerShard]):
        self._shard, self._changed = open_shard(), threading.Condition()

    def pid(self) -> int:
        """Returns the process."""
        return os.getpid()

    def push(self, request: PushRequest) -> ServerAnswer:
        """See :meth:`ServerShard.push`; answered when the push is applied and durable, or ``waiting``."""
        return self._wait(lambda: self._shard.push(request), changes=True)

    def pull(self, request: PullRequest) -> ServerAnswer:
        """See :meth:`ServerShard.pull`."""
        return self._wait(lambda: self._shard.pull(request), changes=False)

    def clocks(self, epoch: int, worker: int) -> ServerAnswer:
        """See :meth:`ServerShard.clocks`."""
        return self._wait(lambda: self._shard.clocks(epoch, worker), changes=False)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call another method of the shard."""
        with self._changed:
            try:
                return getattr(self._shard, name)(*arguments)
            finally:
                self._changed.notify_all()

    def staleness(self) -> dict[int, int]:
        """Returns how often a worker pulled with the slowest one so many steps behind."""
        with self._changed:
            return dict(self._shard.staleness)

    def _wait(self, answer: Callable[[], ServerAnswer], *, changes: bool) -> ServerAnswer:
        until = time.monotonic() + _WAIT
        with self._changed:
            while (found := answer()).status == "waiting":
                remaining = until - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    break
            if changes and found.status == "done":
                self._changed.notify_all()
            return found


class Coordinator:
    """The membership, in a file, and what workers report.

    Args:
      file: holds the membership.
    """

    def __init__(self, file: str):
        self._file = Path(file)
        self._lock = threading.Lock()
        self._reports: list[tuple[int, int, dict[str, float]]] = []
        self._dismissed: set[int] = set()

    def membership(self) -> str | None:
        """Returns the membership as text, ``None`` before the first."""
        return self._file.read_text(encoding="utf-8") if self._file.exists() else None

    def publish(self, text: str) -> None:
        """Replace the membership; it is durable when this returns."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, text)

    def report(self, worker: int, step: int, values: dict[str, float]) -> bool:
        """Take a worker's figures of a step; returns whether it goes on."""
        with self._lock:
            self._reports.append((worker, step, values))
            return worker not in self._dismissed

    def dismiss(self, worker: int) -> None:
        """Let a worker end after its present step."""
        with self._lock:
            self._dismissed.add(worker)

    def take_reports(self) -> list[tuple[int, int, dict[str, float]]]:
        """Returns the reports since the last call."""
        with self._lock:
            found, self._reports = self._reports, []
            return found
