"""What a matmul in several dimensions sends: the collectives of both passes, in bytes of one device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxpar.parallel.tensor.route import MatmulOperand, MatmulRoute
from jaxpar.sharding.resolve import num_shards_over
from jaxpar.sharding.rules import Axes
from jaxpar.utils.arrays import itemsize

type MeshSizes = Mapping[str, int]


@dataclass(frozen=True)
class Sent:
    """One collective of a matmul.

    Attributes:
      backward: whether it is part of the backward pass.
      what: the array: ``input``, ``weight``, ``result``, or the gradient of one of them.
      kind: the operation, as XLA names it.
      axes: the mesh axes.
      wire_bytes: the bytes that one device sends, by the best ring algorithm.
    """

    backward: bool
    what: str
    kind: Literal["all-gather", "reduce-scatter", "all-reduce"]
    axes: Axes
    wire_bytes: float


@dataclass(frozen=True)
class Matmuls:
    """The matmuls of one input with one or more weights.

    Attributes:
      routes: one for each weight.
      x: shape of the input.
      ws: shapes of the weights.
      itemsize: bytes of a number in the compute dtype.
    """

    routes: tuple[MatmulRoute, ...]
    x: tuple[int, ...]
    ws: tuple[tuple[int, ...], ...]
    itemsize: int

    @classmethod
    def of(cls, x: Any, ws: Sequence[Any], routes: Sequence[MatmulRoute]) -> Matmuls:
        """Returns the matmuls of arrays, or of their shapes and dtypes."""
        return cls(tuple(routes), tuple(x.shape), tuple(tuple(w.shape) for w in ws), itemsize(x.dtype))

    def sent(self, sizes: MeshSizes) -> list[Sent]:
        """Returns the collectives on a mesh of these sizes. The backward pass gathers input and weights again."""
        found: list[Sent] = []
        for route, w in zip(self.routes, self.ws, strict=True):
            n = route.contracting_dims
            y = (*self.x[: len(self.x) - n], *w[n:])
            # Weights of one input share its collectives.
            x = [route.x] if route is self.routes[0] else []
            for backward in (False, True):
                for operand in x:
                    found += self._gathered(backward, "input", operand, self.x, sizes)
                found += self._gathered(backward, "weight", route.w, w, sizes)
            found += self._reduced(False, "result", route.y, y, sizes)
            found += self._gathered(True, "gradient of the result", route.y, y, sizes)
            for operand in x:
                found += self._reduced(True, "gradient of the input", operand, self.x, sizes)
            found += self._reduced(True, "gradient of the weight", route.w_grad, w, sizes)
        return found

    def describe(self, sizes: MeshSizes) -> str:
        """Returns what the collectives of the forward pass move, and the bytes of both passes, as a text."""
        sent = self.sent(sizes)
        moves = [f"{one.kind} of the {one.what} over {', '.join(one.axes)}" for one in sent if not one.backward]
        forward = sum(one.wire_bytes for one in sent if not one.backward)
        backward = sum(one.wire_bytes for one in sent if one.backward)
        found = "; ".join(dict.fromkeys(moves)) or "no collective"
        return f"{found}; sends {round(forward):,} bytes forward and {round(backward):,} backward"

    def flops(self, sizes: MeshSizes) -> int:
        """Returns the FLOPs of one device in the forward pass; the backward pass has twice as many."""
        total = 0
        for route, w in zip(self.routes, self.ws, strict=True):
            n = route.contracting_dims
            whole = 2 * math.prod(self.x) * math.prod(w[n:])
            inside = (*route.x.inside[: len(self.x) - n], *route.w.inside)
            total += whole // math.prod(num_shards_over(axes, sizes) for axes in inside)
        return total

    def weight_bytes(self, sizes: MeshSizes) -> int:
        """Returns the bytes of a device's shards of the weights, in the compute dtype."""
        return sum(self._shard(w, route.w.shards, sizes) for route, w in zip(self.routes, self.ws, strict=True))

    def input_bytes(self, sizes: MeshSizes) -> int:
        """Returns the bytes of a device's shard of the input, which the backward pass keeps."""
        return self._shard(self.x, self.routes[0].x.shards, sizes)

    def _shard(self, shape: Sequence[int], shards: Sequence[Axes], sizes: MeshSizes) -> int:
        return self.itemsize * math.prod(shape) // math.prod(num_shards_over(axes, sizes) for axes in shards)

    def _gathered(
        self, backward: bool, what: str, operand: MatmulOperand, shape: Sequence[int], sizes: MeshSizes
    ) -> Iterator[Sent]:
        held = self._shard(shape, operand.shards, sizes)
        for move in operand.moves:
            n = num_shards_over(move.axes, sizes)
            yield Sent(backward, what, "all-gather", move.axes, held * (n - 1))
            held *= n

    def _reduced(
        self, backward: bool, what: str, operand: MatmulOperand, shape: Sequence[int], sizes: MeshSizes
    ) -> Iterator[Sent]:
        held = self._shard(shape, operand.shards, sizes)
        if operand.summed:
            n = num_shards_over(operand.summed, sizes)
            yield Sent(backward, what, "all-reduce", operand.summed, 2 * held * (n - 1) / n)
        for move in operand.moves:
            n = num_shards_over(move.axes, sizes)
            if move.summed:
                yield Sent(backward, what, "reduce-scatter", move.axes, held * (n - 1))
            held *= n
