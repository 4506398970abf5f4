"""``WorkerMemory``: what a worker keeps on disk beside the servers' parameters, so that a kill changes no bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxpar.parameter_server.update_log import LogRecord, UpdateLog


class WorkerMemory:
    """The worker's own arrays at the beginning of its last two rounds.

    Args:
      folder: where to keep them; it is made at the first save.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._last: dict[int, LogRecord] = {}
        self._log: UpdateLog | None = None

    def save(self, clock: int, arrays: Sequence[np.ndarray]) -> None:
        """Keep the arrays of a round, durably; without arrays there is nothing to keep."""
        if not arrays:
            return
        if self._log is None:
            self._open()
        assert self._log is not None
        record = LogRecord("memory", {"clock": clock}, {str(i): np.array(x) for i, x in enumerate(arrays)})
        # The round before is kept too, until all servers have this one's push.
        self._last = {step: old for step, old in self._last.items() if step == clock - 1} | {clock: record}
        self._log.replace(self._last.values())

    def load(self, clock: int) -> list[np.ndarray] | None:
        """Returns the arrays of a round, ``None`` if they were not kept."""
        if not self._folder.exists():
            return None
        if self._log is None:
            self._open()
        record = self._last.get(clock)
        return None if record is None else [record.arrays[str(i)] for i in range(len(record.arrays))]

    def _open(self) -> None:
        self._log = UpdateLog(self._folder)
        for record in self._log.records():
            self._last[record.fields["clock"]] = record
