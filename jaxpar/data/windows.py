"""Windows of a token vector: their number, the rows that one process reads, and the checks on the sizes.

A text of ``n`` tokens holds ``(n - 1) // seq`` windows that share no target: window ``i`` reads tokens ``i * seq`` to
``i * seq + seq``, the first ``seq`` as input and the last ``seq`` as targets.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jaxpar.errors import DataError

type Batch = dict[str, npt.NDArray[np.int32]]
"""Arrays int32 [rows, seq]: ``tokens``, and ``targets``, which are the tokens shifted by one. Packed documents add
``segment_ids``, and ``order`` if an ``arrange`` is given; rows of whole documents also ``positions``, and
``loss_mask``, which is 0 for padding."""

type Arrange = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.int32]]
"""Maps the segments [batch, seq] of a global batch to a token order [seq] for all its rows."""

_HASH_CHUNK = 1 << 20


class RowSource(Protocol):
    """Rows of ``seq`` tokens that have numbers from 0."""

    @property
    def seq(self) -> int:
        """Tokens of a row."""

    @property
    def count(self) -> int:
        """Number of rows."""

    @property
    def packed(self) -> bool:
        """Whether rows hold documents that are told apart."""

    def read(self, numbers: np.ndarray) -> Batch:
        """Returns the rows ``numbers`` [n]."""

    def segments(self, numbers: np.ndarray) -> npt.NDArray[np.int32]:
        """Returns the document of each token of these rows [n, seq], numbered from 0 in each row."""

    def spread(self, batch: int, max_batches: int) -> np.ndarray:
        """Returns the numbers of the rows of at most ``max_batches`` full batches, spread over all rows."""

    def identity(self) -> dict[str, int | str]:
        """Returns what must be equal for a number to mean the same row."""

    def shortage(self, batch: int) -> str:
        """Returns how many rows there are, and that a batch needs more."""


@dataclass(eq=False)
class Windows:
    """The windows of a token vector as rows.

    Attributes:
        tokens: the text's token ids, as :func:`token_vector` returns them.
        seq: tokens per row.
        separator: the token that ends a document; ``None`` if documents are not distinguished.
        checksum: identifies the tokens; without it they are hashed.
        vocab: number of possible tokens, for tokens that were not checked before.

    Raises:
        DataError: ``seq`` is not a positive integer.

    >>> Windows(token_vector(range(100)), 8).count
    12
    """

    tokens: np.ndarray
    seq: int
    separator: int | None = None
    checksum: str | None = None
    vocab: int | None = None

    def __post_init__(self) -> None:
        self.seq = as_integer("seq", self.seq, 1)

    @property
    def count(self) -> int:
        """Number of complete windows in the text."""
        return max(0, self.tokens.size - 1) // self.seq

    @property
    def packed(self) -> bool:
        """Whether documents are told apart."""
        return self.separator is not None

    def read(self, numbers: np.ndarray) -> Batch:
        """Returns the windows ``numbers`` [n].

        Raises:
          DataError: a token is not below ``vocab``.
        """
        span = self.tokens[numbers[:, None] * self.seq + np.arange(self.seq + 1)]
        check_vocab(span, self.vocab)
        span = span.astype(np.int32)
        # Contiguous here, on the reading thread: otherwise the copy to the device copies them on the training thread.
        found = {"tokens": np.ascontiguousarray(span[:, :-1]), "targets": np.ascontiguousarray(span[:, 1:])}
        return {**found, "segment_ids": self.segments(numbers)} if self.packed else found

    def segments(self, numbers: np.ndarray) -> npt.NDArray[np.int32]:
        """Returns the document of each token [n, seq], numbered from 0 per row; a separator ends its document."""
        ends = self.tokens[numbers[:, None] * self.seq + np.arange(self.seq)] == self.separator
        return np.cumsum(ends, axis=1, dtype=np.int32) - ends

    def spread(self, batch: int, max_batches: int) -> np.ndarray:
        """Returns the windows of at most ``max_batches`` full batches, evenly spread over the text."""
        # Spread over the text, because the first windows are the first files, and neighbouring files are similar.
        return evenly(self.count, batch, max_batches)

    def identity(self) -> dict[str, int | str]:
        """Returns what must be equal for a window number to mean the same row. It may hash the full text."""
        content = content_hash(self.tokens) if self.checksum is None else self.checksum
        same: dict[str, int | str] = {"tokens": self.tokens.size, "content": content, "seq": self.seq}
        return same if self.separator is None else {**same, "separator": self.separator}

    def shortage(self, batch: int) -> str:
        """Returns how many windows there are, and that a batch needs more."""
        return (
            f"{self.tokens.size} tokens hold {self.count} windows of seq={self.seq}, and batch={batch} needs {batch} "
            f"windows, {batch * self.seq + 1} tokens"
        )


@dataclass(eq=False)
class EpochPlan:
    """The rows that one process reads of each global batch.

    Attributes:
        rows: the rows.
        batch: rows of the global batch, over all processes.
        process_index: index of this process.
        process_count: number of processes that share a global batch.
        arrange: maps the documents of a global batch to its token order.
        heldout: the rows are for evaluation, which may take fewer than a batch.

    Raises:
        DataError: a size is not a positive integer, ``batch`` is not divisible by ``process_count``, there are too few
            rows for one global batch, or ``arrange`` is given and the rows have no documents.

    >>> plan = EpochPlan(Windows(token_vector(range(100)), 8), batch=4, process_index=0, process_count=2)
    >>> plan.windows, plan.steps
    (12, 3)
    """

    rows: RowSource
    batch: int
    process_index: int = 0
    process_count: int = 1
    arrange: Arrange | None = None
    heldout: bool = False

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("process_index", 0), ("process_count", 1)):
            setattr(self, name, as_integer(name, getattr(self, name), least))
        check_share(self.batch, self.process_index, self.process_count)
        if self.windows < self.batch and not self.heldout:
            raise DataError(
                f"the text is too short for one global batch: {self.rows.shortage(self.batch)}. Remedy: a smaller "
                "batch or seq, or more text."
            )
        if self.arrange is not None and not self.rows.packed:
            raise DataError(
                "arrange orders the tokens of a batch by their documents, but separator is not given, so the text has "
                "no documents. Remedy: pass separator=0, or the token that ends a document; or leave arrange out."
            )

    @property
    def windows(self) -> int:
        """Number of rows."""
        return self.rows.count

    @property
    def steps(self) -> int:
        """Number of full global batches in one pass over the text."""
        return self.windows // self.batch

    def read(self, numbers: np.ndarray) -> Batch:
        """Returns this process's rows of the global batch that consists of the rows ``numbers`` [batch]."""
        rows = self.batch // self.process_count
        found = self.rows.read(numbers[self.process_index * rows : (self.process_index + 1) * rows])
        if self.arrange is not None:
            # The order depends on all rows of the global batch, so it is the same on every process.
            found["order"] = np.tile(self.arrange(self.rows.segments(numbers)), (rows, 1))
        return found

    def identity(self) -> dict[str, int | str]:
        """Returns what must be equal for a number to mean the same row of a batch."""
        return {"batch": self.batch, **self.rows.identity()}


