"""Masks as rules on positions, orders of tokens, and which tiles are visited."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from attention_reference import masks
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.parallel.attention.split.token_order import permutation
from jaxpar.parallel.attention.tiled.blockwise import chosen, tokens_in_blocks
from jaxpar.parallel.attention.tiled.tile import TileArrays, TileSpec, Tokens


@given(masks(st.integers(1, 9)), st.integers(1, 7), st.sampled_from(["contiguous", "zigzag", "striped"]), st.booleans())
@examples(15)
def test_tiles_that_are_left_out_have_nothing_and_unmasked_ones_everything(
    mask: jp.Mask, block: int, order: Any, packed: bool
) -> None:
    """The tiles left out contain no visible score, and the unmasked tiles contain no hidden one."""
    seq = 24
    at = permutation(order, seq, 3)
    ids = (at // 7).astype(np.int32)[None] if packed else None
    tokens = tokens_in_blocks(Tokens(at, None if ids is None else jnp.asarray(ids)), block)
    whole, partly = chosen(TileSpec(mask, 1.0), tokens, tokens, TileArrays())
    seen = np.broadcast_to(mask.visible(at[:, None], at[None]), (seq, seq)).copy()
    if ids is not None:
        seen &= ids[0][:, None] == ids[0][None]
    columns = -(-seq // block)
    numbers = [{int(n) for n in np.asarray(some.numbers)[: int(some.count)]} for some in (whole, partly)]
    assert not numbers[0] & numbers[1]
    for number in range(columns * columns):
        i, j = divmod(number, columns)
        tile = seen[i * block : (i + 1) * block, j * block : (j + 1) * block]
        if number in numbers[0]:
            assert tile.all() and tile.shape == (block, block)
        elif number not in numbers[1]:
            assert not tile.any()


@pytest.mark.parametrize("window", [None, 1, 3, (2, 0), (0, 2), (None, 1)])
def test_the_bounds_of_a_block_are_those_of_its_scores(window: Any) -> None:
    """For every pair of blocks: whether every query sees every key, and whether some may see some."""
    x, blocks = np.arange(9), [(low, high) for low in range(9) for high in range(low, min(low + 4, 9))]
    for causal, chunk, prefix in itertools.product((True, False), (None, 3, 4), (None, 2)):
        if causal and isinstance(window, tuple) and window[1]:
            continue
        mask = jp.Mask(causal=causal, window=window, prefix=prefix, chunk=chunk)
        seen = np.broadcast_to(mask.visible(x[:, None], x[None]), (9, 9))
        for q, k in itertools.product(blocks, blocks):
            some, every = mask.bounds(q, k)
            scores = seen[q[0] : q[1] + 1, k[0] : k[1] + 1]
            # A block that a prefix completes may count as one of which a part is hidden.
            assert scores.all() if every else (prefix is not None or not scores.all()), (mask, q, k)
            assert some or not scores.any(), (mask, q, k)


def test_of_a_causal_sequence_half_the_tiles_are_visited() -> None:
    tokens = tokens_in_blocks(Tokens(np.arange(64, dtype=np.int32)), 8)
    whole, partly = chosen(TileSpec(jp.Mask(causal=True), 1.0), tokens, tokens, TileArrays())
    assert (whole.count, partly.count) == (8 * 7 // 2, 8)


def test_a_function_of_positions_hides_tiles_too() -> None:
    tokens = tokens_in_blocks(Tokens(jnp.arange(32, dtype=jnp.int32)), 8)
    rules = TileSpec(jp.Mask(causal=False, where=lambda q, k: (q >= 16) & (k < 12)), 1.0)
    whole, partly = chosen(rules, tokens, tokens, TileArrays())
    assert (int(whole.count), int(partly.count)) == (2, 2)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"window": 0}, "mask: window"),
        ({"window": (1, -1)}, "None"),
        ({"prefix": -1}, "mask: prefix"),
        ({"chunk": 0}, "mask: chunk"),
        ({"where": lambda q: q > 0}, "mask: where"),
        ({"where": 3}, "3"),
    ],
)
def test_what_is_no_mask_is_an_error(options: dict[str, Any], name: str) -> None:
    with raises(ConfigError, name):
        jp.Mask(**options)
