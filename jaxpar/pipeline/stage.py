"""One stage's layers, forward and backward by hand: nothing is differentiated through the pipeline, and no weight is kept by a tick.

Of a layer, ``jax.vjp`` gives a forward pass and what its backward needs (its *residuals*: by the layer's own checkpoint policy). Those of all layers of
a stage are stacked, without what is there anyway, the weights and the ``side``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

type Layer = Callable[[Any, jax.Array, Any], jax.Array]


@dataclass(frozen=True)
class Chunk:
    """Some layers of a stage.

    Attributes:
      layer: ``layer(weights, x, side) -> x`` of one layer.
      weights: stacked, [layers, ...].
      count: how many of the layers are there; the others, which a shorter stage has to fill up, do nothing. ``None``: all.
    """

    layer: Layer
    weights: Any
    count: jax.Array | None = None

    def forward(self, x: jax.Array, side: Any, *, keep: bool) -> tuple[jax.Array, list[jax.Array]]:
        """The result, and, if asked for, the residuals [layers, ...] of each layer."""

        def one(x: jax.Array, each: tuple[Any, jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
            weights, i = each
            if keep:
                y, residuals = self._kept(weights, x, side)
            else:
                y, residuals = self.layer(weights, x, side), []
            return self._where(i, y, x), residuals

        return jax.lax.scan(one, x, (self.weights, self._numbers()))

    def backward(
        self,
        residuals: list[jax.Array],
        side: Any,
        shape: jax.Array,
        cotangent: jax.Array,
        add: Callable[..., Any],
        sums: Any,
    ) -> tuple[jax.Array, Any]:
        """The cotangent of the input; ``sums = add(sums, layer, gradients)`` is told of each layer's gradients.

        Args:
          shape: anything of the shape and dtype of the input.
        """

        def one(carry: tuple[jax.Array, Any], each: Any) -> tuple[tuple[jax.Array, Any], None]:
            (cotangent, sums), (weights, kept, i) = carry, each
            grads, before = self._pull(weights, shape, side, kept)(cotangent)
            here = jnp.asarray(True) if self.count is None else i < self.count
            return (self._where(i, before, cotangent), add(sums, i, grads, here)), None

        carry, _ = jax.lax.scan(one, (cotangent, sums), (self.weights, residuals, self._numbers()), reverse=True)
        return carry

    def _numbers(self) -> jax.Array:
        return jnp.arange(jax.tree.leaves(self.weights)[0].shape[0])

    def _where(self, i: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
        return new if self.count is None else jnp.where(i < self.count, new, old)

    def _vjp(self, weights: Any, x: jax.Array, side: Any) -> tuple[jax.Array, Any, list[bool]]:
        """The result, leaves and structure of its backward, and of each leaf whether it is there anyway, and need not be kept."""
        y, pull = jax.vjp(lambda weights, x: self.layer(weights, x, side), weights, x)
        leaves, structure = jax.tree.flatten(pull)
        there = [*jax.tree.leaves(weights), *jax.tree.leaves(side)]
        known = [any(leaf is have for have in there) for leaf in leaves]
        return y, (leaves, structure), known

    def _kept(self, weights: Any, x: jax.Array, side: Any) -> tuple[jax.Array, list[jax.Array]]:
        y, (leaves, _), known = self._vjp(weights, x, side)
        return y, [leaf for leaf, is_there in zip(leaves, known, strict=True) if not is_there]

    def _pull(
        self, weights: Any, shape: jax.Array, side: Any, kept: list[jax.Array]
    ) -> Callable[[jax.Array], tuple[Any, jax.Array]]:
        """The backward of a layer, with what was kept put in; the forward that it is taken from is dead code."""
        _, (leaves, structure), known = self._vjp(weights, jnp.zeros_like(shape), side)
        rest = iter(kept)
        return jax.tree.unflatten(
            structure, [leaf if is_there else next(rest) for leaf, is_there in zip(leaves, known, strict=True)]
        )
