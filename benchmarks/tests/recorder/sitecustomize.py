"""Records which lines of ``jaxpar`` each test executes, also in the processes that a test starts.

``planted_faults.py`` puts this folder on ``PYTHONPATH``: Python imports ``sitecustomize`` in every process, and pytest
loads ``record_tests`` beside it. ``JAXPAR_LINES`` names the folder of the records, and
``JAXPAR_LINES_ROOT`` the checkout whose ``jaxpar/`` counts. A record is one line of JSON: test, outcome, CPU seconds,
and the lines of each file. A process that a test starts appends ``test``, ``file:line``, ... to a file of its own as it
goes, because many of these processes are killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from types import CodeType
from typing import IO

_EVENTS = sys.monitoring.events
_TOOL = 4
_FOLDER = os.environ.get("JAXPAR_LINES", "")
_ROOT = os.path.join(os.environ.get("JAXPAR_LINES_ROOT", ""), "")
_CURRENT = "PYTEST_CURRENT_TEST"


class Recorder:
    """The lines that ran since the last ``clear``; in a process that a test started, a file of them."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self.outcome = "passed"
        self.stream: IO[str] | None = None

    def start(self) -> None:
        monitoring = sys.monitoring
        monitoring.use_tool_id(_TOOL, "planted faults")
        monitoring.register_callback(_TOOL, _EVENTS.PY_START, self.function)
        monitoring.register_callback(_TOOL, _EVENTS.LINE, self.line)
        monitoring.set_events(_TOOL, _EVENTS.PY_START)
        os.register_at_fork(after_in_child=self.child)
        if _CURRENT in os.environ:
            self.child()

    def child(self) -> None:
        """Write to a file from now on: this process ends without a hook of pytest."""
        if _CURRENT not in os.environ:
            return
        name = os.path.join(_FOLDER, f"child-{os.getpid()}-{time.monotonic_ns()}")
        self.stream = open(name, "w", buffering=1)  # noqa: SIM115 (open until the process ends)
        self.stream.write(os.environ[_CURRENT].rsplit(" ", 1)[0] + "\n")

    def function(self, code: CodeType, _: int) -> object:
        if code.co_filename.startswith(_ROOT + "jaxpar"):
            sys.monitoring.set_local_events(_TOOL, code, _EVENTS.LINE)
        return sys.monitoring.DISABLE

    def line(self, code: CodeType, number: int) -> object:
        at = code.co_filename[len(_ROOT) :], number
        if self.stream is None:
            self.lines.add(at)
        elif not self.stream.closed:
            self.stream.write(f"{at[0]}:{number}\n")
        return sys.monitoring.DISABLE

    def clear(self) -> None:
        self.lines, self.outcome = set(), "passed"
        sys.monitoring.restart_events()

    def record(self, test: str, seconds: float) -> None:
        files: dict[str, list[int]] = {}
        for file, number in sorted(self.lines):
            files.setdefault(file, []).append(number)
        content = {"test": test, "outcome": self.outcome, "seconds": round(seconds, 3), "lines": files}
        with open(os.path.join(_FOLDER, "tests.jsonl"), "a") as stream:
            stream.write(json.dumps(content, separators=(",", ":")) + "\n")


RECORDER = Recorder()
if _FOLDER:
    RECORDER.start()
