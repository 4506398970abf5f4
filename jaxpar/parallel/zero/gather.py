"""``gather_weight``: a parameter as the compute uses it, and its gradient as the optimizer wants it.

Fully sharded parameters lie split over axes that the compute does not split them over. Left to itself the compiler may send
them around in pieces that overlap with the matmul, one piece at a time and more often than needed, or reduce whole gradients
where each device keeps a part. Said once per weight, it gathers them once, in the compute dtype, and scatters the gradient.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpar.errors import LayoutError
from jaxpar.parallel.collectives import hierarchical
from jaxpar.parallel.collectives.gather_reduce import asked, summing
from jaxpar.parallel.offload.host_weights import to_device
from jaxpar.parallel.precision.fp8_matmul import PRODUCT, input_grad, times, weight_grad
from jaxpar.parallel.precision.int8 import Int8
from jaxpar.parallel.precision.policy import Precision
from jaxpar.parallel.zero.sharded_matmul import GATHERED, Regather, product, route
from jaxpar.sharding.layout import current_layout, hint, to_spec
from jaxpar.sharding.rules import Axes

type _Dims = tuple[str | None, ...]
type _Shapes = tuple[tuple[int, ...], ...]


def gather_weight(w: jax.Array, *dims: str | None, dtype: Any = None) -> jax.Array:
    """``w`` in ``dtype``, laid out by the activation rules; its gradient by the rules of the role ``gradients``.

    Axes that split ``w`` only in the role ``params`` are gathered here. The gradient is reduced in ``dtype`` too.

    Raises:
      LayoutError: as :func:`jaxpar.hint`.
    """
    w = to_device(w)
    w = w if dtype is None else w.astype(dtype)
    return checkpoint_name(_gather(dims, 0, (w.shape,), w), GATHERED)


def sharded_dot(
    x: jax.Array,
    *weights: tuple[jax.Array | Int8, _Dims],
    dtype: Any = None,
    summed: int = 1,
    reshard_after_forward: Regather = True,
) -> tuple[jax.Array, ...]:
    """``x`` [batch, ..., embed] times each of several weights [embed, ...], gathered as by :func:`gather_weight`.

    Weights that lie alike are gathered as one matrix and multiplied at once: one collective and one matmul instead of several.
    Stored as [embed, heads, head_dim], they are matrices here: a TPU would tile them anew for the matmul otherwise.

    Inside a step whose precision says ``int8`` for gathers or reductions, the weights and their gradients cross the mesh so; where it
    says ``fp8`` for matmuls, they are multiplied so.

    A weight that is an :class:`jaxpar.Int8` is gathered in int8 and multiplied as integers of the dtype of ``x``; its scales multiply the result. It has no gradient.

    Args:
      x: what each weight multiplies; its first dim is the batch.
      weights: pairs of a weight and its logical dims; the first is the one that is summed over.
      dtype: of the weights in the compute; their own if not given.
      summed: how many dims are summed over, the last of ``x`` and the first of the weights.
      reshard_after_forward: a number makes neighbours in groups of so many devices keep a part of each weight for the backward pass, which then gathers
        within groups. Otherwise the policy of :class:`jaxpar.RematPolicy` says what is kept.

    Returns:
      For each weight an array [..., *weight.shape[summed:]].

    Raises:
      ConfigError: ``reshard_after_forward`` does not divide the devices that share a weight.
      LayoutError: as :func:`jaxpar.hint`, or a weight whose first dims are not of the sizes of the last of ``x``, or do not share its scales.

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
            which = (
                "its first dim has to be as large as the last"
                if summed == 1
                else f"{summed} dims are summed over, its first and the last"
            )
            raise LayoutError(
                f"sharded_dot(): the weight {dims} of shape {w.shape} cannot multiply x of shape {x.shape}: {which} of x. "
                f"Remedy: transpose the weight, or pass what it belongs to."
            )
    one_token = x.ndim > 2 and x.shape[1] == 1
    if len(weights) > 1 and (one_token or any(isinstance(w, Int8) for w, _ in weights)):
        # A token a row, as in decoding: to be put side by side, weights would be read and written once more than for their product.
        apart = [
            sharded_dot(x, one, dtype=dtype, summed=summed, reshard_after_forward=reshard_after_forward)
            for one in weights
        ]
        return tuple(y for (y,) in apart)
    first, dims = weights[0]
    if isinstance(first, Int8):
        return (_scaled(x, first, dims, summed),)
    brought = [to_device(w) for w, _ in weights]
    ws = [w if dtype is None else w.astype(dtype) for w in brought]
    # A matrix alone lies well as it is stored.
    alone = summed > 1 or (len(ws) == 1 and ws[0].ndim == 2)
    groups = [(0, [i]) for i in range(len(ws))] if alone else _alike([dims for _, dims in weights], ws)
    results: dict[int, jax.Array] = {}
    for ways, group in groups:
        results |= zip(
            group,
            _times(x, ways, weights[group[0]][1], [ws[i] for i in group], summed, reshard_after_forward),
            strict=True,
        )
    return tuple(results[i] for i in range(len(ws)))


