"""The dims of an array as groups of axes, and how primitives that only move data change them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Axis:
    """A direction along which an array has elements. Two axes are one only if they are the same object.

    Attributes:
      size: the number of elements, at least 2.
      copies: whether all elements along it are equal, because it was broadcast.
    """

    size: int
    copies: bool = False


Group = tuple[Axis, ...]
Dims = tuple[Group, ...]
"""For each dim the axes that it is made of, major to minor. A dim of size 1 has none."""


def fresh(shape: Sequence[int], *, copies: bool = False) -> Dims:
    """Returns new axes for a shape."""
    return tuple((Axis(size, copies),) if size != 1 else () for size in shape)


def size(group: Group) -> int:
    """Returns the number of elements along a dim."""
    return math.prod(axis.size for axis in group)


def axes_of(dims: Iterable[Group]) -> Group:
    """Returns all axes, in order."""
    return tuple(axis for group in dims for axis in group)


def split(dims: Dims, axis: Axis, parts: Group) -> Dims:
    """Returns dims in which an axis is divided into several."""
    return tuple(tuple(new for own in group for new in (parts if own is axis else (own,))) for group in dims)


def renamed(dims: Dims, names: Mapping[Axis, Axis]) -> Dims:
    """Returns dims with other axes in place of some."""
    return tuple(tuple(names.get(axis, axis) for axis in group) for group in dims)


def moved(name: str, params: Mapping[str, Any], dims: Dims, out_shape: Sequence[int]) -> Dims | None:
    """Returns the dims after a primitive that only moves data; ``None`` if it is none, or they cannot be followed.

    Args:
      name, params: the primitive.
      dims: those of its operand.
      out_shape: the shape of its result.
    """
    move = _MOVES.get(name)
    return None if move is None else move(params, dims, tuple(out_shape))


def _squeeze(params: Mapping[str, Any], dims: Dims, shape: tuple[int, ...]) -> Dims:
    gone = {int(i) % len(dims) for i in params["dimensions"]}
    return tuple(group for i, group in enumerate(dims) if i not in gone)


def _broadcast(params: Mapping[str, Any], dims: Dims, shape: tuple[int, ...]) -> Dims:
    out = list(fresh(shape, copies=True))
    for group, k in zip(dims, params["broadcast_dimensions"], strict=True):
        if group:
            out[int(k)] = group
    return tuple(out)


def _reshape(params: Mapping[str, Any], dims: Dims, shape: tuple[int, ...]) -> Dims | None:
    if params.get("dimensions") is not None:
        return None
    left, out = list(axes_of(dims)), list[Group]()
    for want in shape:
        group: Group = ()
        while size(group) < want and left:
            group = (*group, left.pop(0))
        if size(group) != want:
            return None
        out.append(group)
    return tuple(out)


_MOVES: dict[str, Callable[[Mapping[str, Any], Dims, tuple[int, ...]], Dims | None]] = {
    "transpose": lambda params, dims, shape: tuple(dims[i] for i in params["permutation"]),
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    **dict.fromkeys(
        ("convert_element_type", "copy", "copy_p", "name", "optimization_barrier"), lambda params, dims, shape: dims
    ),
}
