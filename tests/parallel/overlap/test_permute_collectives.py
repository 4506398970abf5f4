"""Gathers and scatters around rings against JAX's: values, gradients, and that every hop goes to a neighbour."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from profiles import few

from jaxpar.parallel.overlap.permute_collectives import (
    Ring,
    ppermute_all_gather,
    ppermute_reduce_scatter,
    scatter_parts,
)

AXES = ("outer", "inner")


def over(outer: int, inner: int, f: Callable[[jax.Array], jax.Array], into: Any, out: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[: outer * inner]).reshape(outer, inner), AXES)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=into, out_specs=out, check_vma=False))


CASES = [(2, 4, ()), (2, 4, (8,)), (4, 2, (4, 2)), (1, 2, (2,)), (1, 5, (5,))]


@pytest.mark.parametrize(("outer", "inner", "rings"), few(CASES[1:] + CASES[:1], 1, names=3))
def test_rings_give_what_the_collectives_give(outer: int, inner: int, rings: tuple[int, ...]) -> None:
    ways = outer * inner
    # Pieces of 5 have halves of 2 and 3. Sums of whole numbers are exact in any order.
    x, y = np.random.default_rng(0).integers(-8, 9, (2, 3, 5 * ways, 2)).astype(np.float32)
    split = P(None, AXES)

    def ours(x: jax.Array) -> jax.Array:
        return ppermute_all_gather(x, AXES, dim=1, rings=rings)

    def theirs(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, AXES, axis=1, tiled=True)

    # Each device weights its gathered array differently, so that the gradient sums different shares.
    def weighed(gather: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        def f(pair: jax.Array) -> jax.Array:
            x, y = pair
            whole, back = jax.vjp(gather, x)
            mine = jnp.tile(y, (1, ways, 1)) * (1 + jnp.arange(ways * 5)[:, None])
            return jnp.stack([back(mine)[0], whole.reshape(3, ways, 5, 2).sum(1)])

        return f

    both = jnp.stack([x, y])
    results = [over(outer, inner, weighed(f), P(None, None, AXES), P(None, None, AXES))(both) for f in (ours, theirs)]
    np.testing.assert_array_equal(results[0], results[1])
    assert (over(outer, inner, ours, split, P())(x) == x).all()


@pytest.mark.parametrize(("outer", "inner", "rings"), few([(1, 4, ()), *CASES, (1, 1, ())], 2, names=3))
def test_a_summand_read_in_parts_has_the_same_sum(outer: int, inner: int, rings: tuple[int, ...]) -> None:
    ways = outer * inner
    x = np.random.default_rng(1).integers(-8, 9, (ways, 3, 5 * ways)).astype(np.float32)

    def ours(x: jax.Array) -> jax.Array:
        part_of = lambda start, size: jax.lax.dynamic_slice_in_dim(x[0], start, size, 1)
        return scatter_parts(part_of, 5 * ways, AXES, dim=1, rings=rings)

    np.testing.assert_array_equal(over(outer, inner, ours, P(AXES), P(None, AXES))(x), x.sum(0))


@pytest.mark.parametrize(("rings", "hops"), [((8,), {1: 42, -1: 42}), ((4, 2), {1: 12, 2: 36, -2: 36})])
def test_every_hop_is_to_a_neighbour_and_both_ways_are_used_alike(rings: tuple[int, ...], hops: dict[int, int]) -> None:
    """Device 0 sends, in pieces of 6 rows, as many rows in total as a gather and a scatter send."""
    both = lambda x: ppermute_reduce_scatter(ppermute_all_gather(x, AXES, dim=0, rings=rings), AXES, dim=0, rings=rings)
    text = over(1, 8, both, P(AXES), P(AXES)).lower(jnp.zeros((48, 2))).as_text()
    sent: dict[int, int] = {}
    for to, rows in re.findall(r"source_target_pairs = dense<\[\[0, (\d)\].*?: \(tensor<(\d+)x2xf32>\) ->", text):
        far = (int(to) + 4) % 8 - 4
        sent[far] = sent.get(far, 0) + int(rows)
    assert sent == hops and sum(sent.values()) == 2 * 7 * 6


@pytest.mark.parametrize("rings", [(), (3,)])
def test_sums_are_made_in_fp32(rings: tuple[int, ...]) -> None:
    """In bf16, 1 + 2^-8 rounds to 1, so only a sum in fp32 counts both small shares."""
    x = jnp.repeat(jnp.array([1, 2**-8, 2**-8], jnp.bfloat16), 3)
    got = over(1, 3, lambda x: ppermute_reduce_scatter(x, AXES, dim=0, rings=rings), P(AXES), P(AXES))(x)
    assert got.dtype == jnp.bfloat16 and got.tolist() == [1 + 2**-7] * 3


@pytest.mark.parametrize(("size", "rows"), few([(4, 5), (2, 5), (3, 4), (5, 2), (8, 3), (4, 1)], 2, names=2))
def test_halves_give_what_the_collectives_give(size: int, rows: int) -> None:
    """Pieces of an even and an odd number of rows, and of one row, which has no halves."""
    x = np.random.default_rng(2).integers(-8, 9, (size, size * rows, 2)).astype(np.float32)

    def gathered(x: jax.Array) -> jax.Array:
        ring = Ring.of(AXES)
        whole = jnp.full((1, size * rows, 2), jnp.nan)
        for distance, offset, part in ring.halves(x[:, :rows], 1):
            start = (ring.index() + distance) % size * rows + offset
            whole = jax.lax.dynamic_update_slice_in_dim(whole, part, start, 1)
        return whole

    def scattered(x: jax.Array) -> jax.Array:
        ring = Ring.of(AXES)

        def part_of(distance: int, start: int, count: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, (ring.index() + distance) % size * rows + start, count, 1)

        return ring.summed_halves(part_of, rows, 1)

    found = over(1, size, gathered, P(AXES), P(AXES))(x)
    np.testing.assert_array_equal(found, np.broadcast_to(x[:, :rows].reshape(1, size * rows, 2), found.shape))
    np.testing.assert_array_equal(over(1, size, scattered, P(AXES), P(None, AXES))(x), x.sum(0, keepdims=True))


def test_a_hop_of_halves_sends_half_a_piece_each_way() -> None:
    def both(x: jax.Array) -> jax.Array:
        ring = Ring.of(AXES)
        parts = {(distance, start): part for distance, start, part in ring.halves(x, 0)}
        own = lambda distance, start, count: parts[distance, start if distance else 0][:count]
        return ring.summed_halves(own, x.shape[0], 0)

    text = over(1, 4, both, P(AXES), P(AXES)).lower(jnp.zeros((24, 2))).as_text()
    sent = re.findall(r"source_target_pairs = dense<\[\[0, (\d)\].*?: \(tensor<(\d+)x2xf32>\) ->", text)
    assert sorted(sent) == [("1", "3")] * 6 + [("3", "3")] * 6  # three hops each way, of a gather and of a scatter
