"""Conversations: what a template renders, which tokens are answers, and what rows are refused."""

from __future__ import annotations

import functools
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_texts import raises
from small_tokenizer import BEGIN, EOS, save_tokenizer

from jaxpar.data import (
    ChatTemplate,
    conversation_prompt,
    load_chat_template,
    load_conversations,
    load_tokenizer,
)
from jaxpar.data.chat_template import _MOST_BYTES
from jaxpar.data.tokenizer import Tokenizer
from jaxpar.errors import DataError

TURNS = (
    "{{ bos_token }}{% for message in messages %}\n"
    "{{ message.role }}: {{ message.content | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "assistant: {% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Where sat the cat?"},
    {"role": "assistant", "content": "On the mat."},
    {"role": "user", "content": "And the dog — größer?"},
    {"role": "assistant", "content": "On the log."},
]


@functools.cache
def template(source: str = TURNS) -> ChatTemplate:
    """One for each source, with the time that loading would set, so that all tests share its process."""
    return ChatTemplate(source, "turns.jinja", (("bos_token", BEGIN), ("eos_token", EOS)), datetime(2024, 7, 26))


def write(file: Path, rows: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(params=["bytes", "pairs"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return load_tokenizer(None if request.param == "bytes" else save_tokenizer(tmp_path))


def text_of(tokenizer: Tokenizer, ids: Any) -> str:
    decoder = tokenizer.decoder()
    return "".join(decoder.add(int(token)) for token in ids) + decoder.end()


def test_answers_and_the_tokens_that_end_them_have_a_loss(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write(tmp_path / "chat.jsonl", [{"messages": CHAT}] * 40)
    found = load_conversations(source, tokenizer, template(), seq=220, heldout_fraction=0.2)
    assert len(found.train) + len(found.heldout) == 40 and found.truncated == 0 and found.bad == ""
    example = found.train[0]
    tokens, targets, mask = (example[name] for name in ("tokens", "targets", "loss_mask"))
    assert {x.dtype.name for x in example.values()} == {"int32"} and tokens.shape == (220,)
    np.testing.assert_array_equal(tokens[1:], targets[:-1])
    starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
    ends = np.flatnonzero(np.diff(mask, append=0) == -1)
    answers = [text_of(tokenizer, targets[a : b + 1]) for a, b in zip(starts, ends, strict=True)]
    end = EOS if tokenizer.name == "bytes" else ""  # a special token has no text
    assert answers == [f"On the mat.{end}", f"On the log.{end}"]
    if tokenizer.name != "bytes":
        assert all(targets[b] == tokenizer.eos for b in ends)
    padding = np.flatnonzero(targets != tokenizer.eos)[-1] + 1
    assert not mask[padding + 1 :].any()
    text = text_of(tokenizer, tokens)
    assert text.startswith((f"{BEGIN}system: Be short.{EOS}", "system: Be short."))


THINKING = TURNS.replace(
    "{{ message.role }}: ", "{{ message.role }}: {% if message.role == 'assistant' %}<think/>{% endif %}"
)


@pytest.mark.parametrize("source", [TURNS, THINKING, TURNS.replace("{{ bos_token }}", "")])
def test_a_prompt_has_the_tokens_before_the_answer_in_training(
    source: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """What a model is asked with is what it saw in training, for each answer of a conversation."""
    chat = template(source)
    for count in (2, 4):
        text, ids, end = conversation_prompt(CHAT[:count], tokenizer, chat)
        rows = write(tmp_path / "chat.jsonl", [{"messages": CHAT[: count + 1]}] * 40)
        example = load_conversations(rows, tokenizer, chat, seq=300, heldout_fraction=0.2).train[0]
        answer = np.flatnonzero(np.diff(example["loss_mask"], prepend=0) == 1)[-1]
        assert example["tokens"][: answer + 1].tolist() == ids == tokenizer.encode_rendered(text)[0].tolist()
        assert end == EOS and text.endswith("assistant: ")


def test_messages_that_ask_for_no_answer_are_errors(tokenizer: Tokenizer) -> None:
    special = tokenizer.special_tokens[0]
    cases: list[tuple[str, list[dict[str, str]]]] = [
        ("messages", []),
        ("user", [{"role": "user"}]),
        ("\\ud800", [{"role": "user", "content": "a\ud800"}]),
        ("assistant", CHAT[:3]),
        ("a message", [{"role": "user", "content": f"a{special}b"}]),
    ]
    for name, messages in cases:
        with raises(DataError, name):
            conversation_prompt(messages, tokenizer, template())
    with raises(DataError, "turns.jinja", "which"):
        template(TURNS.replace("assistant: {% endif %}", "bot: {% endif %}")).prompt(CHAT[:2])


def test_packed_rows_hold_each_conversation_once_and_apart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    words = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "lay", "on", "the", "log"]
    chats = [{"prompt": " ".join(words[: 1 + i % 13]), "completion": " ".join(words[i % 7 :])} for i in range(60)]
    source = write(tmp_path / "chat.jsonl", chats)
    options: dict[str, Any] = {"seq": 400, "heldout_fraction": 0.2}
    alone = load_conversations(source, tokenizer, template(), **options)
    packed = load_conversations(source, tokenizer, template(), **options, packed=True)
    assert packed.conversations == alone.conversations == (len(alone.train), len(alone.heldout))
    assert len(packed.train) < len(alone.train) and len(packed.heldout) == len(alone.heldout)
    found = []
    for row in packed.train[:]:
        assert {x.dtype.name for x in row.values()} == {"int32"} and {x.shape for x in row.values()} == {(400,)}
        for segment in np.unique(row["segment_ids"]):
            at = row["segment_ids"] == segment
            assert row["positions"][at].tolist() == list(range(at.sum()))
            if row["loss_mask"][at].any():
                found.append([row[name][at].tolist() for name in ("tokens", "targets", "loss_mask")])
    wanted = []
    for example in alone.train:
        count = int(np.flatnonzero(example["loss_mask"])[-1]) + 1
        wanted.append([example[name][:count].tolist() for name in ("tokens", "targets", "loss_mask")])
    shortened = [[part[: len(part) - _after(parts[2])] for part in parts] for parts in found]
    assert sorted(shortened) == sorted(wanted)
    for example, row in zip(alone.heldout, packed.heldout, strict=True):
        for name in example:
            np.testing.assert_array_equal(example[name][row["segment_ids"] == 0], row[name][row["segment_ids"] == 0])
            assert row["loss_mask"][row["segment_ids"] == 1].sum() == 0
    with pytest.raises(IndexError):
        packed.train[len(packed.train)]


def _after(mask: list[int]) -> int:
    """The number of targets after the last answer."""
    return mask[::-1].index(1)


def test_a_template_writes_prompts_and_its_answers_are_found() -> None:
    text, answers = template().render(CHAT)
    assert text.count(EOS) == 5 and "größer" in text
    assert [text[start:end] for start, end in answers] == [f"On the mat.{EOS}", f"On the log.{EOS}"]
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert template(marked).render(CHAT[2:3]) == ("On the mat.", ((0, 11),))
    loop = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
    assert template(loop).render([{"role": "user", "content": "ä"}]).text == '{"role": "user", "content": "ä"}'


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ raise_exception('no system') }}", "TemplateError"),
        ("{{ ''.__class__.__mro__ }}", "class__"),
        ("{{ messages.append(1) }}", "append"),
        ("{% for %}", "jinja2"),
        ("{{ messages[-1].content }}", "turns.jinja: what"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_error(source: str, name: str) -> None:
    with raises(DataError, name):
        template(source).render(CHAT)


def test_rows_without_an_answer_are_errors_or_counted(tmp_path: Path) -> None:
    tokenizer, turn = load_tokenizer(save_tokenizer(tmp_path)), lambda role, name: {"role": role, "content": name}
    bad = {
        "'text'": {"text": "a"},
        "user": {"messages": [{"role": "user"}]},
        "\\udfff": {"messages": [turn("user", "a"), turn("assistant", "\udfff")]},
        "assistant": {"messages": [turn("user", "a")]},
        "'<|endoftext|>'": {"messages": [turn("user", f"a{EOS}"), turn("assistant", "b")]},
        "40": {"messages": [turn("user", "the cat " * 100), turn("assistant", "b")]},
    }
    for number, (name, row) in enumerate(bad.items()):
        file = write(tmp_path / f"{number}.jsonl", [{"messages": CHAT[1:3]}, row])
        with raises(DataError, name):
            load_conversations(file, tokenizer, template(), seq=40)
    rows = [{"prompt": f"Where sat cat {i}?", "completion": "On the mat."} for i in range(60)]
    file = write(tmp_path / "all.jsonl", [*bad.values(), *rows, {"messages": CHAT[1:]}])
    found = load_conversations(file, tokenizer, template(), seq=40, bad_rows="skip")
    assert len(found.train) + len(found.heldout) == 61 and found.truncated == 1
    assert found.bad.startswith(f"6 bad rows skipped: {file} row 1: it has neither messages nor")
    assert all(example["loss_mask"].any() for example in found.train)


def test_a_template_is_found_beside_the_tokenizer(tmp_path: Path) -> None:
    file = save_tokenizer(tmp_path)
    with raises(DataError, "chat_template.jinja"):
        load_chat_template(file)
    config = {"bos_token": {"content": BEGIN}, "eos_token": EOS, "chat_template": TURNS}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for place in (file, tmp_path, tmp_path / "tokenizer_config.json"):
        assert (load_chat_template(place).source, load_chat_template(place).tokens) == (TURNS, template().tokens)
    assert load_chat_template(file).render(CHAT) == template().render(CHAT)
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TURNS}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": several}))
    assert load_chat_template(file).source == TURNS
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    assert load_chat_template(file).render([]).text == EOS
    assert load_chat_template(tmp_path / "chat_template.jinja").name == str(tmp_path / "chat_template.jinja")
    with raises(DataError, "none.jinja"):
        load_chat_template(tmp_path / "none.jinja")


def test_files_that_are_no_template_are_errors(tmp_path: Path) -> None:
    config, file = tmp_path / "tokenizer_config.json", tmp_path / "own.jinja"
    config.write_text('{"chat_template": 3}')
    with raises(DataError, "tokenizer_config.json", "chat_template must"):
        load_chat_template(tmp_path)
    config.write_text("{")
    with raises(DataError, "tokenizer_config.json", "JSON"):
        load_chat_template(tmp_path)
    config.unlink()
    file.write_bytes(b"abc\xff")
    with raises(DataError, "own.jinja", "UTF"):
        load_chat_template(file)
    with file.open("wb") as opened:
        opened.truncate(_MOST_BYTES + 1)
    with raises(DataError, "own.jinja", "bytes"):
        load_chat_template(file)


def test_a_template_that_refuses_a_row_is_an_error_with_its_place(tmp_path: Path) -> None:
    file = write(tmp_path / "chat.jsonl", [{"messages": CHAT[1:3]}])
    with raises(DataError, "chat.jsonl", "turns.jinja"):
        load_conversations(file, load_tokenizer(None), template("{{ raise_exception('no cats') }}"), seq=40)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{% if messages[0].content == 'bad' %}{{ raise_exception('no cats') }}{% endif %}", "TemplateError: no cats"),
        ("{% if messages[0].content == 'bad' %}{{ messages[7].role }}{% endif %}", "UndefinedError: "),
        ("{% if messages[0].content == 'bad' %}{{ 'x' * 99999999999 }}{% endif %}", ""),
        (
            "{% if messages[0].content == 'bad' and messages | length > 1 %}{{ range(99) | random }}{% endif %}",
            "what it",
        ),
    ],
)
def test_a_row_that_its_template_refuses_is_skipped_and_counted(body: str, reason: str, tmp_path: Path) -> None:
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    texts = ["good", "bad", *(f"good {i}" for i in range(30))]
    file = write(tmp_path / "chat.jsonl", [{"prompt": text, "completion": "yes"} for text in texts])
    load = lambda **options: load_conversations(
        file, load_tokenizer(None), ChatTemplate(body + turns + prompt, "turns.jinja"), seq=80, **options
    )
    found = load(bad_rows="skip")
    assert sum(found.conversations) == len(texts) - 1
    assert found.bad.startswith(f"1 bad row skipped: {file} row 2: turns.jinja: {reason}")
    with raises(DataError, "row 2", "bad_rows: skip"):
        load()


def test_a_slice_of_conversations_is_some_of_them(tmp_path: Path) -> None:
    rows = [{"prompt": f"Where sat cat {i}?", "completion": "On the mat."} for i in range(40)]
    file = write(tmp_path / "chat.jsonl", rows)
    train = load_conversations(file, load_tokenizer(None), template(), seq=80).train
    some = train[3:5]
    assert len(some) == 2
    for name, x in train[4].items():
        np.testing.assert_array_equal(some[1][name], x)
