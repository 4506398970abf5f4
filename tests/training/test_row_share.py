"""Which rows each process reads: those that its devices hold, whatever else the processes shard."""

from __future__ import annotations

import numpy as np
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import jaxpar as jp
from jaxpar.data.examples import ExamplePlan
from jaxpar.errors import LayoutError
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
    with raises(LayoutError, "replica × data"):
        share_of({0: {0}, 1: {0, 1}, 2: {1}}, 0, ("replica", "data"))


def test_one_process_reads_all_rows() -> None:
    layout = jp.Layout(jp.MeshSpec(data=2, context=4).build(), jp.Rules(batch="data", seq="context"))
    assert row_share(layout, {"x": ("batch", "seq")}) == RowShare(0, 1, (0, 1), 2)


def test_all_dims_are_cut_from_whole_rows() -> None:
    layout = jp.Layout(jp.MeshSpec(data=4, context=2).build(), jp.Rules(batch="data", seq="context"))
    x = np.arange(8 * 6).reshape(8, 6)
    placed = shard_batch(layout, {"x": x}, {"x": ("batch", "seq")}, RowShare(0, 1, (0, 1, 2, 3), 4))["x"]
    assert placed.sharding.spec == layout.spec(("batch", "seq"), (8, 6))
    np.testing.assert_array_equal(placed, x)


class Recorded:
    """An array outside of memory that records what is read of it."""

    def __init__(self, values: np.ndarray):
        self.values, self.read = values, list[tuple[slice, ...]]()
        self.shape, self.dtype = values.shape, values.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        self.read.append(index)
        return self.values[index]


def test_only_the_slices_of_the_devices_are_read() -> None:
    layout = jp.Layout(
        jp.MeshSpec(data=2, context=2, ulysses=2).build(), jp.Rules(batch="data", height="context", width="ulysses")
    )
    images = [Recorded(np.arange(24).reshape(4, 6) + 100 * i) for i in range(4)]
    examples = [{"image": image, "label": i} for i, image in enumerate(images)]
    batch = ExamplePlan("images", examples, batch=4).read(np.arange(4))
    assert all(image.read == [] for image in images) and batch["image"].shape == (4, 4, 6)
    dims = {"image": ("batch", "height", "width"), "label": ("batch",)}
    placed = shard_batch(layout, batch, dims, row_share(layout, dims))
    np.testing.assert_array_equal(placed["image"], [image.values for image in images])
    np.testing.assert_array_equal(placed["label"], range(4))
    quarters = {(h, w) for h in ((0, 2), (2, 4)) for w in ((0, 3), (3, 6))}
    for image in images:
        bounds = [tuple((part.start, part.stop) for part in index) for index in image.read]
        assert set(bounds) == quarters and len(bounds) == 4


def test_first_dims_with_other_rules_are_an_error() -> None:
    layout = jp.Layout(jp.MeshSpec(data=4, context=2).build(), jp.Rules(batch="data", rows="context"))
    with raises(LayoutError, "batch/y", "[8]"):
        shard_batch(layout, {"y": np.zeros((4,))}, {"y": ("rows",)}, RowShare(0, 2, (0, 1), 4))
