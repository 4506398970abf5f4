"""Rows of conversations: what changes the tokens is used or an error, and what does not is ignored."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from jaxpar.data import ChatTemplate, conversation_prompt, load_conversations, load_tokenizer
from jaxpar.data.bad_rows import BadRow
from jaxpar.data.conversation_rows import messages_of, template_values, unfit
from jaxpar.errors import DataError

TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "größer"}}]
CHAT = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "There."}]
DAY = datetime(2024, 7, 26)
"""What ``load_conversations`` sets where a template has no time. One that has it keeps one process for all loads."""
TEMPLATE = ChatTemplate(
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% if day is defined %}{{ day }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}|"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
    "tools.jinja",
    now=DAY,
)
BLIND = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", "blind.jinja", now=DAY)


def text_of(row: dict[str, Any], folder: Path) -> str:
    """The text of a row, from its tokens, which are bytes."""
    file = folder / "chat.jsonl"
    file.write_text(json.dumps(row) + "\n" + (json.dumps({"messages": CHAT}) + "\n") * 9)
    data = load_conversations(file, load_tokenizer(), TEMPLATE, seq=400, heldout_fraction=0.3, seed=2)
    return bytes(data.train[0]["tokens"].tolist()).rstrip(b"\0").decode()


PLAIN = "user: Where?|assistant: There.|"


@pytest.mark.parametrize(
    ("keys", "begin"),
    [
        ({"tools": TOOLS}, json.dumps(TOOLS, ensure_ascii=False) + "\n"),
        ({"tools": json.dumps(TOOLS)}, json.dumps(TOOLS, ensure_ascii=False) + "\n"),
        ({"day": "Monday"}, "Monday\n"),
        ({"chat_template_kwargs": {"day": "Monday"}, "day": "Tuesday"}, "Monday\n"),
        ({"tools": [], "id": 3, "source": {"name": "a"}, "prompt": "Where?", "score": None}, ""),
        ({"tools": None, "day": None, "chat_template_kwargs": None}, ""),
        ({"eos_token": "x", "add_generation_prompt": True}, ""),
    ],
)
def test_the_template_gets_the_keys_that_it_reads(keys: dict[str, Any], begin: str, tmp_path: Path) -> None:
    assert text_of({"messages": CHAT, **keys}, tmp_path) == begin + PLAIN
    asked = conversation_prompt(CHAT[:1], load_tokenizer(), TEMPLATE, row=keys)
    assert asked.text == f"{begin}user: Where?|assistant: "


def test_an_answer_may_be_calls_of_tools(tmp_path: Path) -> None:
    calls = [{"function": {"name": "look_up", "arguments": {}}}]
    row = {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": calls}], "tools": TOOLS}
    assert text_of(row, tmp_path).endswith(f"assistant: None{json.dumps(calls)}|")
    for role, content, some in (("user", None, calls), ("assistant", None, []), ("assistant", 3, calls)):
        bad = unfit([{"role": role, "content": content, "tool_calls": some}])
        assert bad is not None and bad.reason.startswith("message 0 must have role and content as text, got {")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"tools": TOOLS}, "it has tools, which blind.jinja does not read"),
        ({"documents": ["a"]}, "it has documents, which blind.jinja does not read"),
        ({"chat_template_kwargs": {"dya": 1}}, "it has dya, which blind.jinja does not read"),
        ({"chat_template_kwargs": {"messages": []}}, "it has messages, which blind.jinja does not read"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object, got [1]"),
    ],
)
def test_values_that_would_be_dropped_are_bad_rows(row: dict[str, Any], reason: str) -> None:
    found = template_values(row, BLIND)
    assert isinstance(found, BadRow) and found.reason == reason


@pytest.mark.parametrize("tools", ["[", "3", {"name": "a"}, "null"])
def test_tools_are_a_list(tools: Any) -> None:
    found = template_values({"tools": tools}, TEMPLATE)
    assert isinstance(found, BadRow) and found.reason.startswith("tools must be a list, or one as JSON, got ")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([CHAT[0], {**CHAT[1], "weight": 0.5}], "message 1 must have a weight of 0 or 1, got 0.5"),
        ([CHAT[0], {**CHAT[1], "weight": True}], "message 1 must have a weight of 0 or 1, got True"),
        (
            [{**CHAT[0], "weight": 1}, CHAT[1]],
            "message 0 has weight: 1, but only messages of 'assistant' are trained, not of 'user'",
        ),
        ([{**CHAT[0], "weight": 0}, {**CHAT[1], "weight": 0}], "every answer has weight: 0"),
    ],
)
def test_weights_that_cannot_be(messages: list[dict[str, Any]], reason: str) -> None:
    found = messages_of({"messages": messages})
    assert isinstance(found, BadRow) and found.reason == reason


@given(
    place=st.sampled_from(["role", "content", "name", "key", "tool", "value"]), bad=st.sampled_from(["\ud800", "\0"])
)
@examples(12)
def test_no_text_of_a_row_is_half_a_character_or_a_special_token(
    place: str, bad: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Byte 0 ends a document of bytes. Any place would reach the tokens: templates write what they like."""
    message: dict[str, Any] = dict(CHAT[0])
    row: dict[str, Any] = {"messages": [message, CHAT[1]]}
    if place in ("role", "content", "name"):
        message[place] = f"a{bad}"
    elif place == "key":
        message[f"a{bad}"] = "x"
    else:
        row |= {"tools": [{"name": bad}]} if place == "tool" else {"day": bad}
    file = tmp_path_factory.mktemp("rows") / "chat.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in [row, *[{"messages": CHAT}] * 9]))
    how: dict[str, Any] = {"seq": 90, "heldout_fraction": 0.3, "seed": 2}
    load = lambda bad_rows: load_conversations(file, load_tokenizer(), TEMPLATE, bad_rows=bad_rows, **how)
    assert load("skip").bad.startswith(f"1 bad row skipped: {file} row 1: ")
    with raises(DataError, "row 1", "which"):
        load("error")


def test_the_day_of_training_is_fixed(tmp_path: Path) -> None:
    """All processes and later parts of a run must have the same tokens."""
    dated = ChatTemplate("{{ strftime_now('%d %b %Y') }} " + TEMPLATE.source)
    file = tmp_path / "chat.jsonl"
    file.write_text((json.dumps({"messages": CHAT}) + "\n") * 9)
    example = load_conversations(file, load_tokenizer(), dated, seq=90, heldout_fraction=0.3, seed=2).train[0]
    assert bytes(example["tokens"].tolist()).startswith(b"26 Jul 2024 user")
