"""``gather_weight`` and ``sharded_dot``: fully sharded weights, gathered where the model uses them.

Fully sharded parameters (ZeRO stage 3, FSDP) are sharded over mesh axes that the compute does not use. Left to itself,
the compiler may permute their shards around piece by piece alongside the matmul, more often than needed, or all-reduce
full gradients of which each device keeps only a shard. The functions here gather each weight once, in the compute
dtype, and reduce-scatter its gradient.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpar.errors import LayoutError
from jaxpar.parallel.collectives import hierarchical
from jaxpar.parallel.collectives.gather_reduce import current_precision, is_exact, summing
from jaxpar.parallel.offload.host_weights import to_device
from jaxpar.parallel.precision.fp8_matmul import PRODUCT, input_grad, times, weight_grad
from jaxpar.parallel.precision.int8 import Int8
from jaxpar.parallel.precision.policy import Precision
from jaxpar.parallel.precision.quantized_array import QuantizedArray, is_quantized
from jaxpar.parallel.tensor.matmul import multiply, product_name, routes
from jaxpar.parallel.tensor.route import WeightDims
from jaxpar.parallel.tensor.weights import hint_weight, used_sharding
from jaxpar.parallel.zero.sharded_matmul import GATHERED, Regather, product, route
from jaxpar.sharding.layout import current_layout, hint, to_spec
from jaxpar.sharding.resolve import num_shards_over
from jaxpar.sharding.rules import Axes
from jaxpar.utils.contexts import matmul_observer

type _Shapes = tuple[tuple[int, ...], ...]
EXACT = "product_of_an_exact_weight"
"""The checkpoint name of products whose weight was gathered exactly."""


class Joined(NamedTuple):
    """Weights that are gathered as one.

    Attributes:
      dims: the logical dims; of joined weights those of rows, columns' shards, and ``None``.
      num_shards: the number of column shards of the matrix that they form; 0 for one weight as it is stored.
      shapes: the shapes of the weights.
      exact: they are gathered in the compute dtype, whatever the precision's ``gather`` is.
    """

    dims: WeightDims
    num_shards: int
    shapes: _Shapes
    exact: bool


def gather_weight(w: jax.Array, *dims: str | None, dtype: Any = None, exact: bool = False) -> jax.Array:
    """Returns ``w`` in ``dtype``, sharded by the activation rules; its gradient is sharded by the role ``gradients``.

    Mesh axes that shard ``w`` only in the role ``params`` are gathered. The gradient is reduced in ``dtype`` too.

    Args:
      w: a weight as the state stores it; a weight in host memory is brought to the device first.
      *dims: its logical dims.
      dtype: the dtype of the compute, by default that of ``w``.
      exact: whether the weight is gathered in ``dtype`` even if the step's precision gathers in fewer bits. A weight
        with the dim ``experts`` last, whose products choose experts, and one with a dim in ``precision.exact`` always
        are.

    Raises:
      NoLayoutError: no layout is ambient.
      LayoutError: as :func:`jaxpar.hint`.

    >>> import jax
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(embed=None, mlp=None, params={"embed": "data"}))
    >>> w = jax.device_put(jax.numpy.ones((16, 4)), layout.sharding(("embed", "mlp"), role="params"))
    >>> with layout:
    ...     w.sharding.spec, gather_weight(w, "embed", "mlp").sharding.spec
    (P('data', None), P(None, None))
    """
    w = to_device(w)
    w = w if dtype is None else w.astype(dtype)
    exact = exact or is_exact(dims, current_precision())
    return checkpoint_name(gather_joined(Joined(dims, 0, (w.shape,), exact), w), GATHERED)


def sharded_dot(
    x: jax.Array,
    *weights: tuple[jax.Array | Int8 | QuantizedArray, WeightDims],
    dtype: Any = None,
    summed: int = 1,
    reshard_after_forward: Regather = True,
    exact: bool = False,
    joined: bool = True,
) -> tuple[jax.Array, ...]:
    """Returns the products of ``x`` and each weight; sharded weights are gathered as by :func:`gather_weight`.

    Weights with the same sharding are gathered and multiplied as one matrix: one collective and one matmul instead of
    several. A weight ``[embed, heads, head_dim]`` is multiplied as a matrix, because a TPU would otherwise change its
    tiling for the matmul.

    The precision of the enclosing step applies: with ``int8`` for gathers or reductions, weights or gradients are sent
    in int8; with ``fp8`` for matmuls, the products are computed in fp8.

    A weight of the class :class:`jaxpar.inference.Int8` is gathered in int8 and multiplied as integers in the dtype of
    ``x``; its scales multiply the result. So is a :class:`jaxpar.compression.QuantizedArray` with a scale per channel;
    with a scale per group, its integers are gathered, and multiplied by their scales before the product. Neither has a
    gradient.

    Args:
      x: the input, ``[batch, ..., embed]``; its first dim is the batch.
      *weights: pairs of a weight ``[embed, ...]`` and its logical dims.
      dtype: the dtype of the weights in the compute; by default their own.
      summed: the number of dims that the product sums over: the last of ``x`` and the first of the weights.
      reshard_after_forward: if it is a number g, groups of g neighbouring devices keep a shard of each weight for the
        backward pass, which then gathers within the groups. For a bool, :class:`jaxpar.RematPolicy` decides what is
        kept.
      exact: whether the weights are gathered in ``dtype``, as for :func:`gather_weight`.
      joined: whether weights with the same sharding are gathered and multiplied as one matrix. Over the mesh axes
        ``x``, ``y`` and ``z`` they share the collectives of the input instead, whatever this is.

    Returns:
      For each weight an array ``[..., *weight.shape[summed:]]``.

    Raises:
      NoLayoutError: no layout is ambient.
      ConfigError: ``reshard_after_forward`` does not divide the number of devices that share a weight.
      LayoutError: as :func:`jaxpar.hint`; the first dims of a weight do not match the last dims of ``x``; or the scales
        of an ``Int8`` do not span exactly these dims.

    >>> import jax.numpy as jnp
    >>> import jaxpar as jp
    >>> with jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(embed=None, heads=None, kv_heads=None, head_dim=None)):
    ...     q, k = sharded_dot(
    ...         jnp.ones((2, 8)),
    ...         (jnp.ones((8, 4, 3)), ("embed", "heads", "head_dim")),
    ...         (jnp.ones((8, 2, 3)), ("embed", "kv_heads", "head_dim")),
    ...     )
    >>> q.shape, k.shape
    ((2, 4, 3), (2, 2, 3))
    """
    for w, dims in weights:
        if w.shape[:summed] != x.shape[x.ndim - summed :]:
            which = "its first dim must be as large as the last dim"
            if summed > 1:
                which = f"its first {summed} dims must be as large as the last {summed} dims"
            raise LayoutError(
                f"sharded_dot(): the weight {dims} of shape {w.shape} cannot multiply x of shape {x.shape}: {which} of "
                f"x. Remedy: transpose the weight, or pass the input that it belongs to."
            )
    one_token = x.ndim > 2 and x.shape[1] == 1
    alone = functools.partial(
        sharded_dot, x, dtype=dtype, summed=summed, reshard_after_forward=reshard_after_forward, exact=exact
    )
    if len(weights) > 1 and (one_token or any(is_quantized(w) for w, _ in weights)):
        # With one token per row, as in decoding, joining the weights would read and write them once more than the
        # product.
        return tuple(alone(one)[0] for one in weights)
    first, dims = weights[0]
    if isinstance(first, QuantizedArray):
        if (by_channel := first.by_channel(range(-first.ndim, summed - first.ndim))) is None:
            return (_in_groups(x, first, dims, summed),)
        first = by_channel
    if isinstance(first, Int8):
        return (_scaled(x, first, dims, summed),)
    found = routes(x, weights, summed)
    if matmul_observer.value is not None:
        # Named, so that the observer's program shows which products the backward pass computes again.
        with matmul_observer(None):
            named = alone(*weights, joined=joined)
        return tuple(checkpoint_name(y, product_name(x, [w for w, _ in weights])) for y in named)
    ws = [to_device(w) for w, _ in weights]
    ws = ws if dtype is None else [w.astype(dtype) for w in ws]
    if found is not None:
        precision = current_precision()
        exact = exact or any(is_exact(dims, precision) for _, dims in weights)
        return tuple(multiply(x, ws, found, precision.for_weight(exact)))
    if not joined and len(ws) > 1:
        return tuple(alone(one)[0] for one in weights)
    # A single matrix is gathered as it is stored.
    as_stored = summed > 1 or (len(ws) == 1 and ws[0].ndim == 2)
    groups = [(0, [i]) for i in range(len(ws))] if as_stored else joinable([dims for _, dims in weights], ws)
    precision, results = current_precision(), dict[int, jax.Array]()
    for num_shards, group in groups:
        alike, dims = [ws[i] for i in group], weights[group[0]][1]
        columns = Joined(dims, num_shards, tuple(w.shape for w in alike), exact or is_exact(dims, precision))
        products = _times(x, columns, alike, summed, reshard_after_forward)
        results |= zip(group, products, strict=True)
    return tuple(results[i] for i in range(len(ws)))


def _times(
    x: jax.Array, joined: Joined, ws: Sequence[jax.Array], summed: int, reshard_after_forward: Regather
) -> list[jax.Array]:
    """Returns the products with weights that form a matrix."""
    _, num_shards, shapes, exact = joined
    dims = (*joined.dims[:2], None) if num_shards else joined.dims
    joined = joined._replace(dims=dims)
    shape = (shapes[0][0], num_shards, sum(math.prod(s[1:]) for s in shapes) // num_shards) if num_shards else shapes[0]
    as_one = jax.ShapeDtypeStruct(shape, ws[0].dtype)
    plan = route(x, as_one, dims, summed=summed, reshard_after_forward=reshard_after_forward, exact=exact)
    precision, wide = current_precision(), summing(ws[0].dtype)
    if plan is not None:
        y = product(x, _join_columns(ws, num_shards), plan)
    elif wide is not None:
        y = _summed_wide((joined, summed, wide, precision), x, *ws)
    else:
        y = times(x, checkpoint_name(gather_joined(joined, *ws), GATHERED), summed, precision)
    y = y if precision.gather is None and precision.reduce is None else checkpoint_name(y, PRODUCT)
    y = checkpoint_name(y, EXACT) if exact and precision.gather is not None else y
    if num_shards and ws[0].ndim > 2:
        # The barrier keeps the memory layout that heads prefer out of the matmuls, forward and backward.
        y = jax.lax.optimization_barrier(y)
    parts = jnp.split(y, ends(num_shards, shapes), -1) if num_shards else [y]
    lead = x.shape[: x.ndim - summed]
    return [part.reshape(*lead, *shape[summed:]) for part, shape in zip(parts, shapes, strict=True)]


def _scaled(x: jax.Array, w: Int8, dims: WeightDims, summed: int) -> jax.Array:
    """Returns the product with an int8 weight."""
    if w.summed != tuple(range(-w.ndim, summed - w.ndim)):
        raise LayoutError(
            f"sharded_dot(): the weight {dims} of shape {w.shape} shares its scales over the dims "
            f"{[dim % w.ndim for dim in w.summed]}, but the product sums over its first {summed} dims. Remedy: use "
            f"Int8.of(w, {list(range(summed))})."
        )
    y = jnp.tensordot(x, _gather_integers(w.values, dims).astype(x.dtype), summed)
    return (y * hint(w.scales, *dims[summed:])).astype(x.dtype)


def _in_groups(x: jax.Array, w: QuantizedArray, dims: WeightDims, summed: int) -> jax.Array:
    """Returns the product with a weight whose scales differ along the dims that it sums over."""
    layout, names = current_layout(), w.names_of_scales(dims)
    axes = layout.resolve(names, role="activations").axes
    counts = [num_shards_over(own, layout.sizes) for own in axes]
    # Where groups lie across shards, all devices along the dim have all scales.
    names = tuple(
        n if size % count == 0 else None for n, size, count in zip(names, w.scales.shape, counts, strict=True)
    )
    full = QuantizedArray(_gather_integers(w.values, dims), hint(w.scales, *names), w.tile)
    return jnp.tensordot(x, full.astype(x.dtype), summed)


def _gather_integers(values: jax.Array, dims: WeightDims) -> jax.Array:
    """Returns the integers of a weight as the compute shards them."""
    layout = current_layout()
    stored, used = (
        layout.resolve(dims, values.shape, role=role, dtype=values.dtype).axes for role in ("params", "activations")
    )
    values = _gather_one(values, dims)
    # If values are gathered, the barrier keeps the gather in int8; else the compiler would cast to x.dtype first.
    return values if stored == used else jax.lax.optimization_barrier(values)


def all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A checkpoint policy that saves everything but weights that were gathered or fetched from host memory."""
    if primitive.name == "custom_vjp_call":  # a gather or a fetch, not yet named
        return not all(_gathers(equation) for equation in parameters["call_jaxpr"].eqns)
    return parameters.get("name") != GATHERED


