"""Embedding lookup in a table that is sharded over the vocabulary, or over more axes than the compute uses.

A table sharded for storage can give rows sharded over the batch in two ways. The first gathers the table and reduces
its full gradient. The second gathers the tokens, lets each device look up its columns of every row, and exchanges the
results. The first moves one row per word of the vocabulary, the second one row per token; :func:`lookup` takes
whichever is less. Tokens may be sharded over the batch or along the sequence. Under a pipeline each stage may look up
its own columns.

Shape suffixes: V vocabulary, E embed, B batch, S sequence, P pieces, T tokens of a piece.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.parallel.collectives.gather_reduce import summing
from jaxpar.parallel.collectives.hierarchical import all_to_all_local, gather_local, scatter_local
from jaxpar.parallel.tensor.lookup import lookup_route, lookup_rows
from jaxpar.sharding.layout import current_layout, hint
from jaxpar.sharding.resolve import num_shards_over
from jaxpar.sharding.rules import Axes

_ROWS_PER_SCATTER = 4096
"""Rows of gradients that one scatter-add sums."""
STAGES = "pipeline"
"""The mesh axis of pipeline stages."""


def lookup(table_VE: jax.Array, tokens_BS: jax.Array, dtype: Any, *, by_hand: bool = False) -> jax.Array:
    """Returns rows of an embedding table in ``dtype``, [batch, residual_seq, embed].

    Args:
      table_VE: the table [vocab, embed], with these logical dims.
      tokens_BS: token ids [batch, seq] int. Ids outside the vocabulary read the first or the last row.
      dtype: the compute dtype.
      by_hand: gather the table in a ``shard_map`` where possible, instead of leaving the gather to the partitioner. The
        gradient is then summed a few thousand rows at a time, which avoids the slow compile of a long sort.

    Raises:
      LayoutError: as :func:`jaxpar.hint`.
    """
    if (route := lookup_route(table_VE, tokens_BS)) is not None:
        table_VE = table_VE.astype(summing(dtype) or dtype)
        ids_BS = jnp.clip(tokens_BS, 0, table_VE.shape[0] - 1)
        x_BSE = lookup_rows(route, _rows, jnp.dtype(dtype), table_VE, ids_BS)
        return hint(x_BSE, "batch", "residual_seq", "embed")
    stored = _axes(table_VE, "vocab", "embed", role="params")
    used, tokens = _axes(table_VE, "vocab", "embed"), _axes(tokens_BS, "batch", "seq")
    storage_axes = tuple(axis for axis in stored[1] if axis not in used[1])
    layout = current_layout()
    num_shards = num_shards_over((*tokens[0], *tokens[1]), layout.sizes)
    if _by_columns(table_VE, tokens_BS, stored, num_shards):
        return _columns(table_VE, tokens_BS, stored, dtype)
    words = table_VE.shape[0] // num_shards_over(stored[0], layout.sizes)
    fits = storage_axes == stored[1] and stored[0] == used[0] and set(storage_axes) <= {*tokens[0], *tokens[1]}
    fits = fits and not jax.sharding.get_abstract_mesh().manual_axes
    exchange_is_smaller = bool(storage_axes) and tokens_BS.size // num_shards <= words
    if not fits or not (exchange_is_smaller or by_hand):
        # This hint keeps the gradient replicated as the gathered table is. If the gradient is sharded, the compiler
        # replicates the tokens.
        table_VE, sum_dtype = hint(table_VE.astype(dtype), "vocab", "embed"), summing(dtype)
        if sum_dtype is None:
            x_BSE = jnp.take(table_VE, tokens_BS, axis=0, mode="clip")
        else:
            x_BSE = _take(sum_dtype, table_VE, tokens_BS)
        x_BSE = hint(x_BSE, "batch", "seq", "embed")
        # A separate hint: if the first hint shards the sequence, the compiler gathers the full table.
        return hint(x_BSE, "batch", "residual_seq", "embed")
    return _exchange(table_VE, tokens_BS, storage_axes, dtype, gather_table=not exchange_is_smaller)


def _axes(x: jax.Array, *dims: str, role: str = "activations") -> tuple[Axes, ...]:
    return current_layout().resolve(dims, x.shape, role=role, dtype=x.dtype).axes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take(sum_dtype: Any, table_VE: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """Look up rows; their gradients are summed in the dtype ``sum_dtype``."""
    return jnp.take(table_VE, tokens_BS, axis=0, mode="clip")


def _take_backward(sum_dtype: Any, saved: tuple[jax.Array, jax.Array], grad_BSE: jax.Array) -> tuple[jax.Array, None]:
    tokens_BS, table_VE = saved
    ids_BS = jnp.clip(tokens_BS, 0, table_VE.shape[0] - 1)
    sum_VE = hint(jnp.zeros_like(table_VE, sum_dtype).at[ids_BS].add(grad_BSE.astype(sum_dtype)), "vocab", "embed")
    return jax.lax.optimization_barrier(sum_VE).astype(table_VE.dtype), None


_take.defvjp(lambda dtype, table, tokens: (_take(dtype, table, tokens), (tokens, table)), _take_backward)


def _cast_and_gather(axes: Axes, dim: int, dtype: Any, table_VE: jax.Array) -> jax.Array:
    """Cast a local shard to ``dtype`` and gather it over ``axes``; its gradient is scattered in the table's dtype."""
    return _gather(axes, dim, dtype, table_VE) if axes or table_VE.dtype != dtype else table_VE


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(axes: Axes, dim: int, dtype: Any, table_VE: jax.Array) -> jax.Array:
    # The barrier keeps the cast before the gather. Otherwise the gather sends the wider dtype.
    table_VE = jax.lax.optimization_barrier(table_VE.astype(dtype))
    return gather_local(table_VE, axes, dim=dim) if axes else table_VE


