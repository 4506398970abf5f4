"""``grouped_matmul``: rows sorted by group, each multiplied with the matrix of its group.

On TPU ``jax.lax.ragged_dot`` is a kernel that does the FLOPs of the rows and no more. Elsewhere XLA multiplies every
row with the matrix of every group, so the groups are cut into blocks of rows here, and a block takes one matrix.

Shape suffixes: R rows, G groups, K and N the dims of a matrix, B rows of a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError
from jaxpar.parallel.precision.int8 import Int8
from jaxpar.sharding.hardware.topology import platform_of
from jaxpar.sharding.layout import current_layout
from jaxpar.utils.arrays import accumulator
from jaxpar.utils.contexts import ambient_layout, experts_traced

BLOCK = 64
"""Rows of a block."""
_TILE = 128
"""Rows of a tile of the TPU's kernel."""


def grouped_matmul(rows_RK: jax.Array, w_GKN: jax.Array | Int8, sizes_G: jax.Array) -> jax.Array:
    """Returns the product of each row and the matrix of its group.

    Args:
      rows_RK: rows ``[rows, k]``; those of group 0 first, then those of group 1, and so on.
      w_GKN: one matrix per group ``[groups, k, n]``; an :class:`jaxpar.inference.Int8` has one scale per column, and no
        gradient.
      sizes_G: the number of rows of each group ``[groups]`` int32. Their sum is at most ``rows``.

    Returns:
      ``[rows, n]`` in the dtype of the rows, summed in fp32 or wider. Rows that belong to no group are undefined, and
      what is done with them does not change a gradient.

    >>> import jax.numpy as jnp
    >>> w = jnp.array([[[1.0]], [[10.0]]])
    >>> grouped_matmul(jnp.array([[1.0], [2.0], [3.0]]), w, jnp.array([1, 2])).ravel().tolist()
    [1.0, 20.0, 30.0]
    """
    if isinstance(w_GKN, Int8):
        return _of_integers(rows_RK, w_GKN, sizes_G)
    if experts_traced.value is not None:
        return jax.lax.ragged_dot(rows_RK, w_GKN, sizes_G, preferred_element_type=rows_RK.dtype)
    if _platform() == "tpu":
        # The kernel's tiles have a power of two of rows, at most _TILE, that divides all rows. With odd rows XLA
        # multiplies each row with all matrices.
        rows = rows_RK.shape[0]
        padded = jnp.pad(rows_RK, ((0, -rows % _TILE), (0, 0)))
        return jax.lax.ragged_dot(padded, w_GKN, sizes_G, preferred_element_type=rows_RK.dtype)[:rows]
    return _in_blocks(rows_RK, w_GKN, sizes_G)


def _of_integers(rows_RK: jax.Array, w_GKN: Int8, sizes_G: jax.Array) -> jax.Array:
    """Returns the product with integers, times the scales of each row's group."""
    wide = accumulator(rows_RK)
    if _platform() == "tpu":
        y_RN = jax.lax.ragged_dot(rows_RK, w_GKN.values.astype(rows_RK.dtype), sizes_G, preferred_element_type=wide)
    else:
        y_RN = _product(rows_RK, w_GKN.values, sizes_G, wide)
    row_R = jnp.arange(rows_RK.shape[0], dtype=sizes_G.dtype)
    group_R = jnp.searchsorted(jnp.cumsum(sizes_G), row_R, side="right")
    return (y_RN * _column_scales(w_GKN).at[group_R].get(mode="clip")).astype(rows_RK.dtype)


def _column_scales(w_GKN: Int8) -> jax.Array:
    """Returns one scale per matrix and column ``[groups, n]``."""
    if w_GKN.summed != (-2,):
        raise ConfigError(
            f"experts: an Int8 weight must share its scales along the dim that a product sums over, -2 of [experts, k, "
            f"n], got {list(w_GKN.summed)}. Remedy: Int8.of(w, [-2])."
        )
    return w_GKN.scales


def _platform() -> str:
    return jax.default_backend() if ambient_layout.value is None else platform_of(current_layout().mesh)


class _Blocks(NamedTuple):
    """The blocks of all groups: their group, their first row, and their number of rows; each ``[blocks]`` int32."""

    group: jax.Array
    first: jax.Array
    rows: jax.Array


