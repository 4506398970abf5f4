"""Which rows each process reads: those that its devices hold, whatever else the processes shard."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import jaxpar as jp
from jaxpar.errors import LayoutError
from jaxpar.training import batch as batch_module
from jaxpar.training.batch import RowShare, row_share, shard_batch, share_of


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
@examples(30)
def test_shares_cover_the_rows_once(shares: int, processes: int, shards: int) -> None:
    """``processes`` processes hold each of ``shares`` shares, of ``shards`` shards each."""
    held = {
        share * processes + i: range(share * shards, (share + 1) * shards)
        for share in range(shares)
        for i in range(processes)
    }
    found = [share_of(held, rank, ("data",)) for rank in held]
    assert [one.index for one in found] == [rank // processes for rank in held]
    assert {one.count for one in found} == {shares} and {one.total for one in found} == {shares * shards}


def test_overlapping_shares_are_an_error() -> None:
    with pytest.raises(LayoutError) as caught:
        share_of({0: {0}, 1: {0, 1}, 2: {1}}, 0, ("replica", "data"))
    assert str(caught.value) == (
        "the rows of a batch are in 2 shards over replica × data, and processes hold some of the same shards but not "
        "all: 0: [0], 1: [0, 1], 2: [1]. Remedy: a number of processes that divides 2 or is a multiple of it."
    )


def test_one_process_reads_all_rows() -> None:
    layout = jp.Layout(jp.MeshSpec(data=2, context=4).build(), jp.Rules(batch="data", seq="context"))
    assert row_share(layout, {"x": ("batch", "seq")}) == RowShare(0, 1, (0, 1), 2)


@pytest.mark.parametrize("shards", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_rows_go_to_the_devices_of_their_shards(shards: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The share's rows are those of its shards in order, and other dims are cut from whole arrays."""
    monkeypatch.setattr(batch_module.jax, "process_count", lambda: 2)
    layout = jp.Layout(jp.MeshSpec(data=4, context=2).build(), jp.Rules(batch="data", seq="context"))
    x = np.arange(8 * 6).reshape(8, 6)
    placed = shard_batch(layout, {"x": x}, {"x": ("batch", "seq")}, RowShare(0, 1, shards, 4))["x"]
    wanted = np.concatenate([x[2 * i : 2 * i + 2] for i in np.argsort(shards)])
    assert placed.sharding.spec == layout.spec(("batch", "seq"), (8, 6))
    np.testing.assert_array_equal(placed, wanted)


def test_first_dims_with_other_rules_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module.jax, "process_count", lambda: 2)
    layout = jp.Layout(jp.MeshSpec(data=4, context=2).build(), jp.Rules(batch="data", rows="context"))
    with pytest.raises(LayoutError) as caught:
        shard_batch(layout, {"y": np.zeros((8,))}, {"y": ("rows",)}, RowShare(0, 1, (0, 1, 2, 3), 4))
    assert str(caught.value) == (
        "batch/y [8]: its rows are in 2 shards, but those of the batch's first array in 4. Remedy: give the first dims "
        "of all arrays of the batch one name."
    )