def _gather_backward(axes: Axes, dim: int, dtype: Any, like: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    # The barrier keeps the TPU compiler from summing in the dtype before this cast.
    grad = jax.lax.optimization_barrier(grad.astype(like.dtype))
    return (scatter_local(grad, axes, dim=dim) if axes else grad,)


_gather.defvjp(lambda axes, dim, dtype, table: (_gather(axes, dim, dtype, table), table[:0]), _gather_backward)


def _exchange(
    table_VE: jax.Array, tokens_BS: jax.Array, storage_axes: Axes, dtype: Any, *, gather_table: bool = False
) -> jax.Array:
    """Look up the local columns for the tokens of all devices of ``storage_axes``, and exchange the results.

    With ``gather_table``, gather all columns instead and look up only the device's own tokens.
    """
    batch, seq = _axes(tokens_BS, "batch", "seq")
    split = _axes(table_VE, "vocab", "embed", role="params")
    residual = current_layout().resolve(("residual_seq",), tokens_BS.shape[1:]).axes[0]
    others = tuple(axis for axis in (*batch, *seq) if axis not in (*split[0], *split[1]))
    scattered = split[0] != () and residual == (*seq, *split[0])

    def local(table_VE: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        table_VE = jax.lax.pcast(table_VE, others, to="varying")
        table_VE = _cast_and_gather(storage_axes if gather_table else (), 1, dtype, table_VE)
        ids_BS = tokens_BS if gather_table else gather_local(tokens_BS, storage_axes, dim=0)
        if split[0]:
            ids_BS -= jax.lax.axis_index(split[0]) * table_VE.shape[0]
        rows_BSE = _rows(table_VE, ids_BS)
        if split[0]:
            mine_BS = (ids_BS >= 0) & (ids_BS < table_VE.shape[0])
            rows_BSE = jnp.where(mine_BS[..., None], rows_BSE, 0)
        if scattered:
            rows_BSE = jax.lax.psum_scatter(rows_BSE, split[0], scatter_dimension=1, tiled=True)
        elif split[0]:
            rows_BSE = jax.lax.psum(rows_BSE, split[0])
        return rows_BSE if gather_table else all_to_all_local(rows_BSE, storage_axes, split_dim=0, concat_dim=2)

    in_specs = PartitionSpec(*split), PartitionSpec(batch, seq)
    out_spec = PartitionSpec(batch, residual if scattered else seq, None)
    table_VE, ids_BS = table_VE.astype(summing(dtype) or dtype), jnp.clip(tokens_BS, 0, table_VE.shape[0] - 1)
    x_BSE = jax.shard_map(local, in_specs=in_specs, out_specs=out_spec)(table_VE, ids_BS)
    return hint(x_BSE, "batch", "residual_seq", "embed")


def _by_columns(table_VE: jax.Array, tokens_BS: jax.Array, stored: tuple[Axes, ...], num_shards: int) -> bool:
    """Whether stages should shard a table by columns and not by words: it has fewer words than a device has tokens."""
    if stored[0][:1] != (STAGES,) or jax.sharding.get_abstract_mesh().manual_axes:
        return False
    stages, (words, embed) = current_layout().sizes[STAGES], table_VE.shape
    tokens = {axis for axes in _axes(tokens_BS, "batch", "residual_seq") for axis in axes}
    # The table's other axes must also shard the tokens, or several devices would look up the same tokens.
    fits = {*stored[0][1:], *stored[1]} <= tokens and STAGES not in tokens and embed % stages == 0
    # As columns the table takes V * E / stages, with fp32 gradients. Rows take tokens * E before they are split.
    return fits and tokens_BS.size // num_shards > words


def _columns(table_VE: jax.Array, tokens_BS: jax.Array, stored: tuple[Axes, ...], dtype: Any) -> jax.Array:
    """Reshard the table to columns over stages and look them up: [batch, residual_seq, columns].

    The tokens are sharded over all other axes.
    """
    sizes, rest = current_layout().sizes, stored[0][1:]
    batch, residual = _axes(tokens_BS, "batch", "residual_seq")
    others = tuple(axis for axis in (*batch, *residual) if axis not in (*stored[0], *stored[1]))
    stages, parts = sizes[STAGES], num_shards_over(rest, sizes)
    sum_dtype = summing(dtype) or dtype

    def local(table_VE: jax.Array, ids_BS: jax.Array) -> jax.Array:
        words = table_VE.shape[0]
        table_VE = _cast_and_gather(stored[1], 1, dtype, jax.lax.pcast(table_VE, others, to="varying"))
        table_VE = all_to_all_local(table_VE, (STAGES,), split_dim=1, concat_dim=0)
        table_VE = _cast_and_gather(rest, 0, dtype, table_VE.astype(sum_dtype)) if rest else table_VE
        # Rows are sharded as [stage, part, word]. The exchange and the gather order them as [part, stage, word].
        part, stage = ids_BS // words % parts, ids_BS // words // parts
        ids_BS = (part * stages + stage) * words + ids_BS % words
        return _rows(table_VE, ids_BS)

    in_specs, out_spec = (
        (PartitionSpec(*stored), PartitionSpec(batch, residual)),
        PartitionSpec(batch, residual, STAGES),
    )
    table_VE, ids_BS = table_VE.astype(sum_dtype), jnp.clip(tokens_BS, 0, table_VE.shape[0] - 1)
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_spec)(table_VE, ids_BS)


@jax.custom_vjp
def _rows(table_VE: jax.Array, ids_BS: jax.Array) -> jax.Array:
    """Look up rows in one device's table; a row's gradients are summed in at least fp32."""
    return jnp.take(table_VE, ids_BS, axis=0, mode="clip")


def _rows_backward(saved: tuple[jax.Array, jax.Array], grad_BSE: jax.Array) -> tuple[jax.Array, None]:
    """Sum gradients ``_ROWS_PER_SCATTER`` rows at a time: a TPU sorts the ids, and a long sort is slow to compile."""
    ids_BS, table_VE = saved
    words, embed = table_VE.shape
    rows = min(_ROWS_PER_SCATTER, ids_BS.size)
    missing = -ids_BS.size % rows
    ids_PT = jnp.pad(jnp.clip(ids_BS.ravel(), 0, words - 1), (0, missing)).reshape(-1, rows)
    grad_PTE = jnp.pad(grad_BSE.reshape(-1, embed), ((0, missing), (0, 0))).reshape(*ids_PT.shape, embed)

    def add(sum_VE: jax.Array, piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return sum_VE.at[piece[0]].add(piece[1].astype(sum_VE.dtype)), None

    empty = jnp.zeros_like(table_VE, jnp.promote_types(grad_BSE.dtype, jnp.float32))
    sum_VE, _ = jax.lax.scan(add, empty, (ids_PT, grad_PTE))
    return sum_VE.astype(table_VE.dtype), None


_rows.defvjp(lambda table, ids: (_rows(table, ids), (ids, table)), _rows_backward)
