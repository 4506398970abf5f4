"""``TemplateProcess``: a chat template in a process of its own, which ends if the template needs too much."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.data import template_server
from jaxpar.errors import DataError

_MOST_SECONDS, _MOST_MEMORY = 10.0, 1 << 31
"""Of one text: processor time, and bytes of address space."""
_REMEDY = "Remedy: another template, or shorter messages."


class RenderedText(NamedTuple):
    """A text, and the ranges of it that the template marks as answers with ``{% generation %}``."""

    text: str
    marked: list[tuple[int, int]]


class TemplateProcess:
    """A template that renders texts in a process whose time and memory are limited.

    Args:
      source: the template, in jinja2.
      name: its file, for errors.
      now: the time that ``strftime_now`` tells; by default the current one.

    Attributes:
      reads: the names of the values that the template reads.
      marks: whether it marks answers.

    Raises:
      DataError: it is not a template.
    """

    def __init__(self, source: str, name: str, now: datetime | None):
        self._name, self._lock = name, threading.Lock()
        # -P: the folder of the program has modules with names of Python's own, such as tokenize.
        program = [sys.executable, "-P", str(Path(template_server.__file__))]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(program, text=True, encoding="utf-8", **pipes)
        self._end = weakref.finalize(self, _end, self._process)
        limits = {"seconds": _MOST_SECONDS, "memory": _MOST_MEMORY}
        self._send({"source": source, "now": None if now is None else now.isoformat(), **limits})
        reply = self._receive()
        if "syntax" in reply:
            raise DataError(f"{name} is not a jinja2 template: {reply['syntax']}.")
        self._check(reply)
        self.reads, self.marks = frozenset(reply["reads"]), bool(reply["marks"])

    @property
    def alive(self) -> bool:
        """Whether the process can render: it ends with the first text that needs too much."""
        return self._end.alive

    def render(
        self, messages: Sequence[Any], values: Mapping[str, Any], texts: Sequence[Mapping[str, Any]]
    ) -> list[RenderedText]:
        """Returns texts of a conversation.

        Args:
          messages: of the conversation.
          values: other values for all texts.
          texts: for each text, how many messages it has (``count``), messages that follow (``more``), and values.

        Raises:
          DataError: the template raises an error, or needs too much time or memory.
        """
        with self._lock:
            self._send({"messages": list(messages), "values": dict(values), "texts": [dict(text) for text in texts]})
            replies = [self._receive() for _ in texts]
        for reply in replies:
            self._check(reply)
        return [RenderedText(reply["text"], [(a, b) for a, b in reply["spans"]]) for reply in replies]

    def _check(self, reply: Mapping[str, Any]) -> None:
        if "error" in reply:
            raise DataError(f"{self._name}: {reply['error']}.")
        for kind, unit in (("memory", "bytes of memory for"), ("characters", "characters in")):
            if kind in reply:
                raise DataError(f"{self._name}: it needs more than {reply[kind]:,} {unit} one text. {_REMEDY}")

    def _send(self, request: dict[str, Any]) -> None:
        try:
            line = json.dumps(request, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{self._name}: messages must be JSON values: {error}.") from error
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended, which reading tells

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        status = self._process.wait()
        self._end()
        if status == -signal.SIGPROF:
            why = f"it needs more than {_MOST_SECONDS:g} seconds for one text"
        else:
            why = f"the process that renders it ended with status {status}, such as for lack of memory"
        raise DataError(f"{self._name}: {why}. {_REMEDY}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"got a {type(value).__name__}")


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except BrokenPipeError:  # what was not sent
            pass
