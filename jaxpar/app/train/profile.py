"""``Profiler``: a trace of a range of a run's steps, for xprof and TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from jaxpar.app.train_config import ProfileConfig


class Profiler:
    """Writes ``jax.profiler``'s trace of the steps from ``span.start`` to the folder ``profile``.

    Args:
      span: the steps; ``None`` traces none.
      folder: of the run's output.
      tell: called with each message for the user.
    """

    def __init__(self, span: ProfileConfig | None, folder: Path, tell: Callable[[str], None] = print):
        self._folder, self._tell, self._open = folder / "profile", tell, False
        self.written: list[str] = []
        """The folder of the trace, once there is one."""
        self._first = 0 if span is None else span.start
        self._last = 0 if span is None else span.start + span.steps - 1

    def before(self, step: int) -> None:
        """Start the trace, if this is its first step; call it before each step."""
        if step == self._first:
            jax.profiler.start_trace(str(self._folder))
            self._open = True

    def after(self, step: int) -> None:
        """End the trace, if this was its last step; call it when the step is done."""
        if step == self._last:
            self.close()

    def close(self) -> None:
        """End the trace, if it is open: a run may end before its last step."""
        if self._open:
            jax.profiler.stop_trace()
            self._open = False
            self.written = [f"{self._folder} (xprof {self._folder})"]
            self._tell(f"profile {self._folder}: open it with xprof or TensorBoard, such as xprof {self._folder}")
