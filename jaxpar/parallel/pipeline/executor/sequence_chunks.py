"""Sequences in chunks (Sun et al. 2024, arXiv:2406.03488): a stage's layers for one chunk, with what the chunks before it have left.

What a layer leaves for later chunks (attention: keys and values) is its *carry*: arrays [rows, seq, ...] of a whole microbatch, of which each chunk
writes its own part and reads nothing behind that. So the full carry serves every chunk of a microbatch, forward and backward: it lies
in a pool once, no residual has a copy of it, and of its cotangent each chunk hands on what it adds to the parts before its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.errors import ModelError
from jaxpar.parallel.pipeline.executor.layer_inputs import LayerScalars
from jaxpar.parallel.pipeline.executor.stage import Add, Buffers, Chunk, indices, read, write
from jaxpar.parallel.pipeline.schedules.schedule import Schedule

type CarriedLayer = Callable[[Any, jax.Array, Any, Any, jax.Array], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class SequenceCarry:
    """How layers take a sequence in chunks.

    Attributes:
      layer: ``layer(weights, x, side, carry, chunk) -> (x, carry)`` of one layer and one chunk, its number traced.
      empty: ``empty(batch)`` of a whole microbatch: arrays [rows, seq, ...], or their shapes.
      chunks: of a sequence.
    """

    layer: CarriedLayer
    empty: Callable[[Any], Any]
    chunks: int

    def shapes(self, pieces: Any) -> Any:
        """Of a layer's carry, for a batch [devices, chunks of microbatches, rows, ...].

        Raises:
          ModelError: a leaf is no [rows, seq, ...].
        """

        def whole(x: jax.Array) -> jax.ShapeDtypeStruct:
            rows, *others = x.shape[2:]
            return jax.ShapeDtypeStruct((rows, *(n * self.chunks for n in others[:1]), *others[1:]), x.dtype)

        batch = jax.tree.map(whole, pieces)
        found = jax.eval_shape(self.empty, batch)
        rows, seq = next(x.shape[:2] for x in jax.tree.leaves(batch) if x.ndim > 1)
        for x in jax.tree.leaves(found):
            if x.shape[:2] != (rows, seq):
                raise ModelError(
                    f"PipelineLoss(chunk_carry=...) has {_said(x)}, but each chunk of a microbatch of {rows} rows of {seq} tokens writes its part. Remedy: arrays "
                    f"[rows, seq, ...], here [{rows}, {seq}, ...]."
                )
        return found


class Slots(NamedTuple):
    """Where a chunk's things lie: residuals (``None``: none are kept), its microbatch's carry and the carry's cotangent; and which chunk it is."""

    kept: jax.Array | None
    carry: jax.Array
    back: jax.Array
    chunk: jax.Array


class Pools(NamedTuple):
    """Buffers [slots, layers, ...]: of residuals, of carries, and of the cotangents of those that have one, in fp32 or wider."""

    kept: Buffers
    carry: Buffers
    back: Buffers


class _Linear(NamedTuple):
    """A layer's backward: its leaves and structure, and for each leaf whether it is ``there`` anyway, in the buffers (``kept``), or which of the carry."""

    leaves: list[Any]
    structure: Any
    where: list[str | int]


