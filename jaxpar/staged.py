"""``Staged``: a loss that names the model's stack of layers, and what comes before and after it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.errors import ModelError, listing


def _as_it_is(model: Any, batch: Any) -> Any:
    return batch


def _nothing(model: Any, batch: Any) -> Any:
    return None


@dataclass(frozen=True)
class Staged:
    """A ``loss_fn`` in pieces, so that a pipeline can give the layers to its stages; called, it runs them one after the other.

    Attributes:
      layers: the path of the stack in the model, as ``blocks`` or ``decoder/blocks``: equal layers, their parameters stacked along a
        first dim with the logical name ``layers``.
      before: ``before(model, batch) -> x``, what the first layer is given: [rows, ...], with the sequence second if there is one.
      layer: ``layer(block, x, side) -> x`` of one layer; the same shape and dtype come out. A policy of recomputation is its own matter
        (``jax.checkpoint`` around what it does): what it keeps is what its backward pass is given.
      after: ``after(model, x, batch) -> loss`` or ``(loss, aux)``, the mean over the rows that it is given. A metric ``weight`` in ``aux`` says how
        much these count, 1 without.
      prepare: ``prepare(model, batch) -> batch``, once for the whole batch: the order of tokens, positions. Arrays [rows, seq, ...].
      side: ``side(model, batch) -> anything`` that layers want to know of a batch beside ``x``. It has no gradient.
      dims: the logical dims of ``x``.

    ``model`` is what ``make_model`` returned, for ``loss_fn``; under a pipeline without its layers. ``block`` is one layer: an NNX module
    (the stack's, with one layer's arrays) or the stack's subtree of one layer's arrays.

    >>> import jax, jax.numpy as jnp
    >>> loss = Staged(
    ...     layers="blocks",
    ...     before=lambda model, batch: batch["x"],
    ...     layer=lambda block, x, side: x + jnp.tanh(x @ block["w"]),
    ...     after=lambda model, x, batch: jnp.mean((x - batch["y"]) ** 2),
    ... )
    >>> ones = jnp.ones((2, 4))
    >>> float(loss({"blocks": {"w": jnp.zeros((3, 4, 4))}}, {"x": ones, "y": 2 * ones}))
    1.0
    """

    layers: str
    before: Callable[[Any, Any], jax.Array]
    layer: Callable[[Any, jax.Array, Any], jax.Array]
    after: Callable[[Any, jax.Array, Any], Any]
    prepare: Callable[[Any, Any], Any] = _as_it_is
    side: Callable[[Any, Any], Any] = _nothing
    dims: tuple[str | None, ...] | None = None

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.layers.split("/"))

    def __call__(self, model: Any, batch: Any) -> Any:
        batch = self.prepare(model, batch)
        side = self.side(model, batch)
        leaves, block = stacked_part(model, self.path)

        def one(x: jax.Array, leaves: Any) -> tuple[jax.Array, None]:
            return self.layer(block(leaves), x, side), None

        x, _ = jax.lax.scan(one, self.before(model, batch), leaves)
        return self.after(model, x, batch)


def stacked_part(model: Any, path: tuple[str, ...]) -> tuple[Any, Callable[[Any], Any]]:
    """The stacked arrays at a path of a model, and what makes one layer of one layer's arrays.

    Raises:
      ModelError: there is nothing at the path, or the stack carries arrays that are not trained.
    """
    nnx = sys.modules.get("flax.nnx")
    tree = model["params"] if isinstance(model, dict) and "params" in model else model
    for at, name in enumerate(path):
        inner = tree.get(name) if isinstance(tree, dict) else getattr(tree, name, None)
        if inner is None:
            have = sorted(tree) if isinstance(tree, dict) else sorted(vars(tree))
            raise ModelError(
                f"Staged(layers={'/'.join(path)!r}): the model has no {'/'.join(path[: at + 1])!r}. Remedy: the path of its stack of layers; "
                f"there are {listing(name for name in have if not name.startswith('_'))}."
            )
        tree = inner
    if nnx is None or not isinstance(tree, nnx.Module):
        return tree, lambda leaves: leaves
    graphdef, params, rest = nnx.split(tree, nnx.Param, ...)
    if jax.tree.leaves(rest):
        paths = ["/".join((*path, *map(str, keys))) for keys, _ in nnx.to_flat_state(rest)]
        raise ModelError(
            f"Staged(layers={'/'.join(path)!r}): the layers carry {listing(paths)}, which no pipeline can: each stage sees its own microbatch. "
            f"Remedy: keep counters, keys and statistics out of the stack."
        )
    structure = jax.tree.structure(params)
    return jax.tree.leaves(params), lambda leaves: nnx.merge(
        graphdef, jax.tree.unflatten(structure, jax.tree.leaves(leaves)), rest
    )
