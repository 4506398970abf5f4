"""Chat templates: the text of a conversation as a model's template renders it, and where its answers are.

Templates are programs of other people, so they run in jinja2's sandbox, which cannot change objects or reach Python,
and in a process of their own, whose time and memory are limited (:mod:`jaxpar.data.template_process`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.data.template_process import RenderedText, TemplateProcess
from jaxpar.errors import DataError
from jaxpar.utils.checks import shown
from jaxpar.utils.durable import read_input
from jaxpar.utils.extras import import_extra

type Message = Mapping[str, Any]
"""A message has ``role`` (``system``, ``user``, ``assistant``) and ``content``; an answer may have a ``weight``."""
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
      now: the time that ``strftime_now`` tells; by default the current one.

    >>> chat = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    ...                     "{% if add_generation_prompt %}<assistant>{% endif %}")
    >>> text, answers = chat.render([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}])
    >>> text, [text[start:end] for start, end in answers]
    ('<user>2 + 2?</s><assistant>4</s>', ['4</s>'])
    """

    source: str
    name: str = "the chat template"
    tokens: tuple[tuple[str, str], ...] = ()
    now: datetime | None = None

    def render(self, messages: Sequence[Message], values: Mapping[str, Any] | None = None) -> RenderedConversation:
        """Returns the text of a conversation, and where its answers are.

        An answer is what the template adds to the prompt for it: it is rendered with the messages before it. A template
        with ``{% generation %}`` marks its answers itself. An answer whose message has ``weight: 0`` is left out.

        Args:
          messages: of the conversation.
          values: further values for the template, such as ``tools``.

        Raises:
          DataError: the template refuses the messages, fails, or needs more than 10 seconds or 2 GiB; or what it writes
            for an answer depends on later messages, so that its place is not known.
          MissingExtraError: the package ``jinja2`` is not installed.
        """
        numbers = [i for i, message in enumerate(messages) if message.get("role") == ANSWER]
        trained = [i for i in numbers if message_weight(messages[i])]
        if self._process.marks:
            (rendered,) = self._rendered(messages, values, [_Beginning(len(messages))])
            return RenderedConversation(rendered.text, self._marked(rendered, numbers, trained))
        parts = [_Beginning(i, prompt=True) for i in trained] + [_Beginning(i + 1) for i in trained]
        (text, _), *others = self._rendered(messages, values, [_Beginning(len(messages)), *parts])
        answers = list[tuple[int, int]]()
        for i, (prompt, _), (upto, _) in zip(trained, others, others[len(trained) :], strict=False):
            if not (upto.startswith(prompt) and text.startswith(upto.rstrip())):
                raise DataError(
                    f"{self.name}: what it writes for the answer in message {i} depends on later messages, or does not "
                    "begin with its prompt for an answer, so the answer's tokens are not known. Remedy: a template "
                    "that only adds to what it wrote before, or marks answers with {% generation %}; or rows with one "
                    "answer."
                )
            answers.append((len(prompt), len(upto.rstrip())))
        return RenderedConversation(text, tuple(answers))

    def prompt(self, messages: Sequence[Message], values: Mapping[str, Any] | None = None) -> tuple[str, str]:
        """Returns the text that asks for the next answer of a conversation, and what ends this answer.

        Args:
          messages, values: as for :meth:`render`.

        Raises:
          DataError: the template refuses the messages or fails; or what it writes for an answer does not begin with
            its prompt.
          MissingExtraError: the package ``jinja2`` is not installed.

        >>> chat = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}<end>\\n{% endfor %}"
        ...                     "{% if add_generation_prompt %}assistant: {% endif %}")
        >>> chat.prompt([{"role": "user", "content": "2 + 2?"}])
        ('user: 2 + 2?<end>\\nassistant: ', '<end>')
        """
        answer = {"role": ANSWER, "content": _SAMPLE}
        parts = [_Beginning(len(messages), prompt=True), _Beginning(len(messages), more=(answer,))]
        (prompt, _), (answered, _) = self._rendered(messages, values, parts)
        if not answered.startswith(prompt) or _SAMPLE not in answered:
            raise DataError(
                f"{self.name}: what it writes for an answer does not begin with its prompt for one, which ends in "
                f"{prompt[-20:]!r}. Remedy: a template that writes the beginning of an answer if add_generation_prompt."
            )
        return prompt, answered.rpartition(_SAMPLE)[2].rstrip()

    @property
    def reads(self) -> frozenset[str]:
        """The names of the values that the template reads."""
        return self._process.reads

    def _marked(
        self, rendered: RenderedText, numbers: Sequence[int], trained: Sequence[int]
    ) -> tuple[tuple[int, int], ...]:
        """The answers that the template marks, without those of weight 0."""
        if len(trained) == len(numbers):
            return tuple(rendered.marked)
        if len(rendered.marked) != len(numbers):
            raise DataError(
                f"{self.name}: it marks {len(rendered.marked)} answers of {len(numbers)}, so those with weight: 0 are "
                "not known. Remedy: a template that marks every answer, or rows without weight."
            )
        return tuple(span for i, span in zip(numbers, rendered.marked, strict=True) if i in set(trained))

    def _rendered(
        self, messages: Sequence[Message], values: Mapping[str, Any] | None, parts: Sequence[_Beginning]
    ) -> list[RenderedText]:
        # As transformers, which passes None if there are none. Special tokens are those of the model.
        shared = {"tools": None, "documents": None, **(values or {}), **dict(self.tokens)}
        return self._process.render(messages, shared, [part.values() for part in parts])

    @property
    def _process(self) -> TemplateProcess:
        """The process that renders; a new one if the last one ended."""
        process: TemplateProcess | None = vars(self).get("_started")
        if process is None or not process.alive:
            import_extra("jinja2", "text", "a chat template")
            process = vars(self)["_started"] = TemplateProcess(self.source, self.name, self.now)
        return process


