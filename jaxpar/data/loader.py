"""Batches of token windows: shuffled and resumable for training, in text order for evaluation.

Every process draws the same global batch of window numbers and reads only its own block of rows. The global batch of a
step, row order included, is therefore independent of the number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from jaxpar.data.windows import Arrange, Batch, EpochPlan, Windows, as_integer, token_vector
from jaxpar.errors import DataError
from jaxpar.utils.checks import is_count, shown
from jaxpar.utils.extras import import_extra

STATE_VERSION = 1

# Reading a batch is one numpy gather from memory, so one thread a few batches ahead hides it behind a training step.
# grain's defaults (16 threads, 500 batches) are meant for slow storage.
_THREADS = 1
_BATCHES_AHEAD = 4


def batches(
    tokens: npt.ArrayLike,
    *,
    batch: int,
    seq: int,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
    separator: int | None = None,
    arrange: Arrange | None = None,
) -> Batches:
    """Returns an iterator over training batches whose position can be saved and restored.

    Each epoch visits the windows in a different order, fixed by ``seed``, and drops the windows left over after its
    last full global batch. Process ``p`` gets rows ``p * rows`` to ``(p + 1) * rows`` of the global batch, where ``rows
    = batch // process_count``.

    Args:
        tokens: the text's token ids, integers of shape ``[n]``; kept, not copied.
        batch: rows of the global batch, over all processes.
        seq: tokens per row.
        seed: any integer; determines the order of the windows.
        shuffle: if False, every epoch visits the windows in text order.
        epochs: passes over the text, or None for endless batches.
        process_index: this process, ``0 <= process_index < process_count``.
        process_count: number of processes that share a global batch.
        separator: the token that ends a document; batches then also have ``segment_ids``.
        arrange: maps the documents [batch, seq] of a global batch to a token order [seq]; batches then also have
          ``order``. Requires ``separator``.

    Returns:
        A :class:`Batches` that yields :data:`Batch` dicts of ``rows`` rows.

    Raises:
        DataError: a size is not a positive integer, ``batch`` is not divisible by ``process_count``, ``tokens`` is not
            a vector of int32-sized integers, the text is too short for one global batch, or ``arrange`` is given
            without ``separator``.
        MissingExtraError: grain is not installed.

    >>> import numpy as np
    >>> stream = batches(np.arange(9), batch=2, seq=2, shuffle=False, epochs=1)
    >>> first = next(stream)
    >>> first["tokens"].tolist(), first["targets"].tolist()
    ([[0, 1], [2, 3]], [[1, 2], [3, 4]])
    """
    plan = EpochPlan(Windows(token_vector(tokens), seq, separator), batch, process_index, process_count, arrange)
    epochs = None if epochs is None else as_integer("epochs", epochs, least=1)
    return Batches(plan, seed=as_integer("seed", seed), shuffle=bool(shuffle), epochs=epochs)


def eval_batches(
    tokens: npt.ArrayLike,
    *,
    batch: int,
    seq: int,
    max_batches: int,
    process_index: int = 0,
    process_count: int = 1,
    separator: int | None = None,
    arrange: Arrange | None = None,
) -> list[Batch]:
    """Returns full batches of windows spread evenly over a text, in text order; does not need grain.

    Every call with the same arguments returns the same batches.

    Args:
        tokens: the text's token ids, integers of shape ``[n]``.
        batch: rows of the global batch, over all processes.
        seq: tokens per row.
        max_batches: maximum number of batches; a short text gives fewer.
        process_index: this process, ``0 <= process_index < process_count``.
        process_count: number of processes that share a global batch.
        separator: the token that ends a document; batches then also have ``segment_ids``.
        arrange: maps the documents [batch, seq] of a global batch to a token order [seq]; batches then also have
          ``order``. Requires ``separator``.

    Returns:
        Between 1 and ``max_batches`` :data:`Batch` dicts of ``batch // process_count`` rows.

    Raises:
        DataError: as :func:`batches`.

    >>> import numpy as np
    >>> [b["targets"].tolist() for b in eval_batches(np.arange(6), batch=2, seq=1, max_batches=9)]
    [[[1], [2]], [[3], [4]]]
    """
    plan = EpochPlan(Windows(token_vector(tokens), seq, separator), batch, process_index, process_count, arrange)
    return plan_eval_batches(plan, max_batches)


def plan_eval_batches(plan: EpochPlan, max_batches: int) -> list[Batch]:
    """Returns at most ``max_batches`` full batches of a plan, spread evenly over its rows."""
    numbers = plan.rows.spread(plan.batch, as_integer("max_batches", max_batches, least=1))
    if not numbers.size:
        raise DataError(
            f"the held-out text is too short for one batch: {plan.rows.shortage(plan.batch)}. Remedy: a smaller batch "
            "or seq, or a larger heldout_fraction."
        )
    return [plan.read(rows) for rows in numbers.reshape(-1, plan.batch)]


class Stream(Protocol):
    """Batches of one process, at a position that can be saved and restored."""

    def __iter__(self) -> Self: ...

    def __next__(self) -> Any: ...

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last batch taken, as JSON-able data."""

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a saved position, or raises a DataError."""

    def close(self) -> None:
        """Stops reading."""


class NumberedRows(Protocol):
    """Rows that have numbers from 0, and how a process reads its part of a global batch of them."""

    batch: int
    process_index: int
    process_count: int

    @property
    def windows(self) -> int:
        """Number of rows."""

    @property
    def steps(self) -> int:
        """Number of full global batches in one pass."""

    def read(self, numbers: np.ndarray) -> Any:
        """Returns this process's part of the global batch that consists of these rows."""

    def identity(self) -> dict[str, int | str]:
        """Returns what must be equal for a number to mean the same row."""


