"""Arithmetic on values that depend on positions alone: ``arange``, ``tril`` and masks that are combined from them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxpar.planning.attention.axes import Axis, Dims, Group, fresh, moved
from jaxpar.planning.attention.values import Condition, Conditional, Linear, Number, View

Position = Linear | Conditional

_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg, "not": np.logical_not, "sqrt": np.sqrt, "exp": np.exp, "log": np.log, "abs": abs,
    "rsqrt": lambda x: 1 / np.sqrt(x), "sign": np.sign, "stop_gradient": lambda x: x, "square": np.square,
}  # fmt: skip
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": np.divide, "max": max, "min": min,
    "pow": np.float_power, "ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt,
    "eq": operator.eq, "ne": operator.ne, "and": np.logical_and, "or": np.logical_or,
}  # fmt: skip
_LARGEST = 2**26
"""The elements of the largest array that is compared with a mask."""
_COMPARE = {"ge": (1, 0), "le": (-1, 0), "gt": (1, -1), "lt": (-1, -1)}
"""For each comparison of a and b the factor and the constant that make it ``factor * (a - b) + constant >= 0``."""


def position(name: str, params: Mapping[str, Any], reads: Sequence[Any], out: Any) -> Position | None:
    """Returns a primitive's result if it depends on positions alone or chooses by conditions; else ``None``.

    Args:
      name, params: the primitive.
      reads: what is known of its operands.
      out: the shape and dtype of its result.
    """
    if name == "iota":
        dims = fresh(out.shape)
        return Linear(dims, 0, {axis: 1 for axis in dims[params["dimension"]]})
    if not reads or not all(isinstance(x, Linear | Conditional) for x in reads):
        return None
    if name == "slice":
        return _sliced(params, reads[0], out)
    if len(reads) == 1 and (there_dims := moved(name, params, reads[0].dims, out.shape)) is not None:
        there = replace(reads[0], dims=there_dims)
        return _applied(lambda x: _as_dtype(x, out.dtype), there) if name == "convert_element_type" else there
    found = align(reads, out.shape)
    if found is None:
        return None
    dims, values = found
    result = _computed(name, params, values, dims, out)
    return None if result is None else _applied(lambda x: _as_dtype(x, out.dtype), result)


def constant(x: Any) -> Position | None:
    """Returns what is known of an array that a program contains: positions, a causal mask or a window.

    Args:
      x: a number, integers ``[n]`` at equal distances, or zeros and ones ``[queries, keys]``; there may be more dims of
        size 1.
    """
    plain = isinstance(getattr(x, "dtype", np.dtype(float)), np.dtype) and not isinstance(x, jax.core.Tracer)
    if not plain or not 0 < np.size(x) <= _LARGEST or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    x = np.asarray(x)
    if x.ndim == 0:
        return Linear((), x.item())
    dims = fresh(x.shape)
    wide = [group for group in dims if group]
    if len(wide) == 1 and x.dtype.kind in "iu":
        first, *steps = np.diff(x.ravel().astype(np.int64)).tolist()
        return Linear(dims, int(x.flat[0]), {wide[0][0]: first}) if all(step == first for step in steps) else None
    if len(wide) != 2 or not x.any() or not np.isin(x, (0, 1)).all():
        return None
    (rows,), (columns,) = wide
    x = x.reshape(rows.size, columns.size).astype(bool)
    ahead = np.arange(rows.size)[:, None] - np.arange(columns.size)
    low, high = int(ahead[x].min()), int(ahead[x].max())
    if (x != ((ahead >= low) & (ahead <= high))).any():
        return None
    first = Linear(dims, -low, {rows: 1, columns: -1})
    return Conditional(dims, (first, Linear(dims, high, {rows: -1, columns: 1})), True, False)


def as_choice(x: Any) -> Any:
    """Returns an array of booleans as a choice between true and false, and any other value as it is."""
    is_bool = isinstance(x, View) and (x.source.aval.dtype == bool)
    return Conditional(x.dims, (x,), True, False) if is_bool else x


def align(reads: Sequence[Any], shape: Sequence[int]) -> tuple[Dims, list[Any]] | None:
    """Returns the common dims of the operands of an elementwise operation, and the operands in the axes of these.

    The first operand that has a dim gives its axes. One position in two dims, as in ``x[:, None] >= x``, is two axes.
    """
    dims: list[Group] = [()] * len(shape)
    names: list[dict[Axis, Axis]] = [{} for _ in reads]
    if any(x.dims and len(x.dims) != len(shape) for x in reads):
        return None
    for x, rename in zip(reads, names, strict=True):
        for i, own in enumerate(x.dims):
            group = dims[i]
            if own in ((), group) or all(axis.copies for axis in own):
                dims[i] = group or own
            elif not group or all(axis.copies for axis in group):
                others = {axis for j, other in enumerate(dims) if j != i for axis in other}
                rename |= {axis: Axis(axis.size, axis.copies) for axis in own if axis in others}
                dims[i] = tuple(rename.get(axis, axis) for axis in own)
            elif len(own) == 1 and len(group) == 1 and own[0].size == group[0].size:
                rename[own[0]] = group[0]
            else:
                return None
    return tuple(dims), [x.with_axes(rename) if rename else x for x, rename in zip(reads, names, strict=True)]


def number(x: Any) -> Number | None:
    """Returns the number that a value is everywhere, or ``None``."""
    return x.constant if isinstance(x, Linear) and not x.factors else None


def _computed(
    name: str, params: Mapping[str, Any], values: Sequence[Position], dims: Dims, out: Any
) -> Position | None:
    if name == "select_n" and len(values) == 3:
        return _selected(values, dims)
    if name == "integer_pow":
        return _applied(lambda x: np.float_power(x, params["y"]), replace(values[0], dims=dims))
    if len(values) == 1 and name in _UNARY:
        return _applied(_UNARY[name], replace(values[0], dims=dims))
    if len(values) != 2 or name not in _BINARY:
        return None
    a, b = values
    compute = _BINARY[name]
    m, n = number(a), number(b)
    if m is not None and n is not None:
        return _applied(lambda x: compute(x, n), Linear(dims, m))
    if n is not None and isinstance(a, Conditional):
        return _applied(lambda x: compute(x, n), replace(a, dims=dims))
    if m is not None and isinstance(b, Conditional):
        return _applied(lambda x: compute(m, x), replace(b, dims=dims))
    if isinstance(a, Conditional) and isinstance(b, Conditional):
        return _both(name, a, b, dims)
    if isinstance(a, Linear) and isinstance(b, Linear):
        return _linear(name, a, b, dims)
    return None


def _linear(name: str, a: Linear, b: Linear, dims: Dims) -> Position | None:
    """Sums, multiples and comparisons of positions."""
    m, n = number(a), number(b)
    if name in ("add", "sub"):
        return _sum(a, b, 1 if name == "add" else -1, dims)
    if name == "mul" and (m is not None or n is not None):
        x, factor = (a, n) if n is not None else (b, m)
        factor = factor or 0
        return Linear(dims, x.constant * factor, {axis: own * factor for axis, own in x.factors.items()})
    if not all(float(x).is_integer() for one in (a, b) for x in (one.constant, *one.factors.values())):
        return None
    if name in _COMPARE:
        factor, constant = _COMPARE[name]
        return Conditional(dims, (_at_least_0(a, b, factor, constant, dims),), True, False)
    if name in ("eq", "ne"):
        condition = tuple(_at_least_0(a, b, factor, 0, dims) for factor in (1, -1))
        return Conditional(dims, condition, name == "eq", name == "ne")
    return None


def _sum(a: Linear, b: Linear, sign: int, dims: Dims) -> Linear:
    factors = dict(a.factors)
    for axis, factor in b.factors.items():
        factors[axis] = factors.get(axis, 0) + sign * factor
    return Linear(dims, a.constant + sign * b.constant, {axis: x for axis, x in factors.items() if x})


def _at_least_0(a: Linear, b: Linear, factor: int, constant: int, dims: Dims) -> Linear:
    x = _sum(a, b, -1, dims)
    return Linear(dims, factor * x.constant + constant, {axis: factor * own for axis, own in x.factors.items()})


def _both(name: str, a: Conditional, b: Conditional, dims: Dims) -> Conditional | None:
    """What is computed of two choices, if that is one number wherever the conditions of both do not hold together."""
    with np.errstate(all="ignore"):
        both, *others = (_plain(_BINARY[name](x, y)) for x in (a.yes, a.no) for y in (b.yes, b.no))
    return Conditional(dims, (*a.condition, *b.condition), both, others[0]) if len({*others}) == 1 else None


def _selected(values: Sequence[Position], dims: Dims) -> Position | None:
    which, off, on = values
    if isinstance(which, Linear):
        fixed = number(which)
        return None if fixed is None else replace(on if fixed else off, dims=dims)
    yes, no = (on if which.yes else off), (on if which.no else off)
    a, b = number(yes), number(no)
    if a is not None and b is not None:
        return Conditional(dims, which.condition, a, b)
    if isinstance(yes, Conditional) and b is not None and yes.no == b:
        return Conditional(dims, (*which.condition, *yes.condition), yes.yes, b)
    return None


def _sliced(params: Mapping[str, Any], x: Position, out: Any) -> Position | None:
    """A part of a value: indices begin at another number there."""
    if params["strides"] is not None and any(stride != 1 for stride in params["strides"]):
        return None
    names: dict[Axis, Axis] = {}
    starts: dict[Axis, int] = {}
    dims = list(x.dims)
    for i, (group, start, length) in enumerate(zip(x.dims, params["start_indices"], out.shape, strict=True)):
        if length == np.prod([axis.size for axis in group], dtype=int):
            continue
        if len(group) != 1:
            return None
        dims[i] = fresh((length,), copies=group[0].copies)[0]
        starts[group[0]] = start
        if length > 1:
            names[group[0]] = dims[i][0]
    parts: Condition = x.condition if isinstance(x, Conditional) else (x,)
    if any(isinstance(part, View) and starts.keys() & {a for g in part.dims for a in g} for part in parts):
        return None
    shifted = tuple(_shifted(part, starts, names) for part in parts)
    if isinstance(x, Conditional):
        return Conditional(tuple(dims), shifted, x.yes, x.no)
    (only,) = shifted
    return Linear(tuple(dims), only.constant, only.factors) if isinstance(only, Linear) else None


def _shifted(part: Linear | View, starts: Mapping[Axis, int], names: Mapping[Axis, Axis]) -> Linear | View:
    if isinstance(part, View):
        return part
    constant = part.constant + sum(part.factors.get(axis, 0) * start for axis, start in starts.items())
    factors = {names.get(a, a): f for a, f in part.factors.items() if a in names or a not in starts}
    return Linear(part.dims, constant, factors)


def _applied(function: Callable[[Any], Any], x: Position) -> Position | None:
    """The value with a function of one number applied; of positions only where that changes none of them."""
    with np.errstate(all="ignore"):
        if isinstance(x, Conditional):
            return replace(x, yes=_plain(function(x.yes)), no=_plain(function(x.no)))
        if x.factors:
            return x if all(function(one) == one for one in _least_next_largest(x)) else None
        return replace(x, constant=_plain(function(x.constant)))


def _least_next_largest(x: Linear) -> tuple[Number, ...]:
    """The least and the largest number of positions, and the least one's neighbors along each axis."""
    steps = {axis: factor * (axis.size - 1) for axis, factor in x.factors.items()}
    least = x.constant + sum(step for step in steps.values() if step < 0)
    largest = x.constant + sum(step for step in steps.values() if step > 0)
    return (least, *(least + abs(factor) for factor in x.factors.values()), largest)


def _plain(x: Any) -> Number:
    return np.asarray(x).item()


def _as_dtype(x: Any, dtype: Any) -> Any:
    return np.asarray(x).astype(dtype).astype(np.float64).item() if dtype not in (bool,) else bool(x)