@dataclass(frozen=True)
class Carried(Chunk):
    """Layers of a stage for one chunk of a sequence.

    Attributes:
      carry: how they take it.
      like: the shapes of a layer's carry.
    """

    carry: SequenceCarry = field(kw_only=True)
    like: Any = field(kw_only=True)

    def pools(self, kept: Buffers, layers: int, sizes: dict[str, int]) -> Pools:
        """Empty ones, with a slot more than there are for what nobody reads."""
        leaves = jax.tree.leaves(self.like)
        zeros = lambda name, x, dtype: jnp.zeros((sizes[name] + 1, layers, *x.shape), dtype)
        back = [zeros("back", x, jnp.promote_types(x.dtype, jnp.float32)) for x in leaves if _floats(x)]
        return Pools(kept, [zeros("carry", x, x.dtype) for x in leaves], back)

    def forward(
        self, x: jax.Array, side: Any, buffers: Any, slot: Any, sums: LayerScalars | None = None
    ) -> tuple[jax.Array, Any, LayerScalars]:
        """The result, the pools with what this chunk leaves, and no extras."""

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
            return self._where(i, y, x), Pools(kept, carry, pools.back)

        y, pools = jax.lax.fori_loop(0, self.times, one, (x, buffers))
        return y, pools, sums or {}

    def extras(self, x: jax.Array, side: Any) -> LayerScalars:
        """A layer that carries gives none."""
        return {}

    def backward(
        self, buffers: Any, slot: Any, side: Any, cotangent: jax.Array, add: Add, sums: Any
    ) -> tuple[jax.Array, Any, Any]:
        """The cotangent of the input, the sums of gradients, and the pools with the cotangent of what the chunks before have left."""
        last = slot.chunk == self.carry.chunks - 1

        def one(back: jax.Array, carried: tuple[jax.Array, Any, Buffers]) -> tuple[jax.Array, Any, Buffers]:
            (cotangent, sums, pool), i = carried, self.times - 1 - back
            # Of the last chunk nobody has read anything yet; what lies there is of another microbatch.
            later = [jnp.where(last, 0, x) for x in read(pool, slot.back, i)]
            past = read(buffers.carry, slot.carry, i)
            pull = self._backward_of(
                self._weights(i), side, past, slot.chunk, read(buffers.kept, slot.kept, i), cotangent
            )
            floats = [x for x in past if _floats(x)]
            own = [self._alone(x, leaf, slot.chunk) for x, leaf in zip(later, floats, strict=True)]
            grads, before, more = pull((cotangent, own))
            later = [x + y.astype(x.dtype) for x, y in zip(later, more, strict=True)]
            pool = [write(buffer, x, slot.back, i) for buffer, x in zip(pool, later, strict=True)]
            return self._where(i, before, cotangent), add(sums, i, grads, self._here(i)), pool

        cotangent, sums, pool = jax.lax.fori_loop(0, self.times, one, (cotangent, sums, buffers.back))
        return cotangent, sums, buffers._replace(back=pool)

    def kept(self, x: jax.Array, side: Any, i: Any = 0) -> tuple[jax.Array, Buffers]:
        """Zeros as the result and the residuals of one layer."""

        def one(weights: Any, x: jax.Array, side: Any, past: Buffers, chunk: jax.Array) -> tuple[jax.Array, Buffers]:
            y, _, linear = self._linear(weights, x, side, past, chunk)
            return y, [leaf for leaf, where in zip(linear.leaves, linear.where, strict=True) if where == "kept"]

        # Of a number that is known other residuals would be left.
        chunk = jax.ShapeDtypeStruct((), jnp.int32)
        found = jax.eval_shape(one, self._weights(i), x, side, jax.tree.leaves(self.like), chunk)
        zeros: tuple[jax.Array, Buffers] = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), found)
        return zeros

    def _carried(
        self, weights: Any, x: jax.Array, side: Any, past: Buffers, chunk: jax.Array
    ) -> tuple[jax.Array, Buffers]:
        structure: Any = jax.tree.structure(self.like)
        y, carry = self.carry.layer(weights, x, side, jax.tree.unflatten(structure, past), chunk)
        now, found = jax.tree.flatten(carry)
        was, got = (", ".join(map(_said, leaves)) for leaves in (jax.tree.leaves(self.like), now))
        if structure != found or was != got:
            raise ModelError(
                f"PipelineLoss(chunked_layer=...) was given a carry of {was} and returned {got}, but it goes from chunk to chunk as it is. Remedy: "
                f"jax.lax.dynamic_update_slice_in_dim(carry, part, chunk * part.shape[1], 1)."
            )
        return y, now

    def _linear(
        self, weights: Any, x: jax.Array, side: Any, past: Buffers, chunk: jax.Array
    ) -> tuple[jax.Array, Buffers, _Linear]:
        """The result, the carry, and the backward of weights, input and carry."""
        floats = [leaf for leaf in past if _floats(leaf)]

        def run(weights: Any, x: jax.Array, floats: Buffers) -> tuple[tuple[jax.Array, Buffers], Buffers]:
            rest = iter(floats)
            given = [next(rest) if _floats(leaf) else leaf for leaf in past]
            y, now = self._carried(weights, x, side, given, chunk)
            return (y, [leaf for leaf in now if _floats(leaf)]), [leaf for leaf in now if not _floats(leaf)]

        (y, changed), pull, others = jax.vjp(run, weights, x, floats, has_aux=True)
        sources, rest = [iter(others), iter(changed)], jax.tree.flatten(pull)
        now = [next(sources[_floats(leaf)]) for leaf in past]
        there = [*jax.tree.leaves(weights), *jax.tree.leaves(side), *past, chunk]

        def where(leaf: Any) -> str | int:
            if any(leaf is have for have in there):
                return "there"
            # With later chunks in it, too, which this one's backward does not look at.
            return next((n for n, have in enumerate(now) if leaf is have), "kept")

        return y, now, _Linear(*rest, [where(leaf) for leaf in rest[0]])

    def _backward_of(
        self, weights: Any, side: Any, past: Buffers, chunk: jax.Array, kept: Buffers, like: jax.Array
    ) -> Callable[[Any], tuple[Any, jax.Array, Buffers]]:
        """The backward of a layer with what was kept, and the carry, put in; the forward that it is taken from is dead code."""
        _, _, linear = self._linear(weights, jnp.zeros_like(like), side, past, chunk)
        rest = iter(kept)

        def leaf(found: Any, where: str | int) -> Any:
            return past[where] if isinstance(where, int) else found if where == "there" else next(rest)

        leaves = [leaf(found, where) for found, where in zip(linear.leaves, linear.where, strict=True)]
        pull: Callable[[Any], tuple[Any, jax.Array, Buffers]] = jax.tree.unflatten(linear.structure, leaves)
        return pull

    def _part(self, x: jax.Array, chunk: jax.Array) -> jax.Array:
        """A chunk's own part of [rows, seq, ...]."""
        size = x.shape[1] // self.carry.chunks
        return jax.lax.dynamic_slice_in_dim(x, chunk * size, size, 1)

    def _alone(self, x: jax.Array, like: jax.Array, chunk: jax.Array) -> jax.Array:
        """``x`` with zeros beside a chunk's own part, in the dtype of ``like``."""
        part = self._part(x, chunk).astype(like.dtype)
        return jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(like), part, chunk * part.shape[1], 1)

    def _put(self, pool: jax.Array, part: jax.Array, slot: Slots, i: jax.Array) -> jax.Array:
        """``pool`` [slots, layers, rows, seq, ...] with a chunk's own part of a layer in it."""
        where = indices(slot.carry, i, 0, slot.chunk * part.shape[1], *(0,) * (part.ndim - 2))
        return jax.lax.dynamic_update_slice(pool, part[None, None], where)


