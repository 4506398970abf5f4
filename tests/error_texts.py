"""``raises``: an error has this class, names these things, and its whole text is a line of ``tests/errors``.

A test says what an error is about, and the whole text stands in one place, whatever number of tests raise it::

    with raises(DataError, "source 2"):
        blend(sources, weights)

A line is the class and the text, ``\\n`` for a line break, so that ``grep`` finds a text as a user sees it. The file is
that of the test's folder, or any other one: each text stands once. What differs between machines and runs is a marker.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest

TEXTS = Path(__file__).parent / "errors"
MOST_WORDS = 3
"""The most words of a name: more would pin a sentence."""

MARKERS = {
    "<tmp>": r"/\S*?\w",
    "<python>": re.escape(sys.executable),
    "<jax>": re.escape(jax.__version__),
    "<version>": r"\d+(?:\.\w+)+",
    "<number>": r"\d[\d,.]*(?:e-?\d+)?",
    "<hash>": r"[0-9a-f]{8,}",
    "<root>": re.escape(str(TEXTS.parents[1])),
    "<word>": r"\S+?",
    "<rest>": r".+?",
}
"""What a part of a line stands for, as a regular expression. ``<rest>`` is what another library says, ``<tmp>`` a
folder of the test."""


@contextmanager
def raises[E: BaseException](error: type[E] | tuple[type[E], ...], *names: str) -> Iterator[pytest.ExceptionInfo[E]]:
    """As ``pytest.raises``: the error has one of the texts of ``tests/errors``, in which each of ``names`` occurs."""
    __tracebackhide__ = True
    with pytest.raises(error) as raised:
        yield raised
    check(raised.value, *names)


def check(error: BaseException, *names: str) -> None:
    """``raises`` for an error that is at hand."""
    __tracebackhide__ = True
    line = f"{type(error).__name__}: {error}".replace("\\", "\\\\").replace("\n", "\\n")
    assert names and all(0 < len(name.split()) <= MOST_WORDS for name in names), f"no names of things: {names}"
    missing = [name for name in names if name not in str(error)]
    assert not missing, f"{missing} not in: {error}"
    exact, patterns = lines()
    if line not in exact and not any(pattern.fullmatch(line) for pattern in patterns):
        nearest = max(exact, key=lambda other: len({*other.split()} & {*line.split()}))
        pytest.fail(f"tests/errors has no line\n{line}\nThe nearest one is\n{nearest}")


@functools.cache
def lines() -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """The lines without markers, and the patterns of those with some."""
    read = [line for file in sorted(TEXTS.glob("*.txt")) for line in file.read_text(encoding="utf-8").splitlines()]
    marker = re.compile("|".join(map(re.escape, MARKERS)))
    marked = [line for line in read if marker.search(line)]
    return frozenset(read) - {*marked}, tuple(map(pattern, marked))


def pattern(line: str) -> re.Pattern[str]:
    parts = re.split(f"({'|'.join(map(re.escape, MARKERS))})", line)
    return re.compile("".join(MARKERS.get(part, re.escape(part)) for part in parts))
