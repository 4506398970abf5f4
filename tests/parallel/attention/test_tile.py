"""The factors of dropout in one tile."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar as jp
from jaxpar.parallel.attention.tiled import tile


def factors(sequences: range, heads: range, rows: range, columns: range) -> np.ndarray:
    """The factors [sequences, heads, rows, columns] of one key."""
    rules, key = tile.TileSpec(jp.Mask(), 1.0, dropout=0.4), jnp.array([3, 5], jnp.uint32)
    at = tuple(tile.Tokens(jnp.array(x, jnp.int32)) for x in (rows, columns))
    arrays = tile.TileArrays(key=key, numbers=(jnp.array(sequences), heads.start))
    shape = (len(sequences), len(heads) // 2, 2, len(rows), len(columns))
    draw = jax.jit(functools.partial(tile.kept, rules, shape=shape))
    return np.asarray(draw(at, arrays)).reshape(len(sequences), len(heads), len(rows), len(columns))


def test_every_sequence_head_and_pair_of_positions_draws_for_itself() -> None:
    whole = factors(range(3), range(4), range(16), range(16))
    assert set(np.unique(whole)) == {0.0, np.float32(1 / 0.6)} and abs((whole > 0).mean() - 0.6) < 0.05
    for dim in range(4):  # no two sequences, heads, queries or keys draw the same
        parts = np.moveaxis(whole, dim, 0).reshape(whole.shape[dim], -1)
        assert len(np.unique(parts, axis=0)) == whole.shape[dim]


def test_a_part_draws_what_it_does_in_the_whole() -> None:
    whole = factors(range(3), range(4), range(16), range(16))
    part = factors(range(1, 3), range(2, 4), range(8, 12), range(4, 16))
    np.testing.assert_array_equal(part, whole[1:, 2:, 8:12, 4:])
