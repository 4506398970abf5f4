"""Runs a stage's layers on one chunk of a sequence (Sun et al. 2024, arXiv:2406.03488).

The carry of a layer is the data that it passes to later chunks (for attention: keys and values): arrays
[rows, seq, ...] for a full microbatch. Each chunk writes its own part and reads nothing behind it. One full carry
therefore serves all chunks of a microbatch, forward and backward. A pool stores it once, and no residual contains a
copy. A chunk's backward adds to the carry's cotangent in the parts of the earlier chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.errors import ModelError
from jaxpar.parallel.pipeline.executor.frozen import trained_part, with_trained
from jaxpar.parallel.pipeline.executor.layer_inputs import LayerScalars
from jaxpar.parallel.pipeline.executor.stage import Add, Buffers, Chunk, indices, read, read_unchanged, write
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.utils.arrays import accumulator, describe

type CarriedLayer = Callable[[Any, jax.Array, Any, Any, jax.Array], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class SequenceCarry:
    """How layers process a sequence in chunks.

    Attributes:
      layer: ``layer(weights, x, side, carry, chunk) -> (x, carry)`` runs one layer on one chunk, whose number is
        traced.
      empty: ``empty(batch)`` returns the carry of a full microbatch: arrays [rows, seq, ...], or their shapes.
      chunks: the number of chunks in a sequence.
    """

    layer: CarriedLayer
    empty: Callable[[Any], Any]
    chunks: int

    def shapes(self, pieces: Any) -> Any:
        """Returns the shapes of a layer's carry.

        Args:
          pieces: the batch, [devices, microbatches * chunks, rows, ...].

        Raises:
          ModelError: an array of the carry is not [rows, seq, ...].
        """

        def full_sequence(x: jax.Array) -> jax.ShapeDtypeStruct:
            rows, *others = x.shape[2:]
            return jax.ShapeDtypeStruct((rows, *(n * self.chunks for n in others[:1]), *others[1:]), x.dtype)

        batch = jax.tree.map(full_sequence, pieces)
        found = jax.eval_shape(self.empty, batch)
        rows, seq = next(x.shape[:2] for x in jax.tree.leaves(batch) if x.ndim > 1)
        for x in jax.tree.leaves(found):
            if x.shape[:2] != (rows, seq):
                raise ModelError(
                    f"PipelineLoss(chunk_carry=...) returned {describe(x)}, but each chunk of a microbatch of {rows} "
                    f"rows and {seq} tokens writes its own part. Remedy: return arrays [rows, seq, ...], here "
                    f"[{rows}, {seq}, ...]."
                )
        return found


class Slots(NamedTuple):
    """The number of a sequence chunk, and the slots of its residuals, its carry and the carry's cotangent.

    ``kept`` is ``None`` if no residuals are stored.
    """

    kept: jax.Array | None
    carry: jax.Array
    back: jax.Array
    chunk: jax.Array


class Pools(NamedTuple):
    """Buffers [slots, layers, ...] of residuals, carries, and cotangents of inexact carries, in fp32 or wider."""

    kept: Buffers
    carry: Buffers
    back: Buffers


class _Linear(NamedTuple):
    """The backward of a layer: its leaves and structure, and where each leaf is found.

    ``where`` is ``there`` if the leaf exists anyway, ``kept`` if a buffer stores it, or its index in the carry.
    """

    leaves: list[Any]
    structure: Any
    where: list[str | int]


@dataclass(frozen=True)
class Carried(Chunk):
    """A stage's layers on one chunk of a sequence.

    Attributes:
      carry: how layers process a sequence in chunks.
      like: the shapes of a layer's carry.
    """

    carry: SequenceCarry = field(kw_only=True)
    like: Any = field(kw_only=True)

    def pools(self, kept: Buffers, layers: int, sizes: dict[str, int]) -> Pools:
        """Returns empty pools, with an extra slot for data that nothing reads.

        Args:
          kept: the buffers of residuals.
          layers: the number of layers.
          sizes: the number of slots of each buffer.
        """
        leaves = jax.tree.leaves(self.like)
        zeros = lambda name, x, dtype: jnp.zeros((sizes[name] + 1, layers, *x.shape), dtype)
        back = [zeros("back", x, accumulator(x)) for x in leaves if _floats(x)]
        return Pools(kept, [zeros("carry", x, x.dtype) for x in leaves], back)

    def forward(
        self, x: jax.Array, side: Any, buffers: Any, slot: Any, sums: LayerScalars | None = None
    ) -> tuple[jax.Array, Any, LayerScalars]:
        """Returns the output, the pools with this chunk's carry and residuals, and ``sums`` unchanged."""

        def one(i: jax.Array, carried: tuple[jax.Array, Pools]) -> tuple[jax.Array, Pools]:
            x, pools = carried
            past, kept = read(pools.carry, slot.carry, i), pools.kept
            if slot.kept is None:
                y, now = self._carried(self._weights(i), x, side, past, slot.chunk)
            else:
                y, now, linear = self._linear(self._weights(i), x, side, past, slot.chunk)
                leaves = [leaf for leaf, where in zip(linear.leaves, linear.where, strict=True) if where == "kept"]
                kept = [write(buffer, leaf, slot.kept, i) for buffer, leaf in zip(kept, leaves, strict=True)]
            parts = [self._part(leaf, slot.chunk) for leaf in now]
            carry = [self._put(pool, part, slot, i) for pool, part in zip(pools.carry, parts, strict=True)]
            return self._select(i, y, x), Pools(kept, carry, pools.back)

        y, pools = jax.lax.fori_loop(0, self.times, one, (x, buffers))
        return y, pools, sums or {}

    def extras(self, x: jax.Array, side: Any) -> LayerScalars:
        """Returns no scalars: a layer with a carry returns none."""
        return {}

    def backward(
        self, buffers: Any, slot: Any, side: Any, cotangent: jax.Array, add: Add, sums: Any
    ) -> tuple[jax.Array, Any, Any]:
        """Returns the input's cotangent, the sums of gradients, and the pools.

        The pools then have the cotangent of the carry that the earlier chunks wrote.
        """
        last = slot.chunk == self.carry.chunks - 1

        def one(back: jax.Array, carried: tuple[jax.Array, Any, Buffers]) -> tuple[jax.Array, Any, Buffers]:
            (cotangent, sums, pool), i = carried, self.times - 1 - back
            # No chunk has read the last chunk's carry. The slot still holds the cotangent of another microbatch.
            later = [jnp.where(last, 0, x) for x in read(pool, slot.back, i)]
            past, kept = read_unchanged(buffers.carry, slot.carry, i), read_unchanged(buffers.kept, slot.kept, i)
            pull = self._backward_of(self._weights(i), side, past, slot.chunk, kept, cotangent)
            floats = [x for x in past if _floats(x)]
            own = [self._own_part(x, leaf, slot.chunk) for x, leaf in zip(later, floats, strict=True)]
            grads, before, more = pull((cotangent, own))
            later = [x + y.astype(x.dtype) for x, y in zip(later, more, strict=True)]
            pool = [write(buffer, x, slot.back, i) for buffer, x in zip(pool, later, strict=True)]
            return self._select(i, before, cotangent), add(sums, i, grads, self._exists(i)), pool

        cotangent, sums, pool = jax.lax.fori_loop(0, self.times, one, (cotangent, sums, buffers.back))
        return cotangent, sums, buffers._replace(back=pool)

    def kept(self, x: jax.Array, side: Any, i: Any = 0) -> tuple[jax.Array, Buffers]:
        """Returns zeros in the shapes of the output and the residuals of one layer."""

        def one(weights: Any, x: jax.Array, side: Any, past: Buffers, chunk: jax.Array) -> tuple[jax.Array, Buffers]:
            y, _, linear = self._linear(weights, x, side, past, chunk)
            return y, [leaf for leaf, where in zip(linear.leaves, linear.where, strict=True) if where == "kept"]

        # With a concrete chunk number JAX would save other residuals.
        chunk = jax.ShapeDtypeStruct((), jnp.int32)
        found = jax.eval_shape(one, self._weights(i), x, side, jax.tree.leaves(self.like), chunk)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), found)

    def _carried(
        self, weights: Any, x: jax.Array, side: Any, past: Buffers, chunk: jax.Array
    ) -> tuple[jax.Array, Buffers]:
        """Runs one layer, and checks that the carry keeps its structure, shapes and dtypes."""
        structure: Any = jax.tree.structure(self.like)
        y, carry = self.carry.layer(weights, x, side, jax.tree.unflatten(structure, past), chunk)
        now, found = jax.tree.flatten(carry)
        was, got = (", ".join(map(describe, leaves)) for leaves in (jax.tree.leaves(self.like), now))
        if structure != found or was != got:
            raise ModelError(
                f"PipelineLoss(chunked_layer=...) received a carry of {was} and returned {got}, but the carry must "
                "keep its structure, shapes and dtypes. Remedy: jax.lax.dynamic_update_slice_in_dim(carry, part, "
                "chunk * part.shape[1], 1)."
            )
        return y, now

    def _linear(
        self, weights: Any, x: jax.Array, side: Any, past: Buffers, chunk: jax.Array
    ) -> tuple[jax.Array, Buffers, _Linear]:
        """Returns the output, the carry, and the backward with respect to weights, input and carry."""
        floats = [leaf for leaf in past if _floats(leaf)]

        def run(trained: Any, x: jax.Array, floats: Buffers) -> tuple[tuple[jax.Array, Buffers], Buffers]:
            rest = iter(floats)
            given = [next(rest) if _floats(leaf) else leaf for leaf in past]
            y, now = self._carried(with_trained(weights, trained), x, side, given, chunk)
            return (y, [leaf for leaf in now if _floats(leaf)]), [leaf for leaf in now if not _floats(leaf)]

        (y, changed), pull, others = jax.vjp(run, trained_part(weights), x, floats, has_aux=True)
        sources, rest = [iter(others), iter(changed)], jax.tree.flatten(pull)
        now = [next(sources[_floats(leaf)]) for leaf in past]
        available = [*jax.tree.leaves(weights), *jax.tree.leaves(side), *past, chunk]

        def where(leaf: Any) -> str | int:
            if any(leaf is have for have in available):
                return "there"
            # By the backward the pool also holds later chunks, but this chunk's backward does not depend on them.
            return next((n for n, have in enumerate(now) if leaf is have), "kept")

        return y, now, _Linear(*rest, [where(leaf) for leaf in rest[0]])

    def _backward_of(
        self, weights: Any, side: Any, past: Buffers, chunk: jax.Array, kept: Buffers, like: jax.Array
    ) -> Callable[[Any], tuple[Any, jax.Array, Buffers]]:
        """Returns the backward of a layer with the stored residuals and the carry; its forward is dead code."""
        _, _, linear = self._linear(weights, jnp.zeros_like(like), side, past, chunk)
        rest = iter(kept)

        def leaf(found: Any, where: str | int) -> Any:
            return past[where] if isinstance(where, int) else found if where == "there" else next(rest)

        leaves = [leaf(found, where) for found, where in zip(linear.leaves, linear.where, strict=True)]
        return jax.tree.unflatten(linear.structure, leaves)

    def _part(self, x: jax.Array, chunk: jax.Array) -> jax.Array:
        """Returns a chunk's own part of [rows, seq, ...]."""
        size = x.shape[1] // self.carry.chunks
        return jax.lax.dynamic_slice_in_dim(x, chunk * size, size, 1)

    def _own_part(self, x: jax.Array, like: jax.Array, chunk: jax.Array) -> jax.Array:
        """Returns ``x`` with zeros outside of a chunk's own part, in the dtype of ``like``."""
        part = self._part(x, chunk).astype(like.dtype)
        return jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(like), part, chunk * part.shape[1], 1)

    def _put(self, pool: jax.Array, part: jax.Array, slot: Slots, i: jax.Array) -> jax.Array:
        """Returns ``pool`` [slots, layers, rows, seq, ...] with a chunk's own part written to a layer's slot."""
        start = indices(slot.carry, i, 0, slot.chunk * part.shape[1], *(0,) * (part.ndim - 2))
        return jax.lax.dynamic_update_slice(pool, part[None, None], start)


