"""Where a backward pass is cut in two: the least to keep between cotangents of inputs, made now, and gradients of weights, made later.

What is cheap and the first half has made, the second can make again from what that comes from; and what is cheap and only the second wants can be made in the first
(the gradient of a norm's scale is a row, what it is summed from two activations). So what is kept is a cut between what the first half alone can
make and what the products of the second read. The least in bytes is a minimum cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

_CHEAP = frozenset(
    (
        *("add", "add_any", "sub", "mul", "div", "rem", "neg", "abs", "sign", "max", "min", "clamp", "square", "integer_pow", "pow"),
        *("exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "sin", "cos", "erf", "sqrt", "rsqrt", "cbrt"),
        *("floor", "ceil", "round", "is_finite", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "select_n"),
        *("convert_element_type", "reduce_precision", "broadcast_in_dim", "reshape", "transpose", "squeeze"),
        *("slice", "concatenate", "pad", "rev", "split", "iota", "copy", "name"),
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"),
    )
)  # fmt: skip
"""Primitives that cost next to nothing beside a product, and send nothing: they can be done in either half, or in both."""
_MOST = 2**29
"""What all capacities sum to at the most: the solver counts in int32."""


def least_kept(jaxpr: Jaxpr, free: AbstractSet[Var], wanted: Sequence[Any], early: Sequence[JaxprEqn]) -> list[Var]:
    """The values to keep for ``wanted``, fewest bytes in all, in the order in which they are made.

    Args:
      jaxpr: of both halves.
      free: values that both have.
      wanted: what the second half gives.
      early: the equations that the first half cannot do without.
    """
    graph = _Graph(jaxpr, free, set(map(id, early)))
    graph.flows_to(wanted)
    kept = graph.cut()
    made = [v for e in jaxpr.eqns for v in e.outvars]
    return [v for v in (*jaxpr.invars, *made) if v in kept]


@dataclass
class _Graph:
    """Values as pairs of nodes with their bytes between them; source and sink are nodes 0 and 1."""

    jaxpr: Jaxpr
    free: AbstractSet[Var]
    early: set[int]
    numbers: dict[Var, int] = field(default_factory=dict)
    edges: dict[tuple[int, int], float] = field(default_factory=dict)

    def flows_to(self, wanted: Iterable[Any]) -> None:
        """Everything that these come from, up to what only the first half can have made."""
        made = {v: e for e in self.jaxpr.eqns for v in e.outvars}
        late = self._late()
        ends = {v for v in wanted if isinstance(v, Var)} - self.free
        stack, seen = list(ends), set(ends)
        while stack:
            v = stack.pop()
            maker = made.get(v)
            # What neither half may make again comes from outside of them, or from a product of the first.
            came = _read(maker) if maker is not None and (_is_cheap(maker) or v in late) else None
            if v not in late:
                after = self._after(v)
                self.edges[after - 1, after] = _bytes(v)
                if v in ends:
                    self.edges[after, 1] = math.inf
                if came is None:
                    self.edges[0, after - 1] = math.inf
            for u in {*(came or ())} - self.free:
                if u not in late:
                    self.edges[self._after(u), 1 if v in late else self._after(v) - 1] = math.inf
                if u not in seen:
                    seen.add(u)
                    stack.append(u)

    def cut(self) -> set[Var]:
        """The values of a minimum cut, of several the last: behind it least is made again."""
        # Half a second, which only schedules that split backwards should wait for.
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        nodes = 2 + 2 * len(self.numbers)
        if not self.edges or not any(source == 0 for source, _ in self.edges):
            return set()
        total = sum(size for size in self.edges.values() if size < math.inf)
        scale = min(1.0, _MOST / total)
        sizes = [_MOST * 2 if size == math.inf else max(1, round(size * scale)) for size in self.edges.values()]
        ends = np.array(list(self.edges))
        capacity = csr_array((np.array(sizes, np.int32), (ends[:, 0], ends[:, 1])), shape=(nodes, nodes))
        left = capacity - maximum_flow(capacity, 0, 1).flow
        left.eliminate_zeros()
        reaches = set(breadth_first_order(left.T.tocsr(), 1, return_predecessors=False).tolist())
        return {v for v, n in self.numbers.items() if n in reaches and n - 1 not in reaches}

    def _late(self) -> set[Var]:
        """What only the second half makes: products that the first has no use for, and all that comes of them."""
        found: set[Var] = set()
        for e in self.jaxpr.eqns:
            dear = id(e) not in self.early and not _is_cheap(e)
            if dear or any(v in found for v in _read(e)):
                found |= {*e.outvars}
        return found

    def _after(self, v: Var) -> int:
        """The node behind a value; the one before it is one less."""
        return self.numbers.setdefault(v, 3 + 2 * len(self.numbers))


def _is_cheap(equation: JaxprEqn) -> bool:
    return equation.primitive.name in _CHEAP


def _read(equation: JaxprEqn) -> list[Var]:
    return [v for v in equation.invars if isinstance(v, Var)]


def _bytes(v: Var) -> int:
    aval: Any = v.aval
    return max(1, math.prod(aval.shape) * aval.dtype.itemsize)
