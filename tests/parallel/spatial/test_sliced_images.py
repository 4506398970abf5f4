"""Sliced convolutions, pooling and resizing against those of whole images, and the bytes that they send."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covers import covering
from error_texts import raises
from flax import linen, nnx
from profiles import few

import jaxpar as jp
from jaxpar.errors import ConfigError, LayoutError

SLICES = {"2x2": (2, 2), "1x4": (1, 4), "4x1": (4, 1), "8x1": (8, 1)}
NHWC, NDHWC = ("NHWC", "HWIO", "NHWC"), ("NDHWC", "DHWIO", "NDHWC")
type Image = Callable[..., jax.Array]


def layout(height: int, width: int, depth: int = 1) -> jp.Layout:
    mesh = jp.MeshSpec(data=8 // (height * width * depth), context=height, model=width, ulysses=depth)
    rules = jp.Rules(batch="data", height="context", width="model", depth="ulysses", channels=None)
    return jp.Layout(mesh.build(), rules)


def values_and_gradients(run: Image, *arrays: Any) -> list[np.ndarray]:
    def loss(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = run(*arrays)
        return jnp.sum(jnp.sin(y) * y), y

    every = tuple(range(len(arrays)))
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(jax.grad(loss, every, has_aux=True))(*arrays))]


def check(sliced: Image, whole: Image, slices: jp.Layout, *arrays: Any, dims: Any = ("height", "width")) -> None:
    """Values and gradients of ``sliced`` under the layout are those of ``whole`` without one."""
    with jax.enable_x64(True):
        arrays = tuple(jnp.asarray(x, jnp.float64) for x in arrays)
        expected = values_and_gradients(whole, *arrays)
        with slices:
            found = values_and_gradients(lambda x, *w: sliced(jp.hint(x, "batch", *dims, None), *w), *arrays)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11 * np.abs(b).max())


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "3": {"kernel": 3},
    "3 stride 2": {"kernel": 3, "window_strides": (2, 2)},
    "2 stride 2": {"kernel": 2, "window_strides": (2, 2), "padding": "VALID"},
    "1 stride 2": {"kernel": 1, "window_strides": (2, 2)},
    "3 dilated": {"kernel": 3, "rhs_dilation": (2, 2)},
    "5 grouped": {"kernel": 5, "feature_group_count": 2},
    "3 by depth": {"kernel": 3, "feature_group_count": 4},
    "4 stride 2": {"kernel": 4, "window_strides": (2, 2), "padding": ((1, 1), (1, 1))},
    "uneven padding": {"kernel": 4, "padding": ((2, 1), (0, 3))},
    "7 stride 2": {"kernel": 7, "window_strides": (2, 2)},
    "transposed 2": {"kernel": 2, "padding": ((1, 1), (1, 1)), "lhs_dilation": (2, 2)},
    "transposed 3": {"kernel": 3, "padding": ((1, 2), (1, 2)), "lhs_dilation": (2, 2)},
    "transposed 4": {"kernel": 4, "padding": ((2, 2), (2, 2)), "lhs_dilation": (2, 2)},
}


@pytest.mark.parametrize(("slices", "third"), covering(SLICES, range(3), keep=1))
def test_conv_equals_that_of_the_whole_image(slices: str, third: int) -> None:
    x = images(8, 32, 16, 4)
    options = [{"window_strides": (1, 1), "padding": "SAME", **case} for case in CONVOLUTIONS.values()][third::3]
    kernels = [case.pop("kernel") for case in options]
    weights = [
        images(k, k, 4 // case.get("feature_group_count", 1), 4) for k, case in zip(kernels, options, strict=True)
    ]

    def run(conv: Image, x: jax.Array, *weights: jax.Array) -> jax.Array:
        pairs = zip(weights, options, strict=True)
        return jnp.stack([jnp.mean(conv(x, w, dimension_numbers=NHWC, **o) ** 2, (1, 2, 3)) for w, o in pairs])

    whole = partial(run, jax.lax.conv_general_dilated)
    check(partial(run, jp.spatial.conv), whole, layout(*SLICES[slices]), x, *weights)


@pytest.mark.slow
@pytest.mark.parametrize("slices", few([(2, 2, 2), (1, 1, 8), (2, 1, 4)], 1))
def test_conv_of_volumes(slices: tuple[int, int, int]) -> None:
    x, w, up = images(1, 16, 8, 8, 3), images(3, 3, 3, 3, 5), images(2, 2, 2, 5, 3)

    def run(conv: Image, pool: Image, x: jax.Array, w: jax.Array, up: jax.Array) -> jax.Array:
        y = pool(conv(x, w, (1, 1, 1), "SAME", dimension_numbers=NDHWC), (2, 2, 2), (2, 2, 2))
        y = conv(y, up, (1, 1, 1), ((1, 1),) * 3, (2, 2, 2), dimension_numbers=NDHWC)
        return conv(y, w, (2, 2, 2), "SAME", None, (2, 2, 2), NDHWC)

    sliced, whole = (
        partial(run, jp.spatial.conv, jp.spatial.max_pool),
        partial(run, jax.lax.conv_general_dilated, nnx.max_pool),
    )
    check(sliced, whole, layout(*slices), x, w, up, dims=("depth", "height", "width"))


@pytest.mark.slow
@pytest.mark.parametrize("slices", few(SLICES, 1))
def test_pooling_equals_that_of_the_whole_image(slices: str) -> None:
    cases: list[tuple[tuple[int, int], tuple[int, int] | None, Any]] = [
        ((2, 2), (2, 2), "VALID"), ((3, 3), (2, 2), "SAME"), ((3, 3), None, "SAME"), ((2, 4), (1, 4), ((1, 0), (0, 0)))
    ]  # fmt: skip

    def run(maximum: Image, mean: Image, x: jax.Array) -> jax.Array:
        found = [pool(x, *case) for case in cases for pool in (maximum, mean)]
        found += [mean(x, *case, count_include_pad=False) for case in cases]
        return jnp.stack([jnp.mean(y**2, (1, 2, 3)) for y in found])

    sliced = partial(run, jp.spatial.max_pool, jp.spatial.avg_pool)
    check(sliced, partial(run, nnx.max_pool, nnx.avg_pool), layout(*SLICES[slices]), images(8, 32, 32, 3))


@pytest.mark.slow
@pytest.mark.parametrize("slices", few(["4x1", "2x2"], 1))
def test_resize_equals_that_of_the_whole_image(slices: str) -> None:
    sizes = ((64, 64), (16, 32), (48, 48), (32, 96), (8, 24))

    def run(resize: Image, x: jax.Array) -> jax.Array:
        ys = [resize(x, shape, method) for method in ("nearest", "linear", "cubic") for shape in sizes]
        ys.append(resize(x, (16, 16), "linear", antialias=False))
        return jnp.stack([jnp.mean(y**2, (1, 2, 3)) + jnp.mean(y[:, 1] * y[:, -2], (1, 2)) for y in ys])

    def whole(x: jax.Array, shape: tuple[int, int], method: str, *, antialias: bool = True) -> jax.Array:
        return jax.image.resize(x, (x.shape[0], *shape, x.shape[-1]), method, antialias)

    # jax.image computes its weights in the dtype of the image, we in fp32.
    with jax.enable_x64(False):
        x = jnp.asarray(images(8, 32, 32, 3), jnp.float32)
        expected = values_and_gradients(partial(run, whole), x)
        with layout(*SLICES[slices]):
            found = values_and_gradients(
                lambda x: run(jp.spatial.resize, jp.hint(x, "batch", "height", "width", None)), x
            )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def bytes_by_kind(run: Image, mesh: jp.Layout, *arrays: Any) -> dict[str, float]:
    shardings = (mesh.sharding(("batch", "height", "width", None)), *(mesh.sharding(()) for _ in arrays[1:]))
    with mesh:
        compiled = jax.jit(run, in_shardings=shardings).lower(*arrays).compile()
    found: dict[str, float] = {}
    for c in jp.audit(compiled, mesh=mesh.mesh).collectives:
        found[c.kind] = found.get(c.kind, 0) + c.total_wire_bytes
    return found


@pytest.mark.parametrize("groups", [1, 4])
def test_conv_sends_the_halo_and_the_kernel_gradient_only(groups: int) -> None:
    # Forward one halo of the input, backward its gradient; the kernel's gradient is summed over the slices.
    x, w = jax.ShapeDtypeStruct((2, 32, 32, 4), "float32"), jax.ShapeDtypeStruct((5, 5, 4 // groups, 8), "float32")
    conv = partial(
        jp.spatial.conv, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC, feature_group_count=groups
    )
    step = jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(conv(x, w))), (0, 1))
    sent = bytes_by_kind(step, layout(8, 1), x, w)
    row = 2 * 32 * 4 * 4
    assert sent["collective-permute"] == 2 * (2 + 2) * row
    assert "all-gather" not in sent and "all-to-all" not in sent


def test_pooling_and_resizing_send_the_halo_only() -> None:
    x = jax.ShapeDtypeStruct((2, 32, 32, 4), "float32")
    row = 1 * 32 * 4 * 4  # of the one image of a device
    pool = jax.grad(lambda x: jnp.sum(jp.spatial.max_pool(x, (3, 3), (2, 2), "SAME") ** 2))
    assert bytes_by_kind(pool, layout(4, 1), x) == {"collective-permute": 2 * row}  # SAME pads after, so one row
    resize = jax.grad(lambda x: jnp.sum(jp.spatial.resize(x, (64, 32)) ** 2))
    assert bytes_by_kind(resize, layout(4, 1), x) == {"collective-permute": 2 * 2 * row}


@pytest.mark.slow
def test_flax_layers_take_conv() -> None:
    x = jnp.asarray(images(8, 32, 32, 3), jnp.float32)
    options: dict[str, Any] = {"strides": (2, 2), "conv_general_dilated": jp.spatial.conv}
    own = nnx.Conv(3, 6, (3, 3), rngs=nnx.Rngs(0), **options)
    plain = nnx.Conv(3, 6, (3, 3), rngs=nnx.Rngs(0), strides=(2, 2))
    layer = linen.Conv(6, (3, 3), **options)
    variables = {"params": {"kernel": plain.kernel[...], "bias": plain.bias[...]}}
    with layout(2, 4):
        found = own(x), layer.apply(variables, x)
    for y in found:
        np.testing.assert_allclose(y, plain(x), rtol=1e-5, atol=1e-5)


def test_without_slices_nothing_is_sent() -> None:
    x, w = jax.ShapeDtypeStruct((8, 8, 8, 3), "float32"), jax.ShapeDtypeStruct((3, 3, 3, 3), "float32")
    run = lambda x, w: jp.spatial.conv(x, w, (1, 1), "SAME", dimension_numbers=NHWC)
    assert bytes_by_kind(run, layout(1, 1), x, w) == {}
    with jp.unsharded():
        assert jax.eval_shape(run, x, w).shape == (8, 8, 8, 3)


def test_bf16_kernels_are_summed_in_fp32() -> None:
    x, w = (jnp.asarray(images(*shape), jnp.bfloat16) for shape in ((8, 16, 16, 3), (3, 3, 3, 4)))
    loss = lambda conv, w: jnp.sum(conv(x, w, (1, 1), "SAME", dimension_numbers=NHWC).astype(jnp.float32) ** 2)
    expected = jax.grad(partial(loss, jax.lax.conv_general_dilated))(w)
    with layout(2, 4):
        found = jax.jit(jax.grad(partial(loss, jp.spatial.conv)))(w)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=2e-2)


def run_conv(kernel: int, padding: Any = "SAME", size: int = 32, **options: Any) -> None:
    run = lambda x, w: jp.spatial.conv(x, w, (1, 1), padding, dimension_numbers=NHWC, **options)
    shapes = (8, size, size, 3), (kernel, kernel, 3, 3)
    with layout(8, 1):
        jax.eval_shape(run, *(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))


TOO_WIDE = "5"
NOT_IN_LINE = "30"
TWO_DIMS = "conv: dims"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: run_conv(11), TOO_WIDE),
        (lambda: run_conv(3, "VALID"), NOT_IN_LINE),
        (lambda: run_conv(3, dims=("height",)), TWO_DIMS),
    ],
)
def test_errors_name_sizes_and_remedy(make: Callable[[], None], text: str) -> None:
    with raises(LayoutError, text):
        make()


def test_slices_that_do_not_divide_and_a_dim_sliced_twice() -> None:
    with pytest.raises(LayoutError, match=r"conv\(\).*height.*30.*8"):
        run_conv(3, size=30)
    with pytest.raises(LayoutError, match="context"):
        run_conv(3, dims=("height", "height"))


def test_resize_errors() -> None:
    x = jax.ShapeDtypeStruct((8, 32, 32, 3), "float32")
    with layout(8, 1), raises(LayoutError, "context", "resize"):
        jax.eval_shape(lambda x: jp.spatial.resize(x, (20, 32)), x)
    with raises(ConfigError, "resize: method"):
        jp.spatial.Resizing(8, 16, "bicubic")  # type: ignore[arg-type]
