"""Global indices of a device's sequences and heads, from which dropout draws the same weights under every layout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError, NoLayoutError, listing
from jaxpar.parallel.attention.tiled.tile import varies_over
from jaxpar.parallel.batch_rows import current_batch_rows, here, row_numbers
from jaxpar.sharding.layout import current_layout
from jaxpar.sharding.rules import Axes

ROWS, HEADS = ("replica", "data", "expert"), ("model",)
"""The mesh axes assumed to shard the batch and the heads if no rule names them."""
LAYERS = "pipeline"
"""The mesh axis of pipeline stages; it shards layers."""


def counted(
    q: Any, rows: Axes, heads: Axes, others: Iterable[str], *, per_sequence: bool, remedy: str | None
) -> tuple[jax.Array, Any]:
    """Returns the global index of each local sequence, int32 ``[batch]``, and the index of the first local head.

    Args:
      q: local queries ``[batch, seq, heads, head_dim]``.
      rows: manual axes that shard the batch, major to minor.
      heads: manual axes that shard the heads, major to minor.
      others: manual axes that shard the sequence, or over which the queries are replicated.
      per_sequence: whether each sequence has its own key; its index is then 0.
      remedy: the remedy in the error about an unknown axis; ``None`` if the caller has named all relevant axes.

    Raises:
      ConfigError: it is unknown which dim a manual axis shards, or the number of sequences is not a multiple of the
        number of batch rows on this device.
    """
    ambient = current_batch_rows()
    known = frozenset() if ambient is None else ambient.manual
    left = [axis for axis in manual_axes() if axis not in {*known, *rows, *heads, *others, LAYERS}]
    if left and remedy is not None:
        raise ConfigError(
            f"attention: dropout counts the sequences and heads of all devices, but nothing says what the manual axes "
            f"{listing(left)} split, so devices along them would drop the same weights. Remedy: {remedy}"
        )
    first_head = jax.lax.axis_index(heads) * q.shape[2] if heads else 0
    if per_sequence:
        return jnp.zeros(q.shape[0], jnp.int32), first_head
    numbers = row_numbers(q.shape[0], rows)
    if numbers is None:
        found = here()
        raise ConfigError(
            f"attention: dropout draws for each row of the batch, and {0 if found is None else len(found)} rows of it "
            f"are here (a microbatch's, or a device's), but queries {list(q.shape)} are {q.shape[0]} sequences, so "
            f"nothing says which is whose. Remedy: as many sequences as rows, or a multiple, those of a row one behind "
            f"the other; or a key for each sequence, as key=jax.random.split(key, {q.shape[0]})."
        )
    return numbers, first_head


def manual_axes() -> tuple[str, ...]:
    """Returns the mesh axes of size > 1 that an enclosing ``shard_map`` has made manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in mesh.axis_names if axis in mesh.manual_axes and mesh.shape[axis] > 1)


def manual_of(dim: str | None, usual: Axes = ()) -> Axes:
    """Returns the manual axes over which the ambient rules shard ``dim``; without a rule, those of ``usual``."""
    manual = manual_axes()
    try:
        found = None if dim is None else current_layout().resolve((dim,))
    except NoLayoutError:
        found = None
    axes = usual if found is None or found.problems else found.axes[0]
    return tuple(axis for axis in axes if axis in manual)


def splitting(axes: Axes, q: jax.Array) -> Axes:
    """Returns those of the axes over which ``q`` varies; all of them in a ``shard_map`` with ``check_vma=False``."""
    keeps_count = [axis for axis in axes if axis in varies_over(jax.lax.axis_index(axis))]
    return tuple(axis for axis in axes if axis not in keeps_count or axis in varies_over(q))
