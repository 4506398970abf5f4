"""What a matmul in several dimensions sends: the collectives of both passes, in bytes of one device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxpar.parallel.precision.policy import Precision
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
      weight_itemsize: bytes of a number of a weight while it is gathered.
      grad_itemsize: bytes of a number of a weight's gradient while it is summed.
    """

    routes: tuple[MatmulRoute, ...]
    x: tuple[int, ...]
    ws: tuple[tuple[int, ...], ...]
    itemsize: int
    weight_itemsize: int
    grad_itemsize: int

    @classmethod
    def of(
        cls, x: Any, ws: Sequence[Any], routes: Sequence[MatmulRoute], precision: Precision | None = None
    ) -> Matmuls:
        """Returns the matmuls of arrays, or of their shapes and dtypes, in a step of this precision."""
        precision = Precision() if precision is None else precision
        compute = itemsize(x.dtype)
        gathered, summed = precision.gathering(x.dtype), precision.summing(x.dtype)
        return cls(
            tuple(routes),
            tuple(x.shape),
            tuple(tuple(w.shape) for w in ws),
            compute,
            compute if gathered is None else itemsize(gathered),
            compute if summed is None else itemsize(summed),
        )

    def sent(self, sizes: MeshSizes) -> list[Sent]:
        """Returns the collectives on a mesh of these sizes. The backward pass gathers input and weights again.

        A program that computes the products again in its backward pass also sends :meth:`sent_again`.
        """
        found: list[Sent] = []
        for route, w in zip(self.routes, self.ws, strict=True):
            n = route.contracting_dims
            y = (*self.x[: len(self.x) - n], *w[n:])
            # Weights of one input share its collectives.
            x = [route.x] if route is self.routes[0] else []
            for backward in (False, True):
                for operand in x:
                    found += self._gathered(backward, "input", operand, self._held(self.x, operand, sizes), sizes)
                held = self._held(w, route.w, sizes, self.weight_itemsize)
                found += self._gathered(backward, "weight", route.w, held, sizes)
            result, grad = self._held(y, route.y, sizes), self._held(w, route.w_grad, sizes, self.grad_itemsize)
            found += self._reduced(False, "result", route.y, result, sizes)
            found += self._gathered(True, "gradient of the result", route.y, result, sizes)
            for operand in x:
                found += self._reduced(
                    True, "gradient of the input", operand, self._held(self.x, operand, sizes), sizes
                )
            found += self._reduced(True, "gradient of the weight", route.w_grad, grad, sizes)
        return found

    def sent_again(self, sizes: MeshSizes) -> list[Sent]:
        """Returns what the backward pass also sends if it computes the products again, as rematerialization does.

        These are the sums of the results. It gathers input and weights once, for the products and for the gradients.
        """
        return [replace(one, backward=True) for one in self.sent(sizes) if one.what == "result"]

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
        return sum(self._held(w, route.w, sizes) for route, w in zip(self.routes, self.ws, strict=True))

    def input_bytes(self, sizes: MeshSizes) -> int:
        """Returns the bytes of a device's shard of the input, which the backward pass keeps."""
        return self._held(self.x, self.routes[0].x, sizes)

    def _held(self, shape: Sequence[int], operand: MatmulOperand, sizes: MeshSizes, itemsize: int | None = None) -> int:
        """Returns the bytes of a device's shard of an operand, by default in the compute dtype."""
        shards = math.prod(num_shards_over(axes, sizes) for axes in operand.shards)
        return (self.itemsize if itemsize is None else itemsize) * math.prod(shape) // shards

    def _gathered(
        self, backward: bool, what: str, operand: MatmulOperand, held: int, sizes: MeshSizes
    ) -> Iterator[Sent]:
        for move in operand.moves:
            n = num_shards_over(move.axes, sizes)
            yield Sent(backward, what, "all-gather", move.axes, held * (n - 1))
            held *= n

    def _reduced(
        self, backward: bool, what: str, operand: MatmulOperand, held: int, sizes: MeshSizes
    ) -> Iterator[Sent]:
        if operand.summed:
            n = num_shards_over(operand.summed, sizes)
            yield Sent(backward, what, "all-reduce", operand.summed, 2 * held * (n - 1) / n)
        for move in operand.moves:
            n = num_shards_over(move.axes, sizes)
            if move.summed:
                yield Sent(backward, what, "reduce-scatter", move.axes, held * (n - 1))
            held *= n
