"""One stage's layers, forward and backward by hand: nothing is differentiated through the pipeline, and no weight is kept by a tick.

Of a layer, ``jax.vjp`` gives a forward pass and what its backward needs (its *residuals*: by the layer's own checkpoint policy). They go to a
buffer of all layers, without what is there anyway, the weights and the ``side``. Loops over layers run as often as they are told: not at
all where a tick has nothing of their kind, so that one program serves every tick and holds no conditional.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.executor.layer_inputs import LayerScalars, bits, keys_again, of_number, weighed
from jaxpar.parallel.pipeline.executor.split_backward import Halves, halves
from jaxpar.parallel.pipeline.staged_loss import ADDED

type StageLayer = Callable[[Any, jax.Array, Any], jax.Array | tuple[jax.Array, LayerScalars]]
type Buffers = list[jax.Array]
type Add = Callable[[Any, jax.Array, Any, jax.Array], Any]


@dataclass(frozen=True)
class Chunk:
    """Some layers of a stage.

    Attributes:
      layer: ``layer(weights, x, side) -> x`` of one layer, or ``(x, extras)``, scalars of which ``loss`` is differentiated too.
      weights: of all chunks of the stage, [chunks, layers, ...].
      number: of this chunk.
      times: how many layers a loop is to run, 0 or all.
      count: how many of them are there; the others, which a shorter stage has to fill up, do nothing. ``None``: all.
      start: the number in the model of the first of them.
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
        """The result; the buffers [slots, layers, ...] with the residuals of each layer in a slot, none if there are none; the sums with its extras."""

        def one(
            i: jax.Array, carry: tuple[jax.Array, Buffers, LayerScalars]
        ) -> tuple[jax.Array, Buffers, LayerScalars]:
            x, buffers, sums = carry
            if buffers:
                y, sums, kept = self.passed(x, side, i, sums)
                buffers = [write(buffer, leaf, slot, i) for buffer, leaf in zip(buffers, kept, strict=True)]
                return y, buffers, sums
            y, extras = self._layer(self._weights(i), x, of_number(side, self._number(i)))
            return self._where(i, y, x), buffers, self._summed(i, sums, extras)

        first = (x, buffers, sums or {})
        result: tuple[jax.Array, Buffers, LayerScalars] = jax.lax.fori_loop(0, self.times, one, first)
        return result

    def backward(
        self, buffers: Buffers, slot: jax.Array, side: Any, cotangent: jax.Array, add: Add, sums: Any
    ) -> tuple[jax.Array, Any, Buffers]:
        """The cotangent of the input, ``sums = add(sums, layer, gradients, whether)`` with each layer's gradients, and the buffers."""

        def one(back: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            (cotangent, sums), i = carry, self.times - 1 - back
            beside = of_number(side, self._number(i))
            grads, before = self._put_in(self._weights(i), beside, read(buffers, slot, i), cotangent)(cotangent)
            return self._where(i, before, cotangent), add(sums, i, grads, self._here(i))

        return *jax.lax.fori_loop(0, self.times, one, (cotangent, sums)), buffers

    def backward_of_inputs(
        self, buffers: Buffers, slot: jax.Array, side: Any, cotangent: jax.Array, own: Buffers, to: jax.Array
    ) -> tuple[jax.Array, Buffers]:
        """The cotangent of the input; what gradients of weights want goes to a slot of ``own``."""

        def one(back: jax.Array, carry: tuple[jax.Array, Buffers]) -> tuple[jax.Array, Buffers]:
            (cotangent, own), i = carry, self.times - 1 - back
            weights, kept = self._weights(i), read(buffers, slot, i)
            beside = of_number(side, self._number(i))
            before, found = self.halves(beside, kept, cotangent).inputs(weights, kept, beside, cotangent)
            own = [write(buffer, x, to, i) for buffer, x in zip(own, found, strict=True)]
            return self._where(i, before, cotangent), own

        result: tuple[jax.Array, Buffers] = jax.lax.fori_loop(0, self.times, one, (cotangent, own))
        return result

    def backward_of_weights(self, own: Buffers, slot: jax.Array, side: Any, halves: Halves, add: Add, sums: Any) -> Any:
        """``sums = add(sums, layer, gradients, whether)`` with each layer's gradients, from what :meth:`backward_of_inputs` has kept."""

        def one(i: jax.Array, sums: Any) -> Any:
            # Of a single layer nothing here would change from run to run.
            found = held(read(own, slot, i), i)
            beside = of_number(side, self._number(i))
            return add(sums, i, halves.weights(self._weights(i), beside, found), self._here(i))

        return jax.lax.fori_loop(0, self.times, one, sums)

    def passed(self, x: jax.Array, side: Any, i: Any, sums: LayerScalars) -> tuple[jax.Array, LayerScalars, Buffers]:
        """The result of one layer, the sums with its extras, and its residuals."""
        y, extras, kept = self._kept(x, side, i)
        return self._where(i, y, x), self._summed(i, sums, extras), kept

    def kept(self, x: jax.Array, side: Any, i: Any = 0) -> tuple[jax.Array, Buffers]:
        """The result and the residuals of one layer."""
        y, _, kept = self._kept(x, side, i)
        return y, kept

    def extras(self, x: jax.Array, side: Any) -> LayerScalars:
        """The scalars of one layer beside its result."""
        return self._layer(self._weights(0), x, of_number(side, self._number(0)))[1]

    def _kept(self, x: jax.Array, side: Any, i: Any) -> tuple[jax.Array, LayerScalars, Buffers]:
        (y, extras), (leaves, _), known = self._vjp(self._weights(i), x, of_number(side, self._number(i)))
        return y, extras, [bits(leaf) for leaf, is_there in zip(leaves, known, strict=True) if not is_there]

    def halves(self, side: Any, kept: Buffers, cotangent: jax.Array) -> Halves:
        """The two halves of a layer's backward."""

        def pull(weights: Any, kept: Buffers, side: Any, cotangent: jax.Array) -> tuple[Any, jax.Array]:
            found: tuple[Any, jax.Array] = self._put_in(weights, side, kept, cotangent)(cotangent)
            return found

        return halves(pull, self._weights(0), kept, side, cotangent)

    def _weights(self, i: Any) -> Any:
        # Layer by layer: a chunk cut out of all of them would be a copy.
        leaves, structure = jax.tree.flatten(self.weights)
        # So would be a single layer, which XLA cuts out before the loop if its place is the same in every run. There is one run at the most.
        number = self.number + i if leaves[0].shape[1] == 1 else self.number
        return jax.tree.unflatten(structure, read(leaves, number, i))

    def _number(self, i: Any) -> Any:
        """Of a layer, in the model."""
        return i if self.start is None else self.start + i

    def _layer(self, weights: Any, x: jax.Array, side: Any) -> tuple[jax.Array, LayerScalars]:
        found = self.layer(weights, x, side)
        return found if isinstance(found, tuple) else (found, {})

    def _here(self, i: jax.Array) -> jax.Array:
        return jnp.asarray(True) if self.count is None else i < self.count

    def _summed(self, i: jax.Array, sums: LayerScalars, extras: LayerScalars) -> LayerScalars:
        return {name: total + self._where(i, extras[name], jnp.zeros_like(total)) for name, total in sums.items()}

    def _where(self, i: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
        return new if self.count is None else jnp.where(i < self.count, new, old)

    def _vjp(self, weights: Any, x: jax.Array, side: Any) -> tuple[tuple[jax.Array, LayerScalars], Any, list[bool]]:
        """The result, leaves and structure of its backward, and of each leaf whether it is there anyway, and need not be kept."""

        def run(weights: Any, x: jax.Array) -> Any:
            y, extras = self._layer(weights, x, side)
            return (y, extras.get(ADDED)), extras

        (y, _), pull, extras = jax.vjp(run, weights, x, has_aux=True)
        leaves, structure = jax.tree.flatten(pull)
        there = [*jax.tree.leaves(weights), *jax.tree.leaves(side)]
        return (y, extras), (leaves, structure), [any(leaf is have for have in there) for leaf in leaves]

    def _put_in(
        self, weights: Any, side: Any, kept: Buffers, like: jax.Array
    ) -> Callable[[jax.Array], tuple[Any, jax.Array]]:
        """The backward of a layer, with what was kept put in; the forward that it is taken from is dead code."""
        (_, extras), (leaves, structure), known = self._vjp(weights, jnp.zeros_like(like), side)
        rest = iter(kept)
        pull: Callable[..., tuple[Any, jax.Array]] = jax.tree.unflatten(
            structure,
            [leaf if there else keys_again(next(rest), leaf) for leaf, there in zip(leaves, known, strict=True)],
        )
        if ADDED not in extras:
            return lambda cotangent: pull((cotangent, None))

        def both(cotangent: jax.Array) -> tuple[Any, jax.Array]:
            found = pull((cotangent, weighed(side, extras[ADDED])))
            # Of a microbatch that does not count the layer's own loss may be NaN, and so is 0 times its gradient.
            return jax.tree.map(lambda g: jnp.where(side.weight == 0, 0, g), found)

        return both


def held[T](x: T, run: jax.Array) -> T:
    """``x``, as if it were another in each run of a loop.

    Of what is the same in all of them XLA:CPU does the work once, before the loop: also in ticks where that runs zero times.
    """
    return jax.lax.optimization_barrier((x, run))[0]


def write(buffer: jax.Array, x: jax.Array, slot: Any, i: Any) -> jax.Array:
    """``buffer`` [slots, layers, ...] with ``x`` of a layer in a slot."""
    where = indices(slot, i, *(0,) * x.ndim)
    return jax.lax.dynamic_update_slice(buffer, x.astype(buffer.dtype)[None, None], where, allow_negative_indices=False)


def read(buffers: Sequence[jax.Array], slot: Any, i: Any) -> Buffers:
    """What is in a slot of a layer; with a slot for each layer, [layers], of buffers [slots, 1, ...]."""
    slot, i = (slot[i], 0) if jnp.ndim(slot) else (slot, i)

    def one(buffer: jax.Array) -> jax.Array:
        where = indices(slot, i, *(0,) * (buffer.ndim - 2))
        return jax.lax.dynamic_slice(buffer, where, (1, 1, *buffer.shape[2:]), allow_negative_indices=False)[0, 0]

    return [one(buffer) for buffer in buffers]


def indices(*numbers: Any) -> list[jax.Array]:
    """All int32, as a slice's indices have to be of one dtype; plain numbers are int64 under ``jax_enable_x64``."""
    return [jnp.asarray(n, jnp.int32) for n in numbers]
