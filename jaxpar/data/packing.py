"""Whole documents as rows: several in a row, or one in a row and padding."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxpar.data.windows import Batch, as_integer, check_vocab, content_hash, evenly
from jaxpar.errors import DataError

_EMPTY = -1
"""The number of a row without documents."""


@dataclass(eq=False)
class DocumentRows:
    """Rows that hold whole documents; a document that is longer than a row is cut into pieces.

    Each document predicts its tokens from the second to its ``eos``. No target is in another document. In a row, the
    pieces have ``segment_ids`` 0, 1, ... and ``positions`` from 0; the rest is padding, with a segment of its own and
    ``loss_mask`` 0.

    Attributes:
      tokens: token ids [n] of all documents.
      starts: offset of each document, and the end of the last, [documents + 1].
      seq: tokens of a row.
      alone: one piece in a row, instead of as many as fit.
      checksum: identifies tokens and documents; without it they are hashed.
      vocab: number of possible tokens, for tokens that were not checked before.

    Raises:
      DataError: ``seq`` is not a positive integer, or no document has two tokens.

    >>> rows = DocumentRows(np.array([5, 6, 0, 7, 0, 8, 9, 8, 0]), np.array([0, 3, 5, 9]), seq=4)
    >>> first, second = ({name: x[0].tolist() for name, x in rows.read(np.array([i])).items()} for i in (0, 1))
    >>> first["tokens"], first["targets"], first["segment_ids"], first["positions"]
    ([7, 8, 9, 8], [0, 9, 8, 0], [0, 1, 1, 1], [0, 0, 1, 2])
    >>> second["tokens"], second["loss_mask"]
    ([5, 6, 0, 0], [1, 1, 0, 0])
    """

    tokens: np.ndarray
    starts: np.ndarray
    seq: int
    alone: bool = False
    checksum: str | None = None
    vocab: int | None = None

    def __post_init__(self) -> None:
        self.seq = as_integer("seq", self.seq, 1)
        self._offsets, self._lengths, self._row_starts = self._pieces()
        if not self._offsets.size:
            raise DataError("no document has two tokens, so none can be predicted. Remedy: longer documents.")

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self._row_starts) - 1

    @property
    def packed(self) -> bool:
        """Whether documents are told apart."""
        return True

    def read(self, numbers: np.ndarray) -> Batch:
        """Returns the rows ``numbers`` [n]; -1 is a row of padding.

        Raises:
          DataError: a token is not below ``vocab``.
        """
        rows = []
        for number in numbers:
            pieces = slice(*self._row_starts[number : number + 2]) if number != _EMPTY else slice(0)
            spans = zip(self._offsets[pieces], self._lengths[pieces], strict=True)
            texts = [np.asarray(self.tokens[at : at + length + 1]) for at, length in spans]
            for ids in texts:
                check_vocab(ids, self.vocab)
            rows.append(packed_row([(ids, 1) for ids in texts], self.seq))
        names = packed_row([], self.seq)  # also of no rows
        return {name: np.array([row[name] for row in rows], np.int32).reshape(-1, self.seq) for name in names}

    def segments(self, numbers: np.ndarray) -> npt.NDArray[np.int32]:
        """Returns the piece of each token of these rows [n, seq], numbered from 0 in each row."""
        return self.read(numbers)["segment_ids"]

    def spread(self, batch: int, max_batches: int) -> np.ndarray:
        """Returns the rows of at most ``max_batches`` full batches, evenly spread; of fewer, with empty rows."""
        if self.count < batch:
            return np.concatenate([np.arange(self.count), np.full(batch - self.count, _EMPTY)])
        return evenly(self.count, batch, max_batches)

    def identity(self) -> dict[str, int | str]:
        """Returns what must be equal for a number to mean the same row. It may hash the full text."""
        content, packing = self.checksum, "padded" if self.alone else "documents"
        if content is None:
            ends = hashlib.sha256(np.ascontiguousarray(self.starts, "<i8")).hexdigest()[:16]
            content = f"{content_hash(self.tokens)} documents {ends}"
        return {"tokens": self.tokens.size, "content": content, "seq": self.seq, "packing": packing}

    def shortage(self, batch: int) -> str:
        """Returns how many rows there are, and that a batch needs more."""
        return (
            f"{len(self.starts) - 1} documents fill {self.count} rows of seq={self.seq}, and batch={batch} needs "
            f"{batch} rows"
        )

    @property
    def density(self) -> float:
        """The fraction of all rows that is not padding."""
        return float(self._lengths.sum() / (self.count * self.seq))

    def _pieces(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The offset and the number of targets of each piece, in the order of rows, and each row's first piece."""
        targets = np.diff(self.starts) - 1
        whole = np.maximum(targets, 0)
        counts = -(-whole // self.seq)  # pieces of each document
        document = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = np.asarray(self.starts)[document] + nth * self.seq
        lengths = np.minimum(whole[document] - nth * self.seq, self.seq)
        rows = np.arange(len(lengths)) if self.alone else best_fit(lengths, self.seq)
        order = np.argsort(rows, kind="stable")
        numbers = np.arange(int(rows.max(initial=-1)) + 2)
        return offsets[order], lengths[order], np.searchsorted(rows[order], numbers)


def packed_row(pieces: Sequence[tuple[np.ndarray, np.ndarray | int]], seq: int, pad: int = 0) -> Batch:
    """Returns whole pieces as the arrays [seq] of one row.

    Args:
      pieces: ids [n + 1] and loss mask [n] (or a number) of each piece, which has n targets.
      seq: tokens of the row; the rest of it is padding, with a segment of its own and no loss.
      pad: the id of padding.
    """
    names = ("tokens", "targets", "segment_ids", "positions", "loss_mask")
    row: Batch = {name: np.full(seq, pad if name in ("tokens", "targets") else 0, np.int32) for name in names}
    end = 0
    for segment, (ids, mask) in enumerate(pieces):
        at = slice(end, end + len(ids) - 1)
        row["tokens"][at], row["targets"][at] = ids[:-1], ids[1:]
        row["segment_ids"][at], row["positions"][at], row["loss_mask"][at] = segment, np.arange(len(ids) - 1), mask
        end = at.stop
    row["segment_ids"][end:], row["positions"][end:] = len(pieces), np.arange(seq - end)
    return row


def best_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """Returns the row of each piece, so that the lengths in a row sum to at most ``size``: best fit, longest first.

    Pieces of equal length are placed together, so the time depends on the number of different lengths and rooms more
    than on that of pieces.

    Args:
      lengths: of the pieces, [n], each from 1 to ``size``.
      size: room of a row.

    >>> best_fit(np.array([3, 5, 2, 4, 2]), 8).tolist()
    [0, 0, 1, 1, 1]
    """
    order = np.argsort(-lengths, kind="stable")
    found = np.empty(len(lengths), np.int64)
    free: dict[int, np.ndarray] = {}  # rows by the room that they have left
    rooms = 0  # bit r is set if there are rows with room r
    made = at = 0
    for length, count in zip(*(x[::-1].tolist() for x in np.unique(lengths, return_counts=True)), strict=True):
        left = count
        placed: list[np.ndarray] = []
        changed: list[tuple[int, np.ndarray]] = []
        while left:
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                rows = free.pop(room)
                rooms &= ~(1 << room)
            else:
                room = size
                rows = np.arange(made, made + -(-left // (size // length)))
                made += len(rows)
            each = room // length
            full, rest = min(left // each, len(rows)), 0
            if full < len(rows) and left > full * each:
                rest = left - full * each
            placed += [np.repeat(rows[:full], each), np.repeat(rows[full : full + 1], rest)]
            changed.append((room - each * length, rows[:full]))
            if rest:
                changed.append((room - rest * length, rows[full : full + 1]))
            changed.append((room, rows[full + (rest > 0) :]))
            left -= full * each + rest
            # What is given back is too small for this length, unless all of it is placed.
            for room, rows in changed:
                if len(rows) and room:
                    free[room] = np.concatenate([free[room], rows]) if room in free else rows
                    rooms |= 1 << room
            changed.clear()
        found[order[at : at + count]] = np.concatenate(placed)
        at += count
    return found
