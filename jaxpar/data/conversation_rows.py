"""Rows of conversations: their messages, the values for the template, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpar.data.bad_rows import BadRow
from jaxpar.data.chat_template import ANSWER, ChatTemplate, message_weight
from jaxpar.data.tokenizer import Tokenizer
from jaxpar.utils.checks import shown

_VALUES, _LISTS = "chat_template_kwargs", ("tools", "functions", "documents")
_NOT_VALUES = ("messages", "prompt", "completion", "add_generation_prompt", _VALUES)


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | BadRow:
    """Returns the messages of a row, or why it has none to train on."""
    if "messages" not in row and {"prompt", "completion"} <= row.keys():
        pairs = (("user", row["prompt"]), (ANSWER, row["completion"]))
        row = {"messages": [{"role": role, "content": content} for role, content in pairs]}
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return BadRow(f"it has neither messages nor prompt and completion, but {shown(list(row))[1:-1] or 'nothing'}")
    if (bad := unfit(messages)) is not None:
        return bad
    answers = [m for m in messages if m["role"] == ANSWER and (m.get("content") or m.get("tool_calls"))]
    if not answers:
        return BadRow(f"no message has the role {ANSWER!r}")
    return messages if any(map(message_weight, answers)) else BadRow("every answer has weight: 0")


def unfit(messages: Any) -> BadRow | None:
    """Returns why these are no messages."""
    if not isinstance(messages, list | tuple) or not messages:
        return BadRow(f"messages must be a list with at least one, got {shown(messages)}")
    for number, message in enumerate(messages):
        if not _is_message(message):
            return BadRow(f"message {number} must have role and content as text, got {shown(message)}")
        for text in _texts(message):
            if (bad := _half(text, f"message {number}")) is not None:
                return bad
        weight = message.get("weight")
        if weight is None:
            continue
        if isinstance(weight, bool) or weight not in (0, 1):
            return BadRow(f"message {number} must have a weight of 0 or 1, got {shown(weight)}")
        if weight and message["role"] != ANSWER:
            role = shown(message["role"])
            return BadRow(f"message {number} has weight: 1, but only messages of {ANSWER!r} are trained, not of {role}")
    return None


def template_values(row: Mapping[str, Any], template: ChatTemplate) -> dict[str, Any] | BadRow:
    """Returns what a row gives the template beside messages: the keys that it reads, and ``chat_template_kwargs``.

    Other keys of a row change nothing: names and sources of rows are common. Tools that the template does not read, and
    values that are only for it, are the reason why a row is bad.

    >>> chat = ChatTemplate("{{ tools }}{{ messages }}")
    >>> template_values({"messages": [], "id": 3, "tools": "[]"}, chat)
    {'tools': []}
    >>> template_values({"documents": ["a"]}, chat).reason
    'it has documents, which the chat template does not read'
    """
    special = row.get(_VALUES) or {}
    if not isinstance(special, dict):
        return BadRow(f"{_VALUES} must be an object, got {shown(special)}")
    values = {key: value for key, value in row.items() if key in template.reads and key not in _NOT_VALUES}
    values = {key: value for key, value in (values | special).items() if value is not None}
    for key in (*special, *(key for key in _LISTS if row.get(key) not in (None, [], "", "[]"))):
        if key not in template.reads or key in _NOT_VALUES:
            remedy = "a template that reads it, or rows without it"
            return BadRow(f"it has {shown(key)[1:-1]}, which {template.name} does not read", remedy)
    for key in _LISTS:
        if isinstance(values.get(key), str):  # as some data sets have it, because their columns have one type
            try:
                values[key] = json.loads(values[key])
            except (ValueError, RecursionError):
                return BadRow(f"{key} must be a list, or one as JSON, got {shown(values[key])}")
        if key in values and not isinstance(values[key], list):
            return BadRow(f"{key} must be a list, or one as JSON, got {shown(values[key])}")
    return next(filter(None, (_half(text, "it") for text in _texts(values))), values)


def special_token(
    messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any], tokenizer: Tokenizer
) -> BadRow | None:
    """Returns which special token a message contains, with which it could end its own turn, or another value."""
    for where, value in (("a message", messages), ("a value for the template", values)):
        for text in _texts(value):
            if (name := next((token for token in tokenizer.special_tokens if token in text), None)) is not None:
                return BadRow(f"{where} contains the special token {name!r}", f"remove it from the {where[2:]}")
    return None


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    calls = message["role"] == ANSWER and message.get("tool_calls") and message.get("content") is None
    return bool(calls) or isinstance(message.get("content"), str)


def _half(text: str, where: str) -> BadRow | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a character
        wrong = text[error.start]
        return BadRow(f"{where} has {wrong!r} at character {error.start}, which is not valid text")
    return None


def _texts(value: Any) -> Iterator[str]:
    """Every text in JSON values, those of keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
