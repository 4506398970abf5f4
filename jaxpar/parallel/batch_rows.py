"""Which rows of the whole batch are here: ambient while a loss is traced on a part of them, so that what draws for a row draws the same in every layout.

Whatever cuts a batch (microbatches, axes that are made manual, a pipeline, copies) says so with :func:`batch_rows`. The numbers of rows may be traced,
so every call makes another key of jit's cache: an inner jit that has closed over the numbers of one trace is not found again by the next. That, and the
numbers, cost something, and most losses draw for no row. So a trace begins without numbers; the first that asks for them raises :class:`RowsWanted`,
and :func:`numbering` traces once more with them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError
from jaxpar.sharding.rules import Axes
from jaxpar.utils import contexts

type Numbers = jax.Array | Callable[[], jax.Array]


@dataclass(eq=False)
class BatchRows:
    """Compared by identity.

    Attributes:
      numbers: int32 [rows], the place in the whole batch of each row that is here, or what makes them; ``None`` after the trace that they belong to.
      manual: the axes that were manual there: ``numbers`` are those of a device along them.
    """

    numbers: Numbers | None
    manual: frozenset[str]


class RowsWanted(Exception):
    """Something draws for rows of a batch that was cut, in a trace without their numbers."""


_UNNUMBERED = BatchRows(None, frozenset())


def numbering[**P, R](f: Callable[P, R]) -> Callable[P, R]:
    """``f``, which traces what may draw for rows; it is traced again, with their numbers, if something does."""

    @functools.wraps(f)
    def run(*args: P.args, **options: P.kwargs) -> R:
        try:
            return f(*args, **options)
        except RowsWanted:
            if contexts.rows_wanted.value:  # the numbers that are missing are of an outer cut
                raise
        with contexts.rows_wanted(True):
            return f(*args, **options)

    return run


def rows_wanted() -> bool:
    """Whether this trace is with numbers."""
    found: bool = contexts.rows_wanted.value
    return found


@contextmanager
def batch_rows(numbers: Numbers | None) -> Iterator[None]:
    """While active, the rows of what is traced are these of the whole batch; ``None`` changes nothing. In a trace without numbers they are not looked at.

    Args:
      numbers: int32 [rows], of the device's own rows along axes that are manual here, of all along others. Or a function that makes them of nothing
        traced: it also serves a further ``shard_map`` inside, into which jax lets no array of this one.
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
            here.numbers = None  # what is left of it in caches holds no tracer


def current_batch_rows() -> BatchRows | None:
    """What :func:`batch_rows` was given; ``None`` where the batch was not cut.

    Raises:
      RowsWanted: it was cut, in a trace without numbers.
    """
    found: BatchRows | None = contexts.batch_rows.value
    if found is _UNNUMBERED:
        raise RowsWanted
    return found


def here() -> jax.Array | None:
    """The numbers of the rows that are here; ``None`` where the batch was not cut.

    Raises:
      ConfigError: they are traced, and belong to another ``shard_map`` than the innermost.
    """
    ambient = current_batch_rows()
    if ambient is None or ambient.numbers is None:
        return None
    if callable(ambient.numbers):
        return ambient.numbers()
    if ambient.manual and ambient.manual != frozenset(jax.sharding.get_abstract_mesh().manual_axes):
        raise ConfigError(
            "attention: dropout counts the rows of the batch, but inside of a shard_map of one's own, within a step that makes axes manual and cuts the "
            "batch into microbatches, nothing says which rows are here. Remedy: a key for each sequence, [batch], handed into the shard_map; or "
            "grad_reduction='per_microbatch' (ZeRO stage 2 or 3), or grad_accum_steps=1."
        )
    return ambient.numbers


def rows_of(batch: Any) -> int | None:
    """How many rows a batch has: the first dim of its first array. ``None`` in a trace without numbers."""
    if not rows_wanted():
        return None
    shapes = [x.shape for x in jax.tree.leaves(batch)]
    return shapes[0][0] if shapes and shapes[0] else None


def microbatch_rows(
    rows: int | None, count: int, number: Any, *, ways: int = 1, index: Callable[[], Any] = lambda: 0
) -> Numbers | None:
    """The numbers of a microbatch's rows, as :func:`jaxpar.training.microbatches.pieces_of` cuts a batch.

    Args:
      rows: of the microbatch.
      count: of microbatches.
      number: of this microbatch.
      ways: devices whose rows these are, in their order.
      index: says which device the first of these is.
    """
    if rows is None:
        return None
    each = rows // ways

    def make() -> jax.Array:
        place = jnp.arange(rows, dtype=jnp.int32)
        device = jnp.asarray(index(), jnp.int32) + place // each
        return (device * count + jnp.asarray(number, jnp.int32)) * each + place % each

    return make if isinstance(number, int) else make()


def row_numbers(count: int, axes: Axes) -> jax.Array | None:
    """The places in the whole batch of ``count`` rows that are here, int32 [count]; ``None`` if the batch was cut, but not into so many.

    ``count`` may be a multiple of the rows: the sequences of one row (windows, patches) then stand one behind the other.

    Args:
      axes: that split these rows, beside those that the ambient rows know of: manual axes, major to minor.
    """
    sizes, ambient, found = jax.sharding.get_abstract_mesh().shape, current_batch_rows(), here()
    known = frozenset() if ambient is None else ambient.manual
    split = tuple(axis for axis in axes if axis not in known)
    ways = math.prod(sizes[axis] for axis in split)
    index = jax.lax.axis_index(split) if split else 0
    if found is None:
        return index * count + jnp.arange(count, dtype=jnp.int32)
    rows, rest = divmod(len(found), ways)
    if rest or not rows or count % rows:
        return None
    if ways > 1:
        found = jax.lax.dynamic_slice_in_dim(found, index * rows, rows)
    several = count // rows
    if several == 1:
        return found
    return (found[:, None] * several + jnp.arange(several, dtype=jnp.int32)).reshape(-1)
