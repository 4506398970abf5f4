"""Flax's transposed convolutions on slices against those of whole images, and the bytes that they send."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covers import cover
from error_texts import raises
from flax import linen, nnx

import jaxpar as jp
from jaxpar.errors import ConfigError, LayoutError

DIMS = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}
SLICES = {"2x2": {"context": 2, "model": 2}, "1x4": {"model": 4}, "4x1": {"context": 4}, "8x1": {"context": 8}}
PLAIN = cover(SLICES, (1, 2, 3, 4, 5), (1, 2, 3), ("SAME", "CIRCULAR"))
"""Slices, the size of the kernel, the stride and the padding."""
SPECIAL: list[dict[str, Any]] = [
    *({"kernel_size": k, "strides": s, "padding": "VALID"} for k, s in ((1, 1), (1, 2), (2, 2), (2, 3), (3, 3))),
    {"kernel_size": 4, "strides": 1, "padding": "CIRCULAR"},
    {"kernel_size": 3, "strides": 2, "padding": ((1, 2), (2, 1))},
    {"kernel_size": 3, "strides": 1, "padding": 1, "use_bias": False},
    {"kernel_size": 3, "strides": 2, "kernel_dilation": 2},
    {"kernel_size": 3, "strides": 2, "kernel_dilation": 2, "padding": "CIRCULAR", "transpose_kernel": True},
    {"kernel_size": 3, "strides": None, "mask": True},
]


def plain(kernel: int, stride: int, padding: str) -> dict[str, Any]:
    transposed = (kernel + stride) % 3 == 0
    return {"kernel_size": kernel, "strides": stride, "padding": padding, "transpose_kernel": transposed}


FEW = [plain(kernel, 2, padding) for kernel in (2, 4) for padding in ("SAME", "CIRCULAR")]


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


def values_and_gradients(layers: list[nnx.Module], x: jax.Array, *dims: str) -> list[np.ndarray]:
    """Of all layers in one program, with the sum of their gradients of ``x``."""
    parts = [nnx.split(layer) for layer in layers]

    def loss(params: list[Any], x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        x = jp.hint(x, "batch", *dims, None) if dims else x
        ys = [nnx.merge(graph, p)(x) for (graph, _), p in zip(parts, params, strict=True)]  # type: ignore[operator]
        return sum((jnp.sum(jnp.sin(y) * y) for y in ys), jnp.zeros(())), ys

    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    return [np.asarray(v) for v in jax.tree.leaves(run([params for _, params in parts], x))]


def check(cases: list[dict[str, Any]], slices: jp.Layout, x: jax.Array) -> None:
    """Values and gradients of the sliced layers are those of Flax's, to 1e-5 of the largest."""
    space = x.ndim - 2
    own, flax = (
        [layer(x.shape[-1], 2, rngs=nnx.Rngs(i), **options_of(case, space)) for i, case in enumerate(cases)]
        for layer in (jp.spatial.ConvTranspose, nnx.ConvTranspose)
    )
    for a, b in zip(own, flax, strict=True):  # checkpoints are interchangeable
        jax.tree.map(np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(layer)) for layer in (a, b)))
    expected = values_and_gradients(flax, x)
    with slices:
        found = values_and_gradients(own, x, *DIMS[space])
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max(), err_msg=f"array {i}")


def test_layers_equal_those_of_flax() -> None:
    check(FEW[1:3], layout(context=2, model=4), images(1, 8, 12, 3))


@pytest.mark.slow
@pytest.mark.parametrize("slices", SLICES)
def test_the_grid_of_layers_equals_those_of_flax(slices: str) -> None:
    """Slices, kernels, strides and paddings meet in pairs; each special layer meets one kind of slices."""
    layers = [plain(*case) for name, *case in PLAIN if name == slices] + SPECIAL[list(SLICES).index(slices) :: 4]
    check(layers, layout(**SLICES[slices]), images(2, 24, 24, 3))


@pytest.mark.slow
def test_volumes_and_lines_equal_those_of_flax() -> None:
    check(FEW, layout(context=2, model=2, ulysses=2), images(1, 8, 4, 12, 3))
    check(FEW, layout(model=4), images(2, 16, 3))


