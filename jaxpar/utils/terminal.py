"""Text for a terminal: lines end between words, and what belongs to a line is indented below it."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

_LABEL = re.compile(r"(?:\S+ )*\S+  +(?=\S)")
"""What stands before two spaces, such as ``memory  `` in the summary of a run."""
_WIDEST_LABEL = 20
_NARROWEST = 20
"""In a narrower terminal lines are not cut."""


def terminal_width(file: TextIO | None = None) -> int | None:
    """Returns the number of columns of a terminal; ``None`` if ``file`` (default: standard output) is not one.

    >>> import io
    >>> terminal_width(io.StringIO()) is None
    True
    """
    stream = sys.stdout if file is None else file
    return shutil.get_terminal_size().columns if stream.isatty() else None


def say(*texts: object, file: TextIO | None = None) -> None:
    """Prints texts, in a terminal with lines that end between words.

    Args:
      texts: one or more lines each; they are printed below each other.
      file: where to; the default is standard output.
    """
    width = terminal_width(file)
    for text in texts:
        print(fit(str(text), width), file=file, flush=True)


def shorten(names: Sequence[str], width: int) -> list[str]:
    """Returns names of at most ``width`` characters, cut in the middle; wider where two different ones would be equal.

    >>> shorten(["params/blocks/attention/query", "params/blocks/attention/key", "step"], 16)
    ['param…tion/query', 'param…ention/key', 'step']
    """
    while True:
        head = (width - 1) // 3
        cut = [name if len(name) <= width else f"{name[:head]}…{name[head + 1 - width :]}" for name in names]
        if len(set(cut)) == len(set(names)):
            return cut
        width += 1


def fit(text: str, width: int | None, indent: int = 2) -> str:
    """Returns a text whose lines have at most ``width`` columns, except where a single word is longer.

    Args:
      text: one or more lines.
      width: the number of columns; ``None`` returns the text as it is.
      indent: by how much the further lines of a line without a label are indented.

    >>> print(fit("memory  7 MiB of parameters, 1 MiB on each device", 30))
    memory  7 MiB of parameters, 1
            MiB on each device
    """
    if width is None or width < _NARROWEST:
        return text
    return "\n".join(part for line in text.split("\n") for part in fit_line(line, width, indent))


def fit_line(line: str, width: int, indent: int = 2) -> list[str]:
    """Returns one line as lines of at most ``width`` columns, of which all but the first are indented.

    They begin below what follows a label, and else ``indent`` columns further to the right than the line itself.
    """
    if len(line) <= width:
        return [line]
    start = len(line) - len(line.lstrip())
    label = _LABEL.match(line.lstrip())
    hang = len(label[0]) if label and len(label[0]) <= _WIDEST_LABEL else indent
    return textwrap.wrap(
        line, width, subsequent_indent=" " * (start + hang), break_long_words=False, break_on_hyphens=False
    )  # fmt: skip


def fit_command(command: str, width: int | None, indent: str = "") -> str:
    r"""Returns a shell command for a terminal, which can be pasted: its lines end before an option, with ``\``.

    Args:
      command: without newlines.
      width: the number of columns; ``None`` does not cut the command.
      indent: what each line begins with.

    >>> print(fit_command("jaxpar train my.yaml --set a=1 --set b=2", 32))
    jaxpar train my.yaml --set a=1 \
        --set b=2
    """
    if width is None or len(indent) + len(command) <= width:
        return indent + command
    lines = [""]
    for part in _options(command):
        first = not lines[-1]
        if not first and len(indent) + len(lines[-1]) + len(part) + len("  \\") > width:
            lines.append("    ")
            first = True
        lines[-1] += part if first else f" {part}"
    return " \\\n".join(indent + line for line in lines)


def _options(command: str) -> Iterable[str]:
    """Yields a command's beginning, then each option with its value; a quoted text is never cut."""
    quoted = r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^\s'\"\\]"
    words = re.findall(rf"(?:{quoted})+", command)
    part: list[str] = []
    for word in words:
        if part and (word.startswith("--") or word == "#"):
            yield " ".join(part)
            part = []
        part.append(word)
    yield " ".join(part)
