"""All-to-all, all-gather and reduce-scatter in rounds equal the plain collectives, whatever the rounds."""

from __future__ import annotations

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covers import covering
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.errors import LayoutError
from jaxpar.parallel.collectives import hierarchical


@given(st.integers(1, 20_000), st.integers(1, 64))
def test_rounds_multiply_to_the_devices_and_are_small_where_they_can_be(devices: int, most: int) -> None:
    found = hierarchical.rounds(devices, most)
    assert math.prod(found) == devices
    primes = all(n <= most or all(n % d for d in range(2, n)) for n in found)
    assert primes, found
    assert len(found) == 1 or 1 not in found


@pytest.mark.parametrize(
    ("dims", "axes"),
    covering([(0, 0), (0, 2), (2, 0), (1, 2), (2, 2)], ["data", ("model", "data")], keep=2, strength=1),
)
def test_an_exchange_in_rounds_is_an_all_to_all(
    dims: tuple[int, int], axes: str | tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients are bitwise equal, with the mesh's axes in either order."""
    split, concat = dims
    monkeypatch.setattr(hierarchical, "MOST", 2)
    mesh = jp.MeshSpec(data=4, model=2).build()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8 * 8, 8, 16)), jnp.float32)

    def run(local: Any) -> tuple[jax.Array, jax.Array]:
        """The result, and the gradient of a sum in which every element has another weight."""
        mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(("data", "model")), out_specs=P(("data", "model"))))
        result, pull = jax.vjp(mapped, x)
        return result, pull(jnp.arange(result.size, dtype=result.dtype).reshape(result.shape))[0]

    in_rounds = run(lambda x: hierarchical.all_to_all_local(x, axes, split_dim=split, concat_dim=concat))
    at_once = run(lambda x: jax.lax.all_to_all(x, axes, split, concat, tiled=True))
    chex.assert_trees_all_equal(in_rounds, at_once)


@pytest.mark.parametrize(("axes", "dim"), covering([("model", "data"), "data"], [0, 1], keep=2))
def test_a_gather_in_rounds_is_an_all_gather(axes: str | tuple[str, ...], dim: int) -> None:
    """Bitwise, in one, two and three rounds, with the mesh's axes in either order."""
    mesh = jp.MeshSpec(data=4, model=2).build()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 24)), jnp.float32)
    found = []
    for parts in {"data": [(4,), (2, 2)]}.get(str(axes), [(8,), (2, 4), (4, 2), (2, 2, 2)]):
        gather = jax.shard_map(
            lambda x, parts=parts: hierarchical.gather_local(x, axes, dim=dim, parts=parts),
            mesh=mesh,
            in_specs=P(None, axes) if dim else P(axes),
            out_specs=P(),
            check_vma=False,
        )
        found.append(jax.jit(gather)(x))
    for result in found:
        np.testing.assert_array_equal(result, x)


@pytest.mark.parametrize(("axes", "dim"), covering([("model", "data"), "data"], [0, 1], keep=2))
def test_a_scatter_in_rounds_is_a_reduce_scatter(axes: str | tuple[str, ...], dim: int) -> None:
    """Bitwise for whole numbers, in one, two and three rounds, with the mesh's axes in either order."""
    mesh = jp.MeshSpec(data=4, model=2).build()
    x = jnp.asarray(np.random.default_rng(0).integers(-99, 99, (4, 2, 16, 24)), jnp.float32)
    want = x.sum((0, 1)) if axes != "data" else x.sum(0)[0]
    for parts in {"data": [(4,), (2, 2)]}.get(str(axes), [(8,), (2, 4), (4, 2), (2, 2, 2)]):
        scatter = jax.shard_map(
            lambda x, parts=parts: hierarchical.scatter_local(x[0, 0], axes, dim=dim, parts=parts),
            mesh=mesh,
            in_specs=P("data", "model") if axes != "data" else P("data"),
            out_specs=P(None, axes) if dim else P(axes),
            check_vma=False,
        )
        np.testing.assert_array_equal(jax.jit(scatter)(x), want)


@pytest.mark.parametrize(
    ("topology", "mesh", "axes", "parts"),
    [
        ("v5e:4x4", {"data": 16}, ("data",), (4, 4)),
        ("v5e:4x8", {"data": 32}, ("data",), (8, 4)),
        ("v5p:4x4x4", {"data": 32, "model": 2}, ("data", "model"), (16, 4)),
        ("v5e:2x4", {"data": 8}, ("data",), (8,)),
        ("v5e:4x4", {"data": 8, "model": 2}, ("data",), (8,)),
        ("h100:8x8", {"data": 64}, ("data",), (64,)),
    ],
)
def test_a_whole_torus_is_scattered_over_in_rounds(
    topology: str, mesh: dict[str, int], axes: tuple[str, ...], parts: tuple[int, ...]
) -> None:
    assert hierarchical.scatter_rounds(jp.MeshSpec(**mesh).on(topology), axes) == parts


@pytest.mark.parametrize(
    ("topology", "mesh", "axes", "parts"),
    [
        ("v5p:16x16x16", {"data": 4096}, ("data",), (256, 16)),
        ("v5p:4x8x8", {"data": 64, "model": 4}, ("data", "model"), (32, 8)),
        ("v4:4x4x4", {"data": 64}, ("data",), (16, 4)),
        ("v5p:2x4x4", {"data": 32}, ("data",), (32,)),
        ("v5p:4x8x8", {"data": 64, "model": 4}, ("data",), (64,)),
        ("v5e:16x16", {"data": 256}, ("data",), (256,)),
        ("h100:8x8", {"data": 64}, ("data",), (64,)),
    ],
)
def test_only_a_whole_closed_torus_of_three_dims_is_gathered_in_rounds(
    topology: str, mesh: dict[str, int], axes: tuple[str, ...], parts: tuple[int, ...]
) -> None:
    assert hierarchical.gather_rounds(jp.MeshSpec(**mesh).on(topology), axes) == parts


def test_few_devices_exchange_at_once() -> None:
    mesh = jp.MeshSpec(data=8).build()
    spec = P("data")
    local = jax.shard_map(
        lambda x: hierarchical.all_to_all_local(x, "data", split_dim=0, concat_dim=1),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    report = jp.audit(jax.jit(local).lower(jnp.zeros((64, 4))).compile(), mesh=mesh)
    assert report.count("all-to-all") == 1


def test_pieces_that_do_not_come_out_even() -> None:
    mesh = jp.MeshSpec(data=4, model=2).build()
    swap = jax.shard_map(
        lambda x: hierarchical.all_to_all_local(x, ("data", "model"), split_dim=1, concat_dim=0),
        mesh=mesh,
        in_specs=P(("data", "model")),
        out_specs=P(("data", "model")),
    )
    with raises(LayoutError, "all_to_all_local()"):
        jax.eval_shape(swap, jnp.zeros((8, 12)))
