"""Random graphs of operators, and the best strategies of a graph by trying all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import strategies as st

from jaxpar.planning.operators.costs import OperatorCosts
from jaxpar.planning.operators.graph import DimArray, Edge, Operand, Operator, OperatorGraph, Strategy
from jaxpar.planning.operators.searches import OperatorSearch
from jaxpar.sharding.hardware.topology import Topology

NAMES = ("batch", "embed", "mlp", "vocab")
SIZES = (64, 96, 100, 1024, 1536, 2040, 4096)
MOST_OPERATORS = 8
MOST_STRATEGIES = 200_000


@st.composite
def graphs(draw: st.DrawFn) -> OperatorGraph:
    """Chains, diamonds and anything else of up to 8 operators; some read the same weight; some sizes do not divide."""
    sizes = {name: draw(st.sampled_from(SIZES)) for name in NAMES}
    count = draw(st.integers(2, MOST_OPERATORS))
    weights = draw(st.integers(0, 2))
    operators, edges = list[Operator](), list[Edge]()
    for i in range(count):
        weight = i < min(weights, count - 1)
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2 if weight else 3, unique=True))
        kept = draw(st.lists(st.sampled_from(names), min_size=1, unique=True)) if not weight else names
        operands = []
        for source in [] if weight else draw(st.lists(st.integers(0, i - 1), max_size=2, unique=True)) if i else []:
            read = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
            array = Operand(tuple(read), tuple(sizes[n] for n in read), sharers=draw(st.integers(1, 2)))
            operands.append(array)
            edges.append(Edge(source, i, array, draw(st.integers(1, 3)), draw(st.booleans())))
        if not weight:
            read = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
            operands.append(Operand(tuple(read), tuple(sizes[n] for n in read)))
        result = DimArray(tuple(kept), tuple(sizes[n] for n in kept))
        flops = 0.0 if weight else 2.0 * math.prod(sizes[n] for n in names)
        path = f"params/{i}" if weight else ""
        operators.append(
            Operator(
                f"op {i}", {n: sizes[n] for n in names}, tuple(operands), result, flops, draw(st.integers(1, 3)), path
            )
        )
    return OperatorGraph(tuple(operators), tuple(edges))


def operator_search(graph: OperatorGraph, topology: str, axes: Sequence[str] = ("data", "model")) -> OperatorSearch:
    return OperatorSearch(graph, OperatorCosts(Topology.parse(topology)), dict.fromkeys(axes, NAMES))


def combinations(search: OperatorSearch, mesh: Mapping[str, int]) -> int:
    return math.prod(len(o.strategies(mesh, search.allowed)) for o in search.graph.operators)


def totals(
    search: OperatorSearch, mesh: Mapping[str, int], strategies: Sequence[Sequence[Strategy]]
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of operators, and of redistribution, for each combination of strategies: one dim for each operator."""
    graph, costs = search.graph, search.costs
    shape = [len(mine) for mine in strategies]
    own, moved = np.zeros(shape), np.zeros(shape)
    for i, (operator, mine) in enumerate(zip(graph.operators, strategies, strict=True)):
        along = [1] * len(shape)
        along[i] = -1
        own += np.array([costs.operator(operator, mesh, s) for s in mine]).reshape(along)
    for e in graph.edges:
        along = [1] * len(shape)
        along[e.source], along[e.target] = shape[e.source], shape[e.target]
        pair = [[costs.edge(e, mesh, a, b) for b in strategies[e.target]] for a in strategies[e.source]]
        moved += np.array(pair).reshape(along)  # a source comes before its target
    return own, moved
