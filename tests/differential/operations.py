"""A table of operations in plain JAX: for each name, a function that draws its parameters and its operands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .cases import Dice


@dataclass(frozen=True)
class Operand:
    """A random array: ``normal``, ``positive``, ``mask`` or the exclusive bound of its integers."""

    shape: tuple[int, ...]
    values: str | int = "normal"

    @property
    def real(self) -> bool:
        return self.values in ("normal", "positive")

    def array(self, rng: np.random.Generator) -> np.ndarray[Any, Any]:
        if isinstance(self.values, int):
            return rng.integers(0, self.values, self.shape, np.int32)
        if self.values == "mask":
            return rng.random(self.shape) < 0.6
        normal = rng.normal(size=self.shape)
        return np.abs(normal) + 0.5 if self.values == "positive" else normal


@dataclass(frozen=True)
class Operation:
    """A function of arrays with the operands that it is called with.

    Attributes:
      smooth: whether gradients with respect to its real operands are defined.
    """

    function: Callable[..., Any]
    operands: tuple[Operand, ...]
    smooth: bool = True


OPERATIONS: dict[str, Callable[[Dice], Operation]] = {}


def operation(draw: Callable[[Dice], Operation]) -> Callable[[Dice], Operation]:
    OPERATIONS[draw.__name__.strip("_")] = draw
    return draw


def several(names: dict[str, Any], make: Callable[[Any, Dice], Operation]) -> None:
    """Adds operations that differ only in their function."""
    OPERATIONS.update({name: functools.partial(make, function) for name, function in names.items()})


def size(dice: Dice) -> int:
    return dice.one(8, 8, 16)


def shape(dice: Dice, least: int = 1, most: int = 3) -> tuple[int, ...]:
    return tuple(size(dice) for _ in range(dice.whole(least, most)))


def padding(dice: Dice) -> tuple[int, int]:
    return (dice.whole(-1, 2), dice.whole(-1, 2))


def convolution(kind: str, dice: Dice) -> Operation:
    """A convolution of one to three spatial dims, ``[batch, space…, channels]``."""
    space = dice.one(1, 2, 2, 3) if kind == "plain" else dice.one(1, 2)
    kernel = tuple(dice.one(1, 2, 3, 3) for _ in range(space))
    letters = "DHW"[-space:]
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    options: dict[str, Any] = {"window_strides": (dice.one(1, 1, 2),) * space}
    options["padding"] = dice.one("SAME", "SAME", "VALID", (padding(dice),) * space)
    inputs, rows, images, features = 8, 8, 8, 8
    match kind:
        case "grouped":
            options["feature_group_count"] = dice.one(2, 4)
            inputs //= options["feature_group_count"]
        case "depthwise":
            options["feature_group_count"], inputs = 8, 1
        case "batch_grouped":
            options["batch_group_count"] = dice.one(2, 4, 8)
        case "dilated":
            options["rhs_dilation"] = (2,) * space
        case "transposed":
            options |= {
                "lhs_dilation": (2,) * space,
                "window_strides": (1,) * space,
                "padding": (padding(dice),) * space,
            }
    function = lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)
    return Operation(function, (Operand((images, *(rows,) * space, 8)), Operand((*kernel, inputs, features))))


several(
    {f"conv_{k}": k for k in ("plain", "grouped", "depthwise", "batch_grouped", "dilated", "transposed")}, convolution
)


def pointwise(function: Any, dice: Dice) -> Operation:
    return Operation(function, (Operand(shape(dice), "positive"),))


several({"exp": jnp.exp, "gelu": jax.nn.gelu, "cbrt": jnp.cbrt, "abs": jnp.abs}, pointwise)


def along(function: Any, dice: Dice) -> Operation:
    """A function of one array along one of its dims."""
    dims = shape(dice)
    return Operation(functools.partial(function, axis=dice.whole(0, len(dims) - 1)), (Operand(dims),))


several(
    {
        "sum": jnp.sum,
        "max": jnp.max,
        "logsumexp": jax.nn.logsumexp,
        "softmax": jax.nn.softmax,
        "prod": jnp.prod,
        "variance": jnp.var,
        "sort": jnp.sort,
        "rev": jnp.flip,
        "expand": jnp.expand_dims,
        "diff": jnp.diff,
        "cumulative_reduction": lambda x, axis: jnp.cumsum(x, axis) / (1 + jnp.arange(x.shape[-1])),
        "fft": lambda x, axis: jnp.abs(jnp.fft.fft(x, axis=axis)) ** 2,
        "rfft": lambda x, axis: jnp.abs(jnp.fft.rfft(x, axis=axis)) ** 2,
        "stack": lambda x, axis: jnp.stack([x, 2 * x], axis),
        "split": lambda x, axis: jnp.split(x, 2, axis)[1],
        "median": lambda x, axis: jnp.median(x, axis),
        "normalize": lambda x, axis: x / jnp.linalg.norm(x, axis=axis, keepdims=True),
        "halves": lambda x, axis: sum(jnp.split(x, 2, axis)),
        "roll": lambda x, axis: jnp.roll(x, 3, axis),
        "repeat": lambda x, axis: jnp.repeat(x, 2, axis),
        "trapezoid": lambda x, axis: jnp.trapezoid(x, axis=axis),
    },
    along,
)


def order(function: Any, dice: Dice) -> Operation:
    drawn = along(function, dice)
    return Operation(drawn.function, drawn.operands, smooth=False)


several({"argmax": jnp.argmax, "argsort": jnp.argsort, "any": jnp.any}, order)


def cumulative(function: Any, dice: Dice) -> Operation:
    dims, reverse = shape(dice), dice.chance(0.4)
    dim = dice.whole(0, len(dims) - 1)
    return Operation(lambda x: function(x, axis=dim, reverse=reverse), (Operand(dims, "positive"),))


several(
    {
        "cumsum": lax.cumsum,
        "cumprod": lax.cumprod,
        "cummax": lax.cummax,
        "cumlogsumexp": lax.cumlogsumexp,
        "associative_scan": lambda x, axis, reverse: lax.associative_scan(
            lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (jnp.tanh(x), x), axis=axis, reverse=reverse
        )[1],
    },
    cumulative,
)


@operation
def top_k(dice: Dice) -> Operation:
    k = dice.one(1, 2, 8)
    return Operation(lambda x: lax.top_k(x, k)[0], (Operand(shape(dice, 2)),))


def window(function: Any, dice: Dice) -> Operation:
    dims = shape(dice, 2)
    sizes = tuple(dice.one(1, 2, 3) for _ in dims)
    strides = tuple(dice.one(1, 1, 2) for _ in dims)
    pads = dice.one("SAME", "VALID")
    return Operation(lambda x: function(x, sizes, strides, pads), (Operand(dims, "positive"),))


several(
    {
        "max_pool": lambda x, sizes, strides, pads: lax.reduce_window(x, -jnp.inf, lax.max, sizes, strides, pads),
        "sum_pool": lambda x, sizes, strides, pads: lax.reduce_window(x, 0.0, lax.add, sizes, strides, pads),
    },
    window,
)


@operation
def strided_slice(dice: Dice) -> Operation:
    dims = shape(dice)
    starts = [dice.whole(0, 3) for _ in dims]
    limits = [n - dice.one(0, 0, 1, 4) for n in dims]
    strides = [dice.one(1, 2, 2, 3, 4) for _ in dims]
    return Operation(lambda x: lax.slice(x, starts, limits, strides), (Operand(dims),))


@operation
def strided(dice: Dice) -> Operation:
    """The dims shard evenly before and after."""
    dims, stride = shape(dice), dice.one(2, 4)
    dim = dice.whole(0, len(dims) - 1)
    longer = tuple(n * stride if i == dim else n for i, n in enumerate(dims))
    start = dice.whole(0, stride - 1)
    return Operation(lambda x: x[(slice(None),) * dim + (slice(start, None, stride),)], (Operand(longer),))


@operation
def pad(dice: Dice) -> Operation:
    dims = shape(dice)
    config = [(*padding(dice), dice.one(0, 0, 1, 2)) for _ in dims]
    return Operation(lambda x, v: lax.pad(x, v[0], config), (Operand(dims), Operand((8,))))


def placed(function: Any, dice: Dice) -> Operation:
    """A function of an array, an update and where it goes, in and out of bounds."""
    dims = shape(dice)
    sizes = tuple(dice.one(1, 2, n) for n in dims)
    at = tuple(dice.one(0, n - k, n - k + 1, n, n + 3, -1) for n, k in zip(dims, sizes, strict=True))
    arrays = (Operand(dims), Operand(sizes))
    return Operation(lambda x, update: function(x, update, [jnp.asarray(i, jnp.int32) for i in at]), arrays)


several(
    {
        "dynamic_slice": lambda x, update, at: lax.dynamic_slice(x, at, update.shape) * update,
        "dynamic_update_slice": lax.dynamic_update_slice,
    },
    placed,
)


@operation
def dynamic_index(dice: Dice) -> Operation:
    """The index is an operand, which the compiler cannot fold."""
    dims, write = shape(dice, 2), dice.chance(0.6)
    dim = dice.whole(0, len(dims) - 1)
    size = tuple(dice.one(1, 1, 2) if i == dim else n for i, n in enumerate(dims))

    def function(x: Any, update: Any, at: Any) -> Any:
        starts = [at[0] + 2 if i == dim else jnp.zeros_like(at[0]) for i in range(x.ndim)]
        return lax.dynamic_update_slice(x, update, starts) if write else lax.dynamic_slice(x, starts, size) * update

    return Operation(function, (Operand(dims), Operand(size), Operand((1,), 16)))


@operation
def gather(dice: Dice) -> Operation:
    dims = shape(dice)
    dim, mode = dice.whole(0, len(dims) - 1), dice.one("clip", "fill", None)
    function = lambda x, ids: jnp.take(x, ids, axis=dim, mode=mode, fill_value=0 if mode == "fill" else None)
    return Operation(function, (Operand(dims), Operand(shape(dice, 1, 2), dims[dim] + 2 * (mode == "clip"))))


@operation
def take_along_axis(dice: Dice) -> Operation:
    dims = shape(dice)
    dim = dice.whole(0, len(dims) - 1)
    return Operation(lambda x, ids: jnp.take_along_axis(x, ids, axis=dim), (Operand(dims), Operand(dims, dims[dim])))


def scattered(method: str, dice: Dice) -> Operation:
    rows, ids = size(dice), size(dice)
    tail = shape(dice, 0, 2)
    mode = dice.one("drop", "clip")
    function = lambda x, index, update: getattr(x.at[index], method)(update, mode=mode)
    smooth = method == "add"
    return Operation(
        function, (Operand((rows, *tail)), Operand((ids,), rows + 2), Operand((ids, *tail), "positive")), smooth
    )


several({f"scatter_{m}": m for m in ("add", "max", "min", "multiply")}, scattered)


@operation
def scatter_set(dice: Dice) -> Operation:
    dims = shape(dice, 2)
    function = lambda x, update: x.at[jnp.arange(dims[0])[::-1], 1].set(update)
    return Operation(function, (Operand(dims), Operand((dims[0], *dims[2:]))))


def segmented(function: Any, dice: Dice) -> Operation:
    rows, tail = size(dice), shape(dice, 0, 1)
    return Operation(lambda x, ids: function(x, ids, num_segments=8), (Operand((rows, *tail)), Operand((rows,), 8)))


several({"segment_sum": jax.ops.segment_sum, "segment_max": jax.ops.segment_max}, segmented)


@operation
def concatenate(dice: Dice) -> Operation:
    dims = shape(dice)
    dim = dice.whole(0, len(dims) - 1)
    other = tuple(dice.one(8, 16, 3) if i == dim else n for i, n in enumerate(dims))
    return Operation(lambda *xs: lax.concatenate(xs, dim), (Operand(dims), Operand(other), Operand(dims)))


@operation
def reshape(dice: Dice) -> Operation:
    dims = shape(dice, 2)
    total = int(np.prod(dims))
    to = dice.one((total,), (8, total // 8), (total // 8, 8), (2, total // 2), (4, 2, total // 8), (total // 16, 2, 8))
    return Operation(lambda x: x.reshape(to), (Operand(dims),))


@operation
def transpose(dice: Dice) -> Operation:
    dims = shape(dice, 2)
    order = tuple(int(i) for i in dice.rng.permutation(len(dims)))
    return Operation(lambda x: jnp.transpose(x, order), (Operand(dims),))


def contraction(text: str, dice: Dice) -> Operation:
    sizes = {letter: size(dice) for letter in text if letter.isalpha()}
    operands = tuple(Operand(tuple(sizes[i] for i in part)) for part in text.split("->")[0].split(","))
    return Operation(lambda *xs: jnp.einsum(text, *xs), operands)


several(
    {
        "matmul": "ab,bc->ac",
        "matmul_batched": "abc,acd->abd",
        "einsum_two_contracted": "abc,bcd->ad",
        "einsum_outer": "a,b->ab",
        "einsum_attention": "abcd,aecd->acbe",
        "einsum_chain": "ab,bc,cd->ad",
        "einsum_transposed": "ab,cb->ca",
        "einsum_heads": "abc,cde->abde",
    },
    contraction,
)


@operation
def attention(dice: Dice) -> Operation:
    dims, causal = (8, size(dice), 8, 8), dice.chance(0.5)
    mask = jnp.tril(jnp.ones((dims[1], dims[1]), bool)) | (not causal)

    def function(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)

    return Operation(function, (Operand(dims),) * 3)


@operation
def ragged_dot(dice: Dice) -> Operation:
    function = lambda x, w, sizes: lax.ragged_dot(x, w, sizes)
    return Operation(function, (Operand((16, 8)), Operand((8, 8, 8)), Operand((8,), 3)))


def fourier(function: Any, dice: Dice) -> Operation:
    dims = shape(dice, 2)
    axes = tuple(range(len(dims)))[-dice.whole(1, len(dims)) :]
    return Operation(lambda x: jnp.abs(function(x, axes=axes)) ** 2, (Operand(dims),))


several({"fftn": jnp.fft.fftn, "rfftn": jnp.fft.rfftn, "ifftn": jnp.fft.ifftn}, fourier)


def square(function: Any, dice: Dice) -> Operation:
    n = 8
    definite = lambda x: x @ jnp.swapaxes(x, -1, -2) + n * jnp.eye(n)
    return Operation(lambda x, y: function(definite(x), y), (Operand((8, n, n)), Operand((8, n, n))))


several(
    {
        "cholesky": lambda a, b: jnp.linalg.cholesky(a) @ b,
        "solve": jnp.linalg.solve,
        "inverse": lambda a, b: jnp.linalg.inv(a) @ b,
        "determinant": lambda a, b: jnp.linalg.slogdet(a)[1],
        "triangular_solve": lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True),
        "eigenvalues": lambda a, b: jnp.linalg.eigvalsh(a),
        "qr": lambda a, b: jnp.linalg.qr(a)[1] ** 2,
    },
    square,
)


@operation
def resize(dice: Dice) -> Operation:
    to = (8, dice.one(4, 16, 12), dice.one(8, 16), 8)
    method = dice.one("nearest", "bilinear", "bicubic")
    return Operation(lambda x: jax.image.resize(x, to, method), (Operand((8, 8, 8, 8)),))


@operation
def scan(dice: Dice) -> Operation:
    reverse = dice.chance(0.5)
    body = lambda carry, x: ((carry * x).sum(-1, keepdims=True) / 8 + jnp.tanh(x), carry + x)
    function = lambda c, xs: lax.scan(body, c, xs, reverse=reverse)[1]
    return Operation(function, (Operand((8, 8)), Operand((size(dice), 8, 8))))


@operation
def while_loop(dice: Dice) -> Operation:
    steps = dice.whole(1, 4)
    return Operation(lambda x: lax.fori_loop(0, steps, lambda i, c: jnp.sin(c) + i, x), (Operand(shape(dice)),))


def chosen(function: Any, dice: Dice) -> Operation:
    dims = shape(dice)
    return Operation(function, (Operand(dims, "mask"), Operand(dims), Operand(dims)))


several(
    {
        "where": jnp.where,
        "clamp": lambda m, x, y: lax.clamp(-abs(y), x, abs(y)),
        "masked_sum": lambda m, x, y: jnp.sum(x * y, axis=0, where=m),
        "iota": lambda m, x, y: jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 0) % 3 == 1, x, y),
        "triangle": lambda m, x, y: jnp.tril(x) + jnp.triu(y, 1) if x.ndim > 1 else x,
        "bitcast": lambda m, x, y: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int64), jnp.float64) + y,
        "bits": lambda m, x, y: x + jax.random.normal(jax.random.key(3), x.shape, x.dtype) * y,
        "permutation": lambda m, x, y: x[jax.random.permutation(jax.random.key(1), x.shape[0])] + y,
        "dropout": lambda m, x, y: jnp.where(jax.random.bernoulli(jax.random.key(5), 0.7, x.shape), x, y),
        "outer_broadcast": lambda m, x, y: x[..., None] * y[..., None, :],
        "cond": lambda m, x, y: lax.cond(m.sum() > 2, lambda: x * y, lambda: x + y),
        "nonzero": lambda m, x, y: x[jnp.nonzero(m[(..., *(0,) * (m.ndim - 1))], size=8, fill_value=0)[0]],
        "searchsorted": lambda m, x, y: jnp.searchsorted(jnp.sort(x.ravel()), y) + x,
        "histogram": lambda m, x, y: jnp.bincount((abs(x) * 4).astype(jnp.int32).ravel() % 16, length=16) + y.sum(),
    },
    chosen,
)


@operation
def one_hot(dice: Dice) -> Operation:
    return Operation(lambda ids, w: jax.nn.one_hot(ids, 8) @ w, (Operand((8, size(dice)), 8), Operand((8, 16))))


def loss(function: Any, dice: Dice) -> Operation:
    rows = (8, size(dice))
    return Operation(function, (Operand((*rows, 16)), Operand(rows, 16)))


several(
    {
        "cross_entropy": optax.softmax_cross_entropy_with_integer_labels,
        "hinge": lambda x, ids: optax.sigmoid_binary_cross_entropy(x[..., 0], ids % 2),
        "pick": lambda x, ids: -jnp.take_along_axis(jax.nn.log_softmax(x), ids[..., None], -1)[..., 0],
    },
    loss,
)


@operation
def unfold(dice: Dice) -> Operation:
    kernel, stride = dice.one(1, 2, 3), dice.one(1, 2)
    function = lambda x: lax.conv_general_dilated_patches(x, (kernel, kernel), (stride, stride), "SAME")
    return Operation(function, (Operand((8, 8, 8, 8)),))
