"""Runs the layers of one stage forward and backward.

The backward is written by hand: nothing is differentiated through the pipeline, and no tick stores weights. ``jax.vjp``
of a layer provides its forward and its residuals, as the layer's own checkpoint policy saves them. A buffer for all
layers stores these residuals, except those that exist anyway: the weights and ``side``. Loops over layers run a traced
number of iterations, zero if a tick has no operation of their kind. One program without conditionals therefore serves
all ticks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.executor.frozen import trained_part, with_trained
from jaxpar.parallel.pipeline.executor.layer_inputs import LayerScalars, bits, keys_again, of_number
from jaxpar.parallel.pipeline.executor.split_backward import Halves, halves
from jaxpar.parallel.pipeline.staged_loss import ADDED

type StageLayer = Callable[[Any, jax.Array, Any], jax.Array | tuple[jax.Array, LayerScalars]]
type Buffers = list[jax.Array]
type Forward = tuple[jax.Array, Buffers, LayerScalars]
type Add = Callable[[Any, jax.Array, Any, jax.Array], Any]


@dataclass(frozen=True)
class Chunk:
    """One chunk of a stage's layers.

    Attributes:
      layer: ``layer(weights, x, side) -> x`` runs one layer; or it returns ``(x, extras)``, with scalars by name. The
        scalar ``loss`` is also differentiated.
      weights: those of all chunks of the stage, [chunks, layers, ...]. Those of a ``FrozenWeight`` have no gradient.
      number: the index of this chunk.
      times: the number of iterations of a loop over layers: 0 or all.
      count: the number of layers that exist. The others pad a smaller piece, and do nothing. ``None``: all exist.
      start: the index in the model of the first layer.
    """

    layer: StageLayer
    weights: Any
    number: jax.Array
    times: jax.Array
    count: jax.Array | None = None
    start: jax.Array | None = None

    def forward(
        self, x: jax.Array, side: Any, buffers: Buffers, slot: jax.Array, sums: LayerScalars | None = None
    ) -> tuple[jax.Array, Buffers, LayerScalars]:
        """Runs the forward of all layers.

        Args:
          x: the input of the first layer.
          side: the layers' further inputs.
          buffers: [slots, layers, ...], or empty if no residuals are stored.
          slot: where to store the residuals.
          sums: the scalars to which those of the layers are added.

        Returns:
          The output, the buffers with the residuals of each layer, and the sums.
        """

        first = (x, buffers, sums or {})
        return jax.lax.fori_loop(0, self.times, lambda i, carry: self._forward_one(i, carry, side, slot), first)

    def forward_beside(
        self, first: Forward, side: Any, slot: jax.Array, next_layer: Callable[[jax.Array], Any], number: jax.Array
    ) -> tuple[Forward, Any]:
        """Runs the forward of all layers, and adds the layers of another chunk to the weights.

        Args:
          first: the input of the first layer, the buffers and the sums, as for :meth:`forward`.
          side, slot: as for :meth:`forward`.
          next_layer: ``next_layer(i)`` returns the weights of layer ``i`` of the other chunk.
          number: the index of the other chunk.

        Returns:
          The output, the buffers and the sums, as :meth:`forward` returns them; and the weights.
        """

        def one(i: jax.Array, carry: tuple[Forward, Any]) -> tuple[Forward, Any]:
            forward, weights = carry
            found = next_layer(i)
            y, *others = replace(self, weights=weights)._forward_one(i, forward, side, slot)
            # They are written in place once this layer has read its own weights.
            y, found = jax.lax.optimization_barrier((y, found))
            return (y, *others), jax.tree.map(lambda have, w: write(have, w, number, i), weights, found)

        return jax.lax.fori_loop(0, self.times, one, (first, self.weights))

    def _forward_one(self, i: jax.Array, carry: Forward, side: Any, slot: jax.Array) -> Forward:
        """Runs the forward of layer ``i``."""
        x, buffers, sums = carry
        if buffers:
            y, sums, kept = self.passed(x, side, i, sums)
            return y, [write(buffer, leaf, slot, i) for buffer, leaf in zip(buffers, kept, strict=True)], sums
        y, extras = self._layer(self._weights(i), x, of_number(side, self._number(i)))
        return self._select(i, y, x), buffers, self._summed(i, sums, extras)

    def backward(
        self, buffers: Buffers, slot: jax.Array, side: Any, cotangent: jax.Array, add: Add, sums: Any
    ) -> tuple[jax.Array, Any, Buffers]:
        """Runs the backward of all layers.

        Args:
          buffers: [slots, layers, ...] with the residuals.
          slot: where they are stored.
          side: the layers' further inputs.
          cotangent: of the output.
          add: ``sums = add(sums, layer, gradients, exists)`` adds the gradients of one layer.
          sums: the sums of gradients.

        Returns:
          The cotangent of the input, the sums, and the buffers.
        """

        def one(back: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            (cotangent, sums), i = carry, self.times - 1 - back
            layer_side = of_number(side, self._number(i))
            kept = read_unchanged(buffers, slot, i)
            pull = self._layer_backward(self._weights(i), layer_side, kept, cotangent)
            grads, before = pull(cotangent)
            return self._select(i, before, cotangent), add(sums, i, grads, self._exists(i))

        return *jax.lax.fori_loop(0, self.times, one, (cotangent, sums)), buffers

    def backward_of_inputs(
        self, buffers: Buffers, slot: jax.Array, side: Any, cotangent: jax.Array, own: Buffers, to: jax.Array
    ) -> tuple[jax.Array, Buffers]:
        """Returns the input's cotangent, and ``own`` with the operands of the gradients of weights in slot ``to``."""

        def one(back: jax.Array, carry: tuple[jax.Array, Buffers]) -> tuple[jax.Array, Buffers]:
            (cotangent, own), i = carry, self.times - 1 - back
            weights, kept = self._weights(i), read_unchanged(buffers, slot, i)
            layer_side = of_number(side, self._number(i))
            before, found = self.halves(layer_side, kept, cotangent).inputs(weights, kept, layer_side, cotangent)
            own = [write(buffer, x, to, i) for buffer, x in zip(own, found, strict=True)]
            return self._select(i, before, cotangent), own

        return jax.lax.fori_loop(0, self.times, one, (cotangent, own))

    def backward_of_weights(self, own: Buffers, slot: jax.Array, side: Any, halves: Halves, add: Add, sums: Any) -> Any:
        """Adds the gradients of each layer to ``sums``, from the values that :meth:`backward_of_inputs` stored."""

        def one(i: jax.Array, sums: Any) -> Any:
            # A single layer is loop-invariant, and XLA would hoist its work out of the loop.
            found = held(read_unchanged(own, slot, i), i)
            layer_side = of_number(side, self._number(i))
            return add(sums, i, halves.weights(self._weights(i), layer_side, found), self._exists(i))

        return jax.lax.fori_loop(0, self.times, one, sums)

    def passed(self, x: jax.Array, side: Any, i: Any, sums: LayerScalars) -> tuple[jax.Array, LayerScalars, Buffers]:
        """Returns the output of one layer, the sums with its scalars, and its residuals."""
        y, extras, kept = self._kept(x, side, i)
        return self._select(i, y, x), self._summed(i, sums, extras), kept

    def kept(self, x: jax.Array, side: Any, i: Any = 0) -> tuple[jax.Array, Buffers]:
        """Returns the output and the residuals of one layer."""
        y, _, kept = self._kept(x, side, i)
        return y, kept

    def extras(self, x: jax.Array, side: Any) -> LayerScalars:
        """Returns the scalars of one layer."""
        return self._layer(self._weights(0), x, of_number(side, self._number(0)))[1]

    def _kept(self, x: jax.Array, side: Any, i: Any) -> tuple[jax.Array, LayerScalars, Buffers]:
        (y, extras), (leaves, _), known = self._vjp(self._weights(i), x, of_number(side, self._number(i)))
        return y, extras, [bits(leaf) for leaf, is_there in zip(leaves, known, strict=True) if not is_there]

    def halves(self, side: Any, kept: Buffers, cotangent: jax.Array) -> Halves:
        """Returns the two halves of a layer's backward."""

        def pull(weights: Any, kept: Buffers, side: Any, cotangent: jax.Array) -> tuple[Any, jax.Array]:
            return self._layer_backward(weights, side, kept, cotangent)(cotangent)

        return halves(pull, self._weights(0), kept, side, cotangent)

    def _weights(self, i: Any) -> Any:
        # Slice layer by layer: slicing the chunk first would copy it.
        leaves, structure = jax.tree.flatten(self.weights)
        return jax.tree.unflatten(structure, read_unchanged(leaves, self.number, i))

    def _number(self, i: Any) -> Any:
        """Returns the index of a layer in the model."""
        return i if self.start is None else self.start + i

    def _layer(self, weights: Any, x: jax.Array, side: Any) -> tuple[jax.Array, LayerScalars]:
        found = self.layer(weights, x, side)
        return found if isinstance(found, tuple) else (found, {})

    def _exists(self, i: jax.Array) -> jax.Array:
        return jnp.asarray(True) if self.count is None else i < self.count

    def _summed(self, i: jax.Array, sums: LayerScalars, extras: LayerScalars) -> LayerScalars:
        return {name: total + self._select(i, extras[name], jnp.zeros_like(total)) for name, total in sums.items()}

    def _select(self, i: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
        return new if self.count is None else jnp.where(i < self.count, new, old)

    def _vjp(self, weights: Any, x: jax.Array, side: Any) -> tuple[tuple[jax.Array, LayerScalars], Any, list[bool]]:
        """Returns the output, the backward's leaves and structure, and for each leaf whether it exists anyway."""

        def run(trained: Any, x: jax.Array) -> Any:
            y, extras = self._layer(with_trained(weights, trained), x, side)
            return (y, extras.get(ADDED)), extras

        (y, _), pull, extras = jax.vjp(run, trained_part(weights), x, has_aux=True)
        leaves, structure = jax.tree.flatten(pull)
        there = [*jax.tree.leaves(weights), *jax.tree.leaves(side)]
        return (y, extras), (leaves, structure), [any(leaf is have for have in there) for leaf in leaves]

    def _layer_backward(
        self, weights: Any, side: Any, kept: Buffers, like: jax.Array
    ) -> Callable[[jax.Array], tuple[Any, jax.Array]]:
        """Returns the backward of a layer with the stored residuals; the forward of its ``jax.vjp`` is dead code."""
        (_, extras), (leaves, structure), known = self._vjp(weights, jnp.zeros_like(like), side)
        rest = iter(kept)
        leaves = [leaf if there else keys_again(next(rest), leaf) for leaf, there in zip(leaves, known, strict=True)]
        pull: Callable[..., tuple[Any, jax.Array]] = jax.tree.unflatten(structure, leaves)
        if ADDED not in extras:
            return lambda cotangent: pull((cotangent, None))

        def both(cotangent: jax.Array) -> tuple[Any, jax.Array]:
            found = pull((cotangent, jnp.asarray(side.weight, extras[ADDED].dtype)))
            # The layer's loss may be NaN for a microbatch of weight 0, and so is 0 times its gradient.
            return jax.tree.map(lambda g: jnp.where(side.weight == 0, 0, g), found)

        return both


def held[T](x: T, run: jax.Array) -> T:
    """Returns ``x``, tied to the iteration ``run`` of a loop by an optimization barrier.

    XLA:CPU otherwise hoists loop-invariant work out of the loop, and does it even in ticks in which the loop has no
    iterations.
    """
    return jax.lax.optimization_barrier((x, run))[0]


def write(buffer: jax.Array, x: jax.Array, slot: Any, i: Any) -> jax.Array:
    """Returns ``buffer`` [slots, layers, ...] with ``x`` written to the slot of layer ``i``."""
    start = indices(slot, i, *(0,) * x.ndim)
    return jax.lax.dynamic_update_slice(buffer, x.astype(buffer.dtype)[None, None], start, allow_negative_indices=False)


def read(buffers: Sequence[jax.Array], slot: Any, i: Any) -> Buffers:
    """Returns the content of a slot of layer ``i`` in each buffer.

    Args:
      buffers: [slots, layers, ...], or [slots, 1, ...] if each layer has a slot.
      slot: a scalar, or a slot for each layer, [layers].
      i: the layer.
    """
    slot, i = (slot[i], 0) if jnp.ndim(slot) else (slot, i)

    def one(buffer: jax.Array) -> jax.Array:
        start = indices(slot, i, *(0,) * (buffer.ndim - 2))
        return jax.lax.dynamic_slice(buffer, start, (1, 1, *buffer.shape[2:]), allow_negative_indices=False)[0, 0]

    return [one(buffer) for buffer in buffers]


def read_unchanged(buffers: Sequence[jax.Array], slot: Any, i: Any) -> Buffers:
    """Returns what :func:`read` does, in iteration ``i`` of a loop over layers that writes to none of the buffers.

    XLA clamps the index of a dim of size 1. For a stage of a single layer, the slice is then the same in every
    iteration. XLA hoists it out of the loop, together with the layout that the loop prefers, and so copies the buffer
    of all slots in every tick. Adding ``i``, which is 0 here, to the slot makes the index depend on the iteration.
    """
    layers = slot.shape[0] if jnp.ndim(slot) else max((buffer.shape[1] for buffer in buffers), default=0)
    return read(buffers, slot + i if layers == 1 else slot, i)


def indices(*numbers: Any) -> list[jax.Array]:
    """Returns int32 indices: a slice needs a single dtype, and Python ints are int64 under ``jax_enable_x64``."""
    return [jnp.asarray(n, jnp.int32) for n in numbers]
