"""Read the prompts of ``jaxpar generate``, and show the generated text."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from jaxpar.data.tokenizer import TextDecoder, Tokenizer, load_tokenizer
from jaxpar.errors import ConfigError
from jaxpar.utils.durable import read_input

STDIN = "-"
"""File name of prompts that stands for standard input."""
_MOST_BYTES = 1 << 30
# Control characters could move the cursor, or worse. They are shown as Unicode control pictures.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_PICTURES |= dict.fromkeys(range(128, 160), 0xFFFD)


def read_prompts(file: Path, stdin: BinaryIO | None = None, *, chat: bool = False) -> list[Any]:
    """Read prompts from a file, one per line, without empty lines; in a ``.jsonl`` file each line is a JSON string.

    Args:
      file: its path; ``-`` reads ``stdin`` to its end.
      stdin: by default standard input.
      chat: a line of a ``.jsonl`` file may also hold messages, in a list or an object.

    Raises:
      ConfigError: the file does not exist, is empty, is not UTF-8, or a line of a ``.jsonl`` file is not such JSON.
    """
    try:
        data = (stdin or sys.stdin.buffer).read() if str(file) == STDIN else read_input(file, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(
            f"--prompts {file}: {error.strerror}. Remedy: a readable file with one prompt per line, or - for "
            "standard input."
        ) from error
    try:
        # str.splitlines also splits at characters that JSON strings may hold, such as U+2028.
        lines = data.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--prompts {file}: byte {error.start} is not valid UTF-8. Remedy: save the file as UTF-8."
        ) from error
    found = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"--prompts {file}: no prompt found. Remedy: write at least one prompt, one per line.")
    if file.suffix != ".jsonl":
        return [line for _, line in found]
    return [_value(file, *one, (str, list, dict) if chat else (str,)) for one in found]


def as_tokens(number: int, prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Returns a prompt as the tokens that the model takes.

    Raises:
      ConfigError: it is empty, or has a lone surrogate, which a command line in another encoding can produce.
    """
    if not prompt:
        raise ConfigError(f"generate: prompt {number} is empty. Remedy: write at least one byte.")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"generate: prompt {number} has {prompt[error.start]!r} at character {error.start}, which is not valid "
            "text. Remedy: encode the prompt as UTF-8."
        ) from error
    return tokenizer.encode_prompt(prompt)


def _value(file: Path, number: int, line: str, kinds: tuple[type, ...]) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kinds):
        if list in kinds:
            raise ConfigError(
                f'--prompts {file}: line {number} holds no messages. Remedy: write "..." in each line, the text of a '
                'user, or {"messages": [{"role": "user", "content": "..."}]}.'
            )
        raise ConfigError(
            f'--prompts {file}: line {number} is not a JSON string. Remedy: write "..." in each line, or use a file '
            "name that does not end in .jsonl."
        )
    return value


@dataclass
class Answer:
    """The text that is generated for one prompt.

    Attributes:
      prompt, text: the prompt, and the text so far.
      stop: strings that end the text and are not part of it.
      why: why it ended: ``stop``, ``length`` (the maximum number of tokens), or ``interrupted``; empty before.
      count: number of tokens so far.
      decoder: turns tokens into text; by default they are bytes.
    """

    prompt: str
    stop: tuple[str, ...]
    text: str = ""
    why: str = ""
    count: int = 0
    decoder: TextDecoder = field(default_factory=lambda: load_tokenizer().decoder())

    def add(self, token: int) -> str:
        """Add a token and return the newly settled text, which excludes any possible beginning of a stop string."""
        self.count += 1
        before = self.settled()
        self.text += self.decoder.add(token)
        ends = [self.text.find(stop) for stop in self.stop if stop in self.text]
        if ends:
            self.text, self.why = self.text[: min(ends)], "stop"
        return self.text[len(before) :] if ends else self.settled()[len(before) :]

    def end(self, why: str) -> str:
        """End the text and return the rest of it."""
        before = self.settled()
        self.text += self.decoder.end()
        self.why = why
        return self.text[len(before) :]

    def settled(self) -> str:
        """The text without a suffix that may be the beginning of a stop string."""
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
    """Prints answers: one as it is generated, several as live blocks in a terminal, else each when it ends."""

    def __init__(self, out: TextIO, answers: Sequence[Answer], first: int, *, single: bool):
        self.out, self.answers, self.first, self.single = out, answers, first, single
        self.console = Console(file=out, highlight=False, markup=False)
        self.live: Live | None = None

    def __enter__(self) -> Self:
        if self.single:
            self._write(self.answers[0].prompt)
        elif self.console.is_terminal:
            self.live = Live(self._blocks(), console=self.console, auto_refresh=False, vertical_overflow="visible")
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.update(self._blocks())
            self.live.stop()

    def write(self, text: str) -> None:
        """Print text of a single prompt."""
        if self.single:
            self._write(text)

    def ended(self, row: int) -> None:
        if self.single:
            self._write("\n")
        elif self.live is None:
            self._write(f"[{self.first + row}] {self.answers[row].prompt}{self.answers[row].text}\n")

    def refresh(self) -> None:
        """Redraw after a step, when every row has its token."""
        if self.live is not None:
            self.live.update(self._blocks(), refresh=True)

    def _blocks(self) -> Group:
        blocks = []
        for number, answer in enumerate(self.answers, self.first):
            text = answer.text if answer.why else answer.settled()
            title = f"[{number}] ", "bold green" if answer.why else "bold yellow"
            blocks.append(Text.assemble(title, (_shown(answer.prompt), "dim"), _shown(text)))
        return Group(*blocks)

    def _write(self, text: str) -> None:
        self.out.write(_shown(text) if self.console.is_terminal else text)
        self.out.flush()


def _shown(text: str) -> str:
    """Replace control characters, so that the text is safe for a terminal."""
    return text.translate(_PICTURES)
