"""Rows of whole documents: each target once, in its own segment, in as few rows as best fit needs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from error_texts import raises

from jaxpar.data.packing import DocumentRows, best_fit
from jaxpar.data.windows import EpochPlan
from jaxpar.errors import DataError


def documents_of(seed: int, count: int = 60, longest: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and starts of documents of 1 to ``longest`` tokens, of which the last is 0 and none else."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest + 1, count)
    tokens = random.integers(1, 100, lengths.sum())
    starts = np.cumsum([0, *lengths])
    tokens[starts[1:] - 1] = 0
    return tokens, starts


def one_by_one(lengths: np.ndarray, size: int) -> list[int]:
    """Best fit, longest first: each piece goes to the row with the least room that still fits it."""
    rooms: list[int] = []
    found = [0] * len(lengths)
    for piece in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [(room, row) for row, room in enumerate(rooms) if room >= lengths[piece]]
        row = min(fitting)[1] if fitting else len(rooms)
        if not fitting:
            rooms.append(size)
        rooms[row] -= int(lengths[piece])
        found[piece] = row
    return found


@pytest.mark.parametrize("size", [1, 7, 30, 64])
def test_pieces_of_equal_length_placed_together_are_best_fit(size: int) -> None:
    for seed in range(25):
        lengths = np.random.default_rng(seed).integers(1, size + 1, 1 + 7 * seed)
        ours, plain = best_fit(lengths, size), one_by_one(lengths, size)
        loads = [np.sort(np.bincount(rows, weights=lengths).astype(int)).tolist() for rows in (ours, plain)]
        assert loads[0] == loads[1] and max(loads[0]) <= size


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("seq", [8, 64])
def test_each_target_is_predicted_once_from_the_tokens_before_it(seq: int, alone: bool) -> None:
    tokens, starts = documents_of(3)
    rows = DocumentRows(tokens, starts, seq, alone)
    batch = rows.read(np.arange(rows.count))
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == dict.fromkeys(
        ("tokens", "targets", "segment_ids", "positions", "loss_mask"), ((rows.count, seq), np.dtype("int32"))
    )
    found = []
    for row in range(rows.count):
        one = {name: x[row] for name, x in batch.items()}
        real = one["loss_mask"] == 1
        assert (np.diff(one["segment_ids"]) >= 0).all() and (np.diff(one["loss_mask"]) <= 0).all()
        for segment in range(one["segment_ids"].max() + 1):
            at = one["segment_ids"] == segment
            assert one["positions"][at].tolist() == list(range(at.sum()))
            assert real[at].all() or not real[at].any()
            if real[at].any():
                assert one["tokens"][at][1:].tolist() == one["targets"][at][:-1].tolist()
                found.append((one["tokens"][at].tolist(), int(one["targets"][at][-1])))
        assert not alone or len(set(one["segment_ids"][real])) == 1
    expected = []
    for start, end in itertools.pairwise(starts):
        ids = tokens[start:end].tolist()
        for at in range(0, len(ids) - 1, seq):
            piece = ids[at : at + seq + 1]
            expected.append((piece[:-1], piece[-1]))
    assert sorted(found) == sorted(expected)


def test_no_rows_are_arrays_without_rows() -> None:
    batch = DocumentRows(*documents_of(3), 8).read(np.arange(0))
    names = ("tokens", "targets", "segment_ids", "positions", "loss_mask")
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == dict.fromkeys(names, ((0, 8), np.dtype("int32")))


def test_packing_takes_fewer_rows_than_padding_and_says_how_full_they_are() -> None:
    tokens, starts = documents_of(1, count=400, longest=64)
    packed, padded = (DocumentRows(tokens, starts, 64, alone) for alone in (False, True))
    assert packed.count < 0.6 * padded.count and packed.density > 0.95
    mask = packed.read(np.arange(packed.count))["loss_mask"]
    assert packed.density == pytest.approx(mask.mean(), abs=1e-12)
    assert packed.identity() != padded.identity()


def test_processes_read_their_parts_of_the_same_batch() -> None:
    rows = DocumentRows(*documents_of(2), 32)
    numbers = np.array([3, 0, 2, 1])
    one = EpochPlan(rows, 4).read(numbers)
    two = [EpochPlan(rows, 4, process, 2).read(numbers) for process in range(2)]
    for name, x in one.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in two]), x)


def test_too_few_held_out_rows_are_filled_with_empty_ones() -> None:
    rows = DocumentRows(*documents_of(2, count=3, longest=8), 8, alone=True)
    numbers = rows.spread(8, 5)
    batch = rows.read(numbers)
    assert len(numbers) == 8 and batch["loss_mask"].any(1).sum() == rows.count < 8
    assert batch["positions"][-1].tolist() == list(range(8))
    assert rows.spread(1, 2).size == 2


def test_errors() -> None:
    tokens, starts = documents_of(2)
    with raises(DataError, "two tokens"):
        DocumentRows(np.zeros(3, int), np.array([0, 1, 2, 3]), 8)
    with raises(DataError, "seq=4000"):
        EpochPlan(DocumentRows(tokens, starts, 4000), 4)
    with raises(DataError, "model.vocab"):
        DocumentRows(tokens, starts, 8, vocab=50).read(np.arange(4))
