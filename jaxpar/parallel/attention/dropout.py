"""Global indices of a device's sequences and heads, from which dropout draws the same weights under every layout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError, listing
from jaxpar.parallel.attention.tiled.tile import AttentionArrays, varies_over
from jaxpar.parallel.batch_rows import current_batch_rows, here, row_numbers
from jaxpar.parallel.manual_axes import enclosing_manual_axes
from jaxpar.sharding.rules import Axes

ROWS, HEADS = ("replica", "data", "expert"), ("model",)
"""The mesh axes assumed to shard the batch and the heads if no rule names them."""
LAYERS = "pipeline"
"""The mesh axis of pipeline stages; it shards layers."""


def add_global_indices(
    q: Any, array_options: AttentionArrays, rows: Axes, heads: Axes, others: Iterable[str], *, remedy: str | None
) -> tuple[AttentionArrays, Any]:
    """Returns the array options with the global index of each local sequence, and the index of the first local head.

    Args:
      q: local queries ``[batch, seq, heads, head_dim]``.
      array_options: array options with the key of the dropout. If each sequence has its own key, its index is 0.
      rows: manual axes that shard the batch, major to minor.
      heads: manual axes that shard the heads, major to minor.
      others: manual axes that shard the sequence, or over which the queries are replicated.
      remedy: the remedy in the error about an unknown axis; ``None`` if the caller has named all relevant axes.

    Raises:
      ConfigError: it is unknown which dim a manual axis shards, or the number of sequences is not a multiple of the
        number of batch rows on this device.
    """
    ambient = current_batch_rows()
    known = frozenset() if ambient is None else ambient.manual
    unknown = [axis for axis in enclosing_manual_axes() if axis not in {*known, *rows, *heads, *others, LAYERS}]
    if unknown and remedy is not None:
        raise ConfigError(
            f"attention: dropout numbers the sequences and heads of all devices, but it is unknown which dims the "
            f"manual axes {listing(unknown)} shard, so devices along them would drop the same weights. Remedy: {remedy}"
        )
    first_head = jax.lax.axis_index(heads) * q.shape[2] if heads else 0
    if array_options.key.ndim == 2:
        return array_options._replace(sequences=jnp.zeros(q.shape[0], jnp.int32)), first_head
    if (numbers := row_numbers(q.shape[0], rows)) is None:
        local_rows = here()
        raise ConfigError(
            f"attention: dropout draws one mask per row of the batch, and this device or microbatch has "
            f"{0 if local_rows is None else len(local_rows)} rows, but queries {list(q.shape)} are {q.shape[0]} "
            f"sequences, so it is unknown which row each belongs to. Remedy: pass as many sequences as rows, or a "
            f"multiple with the sequences of a row next to each other; or pass one key per sequence: "
            f"key=jax.random.split(key, {q.shape[0]})."
        )
    return array_options._replace(sequences=numbers), first_head


def axes_sharding(axes: Axes, q: jax.Array) -> Axes:
    """Returns those of the axes over which ``q`` varies; all of them in a ``shard_map`` with ``check_vma=False``."""
    keeps_count = [axis for axis in axes if axis in varies_over(jax.lax.axis_index(axis))]
    return tuple(axis for axis in axes if axis not in keeps_count or axis in varies_over(q))
