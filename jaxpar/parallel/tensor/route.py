"""How one matmul runs whose input, weight and result are sharded over several axes of tensor parallelism.

Each mesh axis has one part in the local matmul ``y[rows, columns] = x[rows, contracted] @ w[contracted, columns]``:

- ``ROWS``: input and result are sharded over it by rows. A weight that is stored sharded over it is gathered.
- ``CONTRACTED``: the weight is sharded over it by a contracted dim. The partial sums of the result are reduced over it.
- ``COLUMNS``: weight and result are sharded over it by columns. An input that is sharded over it is gathered.
- ``WHOLE``: none of these. Input and weight are gathered over it, and the result is sliced.

The rules give the shardings; the parts follow. With weights ``(x, y)`` and activations ``(None, (x, y))``, ``x`` is
contracted and ``y`` has columns: two dimensions, in which only activations are sent. With rows over ``(x, z)``, weights
``(x, y)`` and activations of embed over ``y``, both operands are gathered: 2.5 dimensions, or SUMMA (van de Geijn and
Watts 1997) where ``z`` has size 1. With activations ``((z, y), x)`` and weights ``((x, z), y)``, everything is sharded
over every axis: three dimensions (Agarwal et al. 1995).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from jax.sharding import PartitionSpec

from jaxpar.sharding import messages
from jaxpar.sharding.layout import Layout
from jaxpar.sharding.mesh import TENSOR_AXES
from jaxpar.sharding.resolve import Resolved, resolve
from jaxpar.sharding.rules import Axes
from jaxpar.utils.arrays import itemsize

type WeightDims = tuple[str | None, ...]
type ShardedDims = tuple[Axes, ...]


class AxisPart(Enum):
    """The part of a mesh axis in a local matmul; see the module."""

    ROWS = auto()
    CONTRACTED = auto()
    COLUMNS = auto()
    WHOLE = auto()


@dataclass(frozen=True)
class Move:
    """ShardedDims of one dim that are gathered in one direction of a matmul, and summed or sliced in the other.

    Attributes:
      dim: the dim.
      axes: the mesh axes, major to minor; neighbours in the dim.
      summed: whether the other direction sums over the axes (a reduce-scatter), or each device keeps its slice.
    """

    dim: int
    axes: Axes
    summed: bool


@dataclass(frozen=True)
class MatmulOperand:
    """The sharding of an operand outside the local matmul, and the way to the sharding inside.

    Attributes:
      shards: the mesh axes of each dim outside.
      moves: what is gathered on the way inside, in this order; the way outside is the reverse.
      summed: the axes over which the way outside also sums, because no dim is sharded over them.
    """

    shards: ShardedDims
    moves: tuple[Move, ...] = ()
    summed: Axes = ()

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*self.shards)

    @property
    def inside(self) -> ShardedDims:
        """The mesh axes of each dim inside the local matmul."""
        moved = {axis for move in self.moves for axis in move.axes}
        return tuple(tuple(axis for axis in axes if axis not in moved) for axes in self.shards)


@dataclass(frozen=True)
class MatmulRoute:
    """How one matmul runs in several dimensions.

    Attributes:
      dims: the logical dims of the weight.
      x: the input; its way outside is that of the input's gradient.
      w: the weight as the state stores it.
      w_grad: the weight's gradient.
      y: the result.
      contracting_dims: the number of leading dims of the weight that the product sums over.
    """

    dims: WeightDims
    x: MatmulOperand
    w: MatmulOperand
    w_grad: MatmulOperand
    y: MatmulOperand
    contracting_dims: int

    @property
    def is_tensor(self) -> bool:
        """Whether the matmul involves an axis ``x``, ``y`` or ``z``."""
        return any(axis in TENSOR_AXES for axis in self.axes)

    @property
    def with_gathered_weight(self) -> MatmulRoute:
        """The route of a weight that is already sharded as the local matmul uses it."""
        return replace(self, w=MatmulOperand(self.w.inside))

    @property
    def axes(self) -> Axes:
        """All mesh axes that the matmul involves."""
        found = (axis for one in (self.x, self.w, self.w_grad, self.y) for dim in one.shards for axis in dim)
        sums = (*self.x.summed, *self.w_grad.summed, *self.y.summed)
        return tuple(dict.fromkeys((*found, *sums)))


@dataclass(frozen=True)
class MatmulShardings:
    """The shardings of the arrays of one matmul by the rules.

    Attributes:
      x, y: input and result, ``[batch, ..., contracted]`` and ``[batch, ..., columns]``.
      w, w_grad: the weight as stored, and its gradient.
      contracting_dims: the number of contracted dims.
    """

    x: Resolved
    w: Resolved
    w_grad: Resolved
    y: Resolved
    contracting_dims: int

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for one in (self.x, self.w, self.w_grad, self.y) for text in one.problems))

    @property
    def axes(self) -> Axes:
        """All mesh axes that shard one of the arrays."""
        found = (axis for one in (self.x, self.w, self.w_grad, self.y) for dim in one.axes for axis in dim)
        return tuple(dict.fromkeys(found))

    def parts(self) -> dict[str, AxisPart]:
        """Returns the part of each mesh axis."""
        rows_x, rows_y = _first(self.x.axes[: -self.contracting_dims]), _first(self.y.axes[: self._lead])
        contracted, columns = _all(self.w.axes[: self.contracting_dims]), _all(self.w.axes[self.contracting_dims :])
        columns_y = _all(self.y.axes[self._lead :])

        def part(axis: str) -> AxisPart:
            if axis in rows_x and axis in rows_y:
                return AxisPart.ROWS
            if axis in contracted and axis not in rows_x:
                return AxisPart.CONTRACTED
            return AxisPart.COLUMNS if axis in columns and axis in columns_y else AxisPart.WHOLE

        return {axis: part(axis) for axis in self.axes}

    @property
    def _lead(self) -> int:
        return len(self.x.axes) - self.contracting_dims


def is_live(sizes: Mapping[str, int]) -> bool:
    """Whether a mesh has an axis of tensor parallelism in several dimensions."""
    return any(sizes.get(axis, 1) > 1 for axis in TENSOR_AXES)


def shardings_of(
    layout: Layout, x: Any, w: Any, dims: WeightDims, contracting_dims: int, manual: Iterable[str] = ()
) -> MatmulShardings:
    """Returns the shardings by the rules of the arrays of ``tensordot(x, w, contracting_dims)``.

    Args:
      layout: the layout.
      x: the input, ``[batch, ..., contracted]``; its shape and dtype.
      w: the weight as it is stored; its shape and dtype.
      dims: the logical dims of the weight.
      contracting_dims: the number of leading dims of the weight that the product sums over.
      manual: mesh axes that an enclosing ``shard_map`` has made manual; they are left out.
    """
    lead = x.ndim - contracting_dims
    rows = ("batch", *(None,) * (lead - 1)) if lead else ()
    sizes = {axis: size for axis, size in layout.sizes.items() if axis not in manual}

    def at(names: WeightDims, shape: tuple[int, ...], role: str, what: str, dtype: Any) -> Resolved:
        path = f"{what} of sharded_dot()"
        return resolve(layout.rules, sizes, names, shape, role=role, itemsize=itemsize(dtype), path=path)

    given = at((*rows, *dims[:contracting_dims]), x.shape, "activations", "the input", x.dtype)
    stored = at(dims, w.shape, "params", "a weight", w.dtype)
    w_grad = at(dims, w.shape, "gradients", "the gradient of a weight", w.dtype)
    shape = (*x.shape[:lead], *w.shape[contracting_dims:])
    result = at((*rows, *dims[contracting_dims:]), shape, "activations", "the result", x.dtype)
    return MatmulShardings(given, stored, w_grad, result, contracting_dims)


def route_of(found: MatmulShardings, dims: WeightDims) -> tuple[MatmulRoute, tuple[str, ...]]:
    """Returns the route of a matmul, and what the rules prevent, one text each; with problems the route is unusable."""
    parts, n, lead = found.parts(), found.contracting_dims, len(found.x.axes) - found.contracting_dims
    inside_w = tuple(_of(parts, axes, AxisPart.CONTRACTED, AxisPart.COLUMNS) for axes in found.w.axes)
    rows = tuple(_of(parts, axes, AxisPart.ROWS) for axes in found.x.axes[:lead])
    problems: list[str] = []

    def operand(what: str, resolved: Resolved, inside: ShardedDims, summed: AxisPart) -> MatmulOperand:
        made = _operand(resolved.axes, inside, parts, summed)
        problems.extend(f"sharded_dot() of a weight {dims}: {text}" for text in _misfits(what, made, resolved))
        seen = _all(made.shards)
        return replace(made, summed=tuple(a for a, part in parts.items() if part is summed and a not in seen))

    route = MatmulRoute(
        dims,
        operand("input", found.x, (*rows, *inside_w[:n]), AxisPart.COLUMNS),
        operand("stored weight", found.w, inside_w, AxisPart.ROWS),
        operand("gradient", found.w_grad, inside_w, AxisPart.ROWS),
        operand("result", found.y, (*rows, *inside_w[n:]), AxisPart.CONTRACTED),
        n,
    )
    return route, tuple(problems)


def _operand(
    outside: ShardedDims, inside: ShardedDims, parts: Mapping[str, AxisPart], summed: AxisPart
) -> MatmulOperand:
    """Returns an operand whose dims are sharded over ``inside`` and then over the axes that are gathered."""
    shards: list[Axes] = []
    moves: list[Move] = []
    for dim, (found, kept) in enumerate(zip(outside, inside, strict=True)):
        moved = tuple(axis for axis in found if axis not in _all(inside))
        shards.append((*kept, *moved))
        moves += reversed([Move(dim, axes, part is summed) for part, axes in _runs(moved, parts)])
    return MatmulOperand(tuple(shards), tuple(moves))


def _misfits(what: str, operand: MatmulOperand, resolved: Resolved) -> Iterator[str]:
    """Yields a problem for each dim whose axes the rules place or order as no local matmul can use them."""
    for needed, dim in zip(operand.shards, resolved.dims, strict=True):
        # An input that is replicated over a contracted axis is sliced for free.
        usable = tuple(axis for axis in needed if axis in dim.axes) if what == "input" else needed
        if usable != dim.axes:
            yield (
                f"the dim {dim.name!r} of the {what} is sharded over {messages.written(dim.axes)} (rule "
                f"{dim.rule or None}), but the product requires {messages.written(needed)}. Remedy: shard {dim.name!r} "
                f"over {messages.written(needed)} there, or over none of these axes."
            )


def _runs(axes: Axes, parts: Mapping[str, AxisPart]) -> list[tuple[AxisPart, Axes]]:
    """Returns neighbouring axes of the same part as one."""
    return [(part, tuple(run)) for part, run in itertools.groupby(axes, parts.__getitem__)]


def _of(parts: Mapping[str, AxisPart], axes: Axes, *wanted: AxisPart) -> Axes:
    return tuple(axis for axis in axes if parts[axis] in wanted)


def _first(shards: ShardedDims) -> Axes:
    return shards[0] if shards else ()


def _all(shards: ShardedDims) -> Axes:
    return tuple(axis for axes in shards for axis in axes)