class _Beginning(NamedTuple):
    """A beginning of a conversation: how many messages, which follow them, and whether an answer is asked for."""

    length: int
    more: tuple[Message, ...] = ()
    prompt: bool = False

    def values(self) -> dict[str, Any]:
        return {"count": self.length, "more": list(self.more), "add_generation_prompt": self.prompt}


def message_weight(message: Message) -> Any:
    """Returns the weight of a message in the loss, by default 1."""
    weight = message.get("weight")
    return 1 if weight is None else weight


def load_chat_template(file: str | os.PathLike[str]) -> ChatTemplate:
    """Returns the template of a file, or of a tokenizer's folder.

    Args:
      file: a jinja2 template; or a ``tokenizer_config.json`` with a ``chat_template``; or a ``tokenizer.json`` or its
        folder, beside which one of them is.

    Raises:
      DataError: there is no template, or the file is malformed.
    """
    path = Path(file).expanduser()
    folder = path if os.path.isdir(path) else path.parent
    config = _config(folder / _CONFIG)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    tokens = tuple((name, text) for name in names if (text := _text(config.get(name))) is not None)
    if os.path.isdir(path) or path.name in ("tokenizer.json", _CONFIG):
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
        found = json.loads(read_input(file, 1 << 30))
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} must be JSON: {error!s:.200}.") from error
    return found if isinstance(found, dict) else {}


def _read(file: Path) -> str:
    try:
        if os.path.isfile(file) and file.stat().st_size > _MOST_BYTES:
            raise DataError(f"{file} must have at most {_MOST_BYTES:,} bytes, got {file.stat().st_size:,}.")
        return read_input(file, _MOST_BYTES).decode()
    except OSError as error:
        raise DataError(f"chat template {str(file)!r} cannot be read: {error.strerror}. Remedy: its path.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"chat template {str(file)!r} is not valid UTF-8 at byte {error.start}.") from error
