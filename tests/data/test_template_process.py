"""Chat templates: what they may use, as in transformers, and that none can hang or exhaust a run."""

from __future__ import annotations

import functools
import re
from datetime import datetime
from typing import Any

import pytest
from error_texts import raises

from jaxpar.data import ChatTemplate, template_process
from jaxpar.errors import DataError

USER = {"role": "user", "content": "größer?"}
LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLED = "{% set n = namespace(x=messages) %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}"


chat_of = functools.cache(ChatTemplate)
"""One template for each source, whose process all tests share."""


def text_of(source: str, **values: Any) -> str:
    return ChatTemplate(source).render([USER], values).text


GIVEN = [
    ("{{ messages[0] | tojson }}", '{"role": "user", "content": "größer?"}'),
    ("{{ messages[0].content | tojson(ensure_ascii=True) }}", r'"gr\u00f6\u00dfer?"'),
    ("{{ messages[0].content | tojson(true) }}", r'"gr\u00f6\u00dfer?"'),
    ("{{ {'b': [1], 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": [\n  1\n ]\n}'),
    ("{{ {'b': [1, 2]} | tojson(separators=(',', ':')) }}", '{"b":[1,2]}'),
    ("{{ tools is none }} {{ documents is none }} {{ other is defined }}", "True True False"),
    ("{% generation %}a{% endgeneration %}", "a"),
]


def test_templates_use_what_transformers_gives_them() -> None:
    """Of one template, because each has a process of its own."""
    assert text_of("|".join(source for source, _ in GIVEN)).split("|") == [text for _, text in GIVEN]


def test_the_time_is_the_current_or_a_given_one() -> None:
    source = "{{ strftime_now('%Y-%m-%d') }}"
    days = {f"{datetime.now():%Y-%m-%d}", text_of(source), f"{datetime.now():%Y-%m-%d}"}
    assert len(days) <= 2
    assert ChatTemplate(source, now=datetime(2024, 7, 26)).render([USER]).text == "2024-07-26"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (LOOPS, "0.5"),
        (DOUBLED, "268,435,456"),
        ("{{ 'a'.ljust(10**11) }}", "2,147,483,648"),
        ("{{ '%99999999999d' % messages[0].content | length }}", "2,147,483,648"),
        ("{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "67,108,864"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum"),
        ("{{ '\\ud800' }}", "utf-8"),
    ],
)
def test_a_template_that_needs_too_much_is_an_error(source: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "_MOST_SECONDS", 0.5 if source == LOOPS else 30.0)
    if source == DOUBLED:  # it fills what it may have, which takes seconds
        monkeypatch.setattr(template_process, "_MOST_MEMORY", 1 << 28)
    with raises(DataError, why):
        text_of(source)


def test_the_text_of_the_error_names_a_remedy_and_the_next_text_has_a_new_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_process, "_MOST_SECONDS", 0.5)
    chat = ChatTemplate("{% if messages %}" + LOOPS + "{% endif %}a", "loops.jinja")
    for _ in range(2):
        with raises(DataError, "loops.jinja"):
            chat.render([USER])
        assert chat.render([]).text == "a"


def test_values_that_are_not_json_are_an_error() -> None:
    with raises(DataError, "JSON", "template"):
        text_of("{{ tools }}", tools=[object()])


def test_random_choices_are_the_same_in_every_process() -> None:
    source = "{{ range(10000) | random }} {{ lipsum(1) }}"
    assert re.match(r"\d+ <p>", text_of(source)) and text_of(source) == text_of(source)


MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content | trim }}{{ '|' }}{% endgeneration %}{% else %}{{ m.content }}|{% endif %}"
    "{% endfor %}{{ messages | length }}"
)
CHAT = [USER, {"role": "assistant", "content": " one "}, USER, {"role": "assistant", "content": "two"}]


def answers(chat: ChatTemplate, messages: list[dict[str, Any]]) -> list[str]:
    text, spans = chat.render(messages)
    return [text[start:end] for start, end in spans]


def test_marked_answers_are_those_of_the_template() -> None:
    """Its end depends on later messages, so the marks are the only way to find the answers."""
    assert answers(chat_of(MARKED), CHAT) == ["one|", "two|"]
    macro = "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}" + MARKED.replace(
        "{% generation %}{{ m.content | trim }}{{ '|' }}{% endgeneration %}", "{{ say(m) }}"
    )
    assert answers(ChatTemplate(macro), CHAT) == [" one ", "two"]
    assert answers(ChatTemplate(MARKED.replace("assistant", "user")), CHAT) == ["größer?|", "größer?|"]


PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(("source", "texts"), [(MARKED, ["one|", "two|"]), (PLAIN, [" one |", "two|"])])
@pytest.mark.parametrize("weights", [(0, 1), (1, 0), (None, 0.0), (1, 1.0), (0, 0)])
def test_answers_of_weight_0_have_no_loss(source: str, texts: list[str], weights: tuple[Any, Any]) -> None:
    messages = [dict(message) for message in CHAT]
    messages[1]["weight"], messages[3]["weight"] = weights
    wanted = [text for text, weight in zip(texts, weights, strict=True) if weight is None or weight]
    assert answers(chat_of(source), messages) == wanted


def test_weights_of_answers_that_are_not_marked_one_by_one_are_an_error() -> None:
    chat = ChatTemplate("{% generation %}{{ messages[1].content }}{% endgeneration %}")
    assert answers(chat, CHAT) == [" one "]
    with raises(DataError, "weight: 0"):
        chat.render([*CHAT[:3], {**CHAT[3], "weight": 0}])
