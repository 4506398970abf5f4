"""Load balance of attention: counts of visible scores, counts of visited tiles, and orders that even them out."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from attention_reference import masks
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from interpreters import python
from profiles import examples, few

import jaxpar as jp
from jaxpar.errors import ConfigError, LayoutError, MissingExtraError
from jaxpar.parallel.attention.load_balance import grid, grid_of, places
from jaxpar.parallel.attention.plot import hues, painted
from jaxpar.parallel.attention.tiled.blockwise import chosen, tokens_in_blocks
from jaxpar.parallel.attention.tiled.tile import TileArrays, TileSpec, Tokens

CAUSAL = jp.Mask(causal=True)
REST = ("batch", "heads", "kv_heads", "head_dim")
ORDERS = ("contiguous", "zigzag", "striped")
MASKS = masks(st.integers(1, 9), st.sampled_from([None, lambda q, k: (q + k) % 3 > 0]))


@st.composite
def packings(draw: st.DrawFn, seq: int, kinds: tuple[str, ...] = ("packed", "mixed")) -> np.ndarray:
    """Documents of any lengths followed by padding; or tokens of four documents and padding in any order."""
    if draw(st.sampled_from(kinds)) == "mixed":
        return np.random.default_rng(draw(st.integers(0, 99))).integers(-1, 4, seq)
    ends = sorted(draw(st.lists(st.integers(1, seq), max_size=8)))
    ids = np.searchsorted(ends, np.arange(seq), "right")
    return np.where(np.arange(seq) < draw(st.integers(seq // 2, seq)), ids, -1)


def seen(mask: jp.Mask, at: np.ndarray, segments: np.ndarray | None) -> np.ndarray:
    """Whether each score is visible when tokens are in the order ``at``."""
    visible = np.broadcast_to(mask.visible(at[:, None], at[None]), (len(at),) * 2)
    if segments is None:
        return visible
    own = segments[at]
    return visible & (own[:, None] == own[None]) & (own >= 0)[:, None]


@given(st.data())
@examples(60)
def test_it_counts_what_looking_at_every_score_counts(data: st.DataObject) -> None:
    seq, ways, block = 48, data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(2, 12))
    mask, segments = data.draw(MASKS), data.draw(st.one_of(st.none(), packings(seq)))
    order = data.draw(st.one_of(st.sampled_from(ORDERS), st.permutations(range(seq)).map(np.array)))
    found = jp.context.balance(mask, seq, ways, order, block=block, segment_ids=segments)
    at = places(order, seq, ways).reshape(-1)
    want = seen(mask, at, segments).reshape(ways, seq // ways, ways, seq // ways).sum((1, 3))
    for device in range(ways):
        assert found.visible[device].tolist() == [want[device, (device - hop) % ways] for hop in range(ways)]
    assert (found.visited >= found.visible).all()


@pytest.mark.parametrize(
    ("mask", "segmented"),
    few(
        [
            (CAUSAL, False),
            (jp.Mask(causal=True, window=6, prefix=3), True),
            (jp.Mask(causal=False, chunk=8), False),
            (jp.Mask(causal=False, where=lambda q, k: (q - k) % 16 < 4), True),
        ],
        2,
        names=2,
    ),
    ids=["causal", "window", "chunk", "where"],
)
def test_the_tiles_are_those_that_attention_visits(mask: jp.Mask, segmented: bool) -> None:
    at = places("zigzag", 40, 2)
    ids = np.repeat([0, 1, 2, -1], [9, 6, 21, 4]) if segmented else None
    found = grid(mask, at, 8, ids)
    columns = [tokens_in_blocks(_tokens(row, ids), 8) for row in at]
    visited, whole = np.zeros_like(found.visited), np.zeros_like(found.visited)
    for i, q in enumerate(columns):
        for j, k in enumerate(columns):
            for n, tiles in enumerate(chosen(TileSpec(mask, 1.0), q, k, TileArrays())):
                numbers = np.asarray(tiles.numbers)[: int(tiles.count)]
                for kind in (visited, whole)[: 2 - n]:
                    kind[3 * i + numbers // 3, 3 * j + numbers % 3] = True
    np.testing.assert_array_equal(found.visited, visited)
    np.testing.assert_array_equal(found.visible == found.size, whole)


def _tokens(row: np.ndarray, ids: np.ndarray | None) -> Tokens:
    return Tokens(row.astype(np.int32), None if ids is None else jnp.asarray(ids[row][None], jnp.int32))


@pytest.mark.parametrize(("seq", "ways"), [(4096, 8), (4096, 2), (65536, 16), (131072, 64)])
def test_zigzag_is_even_under_a_causal_mask(seq: int, ways: int) -> None:
    found = jp.context.balance(CAUSAL, seq, ways, "zigzag")
    assert found.ratio <= 1.02 and found.tile_ratio <= 1.02
    assert sum(found.per_device) == seq * (seq + 1) / 2
    assert sum(found.per_hop) == pytest.approx(found.ratio * sum(found.per_device) / ways)


def test_contiguous_is_not_and_striped_nearly() -> None:
    ratio = {order: jp.context.balance(CAUSAL, 4096, 8, order).ratio for order in ORDERS}
    # In every hop but the first, some device computes a full square. In the first, it computes half of one.
    assert ratio["contiguous"] == pytest.approx(2 - 1 / 8, abs=1e-3)
    assert 1 < ratio["striped"] <= 1.02
    assert jp.context.balance(CAUSAL, 4096, 8, "contiguous", impl="gather").ratio == pytest.approx(2 - 1 / 8, abs=1e-3)
    assert jp.context.balance(CAUSAL, 4096, 8, "contiguous", impl="ulysses").ratio == 1


def test_rows_of_scores_are_computed_whole_and_groups_share_a_ring() -> None:
    ring, whole = (jp.context.balance(CAUSAL, 64, 4, block=8, impl=impl) for impl in ("ring", "ring_self_attention"))
    np.testing.assert_array_equal(whole.visible, ring.visible)
    assert (whole.visited == 16 * 16).all() and whole.tile_ratio == 1
    near = jp.context.balance(jp.Mask(causal=True, window=8), 64, 4, "contiguous", impl="ring_self_attention")
    assert near.visited.sum(0).tolist() == [4 * 256, 4 * 256, 0, 0]  # the window reaches no further than the neighbour
    pair = jp.context.balance(CAUSAL, 64, 2, "contiguous", block=8)
    groups = jp.context.balance(CAUSAL, 64, 8, "contiguous", block=8, impl="hybrid", ulysses=4)
    np.testing.assert_array_equal(groups.visible, np.repeat(pair.visible / 4, 4, 0))
    assert groups.ratio == pair.ratio and len(groups.per_device) == 8 and "8 devices, hybrid, contig" in groups.report()


def test_where_nothing_is_seen_nothing_is_uneven() -> None:
    found = jp.context.balance(CAUSAL, 16, 2, segment_ids=np.full(16, -1))
    assert found.ratio == found.tile_ratio == 1 and "-  " in found.report()


def test_the_report() -> None:
    assert jp.context.balance(jp.Mask(causal=True, window=8), 32, 2, "contiguous", block=8).report().splitlines() == [
        "causal, window 8: 32 tokens over 2 devices, ring, contiguous, tiles of 8",
        "device  visible scores  of the mean  in computed tiles",
        "     0             100       87.7 %                192",
        "     1             128      112.3 %                256",
        "critical path, 2 hops: 1.123 × the mean in visible scores, 1.143 × in computed tiles",
    ]
    assert jp.context.balance(jp.Mask(causal=False), 32, 2, impl="ulysses").report().splitlines()[0] == (
        "everything: 32 tokens over 2 devices, ulysses, tiles of 32"
    )


@pytest.mark.parametrize(
    ("error", "call", "name"),
    [
        (ConfigError, lambda: jp.context.balance(CAUSAL, 16, 2, impl="rings"), "ring_self_attention"),
        (LayoutError, lambda: jp.context.balance(CAUSAL, 16, 2, np.arange(8)), "balance: order"),
        (LayoutError, lambda: jp.context.balance(CAUSAL, 16, 3, np.arange(16)), "balance: 16"),
        (
            LayoutError,
            lambda: jp.context.balance(CAUSAL, 16, 2, segment_ids=np.zeros((1, 16), int)),
            "balance: segment_ids",
        ),
        (LayoutError, lambda: jp.context.balance(CAUSAL, 16, 4, impl="hybrid", ulysses=3), "ulysses=3"),
        (LayoutError, lambda: jp.context.balanced_packing(np.zeros(32, int), 8), "32"),
        (ConfigError, lambda: jp.context.balanced_packing(np.zeros(32, int), 4, chunks=3), "balanced_packing: chunks"),
        (
            ConfigError,
            lambda: jp.context.balanced_packing(np.zeros(64, int), 4, impl="ulysses"),
            "balanced_packing: impl",
        ),
    ],
    ids=["impl", "order", "ways", "segments", "groups", "pieces", "chunks", "balancer's impl"],
)
def test_errors_say_what_is_wanted(error: type[Exception], call: Any, name: str) -> None:
    with raises(error, name):
        call()


@given(st.data())
@examples(20)
def test_a_balanced_order_is_one_and_no_worse_than_zigzag(data: st.DataObject) -> None:
    seq, ways, chunks = 64, data.draw(st.sampled_from([2, 4])), data.draw(st.sampled_from([2, 4, 8]))
    segments, impl = data.draw(packings(seq)), data.draw(st.sampled_from(["ring", "gather"]))
    order = jp.context.balanced_packing(segments, ways, chunks=chunks, impl=impl)
    assert sorted(order.tolist()) == list(range(seq))
    starts = order.reshape(ways * chunks, -1)
    assert (np.diff(starts, axis=1) == 1).all() and (np.diff(order.reshape(ways, -1), axis=1) > 0).all()
    found, zigzag = (
        jp.context.balance(CAUSAL, seq, ways, o, segment_ids=segments, impl=impl) for o in (order, "zigzag")
    )
    assert found.ratio <= zigzag.ratio


@pytest.mark.parametrize(("impl", "bound"), [("ring", 1.1), ("gather", 1.01)])
def test_packed_documents_come_out_even(impl: Any, bound: float) -> None:
    lengths = [2048, 100, 700, 30, 400, 12, 350, 220, 90, 146]
    segments = np.repeat(range(len(lengths)), lengths)
    order = jp.context.balanced_packing(segments, 8, chunks=16, impl=impl)
    found, zigzag = (jp.context.balance(CAUSAL, 4096, 8, o, segment_ids=segments, impl=impl) for o in (order, "zigzag"))
    assert zigzag.ratio > 1.6 and found.ratio <= bound
    assert found.order == "given"


@pytest.mark.slow
def test_attention_in_a_given_order_is_attention() -> None:
    """Under a traced order, because every row of a batch may bring another one."""
    segments = np.repeat([0, 1, 2, -1], [15, 4, 10, 3])
    order = jp.context.balanced_packing(segments, 2, chunks=4)
    x = np.random.default_rng(0).normal(size=(3, 1, 32, 2, 4)).astype(np.float32)
    layout = jp.Layout(jp.MeshSpec(context=2).build(jax.devices()[:2]), jp.Rules(seq="context", **dict.fromkeys(REST)))

    def loss(x: Any, segment_ids: Any, order: Any, impl: Any = "ring") -> Any:
        o = jp.attention(*x, impl=impl, segment_ids=segment_ids[None], order=order, block=4)
        return jnp.sum(o**2), o

    both = jax.value_and_grad(loss, has_aux=True)
    with layout:
        (_, want), gradient = jax.jit(functools.partial(both, impl="dense", order=None))(x, segments)
        lying = x[:, :, order], segments[order], order
        (_, got), found = jax.jit(both)(*lying)
        _, dense = jax.jit(functools.partial(loss, impl="dense"))(*lying)
    np.testing.assert_allclose(dense, want[:, order], atol=1e-5)
    np.testing.assert_allclose(got, want[:, order], atol=1e-5)
    np.testing.assert_allclose(found, gradient[:, :, order], atol=1e-5)


@pytest.mark.parametrize(
    ("order", "name"),
    [
        (np.arange(8), "queries'"),
        (np.arange(16)[None], "attention: order"),
    ],
    ids=["length", "shape"],
)
@pytest.mark.parametrize("impl", ["ring", "dense"])
def test_a_given_order_fits_the_sequence(impl: Any, order: Any, name: str) -> None:
    x = np.zeros((1, 16, 2, 4), np.float32)
    layout = jp.Layout(jp.MeshSpec(context=2).build(jax.devices()[:2]), jp.Rules(seq="context", **dict.fromkeys(REST)))
    with layout, raises(LayoutError, name):
        jax.eval_shape(lambda x: jp.attention(x, x, x, impl=impl, order=order), x)


def test_rows_that_lie_alike_are_balanced_together() -> None:
    rows = np.array([np.repeat([0, 1], [48, 16]), np.repeat([0, 1], [16, 48])])
    order = jp.context.balanced_packing(rows, 2, impl="gather")
    work = [jp.context.balance(CAUSAL, 64, 2, order, segment_ids=row, impl="gather").visible.sum(1) for row in rows]
    assert sum(work).max() / sum(work).mean() <= 1.02


@pytest.mark.parametrize("ways", [1, 32])
def test_draw_renders_and_saves(ways: int, tmp_path: Path) -> None:
    figure = jp.context.draw_mask(
        jp.Mask(causal=True, window=40), tmp_path / "mask.png", seq=256, num_shards=ways, block=16
    )
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(legend) == (3 if ways == 32 else ways + 1) and legend[-1] == "lighter: partially masked"
    title = figure.axes[0].get_title(loc="left")
    split = f" over {ways} devices, zigzag" if ways > 1 else ""
    assert title == f"causal, window 40: 256 tokens{split}, tiles of {4 if ways == 32 else 16}"


def test_the_legend_has_the_work() -> None:
    figure = jp.context.draw_mask(CAUSAL, seq=32, num_shards=2, order="contiguous")
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert legend[:2] == ["device 0: 136 scores (52% of the mean)", "device 1: 392 scores (148% of the mean)"]


def test_colours_are_of_the_queries_device_and_pale_where_masked() -> None:
    colours = hues(2)
    found = painted(grid_of(CAUSAL, 32, 2, "zigzag", block=8), colours)
    white, rows = (1.0, 1.0, 1.0), (0, 1, 1, 0)
    for i in range(4):
        for j in range(4):
            dark = colours[rows[i]]
            want = white if j > i else dark if j < i else 0.6 + 0.4 * dark
            np.testing.assert_allclose(found[i, j], want)


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_the_error_names_the_extra() -> None:
    with raises(MissingExtraError, "draw_mask()"):
        jp.context.draw_mask(CAUSAL, seq=16)


def test_a_mask_costs_no_matplotlib() -> None:
    heavy = "import jaxpar, sys; jaxpar.Mask(); print([m for m in ('jax', 'numpy', 'matplotlib') if m in sys.modules])"
    assert python(heavy) == "[]\n"
