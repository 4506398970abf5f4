"""Rows sorted by expert, and back: permutations whose gradients are permutations too, without a scatter.

Shape suffixes: T tokens, K choices of a token, D embed, M rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.utils.arrays import accumulator


class RowOrder(NamedTuple):
    """Which choice of which token stands in which row.

    Attributes:
      order: for each row, the index of its choice among all choices of all tokens ``[rows]`` int32.
      row: for each choice, its row, or the number of rows if it has none ``[tokens, choices]`` int32.
      sizes: the number of rows of each group ``[groups]`` int32.
      live: whether a choice stands in the row ``[rows]`` bool.
    """

    order: jax.Array
    row: jax.Array
    sizes: jax.Array
    live: jax.Array


def row_order(group_TK: jax.Array, groups: int, rows: int | None = None) -> RowOrder:
    """Returns the order that sorts the choices of all tokens by group; within a group they keep their order.

    Args:
      group_TK: the group of each choice ``[tokens, choices]`` int32; ``groups`` for a choice that gets no row.
      groups: the number of groups.
      rows: the number of rows, by default that of all choices. The choices with a group must fit.

    >>> import jax.numpy as jnp
    >>> order = row_order(jnp.array([[1, 0], [2, 1]]), groups=2)
    >>> order.order.tolist(), order.row.tolist(), order.sizes.tolist()
    ([1, 0, 3, 2], [[1, 0], [4, 2]], [1, 2])
    """
    flat = group_TK.reshape(-1).astype(jnp.int32)
    count = flat.size
    index = jnp.arange(count, dtype=jnp.int32)
    if (groups + 1) * count < 2**31:  # one number per choice sorts faster than a pair
        order = jnp.sort(flat * count + index) % count
    else:
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    rows = count if rows is None else rows
    row = jnp.zeros_like(index).at[order].set(index, unique_indices=True)
    row = jnp.where((flat < groups) & (row < rows), row, rows).reshape(group_TK.shape)
    sizes = jnp.sum(flat[:, None] == jnp.arange(groups, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    return RowOrder(order[:rows], row, sizes, jnp.arange(rows) < sizes.sum())


def slots(group_TK: jax.Array, groups: int, capacity: int) -> RowOrder:
    """Returns the order in which every group has ``capacity`` rows; no group has more choices.

    >>> import jax.numpy as jnp
    >>> at = slots(jnp.array([[1], [0], [1]]), groups=2, capacity=2)
    >>> at.order[at.live].tolist(), at.row.ravel().tolist(), at.live.tolist()
    ([1, 0, 2], [2, 0, 3], [True, False, True, True])
    """
    at = row_order(group_TK, groups)
    slot = jnp.arange(groups * capacity, dtype=jnp.int32)
    group, place = slot // capacity, slot % capacity
    start, live = _starts(at.sizes)[group], place < at.sizes[group]
    order = at.order[jnp.minimum(start + place, at.order.shape[0] - 1)]
    row = jnp.where(group_TK < groups, group_TK * capacity + _places(at, group_TK), slot.size)
    return RowOrder(order, row, at.sizes, live)


def _starts(sizes: jax.Array) -> jax.Array:
    return jnp.cumsum(sizes) - sizes


def _places(at: RowOrder, group_TK: jax.Array) -> jax.Array:
    """Returns the place of each choice among those of its group."""
    return at.row - _starts(at.sizes)[jnp.minimum(group_TK, at.sizes.shape[0] - 1)]


@jax.custom_vjp
def to_rows(x_TD: jax.Array, at: RowOrder) -> jax.Array:
    """Returns the token of each row ``[rows, embed]``; a row without a choice holds any token."""
    return x_TD[at.order // at.row.shape[1]]


@jax.custom_vjp
def from_rows(y_MD: jax.Array, at: RowOrder) -> jax.Array:
    """Returns the sum of the rows of each token ``[tokens, embed]``, summed in fp32 or wider."""
    return _sums(y_MD, at)


@jax.custom_vjp
def values_to_rows(values_TK: jax.Array, at: RowOrder) -> jax.Array:
    """Returns one number per row ``[rows]``; a row without a choice has 0."""
    return jnp.where(at.live, values_TK.reshape(-1)[at.order], 0)


def _sums(y_MD: jax.Array, at: RowOrder) -> jax.Array:
    rows = y_MD.shape[0]
    y_TKD = y_MD[jnp.minimum(at.row, rows - 1)]
    y_TKD = jnp.where((at.row < rows)[..., None], y_TKD, 0)
    return y_TKD.sum(1, dtype=accumulator(y_MD)).astype(y_MD.dtype)


to_rows.defvjp(lambda x, at: (to_rows(x, at), at), lambda at, grad_MD: (_sums(grad_MD, at), None))
from_rows.defvjp(
    lambda y, at: (_sums(y, at), at),
    # A row without a choice has no part in the sum.
    lambda at, grad_TD: (jnp.where(at.live[:, None], grad_TD[at.order // at.row.shape[1]], 0), None),
)


def _values_backward(at: RowOrder, grad_M: jax.Array) -> tuple[jax.Array, None]:
    rows = grad_M.shape[0]
    return jnp.where(at.row < rows, grad_M[jnp.minimum(at.row, rows - 1)], 0), None


values_to_rows.defvjp(lambda values, at: (values_to_rows(values, at), at), _values_backward)


def drop_over_capacity(expert_TK: jax.Array, experts: int, capacity: int) -> jax.Array:
    """Returns the choices without those beyond the first ``capacity`` of each expert; a dropped one is ``experts``.

    >>> import jax.numpy as jnp
    >>> drop_over_capacity(jnp.array([[0, 1], [0, 2], [0, 1]]), experts=3, capacity=2).tolist()
    [[0, 1], [0, 2], [3, 1]]
    """
    at = row_order(expert_TK, experts)
    return jnp.where((_places(at, expert_TK) < capacity) & (expert_TK < experts), expert_TK, experts)
