"""Chat templates: the text of a conversation as a model's template renders it, and where its answers are.

Templates are programs of other people, so they run in jinja2's sandbox, which cannot change objects or reach Python.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.errors import DataError
from jaxpar.utils.checks import shown
from jaxpar.utils.extras import import_extra

type Message = Mapping[str, Any]
"""A message has ``role`` (``system``, ``user``, ``assistant``) and ``content``."""
ANSWER = "assistant"
_TEMPLATE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
_MOST_BYTES = 1 << 20
_SAMPLE = "an answer of jaxpar"
"""An answer, to see what a template writes after one."""


class RenderedConversation(NamedTuple):
    """The text of a conversation.

    Attributes:
      text: the text.
      answers: the start and the end of each answer in the text, with the token that ends its turn.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template; :func:`load_chat_template` reads it.

    Attributes:
      source: the template, in jinja2.
      name: its file, for errors.
      tokens: names of special tokens that it may write, such as ``bos_token``.

    >>> chat = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    ...                     "{% if add_generation_prompt %}<assistant>{% endif %}")
    >>> text, answers = chat.render([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}])
    >>> text, [text[start:end] for start, end in answers]
    ('<user>2 + 2?</s><assistant>4</s>', ['4</s>'])
    """

    source: str
    name: str = "the chat template"
    tokens: tuple[tuple[str, str], ...] = ()

    def render(self, messages: Sequence[Message]) -> RenderedConversation:
        """Returns the text of a conversation, and where its answers are.

        An answer is what the template adds to the prompt for it: it is rendered with the messages before it.

        Raises:
          DataError: the template refuses the messages or fails; or what it writes for an answer depends on later
            messages, so that its place is not known.
          MissingExtraError: the package ``jinja2`` is not installed.
        """
        text, answers = self._rendered(messages), list[tuple[int, int]]()
        for i, message in enumerate(messages):
            if message.get("role") != ANSWER:
                continue
            prompt, upto = self._rendered(messages[:i], prompt=True), self._rendered(messages[: i + 1])
            if not (upto.startswith(prompt) and text.startswith(upto.rstrip())):
                raise DataError(
                    f"{self.name}: what it writes for the answer in message {i} depends on later messages, or does not "
                    "begin with its prompt for an answer, so the answer's tokens are not known. Remedy: a template "
                    "that only adds to what it wrote before; or rows with one answer."
                )
            answers.append((len(prompt), len(upto.rstrip())))
        return RenderedConversation(text, tuple(answers))

    def prompt(self, messages: Sequence[Message]) -> tuple[str, str]:
        """Returns the text that asks for the next answer of a conversation, and what ends this answer.

        Raises:
          DataError: the template refuses the messages or fails; or what it writes for an answer does not begin with
            its prompt.
          MissingExtraError: the package ``jinja2`` is not installed.

        >>> chat = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}<end>\\n{% endfor %}"
        ...                     "{% if add_generation_prompt %}assistant: {% endif %}")
        >>> chat.prompt([{"role": "user", "content": "2 + 2?"}])
        ('user: 2 + 2?<end>\\nassistant: ', '<end>')
        """
        prompt = self._rendered(messages, prompt=True)
        answered = self._rendered([*messages, {"role": ANSWER, "content": _SAMPLE}])
        if not answered.startswith(prompt) or _SAMPLE not in answered:
            raise DataError(
                f"{self.name}: what it writes for an answer does not begin with its prompt for one, which ends in "
                f"{prompt[-20:]!r}. Remedy: a template that writes the beginning of an answer if add_generation_prompt."
            )
        return prompt, answered.rpartition(_SAMPLE)[2].rstrip()

    def _rendered(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        values = {**dict(self.tokens), "messages": list(messages), "add_generation_prompt": prompt}
        compiled = self._compiled
        try:
            return str(compiled.render(**values))
        except Exception as error:  # a template can raise anything
            text = str(error).rstrip(".")
            raise DataError(f"{self.name}: {type(error).__name__}: {text:.200}.") from error

    @cached_property
    def _compiled(self) -> Any:
        jinja2 = import_extra("jinja2", "text", "a chat template")

        class AnswerTag(importlib.import_module("jinja2.ext").Extension):  # type: ignore[misc]
            """Allows ``{% generation %}``, with which some templates mark answers for transformers."""

            tags = {"generation"}  # noqa: RUF012 (the name that jinja2 reads)

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = importlib.import_module("jinja2.sandbox").ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[AnswerTag, "jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = raise_exception
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise DataError(f"{self.name} is not a jinja2 template: {error!s:.200}.") from error


def load_chat_template(file: str | os.PathLike[str]) -> ChatTemplate:
    """Returns the template of a file, or of a tokenizer's folder.

    Args:
      file: a jinja2 template; or a ``tokenizer_config.json`` with a ``chat_template``; or a ``tokenizer.json`` or its
        folder, beside which one of them is.

    Raises:
      DataError: there is no template, or the file is malformed.
    """
    path = Path(file).expanduser()
    folder = path if path.is_dir() else path.parent
    config = _config(folder / _CONFIG)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    tokens = tuple((name, text) for name in names if (text := _text(config.get(name))) is not None)
    if path.is_dir() or path.name in ("tokenizer.json", _CONFIG):
        given = folder / _TEMPLATE
        source = _read(given) if given.is_file() else _chosen(config.get("chat_template"), folder / _CONFIG)
        if source is None:
            raise DataError(
                f"{folder} has no chat template: neither {_TEMPLATE}, nor a chat_template in {_CONFIG}. Remedy: name "
                "the file of a template."
            )
        return ChatTemplate(source, str(given if given.is_file() else folder / _CONFIG), tokens)
    return ChatTemplate(_read(path), str(path), tokens)


def _chosen(template: Any, file: Path) -> str | None:
    """The template, or of several the one called ``default``."""
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise DataError(f"{file}: chat_template must be a text, got {shown(template)}.")
    return template


def _text(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _config(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} must be JSON: {error!s:.200}.") from error
    return found if isinstance(found, dict) else {}


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise DataError(f"{file} must have at most {_MOST_BYTES:,} bytes, got {file.stat().st_size:,}.")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"chat template {str(file)!r} cannot be read: {error.strerror}. Remedy: its path.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"chat template {str(file)!r} is not valid UTF-8 at byte {error.start}.") from error