def in_chunks(tree: Any, chunks: int) -> Any:
    """Reshapes [microbatches, rows, seq, ...] to [microbatches * chunks, rows, seq / chunks, ...].

    Arrays without a sequence dim are repeated for every chunk.
    """

    def one(x: jax.Array) -> jax.Array:
        if x.ndim < 3:
            return jnp.repeat(x, chunks, axis=0)
        cut = x.reshape(*x.shape[:2], chunks, -1, *x.shape[3:])
        return jnp.moveaxis(cut, 2, 1).reshape(-1, x.shape[1], *cut.shape[3:])

    return tree if chunks == 1 else jax.tree.map(one, tree)


def check_chunks(x: jax.Array, schedule: Schedule) -> None:
    """Checks that the input of the first layer can be split into chunks.

    Args:
      x: the input, [rows, seq, ...].
      schedule: the schedule.

    Raises:
      ModelError: ``x`` has fewer than three dims, or the chunks do not divide the second one.
    """
    chunks = schedule.sequence_chunks
    if chunks > 1 and (x.ndim < 3 or x.shape[1] % chunks):
        raise ModelError(
            f"PipelineLoss(embed=...) returned {describe(x)}, but the schedule {schedule.name!r} splits the second "
            f"dim into {chunks} chunks, which must divide it. Remedy: return [rows, seq, ...], with the length of the "
            "batch's sequences."
        )


def joined(x: jax.Array, chunks: int) -> jax.Array:
    """Reshapes [microbatches * chunks, rows, seq / chunks, ...] to [microbatches, rows, seq, ...]."""
    if chunks == 1:
        return x
    chunked = jnp.moveaxis(x.reshape(-1, chunks, *x.shape[1:]), 1, 2)
    return chunked.reshape(*chunked.shape[:2], -1, *chunked.shape[4:])


def slots_of(at: Callable[[str], jax.Array], kind: str, kept: Any, chunks: int) -> Any:
    """Returns the slots of a forward (``f``) or a backward (``b``); for full sequences, only that of the residuals.

    Args:
      at: reads a field of the stage's row.
      kind: ``f`` or ``b``.
      kept: the slot of the residuals.
      chunks: the number of chunks in a sequence.
    """
    if chunks == 1:
        return kept
    chunk = at(f"{kind}_microbatch") % chunks
    return Slots(kept, at(f"{kind}_carry"), at("b_back"), chunk)


def _floats(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))
