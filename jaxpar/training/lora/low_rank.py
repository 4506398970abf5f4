"""``LowRank``: a frozen weight and its adapter, as one value of a program."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.utils.arrays import at_least_fp32

RANK = -1
"""The label of the dim that ``a`` and ``b`` share and the weight has not."""
_LARGEST = 64


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w", "a", "b"], meta_fields=["a_dims", "b_dims", "scale"]
)
@dataclass(frozen=True)
class LowRank:
    """The weight ``w + scale * sum over RANK of a * b``.

    Attributes:
      w: the frozen weight.
      a, b: the adapter; each has some of the weight's dims, in ascending order, and then ``RANK``.
      a_dims, b_dims: the weight's dims that they have.
      scale: the factor.
    """

    w: Any
    a: Any
    b: Any
    a_dims: tuple[int, ...]
    b_dims: tuple[int, ...]
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.w.shape)

    def merged(self) -> jax.Array:
        """Returns the sum, in the dtype of ``w``."""
        dims = tuple(range(len(self.shape)))
        a, b = at_least_fp32(self.a), at_least_fp32(self.b)
        added = self.scale * _einsum([(a, (*self.a_dims, RANK)), (b, (*self.b_dims, RANK))], dims)
        return (at_least_fp32(self.w) + added).astype(self.w.dtype)

    def map(self, function: Any) -> LowRank:
        """Returns the value with a function applied to each of the three arrays."""
        return replace(self, w=function(self.w), a=function(self.a), b=function(self.b))


def low_rank(w: Any, a: Any, b: Any, a_labels: Sequence[int], b_labels: Sequence[int], scale: float) -> LowRank:
    """Returns a weight and its adapter, whose dims have these labels: a dim of the weight, or ``RANK``."""
    (a, a_dims), (b, b_dims) = _ordered(a, a_labels), _ordered(b, b_labels)
    return LowRank(w, a, b, a_dims, b_dims, scale)


def _ordered(x: Any, labels: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """Returns an array with its dims in ascending order and ``RANK`` last, and the dims."""
    order = sorted(range(len(labels)), key=lambda i: (labels[i] == RANK, labels[i]))
    moved = x if order == list(range(len(labels))) else jnp.transpose(x, order)
    return moved, tuple(labels[i] for i in order if labels[i] != RANK)


def transposed(x: LowRank, w: Any, order: Sequence[int]) -> LowRank:
    """Returns the value with its dims in another order, of which ``w`` is the weight."""
    place = {dim: new for new, dim in enumerate(order)}
    a, b = ([*(place[dim] for dim in dims), RANK] for dims in (x.a_dims, x.b_dims))
    return low_rank(w, x.a, x.b, a, b, x.scale)


def without_dims(x: LowRank, w: Any, dims: Sequence[int]) -> LowRank:
    """Returns the value without dims of size 1, which are counted from 0; only the dims of ``x`` are used."""
    gone = set(dims)
    place = {dim: new for new, dim in enumerate(d for d in range(len(x.shape)) if d not in gone)}

    def one(array: Any, have: tuple[int, ...]) -> tuple[Any, list[int]]:
        kept = [dim for dim in have if dim not in gone]
        left = jnp.squeeze(array, tuple(i for i, dim in enumerate(have) if dim in gone))
        return left, [*(place[dim] for dim in kept), RANK]

    (a, a_labels), (b, b_labels) = one(x.a, x.a_dims), one(x.b, x.b_dims)
    return low_rank(w, a, b, a_labels, b_labels, x.scale)


def sliced(x: LowRank, w: Any, starts: Sequence[Any], sizes: Sequence[int]) -> LowRank:
    """Returns a box of the value, of which ``w`` is the weight."""

    def one(array: Any, have: tuple[int, ...]) -> Any:
        starts_here = [*(starts[dim] for dim in have), 0]
        return jax.lax.dynamic_slice(array, starts_here, [*(sizes[dim] for dim in have), array.shape[-1]])

    return replace(x, w=w, a=one(x.a, x.a_dims), b=one(x.b, x.b_dims))


def parts(x: LowRank, ws: Sequence[Any], axis: int) -> list[Any]:
    """Returns the parts of the value along a dim, of which ``ws`` are the weights, with or without that dim."""
    found, start = list[Any](), 0
    for w in ws:
        size = w.shape[axis] if w.ndim == len(x.shape) else 1
        starts = [start if dim == axis else 0 for dim in range(len(x.shape))]
        sizes = [size if dim == axis else n for dim, n in enumerate(x.shape)]
        part = sliced(x, w, starts, sizes)
        found.append(part if w.ndim == len(x.shape) else without_dims(replace(part, w=w[None]), w, [axis]))
        start += size
    return found


def reshaped(x: LowRank, w: Any) -> LowRank | None:
    """Returns the value in the shape of ``w``, or ``None`` where dims of ``a`` and of ``b`` would be joined."""
    groups = _groups(x.shape, tuple(w.shape))
    if groups is None:
        return None
    for old, new in groups:
        members = {(dim in x.a_dims, dim in x.b_dims) for dim in old if x.shape[dim] > 1}
        if len(members) > 1 or (not old and any(w.shape[dim] > 1 for dim in new)):
            return None

    def one(array: Any, have: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
        dims: list[int] = []
        for old, new in groups:
            large = [dim for dim in old if x.shape[dim] > 1]
            if large and large[0] in have:
                dims += new
        return array.reshape(*(w.shape[dim] for dim in dims), array.shape[-1]), tuple(dims)

    (a, a_dims), (b, b_dims) = one(x.a, x.a_dims), one(x.b, x.b_dims)
    left = set(range(len(w.shape))) - {*a_dims, *b_dims}  # dims of size 1 that neither has
    if left:
        a, a_dims = _ordered(a.reshape(*a.shape, *(1 for _ in left)), (*a_dims, RANK, *sorted(left)))
    return LowRank(w, a, b, a_dims, b_dims, x.scale)


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]] | None:
    """Returns the groups of neighbouring dims that a reshape turns into each other; ``None`` for empty arrays."""
    if 0 in old:
        return None
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right, have, want = list[int](), list[int](), 1, 1
        while True:
            if have <= want and i < len(old) and (have < want or not left):
                left.append(i)
                have *= old[i]
                i += 1
            elif want < have or (not right and j < len(new)):
                right.append(j)
                want *= new[j]
                j += 1
            else:
                break
        found.append((left, right))
    return found


def concatenated(parts: Sequence[Any], w: Any, axis: int) -> LowRank | None:
    """Returns weights joined along a dim, of which ``w`` is the result; ``None`` if that is no product of two.

    Args:
      parts: weights with and without adapters.
      w: the joined frozen weights.
      axis: the dim.
    """
    adapted = [part for part in parts if isinstance(part, LowRank)]
    first = adapted[0]
    alike = all((p.a_dims, p.b_dims) == (first.a_dims, first.b_dims) for p in adapted)
    if not alike or (axis in first.a_dims) == (axis in first.b_dims):
        return None
    joined_is_a = axis in first.a_dims
    dims = first.a_dims if joined_is_a else first.b_dims
    ranks = [part.a.shape[-1] if isinstance(part, LowRank) else 0 for part in parts]
    starts = list(itertools.accumulate(ranks, initial=0))
    blocks = []
    for part, start in zip(parts, starts, strict=False):
        if isinstance(part, LowRank):
            own = part.scale * (part.a if joined_is_a else part.b)
            space = (start, starts[-1] - start - own.shape[-1])
            blocks.append(jnp.pad(own, [*((0, 0) for _ in dims), space]))
        else:
            sizes = tuple(part.shape[dim] for dim in dims)
            blocks.append(jnp.zeros((*sizes, starts[-1]), first.a.dtype))
    joined = jnp.concatenate(blocks, dims.index(axis))
    other = jnp.concatenate([part.b if joined_is_a else part.a for part in adapted], -1)
    a, b = (joined, other) if joined_is_a else (other, joined)
    return LowRank(w, a, b, first.a_dims, first.b_dims, 1.0)


def product(x: Any, weight: LowRank, numbers: Any, weight_is_left: bool, out: Any, precision: Any) -> Any:
    """Returns what the adapter adds to ``dot_general`` of an array and a weight, or ``None`` if it is no two products.

    Args:
      x: the array.
      weight: the weight.
      numbers: ``dimension_numbers`` of the product.
      weight_is_left: whether the weight is the first operand.
      out: shape and dtype of the result.
      precision: of the product.
    """
    (contracted, batched) = numbers
    if weight_is_left:
        (of_w, of_x), (batch_w, batch_x) = contracted, batched
    else:
        (of_x, of_w), (batch_x, batch_w) = contracted, batched
    if set(of_w) <= set(weight.a_dims):
        first, second = (weight.a, weight.a_dims), (weight.b, weight.b_dims)
    elif set(of_w) <= set(weight.b_dims):
        first, second = (weight.b, weight.b_dims), (weight.a, weight.a_dims)
    else:
        return None
    labels = [_LARGEST + i for i in range(x.ndim)]
    for i, dim in zip((*of_x, *batch_x), (*of_w, *batch_w), strict=True):
        labels[i] = dim
    free_x = [labels[i] for i in range(x.ndim) if i not in (*of_x, *batch_x)]
    free_w = [dim for dim in range(len(weight.shape)) if dim not in (*of_w, *batch_w)]
    result = [*batch_w, *(free_w + free_x if weight_is_left else free_x + free_w)]
    kept = [label for label in (*labels, *first[1]) if label in (*result, *second[1])]
    between = [*dict.fromkeys(kept), RANK]
    options = {"precision": precision, "preferred_element_type": out.dtype}
    computed = jnp.promote_types(x.dtype, weight.w.dtype)  # adapters beside a weight in bf16 are stored in fp32
    inner = _einsum([(x, labels), (first[0].astype(computed), (*first[1], RANK))], between, **options)
    second_operand = (second[0].astype(computed), (*second[1], RANK))
    added = _einsum([(inner.astype(x.dtype), between), second_operand], result, **options)
    return (weight.scale * added).astype(out.dtype)


def _einsum(operands: Sequence[tuple[Any, Sequence[int]]], result: Sequence[int], **options: Any) -> jax.Array:
    """``jnp.einsum`` of arrays whose dims have integer labels."""
    letters = {label: chr(97 + i) for i, label in enumerate(dict.fromkeys(x for _, own in operands for x in own))}
    spell = lambda labels: "".join(letters[label] for label in labels)
    text = f"{','.join(spell(labels) for _, labels in operands)}->{spell(result)}"
    return jnp.einsum(text, *(array for array, _ in operands), **options)
