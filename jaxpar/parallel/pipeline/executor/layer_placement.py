"""Moves the layers of a stack in model order to the chunks of each stage, and their gradients back.

If every stage has one piece and all pieces are equal, the stack is already in place. Otherwise layers move between
stages once per step, when they are smallest: before weights are gathered and after gradients are scattered. They move
in rounds of permutes, in which a stage sends to at most one stage and receives from at most one. No all-to-all moves
them, because XLA:TPU overlaps it with nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.parallel.pipeline.schedules.orders import Pieces

AXIS = "pipeline"
type _Move = tuple[int, int, int, int]
"""Source stage, source slot, target stage, target slot."""


@dataclass(frozen=True)
class Layers:
    """Where the stack stores each layer, and which stage needs it.

    Attributes:
      total: the number of layers in the model.
      pieces: the placement of the pipeline's pieces.
      each: the number of layers in each piece, in model order.
    """

    total: int
    pieces: Pieces
    each: tuple[int, ...]

    @property
    def most(self) -> int:
        """The number of layers in the largest piece, which is the number of slots in every chunk."""
        return max(self.each)

    @property
    def counts(self) -> np.ndarray | None:
        """[stages, chunks], the number of layers in each chunk; ``None`` if all slots are used."""
        return None if self._even else self.sizes

    @property
    def sizes(self) -> np.ndarray:
        """[stages, chunks], the number of layers in each chunk."""
        return self._by_chunk(self.each)

    @property
    def starts(self) -> np.ndarray:
        """[stages, chunks], the index in the model of the first layer of each chunk."""
        return self._by_chunk([sum(self.each[:piece]) for piece in range(len(self.each))])

    def _by_chunk(self, numbers: Sequence[int]) -> np.ndarray:
        """Returns a number of each piece as [stages, chunks]."""
        found = np.zeros((self.pieces.stages, self.pieces.chunks), np.int32)
        for piece, number in enumerate(numbers):
            found[self.pieces.place(piece)] = number
        return found

    def cut(self, w: jax.Array) -> jax.Array:
        """Returns a stage's layers as [chunks, layers, ...].

        Args:
          w: the stage's shard [layers, ...] of the stack, or the full stack if it is replicated over stages.
        """
        chunks, shape = self.pieces.chunks, w.shape[1:]
        if w.shape[0] == self.total and self.pieces.stages > 1:
            return jnp.take(w, self._own_layers(0), axis=0).reshape(chunks, self.most, *shape)
        if self._straight:
            return w.reshape(chunks, self.most, *shape)
        unit = self._unit
        moved = _moved(w.reshape(-1, unit, *shape), self._moves(unit), chunks * self.most // unit)
        return moved.reshape(chunks, self.most, *shape)

    def back(self, w: jax.Array, *, split: bool) -> jax.Array:
        """Returns a stage's gradients in the order of the stack; the inverse of :meth:`cut`.

        Args:
          w: [chunks, layers, ...].
          split: the stack is sharded over stages. If not, the result is the full stack, zero outside of the stage's
            layers.
        """
        shape = w.shape[2:]
        if not split and self.pieces.stages > 1:
            empty = jnp.zeros((self.total, *shape), w.dtype)
            return empty.at[self._own_layers(self.total)].set(w.reshape(-1, *shape), mode="drop")
        if self._straight:
            return w.reshape(-1, *shape)
        unit = self._unit
        back = [(to, place, stage, at) for stage, at, to, place in self._moves(unit)]
        moved = _moved(w.reshape(-1, unit, *shape), back, self.total // self.pieces.stages // unit)
        return moved.reshape(-1, *shape)

    def _own_layers(self, unused: int) -> jax.Array:
        """Returns the index of the layer in each slot of this stage, or ``unused``."""
        index = np.full((self.pieces.stages, self.pieces.chunks * self.most), unused, np.int32)
        for stage, place, layer in self._slots():
            index[stage, place] = layer
        return jnp.asarray(index)[jax.lax.axis_index(AXIS)]

    @property
    def _even(self) -> bool:
        return len(set(self.each)) == 1

    @property
    def _straight(self) -> bool:
        return self._even and (self.pieces.chunks == 1 or self.pieces.stages == 1)

    @property
    def _unit(self) -> int:
        """The number of layers that always move together."""
        return self.most if self._even else 1

    def _slots(self) -> list[tuple[int, int, int]]:
        """Returns the stage, slot and index of every layer."""
        found, layer = [], 0
        for piece, count in enumerate(self.each):
            stage, chunk = self.pieces.place(piece)
            found += [(stage, chunk * self.most + i, layer + i) for i in range(count)]
            layer += count
        return found

    def _moves(self, unit: int) -> list[_Move]:
        """Returns the moves of all units of ``unit`` layers."""
        per = self.total // self.pieces.stages
        units = (slot for slot in self._slots() if slot[1] % unit == 0)
        return [(layer // per, layer % per // unit, stage, place // unit) for stage, place, layer in units]


def _rounds(moves: list[_Move]) -> list[list[_Move]]:
    """Groups moves into rounds in which a stage sends and receives at most once; local moves have their own rounds."""
    rounds: list[list[_Move]] = []
    for move in sorted(moves, key=lambda move: (move[0] == move[2], move)):
        stays = move[0] == move[2]
        for found in rounds:
            alike = (found[0][0] == found[0][2]) is stays
            if alike and all(move[0] != other[0] and move[2] != other[2] for other in found):
                found.append(move)
                break
        else:
            rounds.append([move])
    return rounds


def _moved(w: jax.Array, moves: list[_Move], places: int) -> jax.Array:
    """Returns a stage's units after the moves, [places, unit, ...]."""
    stages, me = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
    result: Any = jnp.zeros((places + 1, *w.shape[1:]), w.dtype)
    for found in _rounds(moves):
        take, put = np.zeros(stages, np.int32), np.full(stages, places, np.int32)
        for stage, at, to, place in found:
            take[stage], put[to] = at, place
        mine = lambda each: jax.lax.dynamic_index_in_dim(jnp.asarray(each), me, 0, False, allow_negative_indices=False)
        x = jax.lax.dynamic_index_in_dim(w, mine(take), 0, keepdims=False, allow_negative_indices=False)
        if found[0][0] != found[0][2]:
            x = jax.lax.ppermute(x, AXIS, [(stage, to) for stage, _, to, _ in found])
        result = jax.lax.dynamic_update_index_in_dim(result, x, mine(put), 0, allow_negative_indices=False)
    return result[:places]
