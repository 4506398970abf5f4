"""Flax's transposed convolutions on slices against those of whole images, and the bytes that they send."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from profiles import few

import jaxpar as jp
from jaxpar.errors import LayoutError

DIMS = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}
SLICES = {"2x2": {"context": 2, "model": 2}, "1x4": {"model": 4}, "4x1": {"context": 4}, "8x1": {"context": 8}}
SAME_AND_CIRCULAR = list(itertools.product((1, 2, 3, 4, 5), (1, 2, 3), ("SAME", "CIRCULAR"), (False, True)))
GRID: list[dict[str, Any]] = [
    *({"kernel_size": k, "strides": s, "padding": p, "transpose_kernel": t} for k, s, p, t in SAME_AND_CIRCULAR),
    *({"kernel_size": k, "strides": s, "padding": "VALID"} for k, s in ((1, 1), (1, 2), (2, 2), (2, 3), (3, 3))),
    {"kernel_size": 3, "strides": 2, "padding": ((1, 2), (2, 1))},
    {"kernel_size": 3, "strides": 1, "padding": 1, "use_bias": False},
    {"kernel_size": 3, "strides": 2, "kernel_dilation": 2},
    {"kernel_size": 3, "strides": 2, "kernel_dilation": (2, 1), "padding": "CIRCULAR", "transpose_kernel": True},
    {"kernel_size": 3, "strides": None, "mask": True},
]


def layout(**axes: int) -> jp.Layout:
    rest = 8 // int(np.prod(list(axes.values())))
    mesh = jp.MeshSpec(data=rest, **axes)
    rules = jp.Rules(batch="data", height="context", width="model", depth="ulysses", channels=None)
    return jp.Layout(mesh.build(), rules)


def images(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def options_of(case: dict[str, Any], space: int) -> dict[str, Any]:
    """The arguments of the layer, a kernel size for each spatial dim."""
    options = {**case, "kernel_size": (case["kernel_size"],) * space}
    if options.pop("mask", False):
        options["mask"] = jnp.asarray(np.arange(np.prod(options["kernel_size"]) * 6) % 3 > 0, jnp.float32).reshape(
            *options["kernel_size"], 3, 2
        )
    return options


def values_and_gradients(layer: nnx.Module, x: jax.Array, dims: tuple[str, ...] | None = None) -> list[np.ndarray]:
    graph, params = nnx.split(layer)

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = nnx.merge(graph, params)(x if dims is None else jp.hint(x, "batch", *dims, None))  # type: ignore[operator]
        return jnp.sum(jnp.sin(y) * y), y

    return [np.asarray(v) for v in jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x))]


def check(cases: list[dict[str, Any]], slices: jp.Layout, x: jax.Array) -> None:
    """Values and gradients of the sliced layers are those of Flax's, to 1e-5 of the largest."""
    space = x.ndim - 2
    for case in cases:
        options = options_of(case, space)
        own, flax = (
            cls(x.shape[-1], 2, rngs=nnx.Rngs(0), **options) for cls in (jp.spatial.ConvTranspose, nnx.ConvTranspose)
        )
        expected = values_and_gradients(flax, x)
        with slices:
            found = values_and_gradients(own, x, DIMS[space])
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max(), err_msg=str(case))


def test_layers_equal_those_of_flax() -> None:
    cases = [GRID[i] for i in (14, 41, 43, 62)]  # 2 stride 2 SAME; circular; circular transposed; VALID
    check(cases, layout(context=2, model=2), images(4, 8, 12, 3))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("slices", few(SLICES, 1))
def test_the_grid_of_layers_equals_those_of_flax(slices: str, part: int) -> None:
    check(GRID[part::4], layout(**SLICES[slices]), images(8, 16, 24, 3))


@pytest.mark.slow
def test_volumes_and_lines_equal_those_of_flax() -> None:
    cases = [case for case in GRID if case["kernel_size"] in (2, 3, 4) and case["strides"] == 2 and len(case) == 4]
    check([c for c in cases if not c.get("transpose_kernel")], layout(context=2, model=2, ulysses=2),
          images(2, 8, 4, 12, 3))  # fmt: skip
    check(cases[::3], layout(model=4), images(4, 16, 3))