def _gathers(equation: Any) -> bool:
    """Whether an equation of a function with a gradient of its own may belong to the gather of a weight."""
    if equation.primitive.name != "custom_vjp_call":
        return equation.primitive.name in _OF_GATHER
    names = {inner.primitive.name for inner in equation.params["call_jaxpr"].eqns}
    return "ppermute" in names and names <= _OF_GATHER | _OF_RING


_OF_GATHER = {
    "all_gather", "device_put", "convert_element_type", "sharding_constraint", "reshape", "concatenate",
    "optimization_barrier", "shard_map",
}  # fmt: skip

_OF_RING = {"ppermute", "axis_index", "add", "mul", "split", "jit"}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_joined(joined: Joined, *ws: jax.Array) -> jax.Array:
    """Gathers one weight as it is stored, or several joined to an array."""
    return _gather_one(_join_columns(ws, joined.num_shards), joined.dims, exact=joined.exact)


def _join_columns(ws: Sequence[jax.Array], num_shards: int) -> jax.Array:
    """Joins weights to one array ``[rows, num_shards, columns of all]``; with 0 shards, returns the only one."""
    if not num_shards:
        return ws[0]
    w_EWF = jnp.concatenate([w.reshape(w.shape[0], num_shards, -1) for w in ws], 2)
    # Without the barrier the compiler gathers the weights as they are stored, and then changes the tiling of full
    # weights.
    return jax.lax.optimization_barrier(w_EWF)


