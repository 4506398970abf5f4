"""Layers as the stages want them: of a stack that lies in the model's order, each stage's chunks, and their gradients back.

Where every stage has one piece the stack already lies so. Else layers go to another stage once a step, before their weights are gathered and after
their gradients are scattered, when they are smallest: in rounds, in each of which a stage sends to one other and receives from one, or, where
every stage has one unit for each, in one exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.parallel.pipeline.schedules.orders import Pieces

AXIS = "pipeline"
type _Move = tuple[int, int, int, int]
"""From a stage and its place to a stage and its place."""


@dataclass(frozen=True)
class Layers:
    """Where each layer lies and where it is wanted.

    Attributes:
      total: layers of the model.
      pieces: of the pipeline.
      each: how many layers each piece has, in the order of the model.
    """

    total: int
    pieces: Pieces
    each: tuple[int, ...]

    @property
    def most(self) -> int:
        """Layers of the largest piece: as many places as every chunk has."""
        return max(self.each)

    @property
    def counts(self) -> np.ndarray | None:
        """[stages, chunks], how many layers are there; ``None`` where all places are filled."""
        if len(set(self.each)) == 1:
            return None
        counts = np.zeros((self.pieces.stages, self.pieces.chunks), np.int32)
        for piece, count in enumerate(self.each):
            counts[self.pieces.place(piece)] = count
        return counts

    @property
    def starts(self) -> np.ndarray:
        """[stages, chunks], the number in the model of the first layer of each."""
        starts = np.zeros((self.pieces.stages, self.pieces.chunks), np.int32)
        for piece in range(len(self.each)):
            starts[self.pieces.place(piece)] = sum(self.each[:piece])
        return starts

    def cut(self, w: jax.Array) -> jax.Array:
        """A stage's part [layers, ...] of a stack as its [chunks, layers, ...]; or the whole stack, where it is not split over stages."""
        chunks, shape = self.pieces.chunks, w.shape[1:]
        if w.shape[0] == self.total and self.pieces.stages > 1:
            index = np.zeros((self.pieces.stages, chunks * self.most), np.int32)
            for stage, place, layer in self._wanted():
                index[stage, place] = layer
            mine = jnp.asarray(index)[jax.lax.axis_index(AXIS)]
            return jnp.take(w, mine, axis=0).reshape(chunks, self.most, *shape)
        if self._straight:
            return w.reshape(chunks, self.most, *shape)
        unit = self._unit
        moved = _moved(w.reshape(-1, unit, *shape), self._moves(unit), chunks * self.most // unit)
        return moved.reshape(chunks, self.most, *shape)

    def back(self, w: jax.Array, *, split: bool) -> jax.Array:
        """A stage's [chunks, layers, ...] as its part of the stack, or as the whole stack, zero but for the stage's own layers."""
        shape = w.shape[2:]
        if not split and self.pieces.stages > 1:
            index = np.full((self.pieces.stages, self.pieces.chunks * self.most), self.total, np.int32)
            for stage, place, layer in self._wanted():
                index[stage, place] = layer
            mine = jnp.asarray(index)[jax.lax.axis_index(AXIS)]
            empty = jnp.zeros((self.total, *shape), w.dtype)
            return empty.at[mine].set(w.reshape(-1, *shape), mode="drop")
        if self._straight:
            return w.reshape(-1, *shape)
        unit = self._unit
        back = [(to, place, stage, at) for stage, at, to, place in self._moves(unit)]
        moved = _moved(w.reshape(-1, unit, *shape), back, self.total // self.pieces.stages // unit)
        return moved.reshape(-1, *shape)

    @property
    def _straight(self) -> bool:
        return len(set(self.each)) == 1 and (self.pieces.chunks == 1 or self.pieces.stages == 1)

    @property
    def _unit(self) -> int:
        """Layers that always go together."""
        return self.most if len(set(self.each)) == 1 else 1

    def _wanted(self) -> list[tuple[int, int, int]]:
        """Stage, place and number of every layer."""
        found, layer = [], 0
        for piece, count in enumerate(self.each):
            stage, chunk = self.pieces.place(piece)
            found += [(stage, chunk * self.most + i, layer + i) for i in range(count)]
            layer += count
        return found

    def _moves(self, unit: int) -> list[_Move]:
        """Of units of layers."""
        per = self.total // self.pieces.stages
        return [
            (layer // per, layer % per // unit, stage, place // unit)
            for stage, place, layer in self._wanted()
            if place % unit == 0
        ]


def _rounds(moves: list[_Move]) -> list[list[_Move]]:
    """Moves such that in a round every stage sends once at the most and receives once; those that stay go by themselves."""
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


def _is_exchange(moves: list[_Move], stages: int) -> bool:
    """Whether every stage has a unit for each, in their order, and keeps what comes by whom it comes from."""
    return set(moves) == {(stage, to, to, stage) for stage in range(stages) for to in range(stages)}


def _moved(w: jax.Array, moves: list[_Move], places: int) -> jax.Array:
    """[places, unit, ...] of a stage, of what the stages have."""
    stages = jax.lax.axis_size(AXIS)
    if _is_exchange(moves, stages):
        return jax.lax.all_to_all(w, AXIS, 0, 0, tiled=True)
    me = jax.lax.axis_index(AXIS)
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
