"""Names that are cut in the middle stay distinct."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxpar.utils.terminal import shorten


@given(st.lists(st.text("ab/", max_size=40), max_size=12), st.integers(4, 30))
def test_names_stay_distinct_and_no_wider_than_needed(names: list[str], width: int) -> None:
    cut = shorten(names, width)
    assert len(set(cut)) == len(set(names))
    assert all(b == a or len(b) < len(a) for a, b in zip(names, cut, strict=True))
