"""The console of a run: in a terminal its lines end between words, and elsewhere they are not cut."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from jaxpar.utils.terminal import fit_line


class RunConsole(Console):
    """A console without highlighting that cuts the lines of a text between words, where a terminal would not.

    >>> import io
    >>> out = io.StringIO()
    >>> RunConsole(file=out, force_terminal=True, no_color=True, width=24).print("data    tokens to train on")
    >>> print(out.getvalue(), end="")
    data    tokens to train
            on
    """

    def __init__(self, **options: Any):
        super().__init__(highlight=False, soft_wrap=True, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints as rich does."""
        if self.is_terminal and len(objects) == 1 and isinstance(objects[0], str) and not options:
            objects = (fit_text(self.render_str(objects[0], highlight=False), self.width),)
        super().print(*objects, **options)


def fit_text(text: Text, width: int) -> Text:
    """Returns a text with styles whose lines have at most ``width`` columns (:func:`jaxpar.utils.terminal.fit`)."""
    lines = []
    for line in text.split("\n", allow_blank=True):
        begin = 0
        for part in fit_line(line.plain, width):
            words = part.strip()
            begin = line.plain.index(words, begin)
            lines.append(Text(part[: len(part) - len(part.lstrip())]) + line[begin : begin + len(words)])
            begin += len(words)
    return Text("\n").join(lines)
