"""The part of the shell's language that launch scripts use: words, quotes and variables. Nothing is executed."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxpar.errors import ConfigError

_MOST_TEXT, _MOST_WORDS = 1 << 18, 20_000
"""Limits of a script with its variables expanded: characters and words."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class ShellWord:
    """A word of a script.

    Attributes:
      text: the word; in an expanded word ``$NAME`` is a variable without a value.
      line: its line, from 1.
      conditional: it stands where the script may not come.
    """

    text: str
    line: int
    conditional: bool = False


@dataclass(frozen=True)
class ShellToken:
    """A word as it is written, in parts with their quotes, or an operator such as ``;`` or ``(``."""

    kind: Literal["word", "operator"]
    parts: tuple[tuple[str, str], ...]
    line: int

    @property
    def bare(self) -> str:
        """The text of a word that has no quotes; else empty. Or the operator."""
        return self.parts[0][1] if len(self.parts) == 1 and self.parts[0][0] == "" else ""


def tokens_of(text: str) -> Iterator[ShellToken]:
    """Yields the tokens of a script, the last of which ends a line. Comments and line continuations are dropped.

    Raises:
      ConfigError: a quote or a bracket is not closed.

    >>> [token.parts for token in tokens_of('A="b c" # d')]
    [(('', 'A='), ('"', 'b c')), (('', '\\n'),)]
    """
    at, line, parts, start = 0, 1, list[tuple[str, str]](), 1
    while at <= len(text):
        char = text[at] if at < len(text) else "\n"
        if text.startswith("\\\n", at) or (not parts and char == "#"):
            end = at + 2 if char == "\\" else _end(text, at, "\n", len(text))
            line += text.count("\n", at, end)
            at = end
            continue
        if char in " \t\r\n;()&|<>":
            if parts and not (char in "<>" and parts[0] in (("", "1"), ("", "2"))):  # 2>&1
                yield ShellToken("word", tuple(parts), start)
            parts = []
            if char not in " \t\r":
                yield ShellToken("operator", (("", char),), line)
            line += char == "\n" and at < len(text)
            at += 1
            continue
        start = start if parts else line
        quote, inner, end = _part(text, at, line)
        if parts and parts[-1][0] == quote == "":
            inner = parts.pop()[1] + inner
        parts.append((quote, inner))
        line += text.count("\n", at, end)
        at = end


def _part(text: str, at: int, line: int) -> tuple[str, str, int]:
    """The part of a word that begins at a position: its quote, its text, and the position after it."""
    char = text[at]
    if char == "'":
        end = _end(text, at + 1, "'", None, line)
        return "'", text[at + 1 : end], end + 1
    if char == '"':
        end = at + 1
        while end < len(text) and text[end] != '"':
            end = _skip(text, end, line)
        if end >= len(text):
            raise ConfigError(f'line {line}: a quote " is not closed.')
        return '"', text[at + 1 : end].replace("\\\n", ""), end + 1
    if char == "\\":
        return "'", text[at + 1 : at + 2], min(at + 2, len(text))
    end = _skip(text, at, line)
    return "", text[at:end], end


def _skip(text: str, at: int, line: int) -> int:
    """The position after one character, or after a whole ``$(...)``, ``${...}`` or backslash pair."""
    if text[at] == "\\":
        return at + 2
    opening = text[at : at + 2]
    if opening not in ("$(", "${"):
        return at + 1
    close = {"(": ")", "{": "}"}[opening[1]]
    depth, end = 0, at + 1
    while end < len(text):
        depth += (text[end] == opening[1]) - (text[end] == close)
        end += 1
        if not depth:
            return end
    raise ConfigError(f"line {line}: a bracket {opening} is not closed.")


def _end(text: str, at: int, char: str, default: int | None, line: int = 0) -> int:
    found = text.find(char, at)
    if found >= 0:
        return found
    if default is None:
        raise ConfigError(f"line {line}: a quote {char} is not closed.")
    return default