def in_chunks(tree: Any, chunks: int) -> Any:
    """Arrays [microbatches, rows, seq, ...] as [microbatches * chunks, rows, seq / chunks, ...]; what has no sequence comes with every chunk."""

    def one(x: jax.Array) -> jax.Array:
        if x.ndim < 3:
            return jnp.repeat(x, chunks, axis=0)
        cut = x.reshape(*x.shape[:2], chunks, -1, *x.shape[3:])
        return jnp.moveaxis(cut, 2, 1).reshape(-1, x.shape[1], *cut.shape[3:])

    return tree if chunks == 1 else jax.tree.map(one, tree)


def check_chunks(x: jax.Array, schedule: Schedule) -> None:
    """What the first layer is given goes in chunks as the batch does."""
    chunks = schedule.sequence_chunks
    if chunks > 1 and (x.ndim < 3 or x.shape[1] % chunks):
        raise ModelError(
            f"PipelineLoss(embed=...) gave {_said(x)}, whose second dim the schedule {schedule.name!r} cuts into {chunks} chunks, which do not divide it. "
            f"Remedy: [rows, seq, ...], as long as the batch's sequences."
        )


def joined(x: jax.Array, chunks: int) -> jax.Array:
    """[microbatches * chunks, rows, seq / chunks, ...] as [microbatches, rows, seq, ...]."""
    if chunks == 1:
        return x
    apart = jnp.moveaxis(x.reshape(-1, chunks, *x.shape[1:]), 1, 2)
    return apart.reshape(*apart.shape[:2], -1, *apart.shape[4:])


def slots_of(at: Callable[[str], jax.Array], kind: str, kept: Any, chunks: int) -> Any:
    """Where the things of a forward (``f``) or a backward (``b``) lie: of whole sequences a slot of residuals alone."""
    if chunks == 1:
        return kept
    chunk = at(f"{kind}_microbatch") % chunks
    return Slots(kept, at(f"{kind}_carry"), at("b_back"), chunk)


def _floats(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _said(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"
