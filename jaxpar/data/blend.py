"""Blends: rows of several sources in given shares, each source shuffled and repeated by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from jaxpar.data.windows import Batch, RowSource
from jaxpar.errors import DataError

_SHARES = 1 << 20
"""Weights are rounded to this many shares, but never to none."""
_ENDLESS = 1 << 40
"""Batches of a stream: more than a run has steps. Row numbers times shares stay below 2^63."""
_ROUNDS = 4


@dataclass(eq=False)
class Blend:
    """The rows of several sources, one source after the other; :class:`BlendOrder` mixes them.

    Attributes:
      names: the name of each source, for errors.
      parts: the sources.
      weights: the share of each source's rows in the blend, above 0; their sum does not matter.

    Raises:
      DataError: a weight is not above 0, a source has no row, or the rows have different arrays.

    >>> from jaxpar.data.windows import Windows
    >>> blend = Blend(("a", "b"), (Windows(np.arange(9), 2), Windows(np.arange(100, 105), 2)), (3, 1))
    >>> blend.count, blend.read(np.array([0, 4]))["tokens"].tolist()
    (6, [[0, 1], [100, 101]])
    """

    names: Sequence[str]
    parts: Sequence[RowSource]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        for name, part, weight in zip(self.names, self.parts, self.weights, strict=True):
            if not 0 < weight < float("inf"):
                raise DataError(f"blend: the weight of {name} must be above 0, got {weight}. Remedy: leave it out.")
            if not part.count:
                raise DataError(
                    f"blend: {name} has no row of seq={part.seq}. Remedy: a smaller seq, more text, or leave it out."
                )

    @property
    def seq(self) -> int:
        """Tokens of a row."""
        return self.parts[0].seq

    @property
    def count(self) -> int:
        """Number of rows of all sources."""
        return int(self.starts[-1])

    @property
    def packed(self) -> bool:
        """Whether documents are told apart."""
        return self.parts[0].packed

    @cached_property
    def starts(self) -> np.ndarray:
        """The number of the first row of each source, and the number of rows, [sources + 1]."""
        return np.cumsum([0, *(part.count for part in self.parts)])

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """The weights as integers."""
        total = float(sum(self.weights))
        return tuple(max(1, round(weight / total * _SHARES)) for weight in self.weights)

    def read(self, numbers: np.ndarray) -> Batch:
        """Returns the rows ``numbers`` [n]."""
        found: Batch = {}
        for part, at in self._by_part(numbers):
            for name, rows in self.parts[part].read(numbers[at] - self.starts[part]).items():
                found.setdefault(name, np.empty((len(numbers), self.seq), np.int32))[at] = rows
        return found

    def segments(self, numbers: np.ndarray) -> npt.NDArray[np.int32]:
        """Returns the document of each token of these rows [n, seq], numbered from 0 in each row."""
        found = np.empty((len(numbers), self.seq), np.int32)
        for part, at in self._by_part(numbers):
            found[at] = self.parts[part].segments(numbers[at] - self.starts[part])
        return found

    def spread(self, batch: int, max_batches: int) -> np.ndarray:
        """Returns the rows of at most ``max_batches`` full batches, in the blend's shares, none of them twice."""
        for steps in range(max_batches, 0, -1):
            parts, positions = deal(np.arange(steps * batch), self.shares)
            counts = np.bincount(parts, minlength=len(self.parts))
            if all(count <= part.count for count, part in zip(counts, self.parts, strict=True)):
                sizes = np.diff(self.starts)
                return self.starts[parts] + positions * sizes[parts] // np.maximum(counts, 1)[parts]
        return np.arange(0)

    def identity(self) -> dict[str, int | str]:
        """Returns what must be equal for a number to mean the same row, and the shares."""
        found: dict[str, int | str] = {"shares": str(list(self.shares))}
        for part, rows in enumerate(self.parts):
            found |= {f"source {part} {name}": value for name, value in rows.identity().items()}
        return found

    def shortage(self, batch: int) -> str:
        """Returns how many rows the sources have, and that a batch needs more."""
        sizes = ", ".join(f"{name} {part.count}" for name, part in zip(self.names, self.parts, strict=True))
        return f"the sources have too few rows of seq={self.seq} in the shares of the blend ({sizes}) for batch={batch}"

    def _by_part(self, numbers: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Which of the numbers belong to each source that has any."""
        parts = np.searchsorted(self.starts, numbers, side="right") - 1
        return [(int(part), np.flatnonzero(parts == part)) for part in np.unique(parts)]


@dataclass(eq=False)
class BlendOrder(Sequence[np.ndarray]):
    """The row numbers of each global batch of a blend: any batch can be computed without those before it.

    After any number of rows, each source has had its share of them, give or take one row for each source. A source's
    rows come in a new order in each pass over them.

    Attributes:
      blend: the sources.
      batch: rows of a global batch.
      seed: determines the orders.
    """

    blend: Blend
    batch: int
    seed: int

    def __len__(self) -> int:
        return _ENDLESS // self.batch

    def __getitem__(self, index: int) -> np.ndarray:  # type: ignore[override]
        parts, positions = deal(np.arange(index * self.batch, (index + 1) * self.batch), self.blend.shares)
        numbers = np.empty(self.batch, np.int64)
        for part, rows in enumerate(self.blend.parts):
            at = np.flatnonzero(parts == part)
            passes, within = np.divmod(positions[at], rows.count)
            for one in np.unique(passes):
                chosen = passes == one
                order = permuted(within[chosen], rows.count, _key(self.seed, part, int(one)))
                numbers[at[chosen]] = self.blend.starts[part] + order
        return numbers


def deal(numbers: np.ndarray, shares: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Deals the numbers 0, 1, ... to sources in proportion to their shares.

    Args:
      numbers: which of them to deal, [n].
      shares: of each source.

    Returns:
      The source of each number, and how many smaller numbers that source has, each [n].

    >>> parts, positions = deal(np.arange(8), (3, 1))
    >>> parts.tolist(), positions.tolist()
    ([0, 0, 0, 1, 0, 0, 0, 1], [0, 1, 2, 0, 3, 4, 5, 1])
    """
    parts, positions = np.empty_like(numbers), np.empty_like(numbers)
    at, rank, total = np.arange(len(numbers)), numbers, sum(shares)
    for part, share in enumerate(shares):
        # Of the first r numbers, this source has r * share / total rounded up; the others share the rest.
        before = rank - rank * (total - share) // total
        mine = rank + 1 - (rank + 1) * (total - share) // total > before
        parts[at[mine]], positions[at[mine]] = part, before[mine]
        at, rank, total = at[~mine], (rank - before)[~mine], total - share
        if not len(at):
            break
    return parts, positions


def permuted(numbers: np.ndarray, count: int, key: int) -> np.ndarray:
    """Returns where a permutation of 0 to ``count - 1`` moves the numbers, without computing all of it.

    A Feistel network permutes the numbers of the next even number of bits; it is applied again to results that are too
    large, which keeps it a permutation of the others. The result is part of what a saved position means, so it must not
    change.

    >>> sorted(permuted(np.arange(10), 10, key=3).tolist()) == list(range(10))
    True
    """
    half = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
    mask = (np.uint64(1) << half) - np.uint64(1)
    found = numbers.astype(np.uint64)
    moving = np.arange(len(found))
    while len(moving):
        left, right = found[moving] >> half, found[moving] & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mixed(right + _turn_key(key, turn)) & mask)
        found[moving] = left << half | right
        moving = moving[found[moving] >= count]
    return found.astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """A hash of 64-bit integers: multiplications by odd constants and shifts."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=1024)
def _turn_key(key: int, turn: int) -> np.ndarray:
    digest = hashlib.sha256(f"jaxpar permutation {key} {turn}".encode()).digest()
    return np.frombuffer(digest[:8], "<u8")


@lru_cache(maxsize=1024)
def _key(seed: int, part: int, one: int) -> int:
    digest = hashlib.sha256(f"jaxpar blend {seed} {part} {one}".encode()).digest()
    return int.from_bytes(digest[:8], "little")
