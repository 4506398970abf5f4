"""Embedding lookups in tables whose words and columns are both sharded over axes of tensor parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.parallel.tensor.local import run_manual, to_inside, to_outside
from jaxpar.parallel.tensor.matmul import routes
from jaxpar.parallel.tensor.route import MatmulOperand, MatmulRoute

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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def lookup_rows(route: MatmulRoute, take: Take, table_VE: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """Returns the rows of the table for the tokens, ``[batch, seq, embed]``, by a route.

    Args:
      route: as :func:`lookup_route` returned it.
      take: the lookup on one device.
      table_VE: the table [vocab, embed], as the state stores it.
      tokens_BS: token ids [batch, seq] of the vocabulary.
    """

    def local(table_VE: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        rows_BSE = _local(route, take, to_inside(table_VE, route.w), to_inside(tokens_BS, _ids(route)))
        return to_outside(rows_BSE, route.y)

    return run_manual([route], local, (route.w.spec, _ids(route).spec), route.y.spec)(table_VE, tokens_BS)


def _backward(
    route: MatmulRoute, take: Take, saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, None]:
    def local(table_VE: jax.Array, tokens_BS: jax.Array, dy: jax.Array) -> jax.Array:
        # The gradient does not depend on the table, so its shape suffices, and nothing is gathered for it.
        shape = jax.eval_shape(lambda table_VE: to_inside(table_VE, route.w), table_VE)
        inside = functools.partial(_local, route, take, tokens_BS=to_inside(tokens_BS, _ids(route)))
        _, pull = jax.vjp(inside, jnp.zeros(shape.shape, shape.dtype))
        return to_outside(pull(to_inside(dy, route.y))[0], route.w_grad)

    specs = (route.w.spec, _ids(route).spec, route.y.spec)
    return run_manual([route], local, specs, route.w_grad.spec)(*saved, dy), None


lookup_rows.defvjp(lambda route, take, *arrays: (lookup_rows(route, take, *arrays), arrays), _backward)


def _ids(route: MatmulRoute) -> MatmulOperand:
    """Returns the rows of the one-hot input."""
    rows = len(route.x.shards) - 1
    return MatmulOperand(route.x.shards[:rows], tuple(move for move in route.x.moves if move.dim < rows))


def _local(route: MatmulRoute, take: Take, table_VE: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """Looks up the words of this device; rows of other words are 0."""
    if not (axes := route.w.inside[0]):
        return take(table_VE, tokens_BS)
    words = table_VE.shape[0]
    ids_BS = tokens_BS - jax.lax.axis_index(axes) * words
    mine_BS = (ids_BS >= 0) & (ids_BS < words)
    return jnp.where(mine_BS[..., None], take(table_VE, jnp.clip(ids_BS, 0, words - 1)), 0)
