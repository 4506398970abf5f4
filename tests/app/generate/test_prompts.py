"""The text of an answer, as it is generated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxpar.app.generate.prompts import Answer

TEXTS = st.text("ab", max_size=12)


@given(TEXTS, st.lists(st.text("ab", min_size=1, max_size=3), max_size=3, unique=True))
def test_an_answer_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    answer, shown = Answer("", tuple(stops)), ""
    for token in text.encode():
        shown += answer.add(token)
        if answer.why:
            break
    else:
        shown += answer.end("length")
    ends = [n for n in range(len(text) + 1) if any(stop in text[:n] for stop in stops)]
    begun = text[: ends[0]] if ends else text
    expected = begun[: min((begun.find(stop) for stop in stops if stop in begun), default=None)]
    assert (shown, answer.text, answer.why) == (expected, expected, "stop" if ends else "length")


def test_of_two_stop_strings_that_end_together_the_earlier_counts() -> None:
    answer = Answer("", ("b", "ab"))
    assert "".join(map(answer.add, b"xab")) == answer.text == "x" and answer.why == "stop"