class Batches(Iterator[Any]):
    """Iterator over the training batches of one process; :func:`batches` makes it.

    Raises:
        MissingExtraError: grain is not installed.

    >>> import json
    >>> import numpy as np
    >>> def stream():
    ...     return batches(np.arange(100), batch=4, seq=3, seed=1)
    >>> one, two = stream(), stream()
    >>> _ = next(one)
    >>> two.set_state(json.loads(json.dumps(one.get_state())))
    >>> bool((next(one)["tokens"] == next(two)["tokens"]).all())
    True
    """

    def __init__(
        self,
        plan: NumberedRows,
        *,
        seed: int,
        shuffle: bool = True,
        epochs: int | None = None,
        order: Sequence[np.ndarray] | None = None,
    ):
        self._plan = plan
        self._seed = seed
        self._shuffle = shuffle
        self._iterator = _grain_iterator(plan, seed, shuffle, epochs, order)

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches in one pass over the data."""
        return self._plan.steps

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last batch taken, as JSON-able data, with a fingerprint of the stream."""
        return {"fingerprint": dict(self._fingerprint), "position": self._iterator.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a saved position: the next batch is the one that followed ``get_state``.

        ``epochs`` may differ from the run that saved the position, so that a finished run can be continued.

        Args:
            state: what ``get_state`` returned, possibly after a round trip through JSON.

        Raises:
            DataError: the position belongs to other data, sizes, seed or process (the error names each difference),
              ``state`` is not a position, or the position is beyond the last epoch. The iterator then keeps its
              position.
        """
        position = position_of(state, self._fingerprint)
        before = self._iterator.get_state()
        try:
            if not isinstance(position, Mapping) or position.keys() != before.keys():
                raise TypeError(f"its keys must be {', '.join(before)}")
            if not all(is_count(value, 0) for value in position.values()):
                raise TypeError("it must be an integer from 0")  # grain takes fractions, and fails at the next batch
            self._iterator.set_state(dict(position))
        except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            # grain moves before it checks, so move back to the previous position.
            self._iterator.set_state(before)
            raise DataError(
                f"data position {shown(position)} does not exist in this stream of {self._plan.steps} global batches "
                f"per epoch ({error}). Remedy: raise epochs, or start from the beginning."
            ) from error

    def close(self) -> None:
        """Stops reading ahead. No batch can be taken afterwards; closing twice is harmless."""
        self._iterator.close()

    @cached_property
    def _fingerprint(self) -> dict[str, int | str | bool]:
        """The values that must be equal for a position to mean the same batches. Cached: it may hash a full text."""
        return {
            "version": STATE_VERSION,
            **self._plan.identity(),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "process_count": self._plan.process_count,
            "process_index": self._plan.process_index,
        }


def position_of(state: Mapping[str, Any], here: Mapping[str, Any]) -> Any:
    """Returns the position in a saved state of a stream whose fingerprint is ``here``.

    Raises:
      DataError: ``state`` is no saved state, or its fingerprint differs; the error names every differing field, because
        grain itself accepts a position of any stream.
    """
    try:
        saved, position = dict(state["fingerprint"]), state["position"]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"this is not a saved data position: {shown(state)}. Remedy: pass what get_state() returned."
        ) from error
    fields = [*here, *(f for f in saved if f not in here)]
    pairs = ((f, saved.get(f, "absent"), here.get(f, "absent")) for f in fields)
    different = [f"{shown(f)[1:-1]} was {shown(was)}, is now {now!r}" for f, was, now in pairs if was != now]
    if different:
        raise DataError(
            f"this data position belongs to another run: {'; '.join(different)}. "
            "Remedy: rebuild the stream with the saved values, or start this one from the beginning."
        )
    return position


def _grain_iterator(
    plan: NumberedRows, seed: int, shuffle: bool, epochs: int | None, order: Sequence[np.ndarray] | None
) -> Any:
    """Returns the grain iterator over one process's batches; ``order`` holds the row numbers of each, if given.

    Batching window numbers before reading keeps every process on the same global batch although it reads only its own
    tokens. Batching before repeating keeps epochs apart.
    """
    grain = import_extra("grain", "train", "the data pipeline")  # takes seconds
    if order is None:
        rows = grain.MapDataset.range(plan.windows)
        rows = rows.shuffle(seed=_spread(seed)) if shuffle else rows
        numbers = rows.batch(plan.batch, drop_remainder=True).repeat(epochs)
    else:
        numbers = grain.MapDataset.source(order)
    dataset = numbers.map(plan.read)
    options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_BATCHES_AHEAD)
    return iter(dataset.to_iter_dataset(options))


def _spread(seed: int) -> int:
    """Returns a 32-bit seed unrelated to that of ``seed + 1``.

    grain shuffles epoch ``e`` with ``seed + e``. With the plain seed, seed 1 would repeat the order of seed 0 one epoch
    ahead, and runs with neighbouring seeds would not be independent.
    """
    return int.from_bytes(hashlib.sha256(f"jaxpar shuffle {seed}".encode()).digest()[:4], "big")
