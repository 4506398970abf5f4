"""The texts that ``jaxpar generate`` goes on with, and how what comes of them is shown."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from jaxpar.errors import ConfigError

BYTES = 256
"""Tokens of the one tokenizer there is: text is bytes (:mod:`jaxpar.data.sources`)."""
STDIN = "-"
"""The name of a file of prompts that is standard input."""
# What is no text could move the cursor, or worse: shown as the pictures that Unicode has of it.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_PICTURES |= dict.fromkeys(range(128, 160), 0xFFFD)


def read_prompts(file: Path, stdin: BinaryIO | None = None) -> list[str]:
    """Prompts of a file: a line each, empty ones left out; of a file that ends in ``.jsonl`` a JSON string each, which may hold line ends.

    Args:
      file: its path; ``-`` for ``stdin``, to its end.
      stdin: by default this process's own.

    Raises:
      ConfigError: there is no such file, none in it, or it is not what its name says.
    """
    try:
        data = (stdin or sys.stdin.buffer).read() if str(file) == STDIN else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--prompts {file}: {error.strerror}. Remedy: a file of prompts, a line each.") from error
    try:
        # Lines end where a text editor ends them: str.splitlines knows ten more ways, some of which JSON strings may hold.
        lines = data.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {file}: byte {error.start} is no UTF-8. Remedy: save it as UTF-8.") from error
    found = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"--prompts {file}: there is no prompt in it. Remedy: one or more, a line each.")
    return [_string(file, *one) for one in found] if file.suffix == ".jsonl" else [line for _, line in found]


def as_bytes(number: int, prompt: str) -> bytes:
    """A prompt as the model takes it.

    Raises:
      ConfigError: it is empty, or holds what no text does: half of a character, as a command line in another encoding leaves it.
    """
    if not prompt:
        raise ConfigError(
            f"generate: prompt {number} is empty, but a model goes on with something. Remedy: one byte or more."
        )
    try:
        return prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"generate: prompt {number} holds {prompt[error.start]!r} at character {error.start}, which is no text. Remedy: UTF-8."
        ) from error


def write_answers(file: Path, answers: Sequence[Answer]) -> None:
    """A JSON object for each answer, a line each.

    Raises:
      ConfigError: the file cannot be written.
    """
    try:
        file.write_text("".join(f"{answer.to_json()}\n" for answer in answers), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--json {file}: {error.strerror}. Remedy: a file in a folder that can be written."
        ) from error


def _string(file: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, str):
        raise ConfigError(
            f'--prompts {file}: line {number} is no JSON string. Remedy: "..." in each line, or a name that does not end in .jsonl.'
        )
    return value


@dataclass
class Answer:
    """What is made of one prompt, as it comes.

    Attributes:
      prompt, text: the prompt, and what was made of it.
      stop: strings that end it; what ends it is left out.
      why: what ended it: ``stop``, ``length`` where it has all that was asked for, or ``interrupted``; empty before.
    """

    prompt: str
    stop: tuple[str, ...]
    text: str = ""
    why: str = ""
    count: int = 0
    reader: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def add(self, token: int) -> str:
        """What of the text is settled by a token more: less than all where a stop string may have begun."""
        self.count += 1
        before = self.settled()
        self.text += self.reader.decode(bytes([token])) if token < BYTES else "\ufffd"
        ends = [self.text.find(stop) for stop in self.stop if stop in self.text]
        if ends:
            self.text, self.why = self.text[: min(ends)], "stop"
        return self.text[len(before) :] if ends else self.settled()[len(before) :]

    def end(self, why: str) -> str:
        """The rest, which nothing follows."""
        before = self.settled()
        self.text += self.reader.decode(b"", final=True)
        self.why = why
        return self.text[len(before) :]

    def settled(self) -> str:
        """The text without an end that a stop string may begin with."""
        held = (
            size
            for stop in self.stop
            for size in range(min(len(stop), len(self.text)), 0, -1)
            if self.text.endswith(stop[:size])
        )
        return self.text[: len(self.text) - max(held, default=0)]

    def to_json(self) -> str:
        return json.dumps({"prompt": self.prompt, "text": self.text, "tokens": self.count, "ended": self.why})


class Page:
    """Answers as they are written: of one prompt as it comes; of several in a terminal each in a block of its own, elsewhere when it has ended."""

    def __init__(self, out: TextIO, answers: Sequence[Answer], first: int, *, alone: bool):
        self.out, self.answers, self.first, self.alone = out, answers, first, alone
        self.console = Console(file=out, highlight=False, markup=False)
        self.live: Live | None = None

    def __enter__(self) -> Self:
        if self.alone:
            self._write(self.answers[0].prompt)
        elif self.console.is_terminal:
            self.live = Live(self._blocks(), console=self.console, auto_refresh=False, vertical_overflow="visible")
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.update(self._blocks())
            self.live.stop()

    def more(self, text: str) -> None:
        """Of the one prompt."""
        if self.alone:
            self._write(text)

    def ended(self, row: int) -> None:
        if self.alone:
            self._write("\n")
        elif self.live is None:
            self._write(f"[{self.first + row}] {self.answers[row].prompt}{self.answers[row].text}\n")

    def turn(self) -> None:
        """Every row has its token of a step."""
        if self.live is not None:
            self.live.update(self._blocks(), refresh=True)

    def _blocks(self) -> Group:
        rows = enumerate(self.answers, self.first)
        return Group(*(self._block(number, answer) for number, answer in rows))

    def _block(self, number: int, answer: Answer) -> Text:
        text = answer.text if answer.why else answer.settled()
        parts = (f"[{number}] ", "bold green" if answer.why else "bold yellow"), (_shown(answer.prompt), "dim")
        return Text.assemble(*parts, _shown(text))

    def _write(self, text: str) -> None:
        self.out.write(_shown(text) if self.console.is_terminal else text)
        self.out.flush()


def _shown(text: str) -> str:
    """As a terminal may be given it."""
    return text.translate(_PICTURES)
