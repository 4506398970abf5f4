"""Which sequences of the whole batch, and which of all heads, are here: what dropout draws for, so that every layout drops the same weights."""

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
"""The axes that split the batch, and the heads, where no rule says so."""
LAYERS = "pipeline"
"""The axis of a pipeline's stages: it splits layers."""


def counted(
    q: Any, rows: Axes, heads: Axes, others: Iterable[str], *, per_sequence: bool, remedy: str | None
) -> tuple[jax.Array, Any]:
    """The places of the sequences that are here in the whole batch, int32 [batch], and the number of the first head.

    Args:
      q: queries [batch, seq, heads, head_dim] as they are here.
      rows, heads: manual axes that split the batch and the heads, major to minor.
      others: manual axes that split the sequence.
      per_sequence: each sequence has a key of its own, so its place does not matter.
      remedy: what to do about an axis of which nothing is known; ``None`` if the caller has named all that matter.

    Raises:
      ConfigError: a manual axis splits neither batch, heads nor sequence as far as is known; or the batch was cut into other rows.
    """
    ambient = current_batch_rows()
    known = frozenset() if ambient is None else ambient.manual
    left = [axis for axis in manual_axes() if axis not in {*known, *rows, *heads, *others, LAYERS}]
    if left and remedy is not None:
        raise ConfigError(
            f"attention: dropout counts the sequences and heads of all devices, but nothing says what the manual axes {listing(left)} split, so devices "
            f"along them would drop the same weights. Remedy: {remedy}"
        )
    first_head = jax.lax.axis_index(heads) * q.shape[2] if heads else 0
    if per_sequence:
        return jnp.zeros(q.shape[0], jnp.int32), first_head
    numbers = row_numbers(q.shape[0], rows)
    if numbers is None:
        found = here()
        raise ConfigError(
            f"attention: dropout draws for each row of the batch, and {0 if found is None else len(found)} rows of it are here (a microbatch's, or a device's), but queries "
            f"{list(q.shape)} are {q.shape[0]} sequences, so nothing says which is whose. Remedy: as many sequences as rows, or a multiple, those of a row "
            f"one behind the other; or a key for each sequence, as key=jax.random.split(key, {q.shape[0]})."
        )
    return numbers, first_head


def manual_axes() -> tuple[str, ...]:
    """Those larger than 1 that an enclosing ``shard_map`` has made manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in mesh.axis_names if axis in mesh.manual_axes and mesh.shape[axis] > 1)


def manual_of(dim: str | None, usual: Axes = ()) -> Axes:
    """The manual axes that the ambient rules split a dim over; of the ``usual`` ones where there are no rules of it."""
    manual = manual_axes()
    try:
        found = None if dim is None else current_layout().resolve((dim,))
    except NoLayoutError:
        found = None
    axes = usual if found is None or found.problems else found.axes[0]
    return tuple(axis for axis in axes if axis in manual)


def splitting(axes: Axes, q: jax.Array) -> Axes:
    """Of these manual axes, the ones over which ``q`` differs; all of them in a ``shard_map`` that does not keep count of it."""
    keeps_count = [axis for axis in axes if axis in varies_over(jax.lax.axis_index(axis))]
    return tuple(axis for axis in axes if axis not in keeps_count or axis in varies_over(q))
