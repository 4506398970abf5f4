"""A text generated from a seed, in which each word depends on the word before it."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from random import Random

_DOCUMENTS = 256
_BYTES = 4096  # of each document
_WORDS = 96
# Cumulative probabilities of a word's first three successors; the fourth has the rest. This gives about 1.1 nats per
# word, far less than a model without context sees in its letters.
_SUCCESSOR_BOUNDS = (0.55, 0.80, 0.93)


def synthetic_documents(seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield ``(path, content)`` of each generated document: sentences from one random first-order chain over words."""
    # Only Random.random(): Python guarantees its sequence for a given seed, unlike that of Random.choice or of numpy's
    # generators. The seed is a string because Random(-1) equals Random(1).
    draw = Random(f"jaxpar synthetic text {seed}").random
    letters = "etaoinshrdlu"
    words = ["".join(letters[int(draw() * len(letters))] for _ in range(2 + i % 6)) for i in range(_WORDS)]
    written = [word + (".\n" if i % 12 == 0 else " ") for i, word in enumerate(words)]
    successors = [[int(draw() * len(words)) for _ in range(len(_SUCCESSOR_BOUNDS) + 1)] for _ in words]
    for document in range(_DOCUMENTS):
        state = int(draw() * len(words))
        pieces: list[str] = []
        size = 0
        while size < _BYTES:
            pieces.append(written[state])
            size += len(written[state])
            state = successors[state][bisect(_SUCCESSOR_BOUNDS, draw())]
        yield f"{document:03d}.txt", "".join(pieces).encode("ascii")[:_BYTES]
