"""One tile of attention: the factors of dropout, and gradients in every dtype."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 3e-2), ("float16", 4e-3)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_are_those_of_a_dense_softmax(dtype: str, bound: float, softcap: float | None) -> None:
    rules, rng = tile.TileSpec(jp.Mask(), 0.3, softcap), np.random.default_rng(0)
    at = (tile.Tokens(jnp.arange(8)), tile.Tokens(jnp.arange(8)))
    shapes = (1, 2, 2, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16), (1, 2, 2, 8, 16)
    q, k, v, grad = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)

    def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        s = jnp.einsum("bkgqd,bkld->bkgql", q, k) * 0.3
        s = s if softcap is None else softcap * jnp.tanh(s / softcap)
        s = jnp.where(np.tri(8, dtype=bool), s, -jnp.inf)
        return jnp.einsum("bkgql,bkld->bkgqd", jax.nn.softmax(s), v), jax.nn.logsumexp(s, -1)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, grad: jax.Array) -> tuple[Any, Any]:
        wide = [x.astype(jnp.float32) for x in (q, k, v, grad)]
        (o, lse), back = jax.vjp(dense, *wide[:3])
        rows = tile.Rows(grad, lse, jnp.sum(o * wide[3], -1))
        return back((wide[3], jnp.zeros_like(lse))), tile.backward(rules, q, k, v, at, tile.TileArrays(), rows, True)[
            :3
        ]

    for expected, result in zip(*jax.jit(both)(q, k, v, grad), strict=True):
        assert jnp.abs(result - expected).max() <= bound * jnp.abs(expected).max()
