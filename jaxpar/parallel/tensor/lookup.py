"""Embedding lookups in tables whose words and columns are both sharded over axes of tensor parallelism.

A table whose words are sharded over axes of the batch is gathered over them, or the tokens are: each device then looks
up its own words for all of them, and the rows are summed and scattered. The first sends one row per word, the second
one row per token; a lookup takes whichever is less.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.collectives.gather_reduce import summable
from jaxpar.parallel.collectives.hierarchical import gather_local, scatter_local
from jaxpar.parallel.tensor.local import run_manual, to_inside, to_outside
from jaxpar.parallel.tensor.matmul import routes
from jaxpar.parallel.tensor.route import MatmulOperand, MatmulRoute
from jaxpar.sharding.rules import Axes

type Take = Callable[[jax.Array, jax.Array], jax.Array]
"""Looks up rows of a local table by local ids, and differentiates to the table."""


def lookup_route(table_VE: jax.Array, tokens_BS: jax.Array) -> MatmulRoute | None:
    """Returns the route of a lookup, which is a product with one-hot rows, or ``None`` if no axis has a part in it.

    Raises:
      LayoutError, ConfigError: as :func:`jaxpar.parallel.tensor.matmul.routes`.
    """
    rows = jax.ShapeDtypeStruct((*tokens_BS.shape, table_VE.shape[0]), table_VE.dtype)
    found = routes(rows, [(table_VE, ("vocab", "embed"))], 1, observed=False)
    return None if found is None else found[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def lookup_rows(route: MatmulRoute, take: Take, dtype: Any, table_VE: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """Returns the rows of the table for the tokens, ``[batch, seq, embed]``, by a route.

    Args:
      route: as :func:`lookup_route` returned it.
      take: the lookup on one device.
      dtype: the dtype of the rows, also while they are sent. The table's gradient is summed in the table's dtype.
      table_VE: the table [vocab, embed], as the state stores it.
      tokens_BS: token ids [batch, seq] of the vocabulary.
    """

    def local(table_VE: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        how = _Lookup.of(route, table_VE, tokens_BS)
        rows_BSE = how.rows(take, to_inside(table_VE, how.table), how.ids(tokens_BS)).astype(dtype)
        return to_outside(how.own(rows_BSE), route.y)

    return run_manual([route], local, (route.w.spec, _ids(route).spec), route.y.spec)(table_VE, tokens_BS)


def _backward(
    route: MatmulRoute, take: Take, _: Any, saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, None]:
    def local(table_VE: jax.Array, tokens_BS: jax.Array, dy: jax.Array) -> jax.Array:
        how = _Lookup.of(route, table_VE, tokens_BS)
        # The gradient does not depend on the table, so its shape suffices, and nothing is gathered for it.
        shape = jax.eval_shape(lambda table_VE: to_inside(table_VE, how.table), table_VE)
        inside = functools.partial(how.rows, take, ids_BS=how.ids(tokens_BS))
        _, pull = jax.vjp(inside, jnp.zeros(shape.shape, shape.dtype))
        dy = how.of_all(to_inside(dy, route.y))
        return to_outside(pull(dy.astype(shape.dtype))[0], how.table_grad)

    specs = (route.w.spec, _ids(route).spec, route.y.spec)
    return run_manual([route], local, specs, route.w_grad.spec)(*saved, dy), None


lookup_rows.defvjp(lambda *args: (lookup_rows(*args), args[3:]), _backward)


def _ids(route: MatmulRoute) -> MatmulOperand:
    """Returns the rows of the one-hot input."""
    rows = len(route.x.shards) - 1
    return MatmulOperand(route.x.shards[:rows], tuple(move for move in route.x.moves if move.dim < rows))


@dataclass(frozen=True)
class _Lookup:
    """How a device looks up rows; used in a ``shard_map``.

    Attributes:
      tokens: the token ids.
      table, table_grad: the table and its gradient.
      words: the axes that shard the words of the local table.
      exchanged: those of them that also shard the tokens: the device looks up the tokens of all their devices.
    """

    tokens: MatmulOperand
    table: MatmulOperand
    table_grad: MatmulOperand
    words: Axes
    exchanged: Axes

    @classmethod
    def of(cls, route: MatmulRoute, table_VE: jax.Array, tokens_BS: jax.Array) -> _Lookup:
        """Returns the lookup by a route, for the local shards of table and tokens."""
        inside, stored = route.w.inside[0], route.w.shards[0]
        moved = stored[len(inside) :]
        over_rows = all(move.summed for move in route.w.moves if move.dim == 0) and not _ids(route).moves
        fits = over_rows and route.w_grad.shards[0] == stored and tokens_BS.size <= table_VE.shape[0]
        if not moved or not fits:
            return cls(_ids(route), route.w, route.w_grad, inside, ())
        table, table_grad = (
            replace(one, moves=tuple(move for move in one.moves if move.dim != 0)) for one in (route.w, route.w_grad)
        )
        return cls(_ids(route), table, table_grad, stored, moved)

    def ids(self, tokens_BS: jax.Array) -> jax.Array:
        """Returns the ids that the device looks up."""
        return self.of_all(to_inside(tokens_BS, self.tokens))

    def of_all(self, x_BS: jax.Array) -> jax.Array:
        """Returns what the devices of the exchanged axes have, along the batch."""
        return gather_local(x_BS, self.exchanged, dim=0) if self.exchanged else x_BS

    def own(self, rows_BSE: jax.Array) -> jax.Array:
        """Returns the sum over the exchanged axes of what their devices looked up for this device."""
        if not self.exchanged:
            return rows_BSE
        return scatter_local(summable(rows_BSE), self.exchanged, dim=0).astype(rows_BSE.dtype)

    def rows(self, take: Take, table_VE: jax.Array, ids_BS: jax.Array) -> jax.Array:
        """Looks up the words of this device; rows of other words are 0."""
        if not self.words:
            return take(table_VE, ids_BS)
        words = table_VE.shape[0]
        ids_BS = ids_BS - jax.lax.axis_index(self.words) * words
        mine_BS = (ids_BS >= 0) & (ids_BS < words)
        return jnp.where(mine_BS[..., None], take(table_VE, jnp.clip(ids_BS, 0, words - 1)), 0)
