"""Orders of rows and exchanges against plain loops, and grouped matmuls against one matmul per group."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st

import jaxpar as jp
from jaxpar.parallel.experts.exchange import exchange_of, round_trip
from jaxpar.parallel.experts.grouped_matmul import equal_groups_matmul, grouped_matmul
from jaxpar.parallel.experts.options import ExpertSizes, most_rows, pieces_for
from jaxpar.parallel.experts.rows import drop_over_capacity, from_rows, row_order, slots, to_rows, values_to_rows
from jaxpar.parallel.experts.select import bytes_per_transfer, select_dispatch
from jaxpar.sharding.hardware.topology import Topology
from tests.profiles import examples


@st.composite
def choices(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """The groups of a few tokens' choices, the last number for none, and the number of groups.

    There are few shapes, as each is compiled.
    """
    groups, tokens, k = draw(st.sampled_from([(4, 6, 3), (1, 1, 1)]))
    flat = draw(st.lists(st.integers(0, groups), min_size=tokens * k, max_size=tokens * k))
    return np.asarray(flat, np.int32).reshape(tokens, k), groups


ordered = jax.jit(row_order, static_argnums=1)
dropped = jax.jit(drop_over_capacity, static_argnums=(1, 2))
slotted = jax.jit(slots, static_argnums=(1, 2))
trip_of = jax.jit(round_trip)


@examples(40)
@given(choices())
def test_rows_are_the_choices_of_each_group_in_order(case: tuple[np.ndarray, int]) -> None:
    chosen, groups = case
    at = jax.device_get(ordered(jnp.asarray(chosen), groups))
    expected = [i for group in range(groups) for i in np.flatnonzero(chosen == group)]
    live = len(expected)
    assert at.order[:live].tolist() == expected and at.live.tolist() == [i < live for i in range(chosen.size)]
    assert at.sizes.tolist() == [(chosen == group).sum() for group in range(groups)]
    row = np.full(chosen.size, chosen.size)
    row[expected] = np.arange(live)
    assert at.row.ravel().tolist() == row.tolist()


@examples(20)
@given(choices(), st.sampled_from([1, 3]))
def test_a_capacity_keeps_the_first_choices_and_slots_hold_them(case: tuple[np.ndarray, int], capacity: int) -> None:
    chosen, groups = case
    kept = np.asarray(dropped(jnp.asarray(chosen), groups, capacity))
    seen = dict.fromkeys(range(groups), 0)
    for index, group in np.ndenumerate(chosen):
        if group < groups:
            seen[group] += 1
        assert kept[index] == (group if group < groups and seen[group] <= capacity else groups)
    at = jax.device_get(slotted(jnp.asarray(kept), groups, capacity))
    for group in range(groups):
        held = at.order[group * capacity :][:capacity][np.asarray(at.live[group * capacity :][:capacity])]
        assert held.tolist() == np.flatnonzero(kept == group).tolist()


@examples(15)
@given(choices(), st.integers(0, 2**31))
def test_gradients_of_rows_are_those_of_plain_indexing(case: tuple[np.ndarray, int], seed: int) -> None:
    chosen, groups = case
    with jax.enable_x64(True):
        rng = np.random.default_rng(seed)
        x, w = jnp.asarray(rng.standard_normal((len(chosen), 2))), jnp.asarray(rng.standard_normal(chosen.shape))
        for got, expected in zip(*(f(x, w, jnp.asarray(chosen), groups) for f in (GRADIENT, PLAIN)), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-12)


def _by_rows(x: jax.Array, w: jax.Array, chosen: jax.Array, groups: int) -> jax.Array:
    at = row_order(chosen, groups)
    return jnp.sum(jnp.sin(from_rows(to_rows(x, at) ** 2 * values_to_rows(w, at)[:, None], at)))


def _plain(x: jax.Array, w: jax.Array, chosen: jax.Array, groups: int) -> jax.Array:
    return jnp.sum(jnp.sin(jnp.sum(x[:, None] ** 2 * jnp.where(chosen < groups, w, 0)[..., None], 1)))


GRADIENT, PLAIN = (jax.jit(jax.grad(f, (0, 1)), static_argnums=3) for f in (_by_rows, _plain))


@examples(20)
@given(st.sampled_from([1, 3, 4]), st.sampled_from([1, 2]), st.integers(0, 2**31))
def test_an_exchange_and_its_way_back_fill_every_row_once(devices: int, local: int, seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 4, (devices, devices * local))
    trips = [jax.device_get(trip_of(jnp.asarray(counts), jnp.asarray(me))) for me in range(devices)]
    rows = [[(me, e, i) for e in range(devices * local) for i in range(counts[me, e])] for me in range(devices)]

    def sent(way: str, rows: list[list[Any]], sizes: list[int]) -> list[list[Any]]:
        found: list[list[Any]] = [[None] * size for size in sizes]
        for me, trip in enumerate(trips):
            slices = getattr(trip, way)
            for n, (start, count, put) in enumerate(zip(slices.start, slices.send, slices.put, strict=True)):
                other = n // local
                mirrored = getattr(trips[other], way).receive[me * local + n % local]
                assert int(count) == int(mirrored)
                for i in range(int(count)):
                    assert found[other][int(put) + i] is None
                    found[other][int(put) + i] = rows[me][int(start) + i]
        return found

    arrive = [int(counts[:, me * local : (me + 1) * local].sum()) for me in range(devices)]
    arrived = sent("there", rows, arrive)
    for me, got in enumerate(arrived):  # one expert after the other, and within it one source after the other
        assert got == sorted(got, key=lambda row: (row[1], row[0], row[2])) and len(got) == arrive[me]
    assert sent("back", arrived, [len(mine) for mine in rows]) == rows


def test_a_grouped_matmul_is_one_matmul_per_group() -> None:
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.standard_normal((210, 5)), jnp.float32), jnp.asarray(rng.standard_normal((4, 5, 3)))

    def loss(f: Any) -> Any:
        return jax.jit(
            jax.value_and_grad(lambda x, w, sizes, live: jnp.sum(jnp.sin(f(x, w, sizes)) * live[:, None]), (0, 1))
        )

    def plain(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(x)), side="right")
        return jnp.einsum("rk,rkn->rn", x, w[jnp.minimum(group, 3)])

    grouped, expected = loss(grouped_matmul), loss(plain)
    for sizes in ([0, 70, 1, 64], [3, 0, 0, 0], [0, 0, 0, 0], [200, 0, 0, 1]):
        args = x, w, jnp.asarray(sizes, jnp.int32), jnp.asarray(np.arange(210) < sum(sizes))
        for a, b in zip(jax.tree.leaves(grouped(*args)), jax.tree.leaves(expected(*args)), strict=True):
            np.testing.assert_allclose(a, b, atol=3e-5)


def test_groups_of_equal_size_are_multiplied_together() -> None:
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.standard_normal((12, 5))), jnp.asarray(rng.standard_normal((4, 5, 3)))
    grouped = jax.jit(grouped_matmul)(x, w, jnp.full(4, 3, jnp.int32))
    np.testing.assert_allclose(jax.jit(equal_groups_matmul)(x, w), grouped, atol=1e-5)


@examples(20)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(1, 8), st.sampled_from([1, 6, 64, 96, 4096]))
def test_pieces_bound_the_rows_of_the_worst_routing(shards: int, more: int, k: int, tokens: int) -> None:
    devices, experts = 2**shards, 2 ** (shards + more)
    sizes = ExpertSizes(tokens, min(k, experts), experts, devices, devices)
    pieces = pieces_for(sizes, None)
    assert tokens % pieces == 0
    enough = max(tokens * sizes.k, 1024)
    assert most_rows(sizes, tokens // pieces, None) <= enough or pieces == tokens
    assert all(tokens % n or most_rows(sizes, tokens // n, None) > enough for n in range(1, pieces) if devices > 1)


def test_the_bytes_of_a_transfer_are_those_of_the_formulas() -> None:
    sizes = ExpertSizes(tokens=4096, k=6, experts=64, devices=16, token_devices=16)
    row, away = 4096, 15 / 16
    distinct = 16 * (1 - np.prod([(60 - i) / (64 - i) for i in range(6)]))
    expected = {"ragged": 4096 * 6 * row * away, "gather": 4096 * 15 * row, "local": 0.0}
    expected["deduplicated"] = 4096 * distinct * row * away
    for name, value in expected.items():
        assert bytes_per_transfer(name, sizes, row) == pytest.approx(value)
    assert select_dispatch("auto", sizes, ("expert",), ("expert",), row).dispatch == "deduplicated"


def test_a_slice_without_a_ragged_exchange_gathers() -> None:
    mesh = lambda name: jax.sharding.AbstractMesh(
        (Topology.parse(name).devices,), ("expert",), abstract_device=Topology.parse(name).abstract_device
    )
    kinds = {name: exchange_of(mesh(name)) for name in ("v5e:4x4", "v5e:8x8", "v5p:4x4x4", "h100:8")}
    assert kinds == {"v5e:4x4": "native", "v5e:8x8": "none", "v5p:4x4x4": "native", "h100:8": "native"}
    sizes = ExpertSizes(tokens=64, k=2, experts=8, devices=8, token_devices=8)
    choose = lambda requested: select_dispatch(requested, sizes, ("expert",), ("expert",), 8, ragged=False)
    assert choose("auto").dispatch == "gather"
    with raises(jp.errors.ConfigError, "ragged_all_to_all"):
        choose("ragged")