@dataclass
class ShellVariables:
    """Variables of a script: a text, a list of words, or a text with ``$NAME`` for what is not known."""

    texts: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[ShellWord]] = field(default_factory=dict)
    _words: int = 0

    def expand(self, token: ShellToken) -> list[ShellWord]:
        """Returns the words that a word becomes: none, one or several.

        Raises:
          ConfigError: the expanded script is too long.
        """
        found: list[ShellWord] = [ShellWord("", token.line)]
        quoted = False
        for quote, text in token.parts:
            if quote == "'":
                found[-1] = replace(found[-1], text=found[-1].text + text)
                quoted = True
            elif name := _list_name(text):
                words = [word for word in self.lists.get(name, [])]
                if name not in self.lists:
                    words = [ShellWord(self._value(name, None), token.line)]
                found[-1:] = [replace(found[-1], text=found[-1].text)] if found[-1].text else []
                found += words if quote else [part for word in words for part in _split(word)]
                found.append(ShellWord("", token.line))
            else:
                pieces = self.fill(text)
                quoted |= quote == '"'
                split = [pieces] if quote else re.split(r"[ \t\r\n]+", pieces)
                found[-1] = replace(found[-1], text=found[-1].text + split[0])
                found += [ShellWord(piece, token.line) for piece in split[1:]]
        found = [word for word in found if word.text or (quoted and len(found) == 1)]
        self._words += len(found)
        if self._words > _MOST_WORDS:
            raise ConfigError(f"more than {_MOST_WORDS:,} words with variables expanded. Remedy: a list of arguments.")
        return found

    def fill(self, text: str) -> str:
        """Returns a text with the values of its variables; a variable without a value is ``$NAME``."""
        result, at = [], 0
        while at < len(text):
            if text[at] == "\\":
                result.append(text[at + 1 : at + 2])
                at += 2
                continue
            end = _skip(text, at, 0)
            if text[at] == "$":
                end, value = self._dollar(text, at, end)
            elif text[at] == "`":
                end = _end(text, at + 1, "`", len(text)) + 1
                value = "$(command)"
            else:
                value = text[at]
            result.append(value)
            at = end
        filled = "".join(result)
        if len(filled) > _MOST_TEXT:
            raise ConfigError(f"more than {_MOST_TEXT:,} characters with variables expanded. Remedy: a list.")
        return filled

    def _dollar(self, text: str, at: int, end: int) -> tuple[int, str]:
        if text.startswith("$((", at):
            return end, self._arithmetic(text[at + 3 : end - 2])
        if text.startswith("$(", at):
            return end, "$(command)"
        if text.startswith("${", at):
            inner = text[at + 2 : end - 1]
            found = re.match(r"([A-Za-z_][A-Za-z0-9_]*|[0-9@*#])(?:(:?[-=])(.*))?$", inner, re.DOTALL)
            if found is None:
                return end, f"$({inner})"
            default = None if found[2] is None else self.fill(found[3].strip("\"'"))
            return end, self._value(found[1], default)
        name = _NAME.match(text, at + 1)
        if name is not None:
            return name.end(), self._value(name[0], None)
        if at + 1 < len(text) and text[at + 1] in "0123456789@*#?$!":
            return at + 2, self._value(text[at + 1], None)
        return at + 1, "$"

    def _value(self, name: str, default: str | None) -> str:
        value = self.texts.get(name)
        if name in self.lists:
            value = next((word.text for word in self.lists[name]), "")  # $NAME is a list's first word
        if value is None or (value == "" and default is not None):
            return f"${name}" if default is None else default
        return value

    def _arithmetic(self, text: str) -> str:
        filled = _NAME.sub(lambda name: self._value(name[0], None), self.fill(text))
        try:
            return str(_evaluate(ast.parse(filled.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            unknown = re.search(r"\$[A-Za-z_0-9]+", filled)
            return unknown[0] if unknown else "$(arithmetic)"


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
        if abs(value) < 2**63:
            return value
    raise ValueError("no arithmetic of integers")


def _list_name(text: str) -> str:
    """The name in ``${NAME[@]}``."""
    found = re.fullmatch(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\[[@*]\]\}|\$([@*])", text)
    return "" if found is None else found[1] or found[2]


def _split(word: ShellWord) -> list[ShellWord]:
    return [replace(word, text=text) for text in word.text.split()]