def evenly(count: int, batch: int, max_batches: int) -> np.ndarray:
    """Returns the numbers of at most ``max_batches`` full batches of ``count`` rows, evenly spread.

    >>> evenly(10, batch=2, max_batches=2).tolist()
    [0, 2, 5, 7]
    """
    rows = min(max_batches, count // batch) * batch
    return np.arange(rows) * count // max(1, rows)


def check_vocab(tokens: np.ndarray, vocab: int | None) -> None:
    """Raise a DataError if a token is outside ``[0, vocab)``."""
    if vocab is not None and tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
        raise DataError(
            f"the text has tokens from {tokens.min()} to {tokens.max()}, but the vocabulary has {vocab}. Remedy: the "
            "tokenizer and model.vocab that the text was written for."
        )


def content_hash(tokens: np.ndarray) -> str:
    """Returns a hash of token ids that does not depend on their integer type or byte order."""
    digest = hashlib.sha256()
    for start in range(0, tokens.size, _HASH_CHUNK):
        digest.update(np.ascontiguousarray(tokens[start : start + _HASH_CHUNK], "<i4"))
    return f"sha256:{digest.hexdigest()[:16]}"


def check_share(batch: int, process_index: int, process_count: int) -> None:
    """Raise a DataError unless the process exists and the processes divide the rows of the global batch."""
    if process_index >= process_count:
        raise DataError(
            f"process_index={process_index} does not exist with process_count={process_count}: "
            "it counts from 0. Remedy: pass jax.process_index() and jax.process_count()."
        )
    if batch % process_count:
        raise DataError(
            f"batch={batch} (global rows) cannot be divided evenly over process_count={process_count}. "
            f"Remedy: use a multiple of {process_count}, such as {-(-batch // process_count) * process_count}."
        )


def token_vector(tokens: npt.ArrayLike) -> np.ndarray:
    """Returns ``tokens`` as an array [n] whose values fit int32, or raise a DataError."""
    array = np.asarray(tokens)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"tokens must be integers of shape [n], got dtype {array.dtype} and shape {array.shape}.")
    # Scan only wider types: a byte text may be a large memory map that need not be read completely here.
    if array.size and not np.can_cast(array.dtype, np.int32):
        low, high = int(array.min()), int(array.max())
        if low < np.iinfo(np.int32).min or high > np.iinfo(np.int32).max:
            raise DataError(f"tokens must fit int32, got {array.dtype} values from {low} to {high}.")
    return array


def as_integer(name: str, value: Any, least: int | None = None) -> int:
    """Returns ``value`` as an int (JSON has no numpy integers) of at least ``least``, or raise a DataError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        expected = "an integer" if least is None else "a positive integer" if least == 1 else f"an integer >= {least}"
        raise DataError(f"{name} must be {expected}, got {value!r}.")
    return number
