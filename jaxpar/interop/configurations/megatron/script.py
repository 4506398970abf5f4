"""``read_script``: the arguments that a launch script gives to a Python program."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxpar.errors import ConfigError
from jaxpar.interop.configurations.megatron.shell import ShellToken, ShellVariables, ShellWord, tokens_of

type Conditions = Literal["refuse", "take", "drop"]

_OPENING = ("if", "for", "while", "until", "case", "select", "{")
_CLOSING = ("fi", "done", "esac", "}")
_AGAIN = ("then", "else", "elif", "do", "export", "local", "declare", "readonly", "time", "exec")
"""Words after which a statement begins."""
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class ScriptArguments:
    """The arguments of a program.

    Attributes:
      values: by flag, with dashes: ``True`` without a value, else a value or a list of them.
      conditional: the same for flags that the script gives only under a condition, with their lines.
      launcher: the arguments before the program, such as those of torchrun.
      taken: the arguments under conditions count: ``values`` has them.
    """

    values: dict[str, Any] = field(default_factory=dict)
    conditional: dict[str, tuple[Any, int]] = field(default_factory=dict)
    launcher: dict[str, Any] = field(default_factory=dict)
    taken: bool | None = None

    def decide(self, conditions: Conditions) -> ScriptArguments:
        """Returns the arguments after a decision about those under conditions: ``take`` all or ``drop`` all."""
        if conditions == "drop":
            return replace(self, taken=False)
        values = self.values | {name: value for name, (value, _) in self.conditional.items()}
        return replace(self, values=values, taken=True if conditions == "take" else None)


def read_script(text: str, source: str, variables: Mapping[str, str]) -> ScriptArguments:
    """Returns the arguments in a launch script, or in a text that only has arguments. Nothing is executed.

    Args:
      text: the script.
      source: its name, for errors.
      variables: values of variables that the script does not set, such as ``{"NNODES": "4"}``.

    Raises:
      ConfigError: the text has no arguments, runs several Python programs, or is not well formed.

    >>> read_script("T=8; torchrun --nnodes 2 train.py --bf16 --tp-size $T", "run.sh", {}).values
    {'--bf16': True, '--tp-size': 8}
    """
    try:
        reader = _Reader(ShellVariables(dict(variables)), frozenset(variables))
        commands = reader.commands(list(tokens_of(text)))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    programs = [command for command in map(_unwrapped, commands) if _program(command) is not None]
    if len(programs) > 1:
        lines = ", ".join(str(command[0].line) for command in programs)
        raise ConfigError(
            f"{source}: lines {lines} run a Python program each. Remedy: a file with the arguments of one of them."
        )
    if not programs:
        words = [word for command in commands if command[0].text.startswith("--") for word in command]
        if not words:
            raise ConfigError(f"{source}: no command has arguments such as --num-layers 32. Remedy: a launch script.")
        return _arguments([], words)
    at = _program(programs[0])
    assert at is not None
    return _arguments(programs[0][:at], programs[0][at + 1 :])


class _Reader:
    """Collects the variables and the commands of a script in the order of its text."""

    def __init__(self, variables: ShellVariables, fixed: frozenset[str]):
        self.variables, self.fixed, self.depth = variables, fixed, 0

    def commands(self, tokens: list[ShellToken]) -> list[list[ShellWord]]:
        found, at = [], 0
        while at < len(tokens):
            at, words = self._statement(tokens, at)
            if words:
                found.append(words)
        return found

    def _statement(self, tokens: list[ShellToken], at: int) -> tuple[int, list[ShellWord]]:
        """Reads one statement; returns the position after it, and the words of its command."""
        words: list[ShellWord] = []
        while at < len(tokens):
            token = tokens[at]
            if token.kind == "operator":
                at += 1
                if token.bare in "&|" and at < len(tokens) and tokens[at].bare == token.bare:
                    if words:  # && and || after a test: what follows may not run
                        self.depth += 1
                        at, rest = self._statement(tokens, at + 1)
                        self.depth -= 1
                        return at, rest if rest else words
                elif token.bare in "<>":
                    while at < len(tokens) and tokens[at].kind == "operator" and tokens[at].bare in "<>&":
                        at += 1
                    at += 1  # the file of a redirection such as ``>> log`` or ``>&1``
                elif token.bare in "\n;&|":
                    return at, words
                continue
            word = token.bare
            if not words and word in _OPENING:
                self.depth += 1
                at += 1
            elif not words and word in _CLOSING:
                self.depth = max(self.depth - 1, 0)
                at += 1
            elif not words and word in _AGAIN:
                at += 1
            elif not words and (name := _ASSIGNMENT.match(token.parts[0][1])) and token.parts[0][0] == "":
                at = self._assign(tokens, at, name[1], adds=bool(name[2]))
            else:
                words += self.variables.expand(token)
                at += 1
        return at, words

    def _assign(self, tokens: list[ShellToken], at: int, name: str, *, adds: bool) -> int:
        """Reads an assignment; returns the position after it."""
        token = tokens[at]
        start = re.sub(r"^[A-Za-z_0-9]+\+?=", "", token.parts[0][1], count=1)
        at += 1
        if start == "" and len(token.parts) == 1 and at < len(tokens) and tokens[at].bare == "(":
            return self._assign_list(tokens, at + 1, name, adds=adds)
        value = "".join(
            text if quote == "'" else self.variables.fill(text)
            for quote, text in ((token.parts[0][0], start), *token.parts[1:])
        )
        if name in self.fixed:
            return at
        if self.depth and self.variables.texts.get(name) != value:
            value = f"${name}"  # which branch runs is not known
        self.variables.texts[name] = (self.variables.texts.get(name, "") + value) if adds else value
        self.variables.lists.pop(name, None)
        return at

    def _assign_list(self, tokens: list[ShellToken], at: int, name: str, *, adds: bool) -> int:
        words: list[ShellWord] = []
        while at < len(tokens) and tokens[at].bare != ")":
            if tokens[at].kind == "word":
                words += self.variables.expand(tokens[at])
            at += 1
        words = [replace(word, conditional=word.conditional or self.depth > 0) for word in words]
        kept = self.variables.lists.get(name, []) if adds or self.depth else []
        self.variables.lists[name] = [*kept, *words]
        return at + 1


def _program(command: list[ShellWord]) -> int | None:
    """The position of the Python program in a command that gives arguments to it."""
    at = next((at for at, word in enumerate(command) if re.search(r"\.py$", word.text)), None)
    return at if at is not None and any(word.text.startswith("--") for word in command[at:]) else None


def _unwrapped(command: list[ShellWord]) -> list[ShellWord]:
    """The command inside of one word, as in ``bash -c "torchrun pretrain.py ..."``."""
    for word in command:
        if re.search(r"\.py\s", word.text):
            return [replace(word, text=text) for text in word.text.split()]
    return command


def _arguments(launcher: list[ShellWord], words: list[ShellWord]) -> ScriptArguments:
    values, conditional = _flags(words)
    return ScriptArguments(values, conditional, _flags(launcher)[0])


def _flags(words: list[ShellWord]) -> tuple[dict[str, Any], dict[str, tuple[Any, int]]]:
    """The values of flags, and those under a condition with their lines. Of several equal flags the last counts."""
    groups: list[tuple[ShellWord, list[str]]] = []
    for word in words:
        # An element of a list may hold a flag and its value: "--split 99,1,0".
        for text in word.text.split() if word.text.startswith("--") else [word.text]:
            if text.startswith("--"):
                name, equals, value = text.partition("=")
                groups.append((replace(word, text=name.replace("_", "-")), [value] if equals else []))
            elif groups:
                groups[-1][1].append(text)
    values: dict[str, Any] = {}
    conditional: dict[str, tuple[Any, int]] = {}
    for flag, texts in groups:
        parsed = [_parsed(text) for text in texts]
        found: Any = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
        if flag.conditional:
            conditional[flag.text] = found, flag.line
        else:
            values[flag.text] = found
    return values, conditional


def _parsed(text: str) -> Any:
    """A value as an integer or a number if it is one."""
    for kind, pattern in ((int, r"[+-]?\d{1,18}"), (float, r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")):
        if len(text) < 100 and re.fullmatch(pattern, text):
            return kind(text)
    return text