def _gather_one(w: jax.Array, dims: WeightDims, *, exact: bool = False) -> jax.Array:
    """Gathers a weight: in rounds where the compiler would do worse, and in ``precision.gather`` if narrower."""
    layout, narrow = current_layout(), current_precision().for_weight(exact).gathering(w.dtype)
    stored, used = layout.resolve(dims, w.shape, role="params", dtype=w.dtype), used_sharding(w, dims)
    pairs = zip(stored.axes, used.axes, strict=True)
    gathered_axes = [have[len(want) :] if have[: len(want)] == want else None for have, want in pairs]
    gathers = [(dim, axes) for dim, axes in enumerate(gathered_axes) if axes]
    if narrow is not None and gathers and not jax.sharding.get_abstract_mesh().manual_axes:
        return _gather_one(jax.lax.optimization_barrier(w.astype(narrow)), dims).astype(w.dtype)
    one_dim = len(gathers) == 1 and None not in gathered_axes
    parts = hierarchical.gather_rounds(layout.mesh, gathers[0][1]) if one_dim else ()
    if len(parts) < 2 or jax.sharding.get_abstract_mesh().manual_axes:
        return hint_weight(w, *dims)
    ((dim, axes),) = gathers
    gather = functools.partial(hierarchical.gather_local, axes=axes, dim=dim, parts=parts)
    # check_vma is off: jax assumes that the result of gathers in rounds differs between devices.
    run = jax.shard_map(gather, in_specs=to_spec(stored), out_specs=to_spec(used), check_vma=False)
    # Without the barrier, XLA gathers in the dtype that w was cast from.
    return hint_weight(run(jax.lax.optimization_barrier(w)), *dims)


