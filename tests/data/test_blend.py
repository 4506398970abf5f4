"""Blends: shares that hold at every row, orders that need no history, and the same batches for any processes."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from error_texts import raises
from profiles import few

from jaxpar.data.blend import Blend, BlendOrder, deal, permuted
from jaxpar.data.loader import Batches, plan_eval_batches
from jaxpar.data.packing import DocumentRows
from jaxpar.data.windows import EpochPlan, Windows
from jaxpar.errors import DataError

WEIGHTS = (0.6, 0.3, 0.1)
SIZES = (900, 500, 70)


def blend_of(weights: tuple[float, ...] = WEIGHTS, sizes: tuple[int, ...] = SIZES) -> Blend:
    """Sources whose tokens are 1000 times their number and then count up."""
    names = [f"source {part}" for part in range(len(sizes))]
    parts = [Windows(1000 * part + np.arange(size), 4) for part, size in enumerate(sizes)]
    return Blend(names, parts, weights)


def stream_of(blend: Blend, seed: int = 0, index: int = 0, count: int = 1) -> Batches:
    plan = EpochPlan(blend, 8, index, count)
    return Batches(plan, seed=seed, order=BlendOrder(blend, 8, seed))


def taken(stream: Batches, steps: int) -> list[np.ndarray]:
    return [next(stream)["tokens"] for _ in range(steps)]


@pytest.mark.parametrize("shares", [(3, 1), (1, 1, 1), (700, 299, 1), (1,), (1, 1000)])
def test_each_source_has_its_share_after_any_number_of_rows(shares: tuple[int, ...]) -> None:
    parts, positions = deal(np.arange(3000), shares)
    for part, share in enumerate(shares):
        count = np.cumsum(parts == part)
        exact = np.array([float(Fraction(share, sum(shares)) * (n + 1)) for n in range(3000)])
        assert np.abs(count - exact).max() < len(shares)
        assert positions[parts == part].tolist() == list(range(count[-1]))
    later = deal(np.arange(1000, 1100), shares)
    assert later[0].tolist() == parts[1000:1100].tolist() and later[1].tolist() == positions[1000:1100].tolist()


@pytest.mark.parametrize("count", few([1, 2, 3, 10, 64, 65, 1000], 3))
def test_a_permutation_moves_each_number_once_and_follows_its_key(count: int) -> None:
    orders = [permuted(np.arange(count), count, key) for key in range(20)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(count))
    assert permuted(np.array([count - 1]), count, 7)[0] == orders[7][-1]
    if count >= 64:
        assert len({tuple(order) for order in orders}) == 20
        first = np.array([permuted(np.arange(4), count, key) for key in range(4000)]) / (count - 1)
        assert np.abs(first.mean(0) - 0.5).max() < 0.03 and abs(np.corrcoef(first[:, 0], first[:, 1])[0, 1]) < 0.06


def test_a_permutation_stays_what_it_is() -> None:
    assert permuted(np.arange(10), 10, key=3).tolist() == [5, 0, 3, 9, 1, 4, 8, 2, 7, 6]


def test_the_rows_of_a_blend_are_in_its_shares_and_each_pass_has_each_row_once() -> None:
    blend = blend_of()
    rows = np.concatenate(taken(stream_of(blend), 200))
    parts = rows[:, 0] // 1000
    assert np.abs(np.bincount(parts) / len(rows) - WEIGHTS).max() < 2e-3
    for part, source in enumerate(blend.parts):
        numbers = (rows[parts == part][:, 0] - 1000 * part) // 4
        passes = [numbers[at : at + source.count] for at in range(0, len(numbers), source.count)]
        for one in passes[:-1]:
            assert sorted(one.tolist()) == list(range(source.count))
        if len(passes) > 2:
            assert passes[0].tolist() != passes[1].tolist()


def test_batches_do_not_depend_on_processes_and_do_on_the_seed() -> None:
    one = taken(stream_of(blend_of()), 12)
    four = [taken(stream_of(blend_of(), index=index, count=4), 12) for index in range(4)]
    for step, batch in enumerate(one):
        np.testing.assert_array_equal(np.concatenate([rows[step] for rows in four]), batch)
    assert not np.array_equal(one[0], taken(stream_of(blend_of(), seed=1), 1)[0])


def test_a_position_continues_exactly_and_fits_only_its_own_blend() -> None:
    stream = stream_of(blend_of())
    taken(stream, 33)
    state = json.loads(json.dumps(stream.get_state()))
    after = taken(stream, 5)
    other = stream_of(blend_of())
    other.set_state(state)
    for x, y in zip(after, taken(other, 5), strict=True):
        np.testing.assert_array_equal(x, y)
    with raises(DataError, "shares", "314573"):
        stream_of(blend_of((0.5, 0.4, 0.1))).set_state(state)
    with raises(DataError, "sha256:eefcdec04ddc52d6"):
        stream_of(blend_of(sizes=(900, 500, 71))).set_state(state)


def test_held_out_batches_have_the_shares_and_no_row_twice() -> None:
    found = plan_eval_batches(EpochPlan(blend_of(sizes=(90, 50, 70)), 8, heldout=True), 100)
    rows = np.concatenate([batch["tokens"] for batch in found])
    assert len(np.unique(rows[:, 0])) == len(rows) == 32  # 18 or more rows of the first, which has 22
    assert np.bincount(rows[:, 0] // 1000).tolist() == [20, 9, 3]
    with raises(DataError, "seq=4", "batch=8"):
        plan_eval_batches(EpochPlan(blend_of(sizes=(9, 50, 70)), 8, heldout=True), 2)


def test_sources_that_cannot_be_blended() -> None:
    with raises(DataError, "blend", "2 must"):
        blend_of((1, 1, 0))
    with raises(DataError, "seq=4", "blend: source 2"):
        blend_of(sizes=(900, 500, 4))


def test_packed_sources_tell_their_documents_apart() -> None:
    tokens = [np.array([1, 2, 0, 3, 4, 5, 0, 6, 7, 8, 9, 0]), np.array([11, 12, 13, 0, 14, 15, 0])]
    parts = [DocumentRows(tokens[0], np.array([0, 3, 7, 12]), 4), DocumentRows(tokens[1], np.array([0, 4, 7]), 4)]
    blend = Blend(["a", "b"], parts, (0.5, 0.5))
    numbers = np.array([parts[0].count, 0, parts[0].count + 1, 1])
    assert blend.packed
    want = [parts[part].segments(np.array([row]))[0] for part, row in ((1, 0), (0, 0), (1, 1), (0, 1))]
    np.testing.assert_array_equal(blend.segments(numbers), want)
    assert blend.segments(numbers).dtype == np.int32
    np.testing.assert_array_equal(blend.read(numbers)["segment_ids"], want)