def _times(
    x: jax.Array, ways: int, dims: _Dims, ws: Sequence[jax.Array], summed: int, reshard_after_forward: Regather
) -> list[jax.Array]:
    """The products with weights that can be one matrix in so many ways; 0 for a weight as it is stored."""
    shapes = tuple(w.shape for w in ws)
    shape = (shapes[0][0], ways, sum(math.prod(s[1:]) for s in shapes) // ways) if ways else shapes[0]
    as_one = jax.ShapeDtypeStruct(shape, ws[0].dtype)
    way = route(
        x, as_one, (*dims[:2], None) if ways else dims, summed=summed, reshard_after_forward=reshard_after_forward
    )
    precision, wide = asked(), summing(ws[0].dtype)
    if way is not None:
        y = product(x, _side_by_side(ws, ways) if ways else ws[0], way)
    elif wide is not None:
        y = _summed_wide((dims, ways, shapes), summed, wide, precision, x, *ws)
    else:
        y = times(x, checkpoint_name(_gather(dims, ways, shapes, *ws), GATHERED), summed, precision)
    y = y if precision.gather is None and precision.reduce is None else checkpoint_name(y, PRODUCT)
    if ways and ws[0].ndim > 2:
        # What heads want of the order in memory would else reach into the matmuls, forward and backward.
        y = jax.lax.optimization_barrier(y)
    parts = jnp.split(y, _ends(ways, shapes), -1) if ways else [y]
    lead = x.shape[: x.ndim - summed]
    return [part.reshape(*lead, *shape[summed:]) for part, shape in zip(parts, shapes, strict=True)]


def _scaled(x: jax.Array, w: Int8, dims: _Dims, summed: int) -> jax.Array:
    """The product with a weight in 8-bit integers."""
    if w.summed != tuple(range(-w.ndim, summed - w.ndim)):
        raise LayoutError(
            f"sharded_dot(): the weight {dims} of shape {w.shape} has a scale for all of its dims {[dim % w.ndim for dim in w.summed]}, but its first "
            f"{summed} are summed over. Remedy: Int8.of(w, {list(range(summed))})."
        )
    layout = current_layout()
    stored, used = (layout.resolve(dims, w.shape, role=role, dtype=w.dtype).axes for role in ("params", "activations"))
    values = _gather_one(w.values, *dims)
    # Where something is gathered: else it would be gathered in the dtype of the product.
    values = values if stored == used else jax.lax.optimization_barrier(values)
    y = jnp.tensordot(x, values.astype(x.dtype), summed)
    return (y * hint(w.scales, *dims[summed:])).astype(x.dtype)


def all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A checkpoint policy that keeps everything but gathered and fetched weights, neither under their name nor before they have it."""
    if primitive.name == "custom_vjp_call":  # a gather's does nothing but lay out, a to_device's brings
        return not {equation.primitive.name for equation in parameters["call_jaxpr"].eqns} <= _OF_GATHER
    return parameters.get("name") != GATHERED


_OF_GATHER = {
    "all_gather",
    "device_put",
    "convert_element_type",
    "sharding_constraint",
    "reshape",
    "concatenate",
    "optimization_barrier",
    "shard_map",
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(dims: _Dims, ways: int, shapes: _Shapes, *ws: jax.Array) -> jax.Array:
    """One weight as it is stored; or, with ``ways``, some that lie alike side by side: [rows, ways, columns of all]."""
    if not ways:
        return _gather_one(ws[0], *dims)
    return _gather_one(_side_by_side(ws, ways), *dims[:2], None)


def _side_by_side(ws: Sequence[jax.Array], ways: int) -> jax.Array:
    """Weights as one of [rows, ways, columns of all]."""
    w_EWF = jnp.concatenate([w.reshape(w.shape[0], ways, -1) for w in ws], 2)
    # Behind a barrier, or the compiler gathers the weight as it is stored and tiles all of it anew afterwards.
    return jax.lax.optimization_barrier(w_EWF)


def _gather_one(w: jax.Array, *dims: str | None) -> jax.Array:
    """A hint; where the compiler would not gather at once, it is gathered in rounds before; in a narrower dtype if asked for."""
    layout, narrow = current_layout(), asked().gathering(w.dtype)
    stored, used = (layout.resolve(dims, w.shape, role=role, dtype=w.dtype) for role in ("params", "activations"))
    pairs = zip(stored.axes, used.axes, strict=True)
    gone = [have[len(want) :] if have[: len(want)] == want else None for have, want in pairs]
    spread = [(dim, axes) for dim, axes in enumerate(gone) if axes]
    if narrow is not None and spread and not jax.sharding.get_abstract_mesh().manual_axes:
        return _gather_one(jax.lax.optimization_barrier(w.astype(narrow)), *dims).astype(w.dtype)
    parts = hierarchical.gather_rounds(layout.mesh, spread[0][1]) if len(spread) == 1 and None not in gone else ()
    if len(parts) < 2 or jax.sharding.get_abstract_mesh().manual_axes:
        return hint(w, *dims)
    ((dim, axes),) = spread
    gathered = jax.shard_map(
        lambda w: hierarchical.gather_local(w, axes, dim=dim, parts=parts),
        in_specs=to_spec(stored),
        out_specs=to_spec(used),
        check_vma=False,  # jax takes what rounds have gathered for different on every device
    )(jax.lax.optimization_barrier(w))  # in its own dtype, not in that of what it was cast from
    return hint(gathered, *dims)


def _forward(dims: _Dims, ways: int, shapes: _Shapes, *ws: jax.Array) -> tuple[jax.Array, None]:
    return _gather(dims, ways, shapes, *ws), None


def _backward(dims: _Dims, ways: int, shapes: _Shapes, _: None, grad: jax.Array) -> tuple[jax.Array, ...]:
    return _apart(dims, ways, shapes, _scattered(dims, ways, grad))


def _scattered(dims: _Dims, ways: int, grad: jax.Array) -> jax.Array:
    return hint(grad, *((*dims[:2], None) if ways else dims), role="gradients")


def _apart(dims: _Dims, ways: int, shapes: _Shapes, grad: jax.Array) -> tuple[jax.Array, ...]:
    """The gradient of weights side by side as one of each."""
    if not ways:
        return (grad,)
    # Behind a barrier: taken apart before it is scattered, the sum over devices would be made whole on each of them.
    parts = jnp.split(jax.lax.optimization_barrier(grad), _ends(ways, shapes), 2)
    return tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))


_gather.defvjp(_forward, _backward)

type _Group = tuple[_Dims, int, _Shapes]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _summed_wide(
    group: _Group, summed: int, wide: Any, precision: Precision, x: jax.Array, *ws: jax.Array
) -> jax.Array:
    """The product with gathered weights, whose gradient is summed over devices in the dtype ``wide``, and rounded to theirs afterwards."""
    return _forward_wide(group, summed, wide, precision, x, *ws)[0]


def _forward_wide(
    group: _Group, summed: int, wide: Any, precision: Precision, x: jax.Array, *ws: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    w = checkpoint_name(_gather(*group, *ws), GATHERED)
    return times(x, w, summed, precision), (x, w)


def _backward_wide(
    group: _Group, summed: int, wide: Any, precision: Precision, saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, ...]:
    (x, w), (dims, ways, shapes) = saved, group
    dx = input_grad(dy, w, summed, precision).astype(x.dtype)
    grad = weight_grad(x, dy, summed, precision, wide)
    # Behind a barrier, or the compiler sums what has been rounded.
    grad = jax.lax.optimization_barrier(_scattered(dims, ways, grad))
    return dx, *_apart(dims, ways, shapes, grad.astype(w.dtype))


_summed_wide.defvjp(_forward_wide, _backward_wide)


def _ends(ways: int, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Where each but the last of the weights ends among the columns of all."""
    return list(itertools.accumulate(math.prod(shape[1:]) // ways for shape in shapes))[:-1]


def _alike(dims: Sequence[_Dims], ws: Sequence[jax.Array]) -> Iterator[tuple[int, list[int]]]:
    """Ways and places of the weights that can be one matrix; ways are 0 for one that can only be taken as it is stored."""
    groups: dict[Any, list[int]] = {}
    for i, (names, w) in enumerate(zip(dims, ws, strict=True)):
        lies = [_columns(names, w, role) for role in ("activations", "gradients")]
        groups.setdefault(i if None in lies else (w.dtype, *lies), []).append(i)
    sizes = current_layout().sizes
    for key, group in groups.items():
        yield 0 if isinstance(key, int) else math.prod(sizes[axis] for axis in key[1][1]), group


def _columns(dims: _Dims, w: jax.Array, role: str) -> tuple[Axes, Axes] | None:
    """Axes of rows and of columns, if the weight's matrix can lie as the weight does.

    Some whole heads are columns of [embed, heads * head_dim] in one piece; a part of every head is not.
    """
    layout = current_layout()
    lies = layout.resolve(dims, w.shape, role=role, dtype=w.dtype)
    if lies.problems or len(dims) < 2 or any(lies.axes[2:]) or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    ways = math.prod(layout.sizes[axis] for axis in lies.axes[1])
    shape = (w.shape[0], ways, w.size // w.shape[0] // ways)
    same = layout.resolve((*dims[:2], None), shape, role=role, dtype=w.dtype).axes == (*lies.axes[:2], ())
    return (lies.axes[0], lies.axes[1]) if same else None