def _backward(joined: Joined, _: None, grad: jax.Array) -> tuple[jax.Array, ...]:
    return split_joined(joined.num_shards, joined.shapes, hint(grad, *joined.dims, role="gradients"))


def split_joined(num_shards: int, shapes: _Shapes, grad: jax.Array) -> tuple[jax.Array, ...]:
    """Splits the gradient of joined weights into one gradient per weight."""
    if not num_shards:
        return (grad,)
    # Without the barrier the compiler splits before it scatters, and all-reduces full gradients on every device.
    parts = jnp.split(jax.lax.optimization_barrier(grad), ends(num_shards, shapes), 2)
    return tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))


gather_joined.defvjp(lambda joined, *ws: (gather_joined(joined, *ws), None), _backward)

type _WideSum = tuple[Joined, int, Any, Precision]
"""The weights, the number of summed dims, the dtype of the sums, and the precision."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed_wide(how: _WideSum, x: jax.Array, *ws: jax.Array) -> jax.Array:
    """Returns the product with gathered weights; their gradient is summed over devices in ``wide``, then rounded."""
    return _forward_wide(how, x, *ws)[0]


def _forward_wide(how: _WideSum, x: jax.Array, *ws: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    joined, summed, _, precision = how
    w = checkpoint_name(gather_joined(joined, *ws), GATHERED)
    return times(x, w, summed, precision), (x, w)


def _backward_wide(how: _WideSum, saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, ...]:
    (x, w), (joined, summed, wide, precision) = saved, how
    dx = input_grad(dy, w, summed, precision).astype(x.dtype)
    grad = weight_grad(x, dy, summed, precision, wide)
    # Without the barrier the compiler rounds before it sums.
    grad = jax.lax.optimization_barrier(hint(grad, *joined.dims, role="gradients"))
    return dx, *split_joined(joined.num_shards, joined.shapes, grad.astype(w.dtype))


_summed_wide.defvjp(_forward_wide, _backward_wide)


def ends(num_shards: int, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Returns the ends of all weights but the last among the joined columns."""
    return list(itertools.accumulate(math.prod(shape[1:]) // num_shards for shape in shapes))[:-1]


def joinable(dims: Sequence[WeightDims], ws: Sequence[jax.Array]) -> Iterator[tuple[int, list[int]]]:
    """Yields (number of column shards, indices) of the weights that can form one matrix; 0 for one taken as stored."""
    groups: dict[Any, list[int]] = {}
    for i, (names, w) in enumerate(zip(dims, ws, strict=True)):
        used, grad = (_columns(names, w, role) for role in ("activations", "gradients"))
        key = (is_exact(names, current_precision()), w.dtype, used, grad)
        # A gradient has as many blocks of columns as the matrix: it is sharded along these, or along none.
        fits = used is not None and grad is not None and grad[1] in ((), used[1])
        groups.setdefault(key if fits else i, []).append(i)
    sizes = current_layout().sizes
    for key, group in groups.items():
        yield 0 if isinstance(key, int) else num_shards_over(key[2][1], sizes), group


def _columns(dims: WeightDims, w: jax.Array, role: str) -> tuple[Axes, Axes] | None:
    """Returns the mesh axes of a weight's rows and columns as a matrix, or ``None`` if that would change its sharding.

    A shard that holds some heads in full is one block of columns of ``[embed, heads * head_dim]``; a part of every head
    is not.
    """
    layout = current_layout()
    resolved = layout.resolve(dims, w.shape, role=role, dtype=w.dtype)
    if resolved.problems or len(dims) < 2 or any(resolved.axes[2:]) or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    num_shards = num_shards_over(resolved.axes[1], layout.sizes)
    shape = (w.shape[0], num_shards, w.size // w.shape[0] // num_shards)
    same = layout.resolve((*dims[:2], None), shape, role=role, dtype=w.dtype).axes == (*resolved.axes[:2], ())
    return (resolved.axes[0], resolved.axes[1]) if same else None
