"""Global row numbers of the part of a batch that is traced, so that random draws per row are the same in every layout.

Code that splits a batch (microbatches, manual axes, a pipeline, interleaved copies) gives the row numbers of each part
by :func:`batch_rows`. They are ambient while the loss of that part is traced.

The numbers have a cost, and most losses draw nothing per row. They may be traced values, so each call of
:func:`batch_rows` changes jit's cache key: an inner jit that captured the numbers of one trace must not be used again
in the next. A trace therefore begins without numbers. The first use of them raises :class:`RowsWanted`, and
:func:`numbering` then traces again with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError
from jaxpar.sharding.resolve import num_shards_over
from jaxpar.sharding.rules import Axes
from jaxpar.utils import contexts

type Numbers = jax.Array | Callable[[], jax.Array]


@dataclass(eq=False)
class BatchRows:
    """The rows of the part of a batch that is traced. Instances compare by identity.

    Attributes:
      numbers: int32 ``[rows]``, the global row number of each local row, or a function that returns them; ``None`` once
        the trace that they belong to has ended.
      manual: the axes that were manual where the numbers were given. The numbers are those of one device along these
        axes.
    """

    numbers: Numbers | None
    manual: frozenset[str]


class RowsWanted(Exception):
    """Raised when code needs the row numbers of a batch that was split, in a trace without numbers."""


_UNNUMBERED = BatchRows(None, frozenset())


def numbering[**P, R](f: Callable[P, R]) -> Callable[P, R]:
    """Wraps a function that traces a loss; the function is called again, with row numbers, if the loss needs them."""

    @functools.wraps(f)
    def run(*args: P.args, **options: P.kwargs) -> R:
        try:
            return f(*args, **options)
        except RowsWanted:
            if contexts.rows_wanted.value:  # an enclosing split did not give its numbers; tracing again would not help
                raise
        with contexts.rows_wanted(True):
            return f(*args, **options)

    return run


def rows_wanted() -> bool:
    """Returns whether this trace has row numbers."""
    return contexts.rows_wanted.value


@contextmanager
def batch_rows(numbers: Numbers | None) -> Iterator[None]:
    """While active, the traced rows have these global numbers. ``None`` keeps the enclosing numbers.

    A trace without numbers ignores the argument and records only that the batch was split.

    Args:
      numbers: int32 ``[rows]``: the rows of this device along axes that are manual here, of all devices along other
        axes. Or a function that computes them from no traced value. A function also works inside a nested
        ``shard_map``, which cannot capture arrays of the enclosing one.
    """
    if not rows_wanted():
        with contexts.batch_rows(_UNNUMBERED):
            yield
        return
    if numbers is None:
        yield
        return
    here = BatchRows(numbers, frozenset(jax.sharding.get_abstract_mesh().manual_axes))
    with contexts.batch_rows(here):
        try:
            yield
        finally:
            here.numbers = None  # jit's cache keeps the object, and must not keep a tracer alive


def current_batch_rows() -> BatchRows | None:
    """Returns the ambient rows, or ``None`` if the batch was not split.

    Raises:
      RowsWanted: the batch was split, in a trace without numbers.
    """
    found: BatchRows | None = contexts.batch_rows.value
    if found is _UNNUMBERED:
        raise RowsWanted
    return found


def here() -> jax.Array | None:
    """Returns the global numbers of the local rows, int32 ``[rows]``, or ``None`` if the batch was not split.

    Raises:
      RowsWanted: the batch was split, in a trace without numbers.
      ConfigError: the numbers are traced values of an enclosing ``shard_map``, not of the innermost one.
    """
    ambient = current_batch_rows()
    if ambient is None or ambient.numbers is None:
        return None
    if callable(ambient.numbers):
        return ambient.numbers()
    if ambient.manual and ambient.manual != frozenset(jax.sharding.get_abstract_mesh().manual_axes):
        raise ConfigError(
            "attention: dropout numbers the rows of the batch, but the numbers are unknown inside your own shard_map, "
            "within a step that makes axes manual and splits the batch into microbatches. Remedy: pass one key per "
            "sequence, [batch], into the shard_map; or use grad_reduction='per_microbatch' (ZeRO stage 2 or 3), or "
            "grad_accum_steps=1."
        )
    return ambient.numbers


def rows_of(batch: Any) -> int | None:
    """Returns the number of rows in a batch, by its first array; ``None`` in a trace without numbers."""
    if not rows_wanted():
        return None
    shapes = [x.shape for x in jax.tree.leaves(batch)]
    return shapes[0][0] if shapes and shapes[0] else None


def microbatch_rows(
    rows: int | None, count: int, number: Any, *, num_shards: int = 1, index: Callable[[], Any] = lambda: 0
) -> Numbers | None:
    """Returns the global row numbers of a microbatch, split as by :func:`jaxpar.training.microbatches.pieces_of`.

    Args:
      rows: rows in the microbatch; ``None`` returns ``None``.
      count: the number of microbatches.
      number: the index of this microbatch. For a Python integer the result is a function, else an array.
      num_shards: the number of devices whose rows the microbatch holds, in device order.
      index: returns the index of the first of these devices.
    """
    if rows is None:
        return None
    each = rows // num_shards

    def make() -> jax.Array:
        place = jnp.arange(rows, dtype=jnp.int32)
        device = jnp.asarray(index(), jnp.int32) + place // each
        return (device * count + jnp.asarray(number, jnp.int32)) * each + place % each

    return make if isinstance(number, int) else make()


def row_numbers(count: int, axes: Axes) -> jax.Array | None:
    """Returns the global numbers of ``count`` local rows, int32 ``[count]``.

    ``count`` may be a multiple of the number of rows: each row then has several consecutive sequences (windows,
    patches).

    Args:
      count: the number of rows, or of sequences, on this device.
      axes: manual axes (major to minor) that shard these rows in addition to those that the ambient rows account for.

    Returns:
      The numbers, or ``None`` if the batch was split into parts that do not match ``count``.

    Raises:
      RowsWanted: the batch was split, in a trace without numbers.
      ConfigError: as :func:`here`.
    """
    sizes, ambient, found = jax.sharding.get_abstract_mesh().shape, current_batch_rows(), here()
    known = frozenset() if ambient is None else ambient.manual
    split = tuple(axis for axis in axes if axis not in known)
    num_shards = num_shards_over(split, sizes)
    index = jax.lax.axis_index(split) if split else 0
    if found is None:
        return index * count + jnp.arange(count, dtype=jnp.int32)
    rows, rest = divmod(len(found), num_shards)
    if rest or not rows or count % rows:
        return None
    if num_shards > 1:
        found = jax.lax.dynamic_slice_in_dim(found, index * rows, rows)
    several = count // rows
    if several == 1:
        return found
    return (found[:, None] * several + jnp.arange(several, dtype=jnp.int32)).reshape(-1)
