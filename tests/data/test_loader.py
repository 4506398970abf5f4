"""The content of batches, their equality for every process count, and saved positions that restore safely."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import numpy as np
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples, few

from jaxpar.data import Batch, Batches, batches, eval_batches
from jaxpar.errors import DataError, MissingExtraError

TOKENS = np.arange(1000)  # each token is its own position, so a row identifies its window


def take(stream: Batches, count: int) -> list[Batch]:
    return list(itertools.islice(stream, count))


def windows_of(taken: list[Batch], seq: int) -> list[list[int]]:
    """The numbers of the windows in each batch, in row order."""
    return [(b["tokens"][:, 0] // seq).tolist() for b in taken]


def test_targets_are_the_tokens_one_place_on() -> None:
    for b in take(batches(TOKENS, batch=6, seq=8), 5):
        assert b["tokens"].shape == b["targets"].shape == (6, 8)
        assert b["tokens"].dtype == b["targets"].dtype == np.int32
        assert b["tokens"].flags.c_contiguous
        assert b["targets"].flags.c_contiguous
        np.testing.assert_array_equal(b["targets"], b["tokens"] + 1)
        np.testing.assert_array_equal(b["tokens"], b["tokens"][:, :1] + np.arange(8))
        np.testing.assert_array_equal(b["tokens"][:, 0] % 8, 0)


def test_documents_are_told_apart_and_every_process_gets_the_order_of_all_rows() -> None:
    text = np.array([5, 0, 5, 5, 5, 0, 0, 5, 5, 5, 5, 5, 5])
    seen = []

    def backwards(ids: np.ndarray) -> np.ndarray:
        seen.append(ids)
        return np.arange(3, -1, -1, dtype=np.int32)

    how: dict[str, Any] = {"batch": 2, "seq": 4, "separator": 0, "arrange": backwards}
    (both,) = eval_batches(text, max_batches=1, **how)
    assert both["segment_ids"].tolist() == [[0, 0, 1, 1], [0, 0, 1, 2]]
    assert both["order"].tolist() == [[3, 2, 1, 0]] * 2
    (half,) = eval_batches(text, max_batches=1, process_index=1, process_count=2, **how)
    assert half["segment_ids"].tolist() == [[0, 0, 1, 2]] and half["order"].tolist() == [[3, 2, 1, 0]]
    np.testing.assert_array_equal(*seen)


def test_a_position_in_packed_documents_is_none_in_others() -> None:
    packed, plain = (batches(TOKENS, batch=4, seq=8, **how) for how in ({"separator": 0}, {}))
    with raises(DataError, "separator", "absent"):
        plain.set_state(packed.get_state())


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_visits_windows_at_most_once_and_drops_less_than_a_batch(shuffle: bool) -> None:
    stream = batches(TOKENS, batch=10, seq=8, epochs=1, shuffle=shuffle)
    seen = list(itertools.chain(*windows_of(list(stream), 8)))
    assert stream.steps_per_epoch == 12
    assert len(seen) == len(set(seen)) == 120  # of 124 windows
    assert set(seen) <= set(range(124))
    assert (seen == sorted(seen)) is not shuffle


def test_the_last_window_of_the_text_is_used_when_it_fits_exactly() -> None:
    (only,) = batches(np.arange(2 * 3 + 1), batch=2, seq=3, shuffle=False, epochs=1)
    assert only["targets"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_epochs_differ_and_the_seed_fixes_them() -> None:
    def order(seed: int) -> list[list[int]]:
        return windows_of(list(batches(TOKENS, batch=31, seq=8, seed=seed, epochs=3)), 8)

    steps = 4
    first = order(0)
    assert len(first) == 3 * steps
    epochs = [list(itertools.chain(*first[e * steps : (e + 1) * steps])) for e in range(3)]
    assert all(sorted(e) == list(range(124)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert order(0) == first
    assert order(1) != first


@pytest.mark.parametrize("seed", [0, 5])
def test_neighbouring_seeds_are_not_one_order_shifted_by_an_epoch(seed: int) -> None:
    this = windows_of(take(batches(TOKENS, batch=31, seq=8, seed=seed), 8), 8)
    following = windows_of(take(batches(TOKENS, batch=31, seq=8, seed=seed + 1), 4), 8)
    assert this[4:] != following


def test_any_integer_is_a_seed() -> None:
    seeds: list[Any] = [-1, 1, 2**70, np.int64(3)]
    orders = [windows_of(take(batches(TOKENS, batch=31, seq=8, seed=s), 1), 8) for s in seeds]
    assert all(a != b for a, b in itertools.combinations(orders, 2))


def test_without_shuffling_every_epoch_is_in_order() -> None:
    taken = windows_of(take(batches(np.arange(21), batch=2, seq=4, shuffle=False), 5), 4)
    assert taken == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


@examples(12)
@given(
    rows=st.integers(1, 3),
    process_count=st.integers(1, 4),
    windows=st.integers(12, 40),
    seq=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
)
def test_processes_together_see_exactly_what_one_process_sees(
    rows: int, process_count: int, windows: int, seq: int, seed: int, shuffle: bool
) -> None:
    tokens = np.arange(windows * seq + 1)
    options: dict[str, Any] = {"batch": rows * process_count, "seq": seq, "seed": seed, "shuffle": shuffle}
    count = 2 * (windows // (rows * process_count)) + 1  # into the third epoch
    alone = take(batches(tokens, **options), count)
    shares = [
        take(batches(tokens, **options, process_index=p, process_count=process_count), count)
        for p in range(process_count)
    ]
    for step, whole in enumerate(alone):
        for key in ("tokens", "targets"):
            assert all(share[step][key].shape == (rows, seq) for share in shares)
            np.testing.assert_array_equal(np.concatenate([share[step][key] for share in shares]), whole[key])


@pytest.mark.parametrize("steps", few([0, 1, 3, 4, 11], 2))
def test_a_restored_position_continues_exactly(steps: int) -> None:
    def stream() -> Batches:
        return batches(TOKENS, batch=30, seq=8, seed=7, process_index=1, process_count=2)

    running = stream()
    take(running, steps)
    saved = json.dumps(running.get_state())
    expected = take(running, 6)  # crosses an epoch boundary: an epoch has 4 batches
    restored = stream()
    take(restored, 2)  # batches read ahead before the restore must not come out after it
    restored.set_state(json.loads(saved))
    for want, got in zip(expected, take(restored, 6), strict=True):
        np.testing.assert_array_equal(want["tokens"], got["tokens"])
        np.testing.assert_array_equal(want["targets"], got["targets"])
    assert restored.get_state() == running.get_state()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"batch": 8}, ["batch was"]),
        ({"seq": 5}, ["seq was"]),
        ({"seed": 2}, ["seed was"]),
        ({"shuffle": False}, ["shuffle was"]),
        ({"process_index": 1}, ["process_index was"]),
        ({"process_count": 4}, ["process_count was"]),
        ({"tokens": TOKENS[:-1]}, ["tokens was", "content was"]),
        ({"tokens": TOKENS[::-1]}, ["content was"]),
        ({"seq": 2, "batch": 8, "seed": 3}, ["batch was", "seq was", "seed was"]),
    ],
)
def test_a_position_of_another_run_is_refused_naming_every_difference(change: dict[str, Any], names: list[str]) -> None:
    options: dict[str, Any] = {"tokens": TOKENS, "batch": 4, "seq": 8, "seed": 1, "process_count": 2}
    saved = batches(**options).get_state()
    with raises(DataError, *names):
        batches(**(options | change)).set_state(saved)


def test_a_position_of_another_version_is_refused() -> None:
    stream = batches(TOKENS, batch=4, seq=8)
    saved = stream.get_state()
    saved["fingerprint"] |= {"version": 99, "colour": "red"}
    del saved["fingerprint"]["seed"]
    with raises(DataError, "version", "seed", "colour"):
        stream.set_state(saved)


def test_the_integer_type_of_the_tokens_is_no_difference() -> None:
    small = np.arange(200, dtype=np.uint8)
    saved = batches(small, batch=4, seq=8).get_state()
    for dtype in (np.int64, np.uint32, ">i2"):
        stream = batches(small.astype(dtype), batch=4, seq=8)
        stream.set_state(saved)
        assert next(stream)["tokens"].dtype == np.int32


@pytest.mark.parametrize("junk", [{}, {"fingerprint": {}}, {"fingerprint": 3, "position": {}}, None, "text"])
def test_what_is_no_position_is_refused(junk: Any) -> None:
    with raises(DataError, "get_state()"):
        batches(TOKENS, batch=4, seq=8).set_state(junk)


@pytest.mark.parametrize("position", [{}, {"next_index": 32}, {"next_index": -1}, {"next_index": "2"}, None])
def test_a_position_that_does_not_exist_leaves_the_stream_where_it_was(position: Any) -> None:
    stream = batches(TOKENS, batch=4, seq=8, shuffle=False, epochs=1)  # 31 batches
    next(stream)
    with raises(DataError, "next_index", "31"):
        stream.set_state(stream.get_state() | {"position": position})
    assert windows_of([next(stream)], 8) == [[4, 5, 6, 7]]


def test_a_finished_run_can_be_continued_with_more_epochs() -> None:
    finished = batches(TOKENS, batch=31, seq=8, epochs=1)
    assert len(list(finished)) == 4
    longer = batches(TOKENS, batch=31, seq=8, epochs=2)
    longer.set_state(finished.get_state())
    assert windows_of(list(longer), 8) == windows_of(take(batches(TOKENS, batch=31, seq=8), 8), 8)[4:]


def test_changing_a_saved_state_does_not_change_the_stream() -> None:
    stream = batches(TOKENS, batch=4, seq=8)
    stream.get_state()["fingerprint"]["seed"] = 5
    assert stream.get_state()["fingerprint"]["seed"] == 0


def test_close_stops_the_stream_and_may_be_repeated() -> None:
    stream = batches(TOKENS, batch=4, seq=8)
    next(stream)
    stream.close()
    stream.close()
    with pytest.raises(ValueError, match="close"):
        next(stream)


def test_evaluation_is_spread_evenly_in_order_and_repeatable() -> None:
    evaluation = eval_batches(TOKENS, batch=40, seq=8, max_batches=10)
    rows = [row for batch in windows_of(evaluation, 8) for row in batch]
    assert rows == sorted(set(rows)) and len(rows) == 120  # 3 batches of the 124 windows, none twice
    assert all((b["targets"] == b["tokens"] + 1).all() for b in evaluation)
    few = windows_of(eval_batches(TOKENS, batch=4, seq=8, max_batches=1), 8)
    assert few == [[0, 31, 62, 93]] == windows_of(eval_batches(TOKENS, batch=4, seq=8, max_batches=1), 8)


def test_evaluation_shares_rows_between_processes() -> None:
    whole = eval_batches(TOKENS, batch=6, seq=8, max_batches=3)
    shares = [eval_batches(TOKENS, batch=6, seq=8, max_batches=3, process_index=p, process_count=3) for p in range(3)]
    for step, b in enumerate(whole):
        np.testing.assert_array_equal(np.concatenate([share[step]["targets"] for share in shares]), b["targets"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 6, "process_count": 4}, "batch=6"),
        ({"batch": 0}, "batch"),
        ({"batch": 2.0}, "2.0"),
        ({"seq": -3}, "-3"),
        ({"process_count": 0}, "process_count must"),
        ({"process_index": -1}, "-1"),
        ({"process_index": 2, "process_count": 2}, "process_index=2"),
        ({"seq": 500, "batch": 2}, "seq=500"),
        ({"tokens": np.zeros(0, int)}, "hold 0"),
        ({"tokens": np.zeros((2, 600), int)}, "(2"),
        ({"tokens": np.zeros(1000)}, "float64"),
        ({"tokens": np.full(1000, 2**31)}, "int32"),
        ({"arrange": np.argsort}, "arrange orders"),
    ],
)
def test_unusable_sizes_and_tokens_are_refused_by_both(options: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"tokens": TOKENS, "batch": 4, "seq": 8, **options}
    with raises(DataError, words):
        batches(**arguments)
    with raises(DataError, words):
        eval_batches(**arguments, max_batches=1)


def test_other_arguments_are_checked_too() -> None:
    with raises(DataError, "epochs", "got 0"):
        batches(TOKENS, batch=4, seq=8, epochs=0)
    with raises(DataError, "seed", "'x'"):
        batches(TOKENS, batch=4, seq=8, seed="x")  # type: ignore[arg-type]
    with raises(DataError, "max_batches"):
        eval_batches(TOKENS, batch=4, seq=8, max_batches=0)


def test_without_grain_training_says_how_to_get_it_and_evaluation_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grain", None)  # what an import finds when the package is missing
    with raises(MissingExtraError, "grain"):
        batches(TOKENS, batch=4, seq=8)
    assert len(eval_batches(TOKENS, batch=4, seq=8, max_batches=1)) == 1


def test_a_broken_grain_is_not_reported_as_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError("No module named 'etils'", name="etils")

    monkeypatch.setattr("jaxpar.utils.extras.importlib.import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="etils"):
        batches(TOKENS, batch=4, seq=8)
