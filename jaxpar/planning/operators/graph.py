"""``OperatorGraph``: the operators of a step by named dim, the arrays between them, and how each may be sharded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

type Strategy = tuple[str | None, ...]
"""For each mesh axis the dim of an operator that it shards; ``None`` where it shards none."""


@dataclass(frozen=True)
class DimArray:
    """An array that an operator reads or makes.

    Attributes:
      names: of its dims; ``None`` for a dim that is not sharded.
      sizes: of its dims.
      itemsize: bytes of an element.
    """

    names: tuple[str | None, ...]
    sizes: tuple[int, ...]
    itemsize: int = 2

    @property
    def bytes(self) -> int:
        """Bytes, without a mesh."""
        return math.prod(self.sizes) * self.itemsize


@dataclass(frozen=True)
class Operand(DimArray):
    """An array that an operator reads.

    Attributes:
      sharers: operators of weights that read the same activation; their gradients of it are summed before they are
        reduced.
      differentiable: whether it has a gradient.
    """

    sharers: int = 1
    differentiable: bool = True


@dataclass(frozen=True)
class Operator:
    """An operator of the forward pass with the elementwise operations that follow it.

    Attributes:
      name: for messages.
      sizes: dim → size of each dim that may be sharded.
      operands: what it reads.
      result: what it makes. A dim that only operands have is summed over.
      flops: of one run.
      times: runs in a step.
      path: of a parameter or an array of the batch, which is an operator without operands; "" for all others.
    """

    name: str
    sizes: Mapping[str, int]
    operands: tuple[Operand, ...]
    result: DimArray
    flops: float = 0.0
    times: int = 1
    path: str = ""

    def strategies(self, mesh: Mapping[str, int], allowed: Mapping[str, Collection[str]]) -> tuple[Strategy, ...]:
        """Returns every way to shard the operator on a mesh: each axis shards a dim that it divides, or none.

        Args:
          mesh: axis → size.
          allowed: axis → the dims that it may shard.

        >>> matmul = Operator("up", {"batch": 8, "mlp": 6}, (), DimArray(("batch", "mlp"), (8, 6)))
        >>> matmul.strategies({"data": 4}, {"data": ("batch", "mlp")})
        (('batch',), (None,))
        """
        choices = [
            [*(name for name in self.sizes if size > 1 and name in allowed[axis]), None] for axis, size in mesh.items()
        ]
        return tuple(s for s in itertools.product(*choices) if self.divides(mesh, s))

    def divides(self, mesh: Mapping[str, int], strategy: Strategy) -> bool:
        """Whether a strategy's axes divide its dims."""
        ways: dict[str, int] = {}
        for name, size in zip(strategy, mesh.values(), strict=True):
            if name is not None:
                ways[name] = ways.get(name, 1) * size
        return all(name in self.sizes and self.sizes[name] % n == 0 for name, n in ways.items())


@dataclass(frozen=True)
class Edge:
    """An array that one operator makes and another reads.

    Attributes:
      source, target: places in ``OperatorGraph.operators``.
      array: as the target reads it.
      times: how often it is handed on in a step.
      differentiable: whether its gradient goes back.
    """

    source: int
    target: int
    array: DimArray
    times: int = 1
    differentiable: bool = True


@dataclass(frozen=True)
class OperatorGraph:
    """The operators of a step, in an order in which each follows those that it reads, except for loops.

    Attributes:
      operators: the operators.
      edges: the arrays between them.
    """

    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All dims that may be sharded."""
        return tuple(sorted({name for operator in self.operators for name in operator.sizes}))

    @cached_property
    def around(self) -> tuple[tuple[int, ...], ...]:
        """The places of the edges of each operator."""
        found: list[list[int]] = [[] for _ in self.operators]
        for k, edge in enumerate(self.edges):
            for end in {edge.source, edge.target}:
                found[end].append(k)
        return tuple(map(tuple, found))
