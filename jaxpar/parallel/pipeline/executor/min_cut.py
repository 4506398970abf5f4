"""Chooses the values to store between the halves of a split backward, so that they have the fewest bytes.

The first half computes cotangents of inputs, the second half gradients of weights. The second half can recompute cheap
values of the first half from their operands. The first half can compute cheap values that only the second half needs:
the gradient of a norm's scale is one row, but it is a sum over two activations. The stored values are therefore a cut
between the values that only the first half can compute and the operands of the second half's products. A minimum cut
has the fewest bytes.
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
        *("add", "add_any", "sub", "mul", "div", "rem", "neg", "abs", "sign", "max", "min", "clamp",
          "square", "integer_pow", "pow"),
        *("exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "sin", "cos", "erf", "sqrt", "rsqrt", "cbrt"),
        *("floor", "ceil", "round", "is_finite", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor",
          "select_n"),
        *("convert_element_type", "reduce_precision", "broadcast_in_dim", "reshape", "transpose", "squeeze"),
        *("slice", "concatenate", "pad", "rev", "split", "iota", "copy", "name"),
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"),
    )
)  # fmt: skip
"""Primitives that cost little compared to a product and do not communicate: they may run in either half, or in both."""
_MOST = 2**29
"""The largest sum of all capacities: the solver counts in int32."""


def least_kept(jaxpr: Jaxpr, free: AbstractSet[Var], results: Sequence[Any], early: Sequence[JaxprEqn]) -> list[Var]:
    """Returns the values to store for ``results``, with the fewest bytes in total, in the order of their computation.

    Args:
      jaxpr: of both halves.
      free: the values that both halves have.
      results: the results of the second half.
      early: the equations that the first half needs.
    """
    graph = _Graph(jaxpr, free, set(map(id, early)))
    graph.flows_to(results)
    kept = graph.cut()
    made = [v for e in jaxpr.eqns for v in e.outvars]
    return [v for v in (*jaxpr.invars, *made) if v in kept]


@dataclass
class _Graph:
    """Each value is a pair of nodes with its bytes as the capacity between them; nodes 0 and 1 are source and sink."""

    jaxpr: Jaxpr
    free: AbstractSet[Var]
    early: set[int]
    numbers: dict[Var, int] = field(default_factory=dict)
    edges: dict[tuple[int, int], float] = field(default_factory=dict)

    def flows_to(self, results: Iterable[Any]) -> None:
        """Adds all values that these derive from, back to those that only the first half can compute."""
        producers = {v: e for e in self.jaxpr.eqns for v in e.outvars}
        late = self._late()
        ends = {v for v in results if isinstance(v, Var)} - self.free
        stack, seen = list(ends), set(ends)
        while stack:
            v = stack.pop()
            producer = producers.get(v)
            # A value that must not be recomputed is an input, or the result of an expensive equation of the first half.
            operands = _read(producer) if producer is not None and (_is_cheap(producer) or v in late) else None
            if v not in late:
                after = self._after(v)
                self.edges[after - 1, after] = _bytes(v)
                if v in ends:
                    self.edges[after, 1] = math.inf
                if operands is None:
                    self.edges[0, after - 1] = math.inf
            for u in {*(operands or ())} - self.free:
                if u not in late:
                    self.edges[self._after(u), 1 if v in late else self._after(v) - 1] = math.inf
                if u not in seen:
                    seen.add(u)
                    stack.append(u)

    def cut(self) -> set[Var]:
        """Returns the values of a minimum cut; of several, the last one, which needs the least recomputation."""
        # Importing SciPy takes half a second, so only schedules that split backwards do it.
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
        """Returns the values that only the second half computes: products that the first skips, and dependents."""
        found: set[Var] = set()
        for e in self.jaxpr.eqns:
            expensive = id(e) not in self.early and not _is_cheap(e)
            if expensive or any(v in found for v in _read(e)):
                found |= {*e.outvars}
        return found

    def _after(self, v: Var) -> int:
        """The second node of a value; the first node is one less."""
        return self.numbers.setdefault(v, 3 + 2 * len(self.numbers))


def _is_cheap(equation: JaxprEqn) -> bool:
    return equation.primitive.name in _CHEAP


def _read(equation: JaxprEqn) -> list[Var]:
    return [v for v in equation.invars if isinstance(v, Var)]


def _bytes(v: Var) -> int:
    aval: Any = v.aval
    return max(1, math.prod(aval.shape) * aval.dtype.itemsize)