class Network(linen.Module):
    """A model of Linen that knows nothing of slices."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.silu(linen.ConvTranspose(4, (4, 4), strides=(2, 2), padding="CIRCULAR")(x))
        return linen.ConvTranspose(2, (3, 3), use_bias=False, transpose_kernel=True, dtype="float32")(x)


class Layers(nnx.Module):
    """A model of NNX that knows nothing of slices."""

    def __init__(self, rngs: nnx.Rngs):
        self.grouped = nnx.Conv(4, 4, (3, 3), feature_group_count=2, rngs=rngs)
        self.rest = nnx.List([nnx.ConvTranspose(4, 4, (4, 4), strides=2, rngs=rngs)])
        self.circular = nnx.Conv(4, 4, (3, 3), padding="CIRCULAR", rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.rest[0](self.circular(self.grouped(x)))


@pytest.mark.slow
def test_models_of_others_compute_on_slices() -> None:
    x = images(2, 8, 16, 4)
    network, model = Network(), Layers(nnx.Rngs(0))
    init = lambda key: network.init(key, x)
    variables, paths = jax.jit(init)(jax.random.key(0)), nnx.to_flat_state(nnx.state(model)).paths
    run = lambda variables, x: network.apply(variables, x)
    forward = lambda model, x: model(x)
    expected = jax.jit(run)(variables, x), nnx.jit(forward)(model, x)
    with layout(context=2, model=2):
        with linen.intercept_methods(jp.spatial.intercept_conv_transpose):
            shapes = jax.eval_shape(init, jax.random.key(0))
            intercepted = jax.jit(lambda *arrays: run(*arrays)).trace(variables, x)
        assert jp.spatial.use_slices(model) is model
        found = intercepted.lower().compile()(variables, x), nnx.jit(lambda *arrays: forward(*arrays))(model, x)
    assert str(intercepted.jaxpr).count("shard_map[") == 2  # both layers are computed slice by slice
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, variables)
    assert nnx.to_flat_state(nnx.state(model)).paths == paths
    assert type(model.rest[0]) is jp.spatial.ConvTranspose
    assert model.circular.conv_general_dilated is jax.lax.conv_general_dilated
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def bytes_by_kind(slices: jp.Layout, size: int, **options: Any) -> dict[str, float]:
    """What a device sends for a layer's value and the gradients of its input and its kernel."""
    layer = jp.spatial.ConvTranspose(4, 8, (size, size), rngs=nnx.Rngs(0), use_bias=False, **options)
    graph, params = nnx.split(layer)
    step = jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(nnx.merge(graph, p)(x))), (0, 1))
    x = jax.ShapeDtypeStruct((2, 32, 32, 4), "float32", sharding=slices.sharding(("batch", "height", "width", None)))
    with slices:
        compiled = jax.jit(step).lower(params, x).compile()
    found: dict[str, float] = {}
    for c in jp.audit(compiled, mesh=slices.mesh).collectives:
        found[c.kind] = found.get(c.kind, 0) + c.total_wire_bytes
    return found


@pytest.mark.parametrize(
    ("size", "options", "rows"),
    [
        pytest.param(2, {"strides": (2, 2)}, 0, marks=pytest.mark.slow),
        (3, {"strides": (2, 2)}, 1),  # padding 2 and 1 of the spread image
        pytest.param(4, {"strides": (2, 2)}, 1 + 1, marks=pytest.mark.slow),
        pytest.param(5, {"strides": (1, 1), "padding": "CIRCULAR"}, 2 + 2, marks=pytest.mark.slow),
    ],
)
def test_layers_send_the_halo_and_the_kernel_gradient_only(size: int, options: dict[str, Any], rows: int) -> None:
    # Forward the halo of the input, backward that of its gradient; the kernel's gradient is summed over the slices.
    sent = bytes_by_kind(layout(context=8), size, **options)
    row = 2 * 32 * 4 * 4
    assert sent.pop("collective-permute", 0) == 2 * rows * row
    kernel = 4 * size * size * 4 * 8
    assert sent.pop("all-reduce") == pytest.approx(2 * 7 / 8 * (kernel + 4))  # with the loss
    assert sent == {}


def test_valid_windows_that_overlap_do_not_divide() -> None:
    with layout(context=8), raises(LayoutError, "34 windows"):
        x, w = jax.ShapeDtypeStruct((8, 32, 32, 3), "float32"), jax.ShapeDtypeStruct((3, 3, 3, 3), "float32")
        jax.eval_shape(lambda x, w: jp.spatial.conv_transpose(x, w, (1, 1), "VALID"), x, w)


def test_a_mask_of_another_shape_is_refused() -> None:
    mask = jnp.ones(5)  # it would broadcast
    layer = jp.spatial.ConvTranspose(3, 5, (2, 2), mask=mask, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    with raises(ConfigError, "ConvTranspose"):
        layer(jnp.ones((1, 4, 4, 3)))


def test_unknown_padding() -> None:
    with layout(context=8), raises(ConfigError, "conv_transpose: padding"):
        jp.spatial.conv_transpose(jnp.ones((8, 32, 32, 3)), jnp.ones((3, 3, 3, 3)), (2, 2), "FULL")


@pytest.mark.slow
def test_consistent_padding_is_that_of_the_convolution() -> None:
    x, w = images(8, 16, 8, 3), images(4, 4, 3, 2)
    options: dict[str, Any] = {"strides": (2, 2), "padding": ((1, 1), (1, 1)), "use_consistent_padding": True}
    with layout(context=4):
        found = jp.spatial.conv_transpose(x, w, **options)
    np.testing.assert_allclose(found, jax.lax.conv_transpose(x, w, **options), rtol=1e-5, atol=1e-5)
