"""Sources whose rows differ have different identities, so a saved position is of one of them only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpar.data.blend import Blend
from jaxpar.data.packing import DocumentRows
from jaxpar.data.windows import EpochPlan, Windows

TOKENS = np.arange(1, 65) % 7
OTHER = np.where(np.arange(64) == 40, 9, TOKENS)


def windows(tokens: np.ndarray = TOKENS, seq: int = 4, separator: int | None = None) -> Windows:
    return Windows(tokens, seq, separator)


def documents(
    tokens: np.ndarray = TOKENS, ends: tuple[int, ...] = (10, 30, 64), seq: int = 4, *, alone: bool = False
) -> DocumentRows:
    return DocumentRows(tokens, np.array([0, *ends]), seq, alone)


def blend(*parts: Any, weights: tuple[float, ...] = (1.0, 1.0)) -> Blend:
    return Blend(("a", "b"), parts or (windows(), windows(OTHER)), weights)


SOURCES: dict[str, Callable[[], Any]] = {
    "windows": windows,
    "windows of other tokens": lambda: windows(OTHER),
    "windows of fewer tokens": lambda: windows(TOKENS[:-1]),
    "longer windows": lambda: windows(seq=5),
    "windows with a separator": lambda: windows(separator=0),
    "windows with another separator": lambda: windows(separator=1),
    "documents": documents,
    "documents of other tokens": lambda: documents(OTHER),
    "other documents": lambda: documents(ends=(10, 31, 64)),
    "longer rows": lambda: documents(seq=5),
    "one document in a row": lambda: documents(alone=True),
    "a blend": blend,
    "the blend in another order": lambda: blend(windows(OTHER), windows()),
    "other shares": lambda: blend(weights=(1.0, 2.0)),
    "a blend of longer rows": lambda: blend(windows(seq=5), windows(OTHER, seq=5)),
}


def test_rows_that_differ_have_another_identity() -> None:
    identities = {name: source().identity() for name, source in SOURCES.items()}
    assert identities == {name: source().identity() for name, source in SOURCES.items()}
    same = [(a, b) for a in identities for b in identities if a < b and identities[a] == identities[b]]
    assert same == []


def test_batches_that_differ_have_another_identity() -> None:
    one, two = (EpochPlan(windows(), batch) for batch in (2, 3))
    assert one.identity() != two.identity() and one.identity() == EpochPlan(windows(), 2).identity()