def _blocks(sizes_G: jax.Array, rows: int) -> _Blocks:
    """Returns the blocks; there are as many as the worst sizes need, and the last ones may have no rows."""
    groups = sizes_G.shape[0]
    per_group = -(-sizes_G // BLOCK)
    ends, first_row = jnp.cumsum(per_group), jnp.cumsum(sizes_G) - sizes_G
    b = jnp.arange(rows // BLOCK + groups, dtype=sizes_G.dtype)
    group = jnp.minimum(jnp.searchsorted(ends, b, side="right"), groups - 1).astype(sizes_G.dtype)
    offset = (b - (ends - per_group)[group]) * BLOCK
    live = jnp.where(b < ends[-1], jnp.clip(sizes_G[group] - offset, 0, BLOCK), 0)
    return _Blocks(group, first_row[group] + offset, live)


def _product(rows_RK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array, dtype: Any = None) -> jax.Array:
    padded = jnp.pad(rows_RK, ((0, BLOCK), (0, 0)))

    def block(out: jax.Array, at: _Blocks) -> tuple[jax.Array, None]:
        def multiply(out: jax.Array) -> jax.Array:
            x_BK = jax.lax.dynamic_slice_in_dim(padded, at.first, BLOCK)
            w_KN = w_GKN[at.group].astype(x_BK.dtype)  # of integers, only those that have rows are cast
            y_BN = jnp.dot(x_BK, w_KN, preferred_element_type=accumulator(x_BK)).astype(out.dtype)
            old = jax.lax.dynamic_slice_in_dim(out, at.first, BLOCK)
            y_BN = jnp.where((jnp.arange(BLOCK) < at.rows)[:, None], y_BN, old)
            return jax.lax.dynamic_update_slice_in_dim(out, y_BN, at.first, 0)

        return jax.lax.cond(at.rows > 0, multiply, lambda out: out, out), None

    empty = jnp.zeros((padded.shape[0], w_GKN.shape[2]), dtype or rows_RK.dtype)
    return jax.lax.scan(block, empty, _blocks(sizes_G, rows_RK.shape[0]))[0][: rows_RK.shape[0]]


def _weight_gradient(rows_RK: jax.Array, dy_RN: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    pads = ((0, BLOCK), (0, 0))
    padded = jnp.pad(rows_RK, pads), jnp.pad(dy_RN, pads)

    def block(dw_GKN: jax.Array, at: _Blocks) -> tuple[jax.Array, None]:
        def add(dw_GKN: jax.Array) -> jax.Array:
            live = (jnp.arange(BLOCK) < at.rows)[:, None]
            x, dy = (jnp.where(live, jax.lax.dynamic_slice_in_dim(x, at.first, BLOCK), 0) for x in padded)
            return dw_GKN.at[at.group].add(jnp.dot(x.T, dy, preferred_element_type=dw_GKN.dtype))

        return jax.lax.cond(at.rows > 0, add, lambda dw: dw, dw_GKN), None

    zeros = jnp.zeros(w_GKN.shape, accumulator(w_GKN))
    return jax.lax.scan(block, zeros, _blocks(sizes_G, rows_RK.shape[0]))[0].astype(w_GKN.dtype)


@jax.custom_vjp
def _in_blocks(rows_RK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    return _product(rows_RK, w_GKN, sizes_G)


def _backward(saved: tuple[jax.Array, ...], dy_RN: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows_RK, w_GKN, sizes_G = saved
    dx_RK = _product(dy_RN, w_GKN.swapaxes(1, 2), sizes_G)
    return dx_RK, _weight_gradient(rows_RK, dy_RN, w_GKN, sizes_G), None


_in_blocks.defvjp(lambda *arrays: (_product(*arrays), arrays), _backward)


def equal_groups_matmul(rows_RK: jax.Array, w_GKN: jax.Array | Int8) -> jax.Array:
    """Returns :func:`grouped_matmul` where all groups have the same number of rows.

    >>> import jax.numpy as jnp
    >>> equal_groups_matmul(jnp.ones((4, 2)), jnp.ones((2, 2, 3))).shape
    (4, 3)
    """
    groups = w_GKN.shape[0]
    x_GRK = rows_RK.reshape(groups, -1, rows_RK.shape[1])
    values_GKN = w_GKN.values.astype(rows_RK.dtype) if isinstance(w_GKN, Int8) else w_GKN
    y_GRN = jnp.einsum("grk,gkn->grn", x_GRK, values_GKN, preferred_element_type=accumulator(rows_RK))
    y_GRN = y_GRN * _column_scales(w_GKN)[:, None] if isinstance(w_GKN, Int8) else y_GRN
    return y_GRN.astype(rows_RK.dtype).reshape(rows_RK.shape[0], -1)
