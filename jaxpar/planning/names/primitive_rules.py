"""Which dims of its operands and results each primitive makes one, and what it does with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.planning.names.dim_classes import Dim, DimClasses, Use


@dataclass(eq=False, slots=True)
class TracedValue:
    """An array of the program.

    Attributes:
      dims: its dims.
      shape: their sizes.
      data: whether it depends on the batch.
      weight: whether it is a parameter, or made of one, and does not depend on the batch.
      numbers: whether it has the batch's own numbers, such as tokens and labels.
      counts: the dim along which it counts 0, 1, 2, ..., if it does.
    """

    dims: list[Dim]
    shape: tuple[int, ...]
    data: bool = False
    weight: bool = False
    numbers: bool = False
    counts: int | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """An equation: its primitive and parameters, and the arrays that it reads and makes."""

    classes: DimClasses
    name: str
    params: Mapping[str, Any]
    reads: Sequence[TracedValue]
    makes: Sequence[TracedValue]

    def one(self, a: Dim, b: Dim) -> None:
        """Make two dims one. A dim of size 1 is repeated along the other, and says nothing of it."""
        if a and b:
            self.classes.unite(a, b)

    def same(self, left: Sequence[Dim], right: Sequence[Dim]) -> None:
        """Make dims one, pair by pair."""
        for a, b in zip(left, right, strict=True):
            self.one(a, b)

    def mark(self, use: Use, *dims: Dim) -> None:
        """Note what is done with dims."""
        for dim in dims:
            self.classes.mark(dim, use)


def _elementwise(op: Operation) -> None:
    """Every element of the results comes from the elements at its place; scalars are operands of all."""
    for out in op.makes:
        for x in op.reads:
            if x.dims:
                op.same(x.dims, out.dims)


def _reduce(op: Operation) -> None:
    """The results have the dims of the operands at their place, without ``axes``: names of mesh axes, or dims."""
    axes = op.params.get("axes", ())
    for x, out in zip(op.reads, op.makes, strict=False):
        op.same([dim for i, dim in enumerate(x.dims) if i not in axes], out.dims)


def _dot_general(op: Operation) -> None:
    (contracted, batch) = op.params["dimension_numbers"]
    pair, out = op.reads[:2], op.makes[0]
    activations = all(x.data for x in pair)
    uses = ((contracted, Use.JOINED, Use.CONTRACTED), (batch, Use.SEPARATE, Use.PER_WEIGHT))
    for (left, right), use, weight_use in uses:
        for i, j in zip(left, right, strict=True):
            op.one(pair[0].dims[i], pair[1].dims[j])
            op.mark(use if activations else weight_use, pair[0].dims[i])
    free = []
    for x, taken in zip(pair, ((*contracted[0], *batch[0]), (*contracted[1], *batch[1])), strict=True):
        free.append([dim for i, dim in enumerate(x.dims) if i not in taken])
        if activations:
            op.mark(Use.OPPOSED, *free[-1])
        elif not x.data:
            op.mark(Use.PRODUCED, *free[-1])
    op.same([*(pair[0].dims[i] for i in batch[0]), *free[0], *free[1]], out.dims)


def _ragged_dot(op: Operation) -> None:
    """``[tokens, in] @ [groups, in, out]``, where each group takes some of the tokens."""
    numbers = op.params["ragged_dot_dimension_numbers"]
    (left, right), (left_batch, right_batch) = numbers.dot_dimension_numbers
    groups, ragged = list(numbers.rhs_group_dimensions), list(numbers.lhs_ragged_dimensions)
    x, weight, out = op.reads[0], op.reads[1], op.makes[0]
    op.same([x.dims[i] for i in left], [weight.dims[j] for j in right])
    op.same([x.dims[i] for i in left_batch], [weight.dims[j] for j in right_batch])
    op.mark(Use.PER_WEIGHT, *(weight.dims[j] for j in groups))
    if set(ragged) & set(left):
        return  # the gradient of the weight: a sum over the tokens of each group
    op.mark(Use.CONTRACTED, *(x.dims[i] for i in left))
    kept = [dim for i, dim in enumerate(x.dims) if i not in (*left, *left_batch)]
    new = [dim for j, dim in enumerate(weight.dims) if j not in (*right, *right_batch, *groups)]
    op.mark(Use.PRODUCED, *new)
    op.same([*(x.dims[i] for i in left_batch), *kept, *new], out.dims)


def _conv_general_dilated(op: Operation) -> None:
    numbers, params = op.params["dimension_numbers"], op.params
    (x, weight), out = op.reads, op.makes[0]
    lhs, rhs, result = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    if params["batch_group_count"] == 1:
        op.one(x.dims[lhs[0]], out.dims[result[0]])
        if params["feature_group_count"] == 1:
            op.one(x.dims[lhs[1]], weight.dims[rhs[1]])
        elif x.shape[lhs[1]] == out.shape[result[1]]:  # depthwise
            op.one(x.dims[lhs[1]], out.dims[result[1]])
    op.one(weight.dims[rhs[0]], out.dims[result[1]])
    op.mark(Use.CONVOLVED, weight.dims[rhs[0]], weight.dims[rhs[1]])
    for i, j, k in zip(lhs[2:], rhs[2:], result[2:], strict=True):
        op.mark(Use.WINDOW, weight.dims[j])
        if x.shape[i] == out.shape[k]:
            op.one(x.dims[i], out.dims[k])


def _reshape(op: Operation) -> None:
    """The same atoms in other groups, divided where they must be."""
    classes, (x, out) = op.classes, (op.reads[0], op.makes[0])
    left = [atom for dim in x.dims for atom in classes.flat(dim)]
    for k, size in enumerate(out.shape):
        taken: list[int] = []
        need = size
        while need > 1 and left:
            atom, *rest = classes.flat((left.pop(0),))
            left[:0] = rest
            if classes.sizes[atom] > need and (parts := classes.split(atom, need)):
                atom, *rest = classes.flat(parts)
                left[:0] = rest
            if need % classes.sizes[atom]:
                left = []
                break
            taken.append(atom)
            need //= classes.sizes[atom]
        if need > 1:
            classes.misaligned += 1
            return
        out.dims[k] = tuple(taken)
    if x.counts is not None and (found := [k for k, size in enumerate(out.shape) if size == x.shape[x.counts]]):
        out.counts = found[-1] if math.prod(out.shape) == x.shape[x.counts] else None


def _broadcast_in_dim(op: Operation) -> None:
    x, out, places = op.reads[0], op.makes[0], op.params["broadcast_dimensions"]
    op.same(x.dims, [out.dims[k] for k in places])
    out.counts = None if x.counts is None else places[x.counts]


def _iota(op: Operation) -> None:
    op.makes[0].counts = op.params["dimension"]


def _convert(op: Operation) -> None:
    op.same(op.reads[0].dims, op.makes[0].dims)
    op.makes[0].counts = op.reads[0].counts


def _eq(op: Operation) -> None:
    """A comparison with 0, 1, 2, ... chooses from a dim, as in one_hot."""
    _elementwise(op)
    for x, y in (op.reads, op.reads[::-1]):
        if x.counts is not None and not x.data and y.numbers:
            op.mark(Use.LABELLED, x.dims[x.counts])


def _transpose(op: Operation) -> None:
    op.makes[0].dims[:] = [op.reads[0].dims[i] for i in op.params["permutation"]]


def _squeeze(op: Operation) -> None:
    rank, gone = len(op.reads[0].dims), op.params["dimensions"]
    op.makes[0].dims[:] = [dim for i, dim in enumerate(op.reads[0].dims) if i not in {d % rank for d in gone}]


def _slice(op: Operation) -> None:
    x, out, strides = op.reads[0], op.makes[0], op.params["strides"]
    for i, (start, end) in enumerate(zip(op.params["start_indices"], op.params["limit_indices"], strict=True)):
        whole = x.shape[i]
        if (start, end) == (0, whole) and out.shape[i] == whole:
            op.one(x.dims[i], out.dims[i])
        elif (strides is None or strides[i] == 1) and start < end:
            sizes = [n for n in (start, end - start, whole - end) if n]
            pieces = op.classes.cut(x.dims[i], sizes)
            if pieces is not None:
                op.one(pieces[1 if start else 0], out.dims[i])
        op.mark(Use.CUT, *([] if out.shape[i] == whole else [x.dims[i]]))


def _split(op: Operation) -> None:
    axis, x = op.params["axis"], op.reads[0]
    pieces = None if 0 in op.params["sizes"] else op.classes.cut(x.dims[axis], op.params["sizes"])
    for i, out in enumerate(op.makes):
        for k, (a, b) in enumerate(zip(x.dims, out.dims, strict=True)):
            if k != axis:
                op.one(a, b)
            elif pieces is not None:
                op.one(pieces[i], b)


def _concatenate(op: Operation) -> None:
    axis, out = op.params["dimension"], op.makes[0]
    for x in op.reads:
        op.same([*x.dims[:axis], *x.dims[axis + 1 :]], [*out.dims[:axis], *out.dims[axis + 1 :]])
    if out.shape[axis] > 1:
        out.dims[axis] = op.classes.add([x.dims[axis] for x in op.reads if x.shape[axis]])


def _stack(op: Operation) -> None:
    axis, out = op.params["axis"], op.makes[0]
    for x in op.reads:
        op.same(x.dims, [*out.dims[:axis], *out.dims[axis + 1 :]])
    op.mark(Use.PARTS, out.dims[axis])


def _unstack(op: Operation) -> None:
    axis, x = op.params["axis"], op.reads[0]
    for out in op.makes:
        op.same([*x.dims[:axis], *x.dims[axis + 1 :]], out.dims)
    op.mark(Use.PARTS, x.dims[axis])


def _where_equal(op: Operation) -> None:
    """Unite the dims that have the same size before and after."""
    out = op.makes[0]
    for x in op.reads:
        if len(x.dims) == len(out.dims):
            for a, b, m, n in zip(x.dims, out.dims, x.shape, out.shape, strict=True):
                op.one(a, b) if m == n else op.mark(Use.CUT, a)


def _sort(op: Operation) -> None:
    """All operands of a sort, as keys and the numbers that an ``argsort`` counts, are permuted alike."""
    for values in (*op.reads, *op.makes):
        op.same(op.reads[0].dims, values.dims)


def _top_k(op: Operation) -> None:
    x, axis = op.reads[0], op.params.get("axis", op.params.get("reduction_dimension", -1))
    axis %= len(x.dims)
    for i, dim in enumerate(x.dims):
        if i == axis:
            op.mark(Use.SELECTED, dim)
        else:
            for out in op.makes:
                op.one(dim, out.dims[i])


def _gather(op: Operation) -> None:
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    (x, indices), out = op.reads, op.makes[0]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    for i, k in zip([i for i in range(len(x.dims)) if i not in gone], numbers.offset_dims, strict=True):
        op.one(x.dims[i], out.dims[k]) if sizes[i] == x.shape[i] else op.mark(Use.CUT, x.dims[i])
    op.same(indices.dims[:-1], [dim for k, dim in enumerate(out.dims) if k not in numbers.offset_dims])
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        op.one(x.dims[i], indices.dims[j])
    for i in numbers.collapsed_slice_dims:
        if indices.numbers:
            op.mark(Use.LABELLED if x.data else Use.LOOKED_UP, x.dims[i])
        elif not indices.data:
            op.mark(Use.INDEXED, x.dims[i])


def _scatter(op: Operation) -> None:
    numbers, (x, indices, updates) = op.params["dimension_numbers"], op.reads
    op.same(x.dims, op.makes[0].dims)
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [i for i in range(len(x.dims)) if i not in gone]
    for i, k in zip(kept, numbers.update_window_dims, strict=True):
        if x.shape[i] == updates.shape[k]:
            op.one(x.dims[i], updates.dims[k])
    op.same(indices.dims[:-1], [dim for k, dim in enumerate(updates.dims) if k not in numbers.update_window_dims])
    for i, j in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        op.one(x.dims[i], indices.dims[j])


_ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "copy", "copy_p", "cos", "cosh", "device_put",
    "digamma", "div", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma",
    "igammac", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "logistic", "lt", "lt_to",
    "max", "min", "mul", "mulhi", "name", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "polygamma",
    "population_count", "pow", "random_gamma", "real", "reduce_precision", "regularized_incomplete_beta", "rem",
    "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin",
    "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
)  # fmt: skip
_SCATTERS = (
    "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max", "scatter_add", "scatter_sub",
    "scatter_mul", "scatter_min", "scatter_max",
)  # fmt: skip
_WINDOWS = (
    "bitcast_convert_type", "tile", "pad", "dynamic_slice", "dynamic_update_slice", "reduce_window",
    "reduce_window_max", "reduce_window_sum", "reduce_window_min", "select_and_scatter_add", "select_and_gather_add",
)  # fmt: skip
_REDUCTIONS = (
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax",
    "argmin", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev", "optimization_barrier", "psum",
    "psum_invariant", "pvary", "sharding_constraint", "reshard", "copy",
)  # fmt: skip
"""Reductions, and what keeps all dims."""

RULES: dict[str, Callable[[Operation], None]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv_general_dilated,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast_in_dim,
    "iota": _iota,
    "convert_element_type": _convert,
    "eq": _eq,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "top_k": _top_k,
    "approx_top_k": _top_k,
    "gather": _gather,
    "sort": _sort,
    **dict.fromkeys(_SCATTERS, _scatter),
    **dict.fromkeys(_WINDOWS, _where_equal),
    **dict.fromkeys(_REDUCTIONS, _reduce),
}
