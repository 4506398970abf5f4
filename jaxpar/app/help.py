"""``help_in_terminal``: help texts whose lines end between words."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

from jaxpar.utils.terminal import fit, terminal_width

_STYLE = re.compile(r"\x1b\[[\d;]*m")
_COMMANDS = re.compile(r"^(.*usage:.*)\{[\w,-]+\}")
_EMPTY = re.compile(r"│ *│")


class _Help(io.StringIO):
    """Holds what is written, and says that it is the terminal that it is meant for."""

    def __init__(self, meant_for: TextIO):
        super().__init__()
        self._meant_for = meant_for

    @property
    def encoding(self) -> str:  # type: ignore[override]  # tyro draws boxes where the encoding has them
        return getattr(self._meant_for, "encoding", None) or ""

    def isatty(self) -> bool:
        return self._meant_for.isatty()


@contextmanager
def help_in_terminal() -> Iterator[None]:
    """Catches what is printed, such as the help of tyro, and prints it as :func:`shown`."""
    screen = sys.stdout
    held = _Help(screen)
    try:
        with redirect_stdout(held):
            yield
    finally:
        screen.write(shown(held.getvalue(), terminal_width(screen)))


def shown(text: str, width: int | None) -> str:
    """Returns a help text for a terminal of ``width`` columns: tyro cuts its usage and descriptions within words.

    >>> print(shown("usage: jaxpar [-h] {train,explain,check,plan}", None))
    usage: jaxpar [-h] COMMAND
    """
    lines = [(line, _STYLE.sub("", line)) for line in _COMMANDS.sub(r"\1COMMAND", text).split("\n")]
    ends = [bare.startswith("╰") for _, bare in lines[1:]] + [False]  # the next line ends a box
    kept = [pair for pair, end in zip(lines, ends, strict=True) if not (end and _EMPTY.fullmatch(pair[1]))]
    return "\n".join(line if width is None or len(bare) <= width else fit(bare, width, 0) for line, bare in kept)
