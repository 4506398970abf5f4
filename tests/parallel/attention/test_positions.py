"""Positions of any sign and masks of any size: visibility follows the mask's definition without integer overflow."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_reference import MESHES, arrays, assert_close, compiled, layout, masks, reference, sees
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples, few

import jaxpar as jp
from jaxpar.errors import LayoutError
from jaxpar.parallel.attention.split.partition import turns_of
from jaxpar.parallel.attention.split.token_order import permutation
from jaxpar.parallel.attention.tiled.blockwise import chosen, tokens_in_blocks
from jaxpar.parallel.attention.tiled.tile import TileArrays, TileSpec, Tokens

HUGE = (1, 2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**70)
LEAST, GREATEST = -(2**31) + 1, 2**31 - 1
"""The range of positions."""
sizes = st.integers(1, 9) | st.sampled_from(HUGE)
WHERE = lambda q, k: q % 3 != k % 3


def starts(length: int) -> st.SearchStrategy[int]:
    """The first of ``length`` positions: near the keys or far from them."""
    return st.integers(-20, 20) | st.integers(LEAST, GREATEST - length) | st.sampled_from((LEAST, GREATEST - length))


@given(masks(sizes), starts(7), starts(9))
@examples(30)
def test_a_mask_of_any_size_is_what_its_words_say_of_any_positions(mask: jp.Mask, first: int, other: int) -> None:
    """For Python's integers, and for numpy's of 32 and of 64 bits."""
    q, k = first + np.arange(7), other + np.arange(9)
    want = sees(mask, q, k)[0]
    for kind in (np.int32, np.int64):
        found = mask.visible(q.astype(kind)[:, None], k.astype(kind)[None])
        np.testing.assert_array_equal(np.broadcast_to(found, want.shape), want)
    assert [[bool(mask.visible(a, b)) for b in k.tolist()] for a in q.tolist()] == want.tolist()


def test_a_mask_of_any_size_is_what_its_words_say_in_a_program() -> None:
    q = np.array([LEAST, LEAST + 1, -(2**30), -1, 0, 1, 5, 2**30, GREATEST - 1, GREATEST], np.int32)
    for size, causal in itertools.product(HUGE, (True, False)):
        for name in ("window", "prefix", "chunk"):
            mask = jp.Mask(causal=causal, **{name: size})
            found = jnp.broadcast_to(mask.visible(jnp.asarray(q)[:, None], jnp.asarray(q)[None]), (len(q), len(q)))
            np.testing.assert_array_equal(found, sees(mask, q, q)[0], str(mask))


@given(st.data(), masks(sizes, st.none() | st.just(WHERE)), st.sampled_from(["contiguous", "zigzag", "striped"]))
@examples(15)
def test_no_tile_that_is_left_out_has_a_visible_score(data: Any, mask: jp.Mask, order: Any) -> None:
    """Unmasked tiles have no hidden score either; also in a ring's hops, and for queries at any position."""
    ways, block, seq = 3, data.draw(st.integers(1, 5)), 18
    offset = data.draw(starts(seq))
    at = permutation(order, seq, ways)
    rows, columns = (tokens_in_blocks(Tokens(x), block) for x in ((at + np.int64(offset)).astype(np.int32), at))
    whole, partly = (
        {int(n) for n in np.asarray(some.numbers)[: int(some.count)]}
        for some in chosen(TileSpec(mask, 1.0), rows, columns, TileArrays())
    )
    seen = sees(mask, at.astype(np.int64) + offset, at.astype(np.int64))[0]
    assert not whole & partly
    for number in range(len(rows.positions) * len(columns.positions)):
        i, j = divmod(number, len(columns.positions))
        tile = seen[i * block : (i + 1) * block, j * block : (j + 1) * block]
        assert (tile.all() and tile.shape == (block, block)) if number in whole else number in partly or not tile.any()
    each = seen.reshape(ways, seq // ways, ways, seq // ways).any((1, 3))
    hops = turns_of(mask, at, ways, block, offset)
    assert all(hop in hops for hop in range(ways) if any(each[i, (i - hop) % ways] for i in range(ways)))


PROBLEMS: dict[str, list[jp.Mask]] = {
    "dense": [jp.Mask(window=4), jp.Mask(causal=False, window=(3, 2), chunk=5)],
    "flash": [jp.Mask(causal=False, chunk=6, where=WHERE), jp.Mask(window=2**31)],
    "gather": [jp.Mask(window=3), jp.Mask(causal=False, window=(None, 2))],
    "ring": [jp.Mask(), jp.Mask(causal=False, window=(4, 3))],
    "ring_self_attention": [jp.Mask(chunk=4), jp.Mask(window=2**31 - 1)],
    "ulysses": [jp.Mask(window=5), jp.Mask(where=WHERE)],
    "hybrid": [jp.Mask(window=2**40, chunk=2**31)],
    "split_kv": [jp.Mask(window=6), jp.Mask(causal=False, chunk=5)],
}
"""Each implementation meets causal and other masks. Queries and keys have lengths that blocks of 3 do not divide."""


@pytest.mark.parametrize(
    ("impl", "mask"), few([(impl, mask) for impl, some in PROBLEMS.items() for mask in some], 1, names=2)
)
def test_queries_may_stand_anywhere(impl: str, mask: jp.Mask) -> None:
    """Values and gradients with traced offsets and prefixes, drawn at random and at the ends of int32."""
    rng = np.random.default_rng(len(impl))
    queries, keys = (20, 28) if impl == "hybrid" else (10, 14)
    run = compiled(impl, mask=mask, block=3)
    near = rng.integers(-queries - 4, keys + 4, 6).tolist()
    for offset in (*near, 0, -1, -2, LEAST, GREATEST - queries + 1):
        x, gradient = arrays(rng, queries, keys)
        prefix = rng.integers(0, keys + 2, 2).astype(np.int32)
        seen = sees(mask, offset + np.arange(queries), np.arange(keys), prefix)
        found = run(x, gradient, q_offset=np.int32(offset), prefix=prefix)
        assert_close(found, reference(x, gradient, seen))


@pytest.mark.slow
@pytest.mark.parametrize("impl", few(sorted(MESHES, key=lambda impl: impl != "ring"), 1))
def test_queries_may_stand_before_the_keys(impl: str) -> None:
    """With an offset known at trace time, a ring leaves out hops, and lists of tiles are built on the host."""
    rng = np.random.default_rng(3)
    for mask, offset, queries, keys in (
        (jp.Mask(causal=True, prefix=1), -2, 4, 4),
        (jp.Mask(causal=False, window=(1, 7)), -6, 12, 8),
    ):
        x, gradient = arrays(rng, queries, keys)
        found = compiled(impl, mask=mask, q_offset=offset, block=2)(x, gradient)
        assert_close(found, reference(x, gradient, sees(mask, offset + np.arange(queries), np.arange(keys))))


@pytest.mark.parametrize("impl", few(["ring", "dense", "flash"], 1))
def test_a_query_at_minus_one_is_no_padding(impl: str) -> None:
    """Four queries from -2 on, two keys, one of them a prefix: all but the last query see only the first key."""
    x, gradient = arrays(np.random.default_rng(0), 4, 2, batch=1, heads=1, kv_heads=1)
    o = compiled(impl, mask=jp.Mask(causal=True, prefix=1), q_offset=-2)(x, gradient)[0]
    np.testing.assert_allclose(o[0, :3, 0], np.repeat(x[2][0, :1, 0], 3, 0), rtol=1e-6)


@pytest.mark.parametrize("impl", few(["flash", "ring", "dense"], 1))
def test_slopes_of_any_distance(impl: str) -> None:
    """The distance is exact when query and key are further apart than the greatest int32."""
    rng = np.random.default_rng(4)
    x, gradient = arrays(rng, 6, 8)
    slopes = np.full(4, 2.0**-30, np.float32)
    run = compiled(impl, causal=False, block=2, alibi=slopes)
    for offset in (LEAST, GREATEST - 8, -3):
        apart = np.abs(offset + np.arange(6)[:, None] - np.arange(8)[None]).astype(np.float64)
        bias = -(slopes.astype(np.float64)[None, :, None, None] * apart)
        want = reference(x, gradient, np.ones((1, 6, 8), bool), bias)[:4]
        assert_close(run(x, gradient, q_offset=np.int32(offset)), want, 3e-5)


@pytest.mark.slow
def test_a_function_of_positions_meets_positions_of_tokens_only() -> None:
    met: list[np.ndarray] = []

    def where(q: Any, k: Any) -> Any:
        jax.debug.callback(lambda q, k: met.extend((np.asarray(q), np.asarray(k))), q, k)
        return q >= k

    x, gradient = arrays(np.random.default_rng(5), 5, 5)
    compiled("flash", mask=where, block=3)(x, gradient)
    jp.context.balance(jp.Mask(where=lambda q, k: met.extend((q, k)) or q >= k), 10, 2, "contiguous", block=4)
    jax.effects_barrier()
    assert met and all(0 <= at.min() and at.max() < 10 for at in met)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"q_offset": 2**31 - 3}, "attention: q_offset 2147483645"),
        ({"q_offset": -(2**31)}, "-2147483648"),
        ({"q_offset": np.int64(2**40)}, "attention: q_offset 1099511627776"),
        ({"q_offset": np.array(2**40)}, "attention: q_offset 1099511627776"),
        ({"q_offset": 1.5}, "1.5"),
        ({"q_offset": np.zeros(2, np.int32)}, "int32[2]"),
        ({"prefix": np.ones(1)}, "attention: prefix"),
        ({"order": np.array([0, 1, 2**32, 3])}, "attention: order"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_positions_beyond_int32_are_an_error(options: dict[str, Any], name: str) -> None:
    x, _ = arrays(np.random.default_rng(0), 4, 4)
    with layout("dense"), raises(LayoutError, name):
        jp.attention(*x, **options)


def test_the_local_form_counts_the_queries_of_all_devices() -> None:
    spec = jax.sharding.PartitionSpec(None, "context")
    local = lambda x: jp.context.attention_local(x, x, x, q_offset=2**31 - 6)
    x = jnp.zeros((1, 8, 1, 4))
    with raises(LayoutError, "attention: q_offset 2147483642"):
        jax.eval_shape(jax.shard_map(local, mesh=layout("ring").mesh, in_specs=spec, out_specs=spec), x)


@given(masks(sizes), st.sampled_from(["contiguous", "zigzag", "striped"]), st.integers(1, 7))
@examples(60)
def test_work_of_masks_of_any_size_is_counted(mask: jp.Mask, order: Any, block: int) -> None:
    found = jp.context.balance(mask, 24, 2, order, block=block)
    assert found.visible.sum() == sees(mask, np.arange(24), np.arange(24)).sum()
