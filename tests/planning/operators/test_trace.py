"""Tests the operators that are found in traced losses: their dims, their sums and who reads whose results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from profiles import few

from jaxpar.planning.names.annotate import trace_loss
from jaxpar.planning.operators.graph import OperatorGraph
from jaxpar.planning.operators.trace import operator_graph
from tests.planning.names import models


def graph_of(case: str) -> OperatorGraph:
    return operator_graph(trace_loss(*models.CASES[case]()))


def reads(graph: OperatorGraph) -> set[tuple[str, str, int]]:
    """Source, target and how often, by the last two parts of their names."""
    short = [f"{i} {'/'.join(o.name.split('/')[-2:])}" for i, o in enumerate(graph.operators)]
    return {(short[e.source], short[e.target], e.times) for e in graph.edges}


def test_a_scanned_model_has_its_layers_once_and_hands_their_result_on() -> None:
    graph = graph_of("gpt scanned")
    assert [o.times for o in graph.operators] == [1, 1, *[2] * 10, 1]
    query = next(o for o in graph.operators if o.name.endswith("query/kernel"))
    assert query.sizes == {"batch": 8, "seq": 16, "heads": 3, "head_dim": 8, "embed": 24}
    assert query.flops == 2 * 8 * 16 * 24 * 24
    assert [x.sharers for x in query.operands] == [3, 1]
    into_query = {pair for pair in reads(graph) if pair[1] == "2 query/kernel"}
    assert into_query == {("1 tokens/embedding", "2 query/kernel", 1), ("11 add", "2 query/kernel", 1)}


def test_a_tied_table_is_an_operator_that_lookup_and_head_read() -> None:
    graph = graph_of("gpt tied")
    assert graph.operators[0].path == "params/tokens/embedding" and not graph.operators[0].operands
    assert {e.target for e in graph.edges if e.source == 0} == {2, len(graph.operators) - 1}


def test_the_sequence_of_keys_is_not_sharded_with_that_of_queries() -> None:
    scores = next(o for o in graph_of("gpt").operators if o.name == "dot_general")
    queries, keys = (x.names for x in scores.operands)
    assert queries == ("batch", "seq", "heads", "head_dim") and keys == ("batch", None, "heads", "head_dim")


def test_dims_of_two_sizes_are_sharded_where_both_divide() -> None:
    def loss_fn(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        x = batch["images"]
        y = jax.lax.conv_general_dilated(x, params["w"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.mean(y**2)

    make_model = lambda key: {"w": jax.random.normal(key, (3, 3, 4, 12))}
    graph = operator_graph(trace_loss(make_model, loss_fn, {"images": models.floats(8, 6, 6, 4)}))
    conv = graph.operators[-1]
    assert conv.flops == 2 * 8 * 3 * 3 * 12 * 9 * 4
    assert conv.sizes["batch"] == 8 and conv.times == 1


@pytest.mark.parametrize("case", few(list(models.CASES), 4))
def test_every_operator_reads_what_comes_before_it_or_from_a_loop(case: str) -> None:
    graph = graph_of(case)
    assert any(o.flops for o in graph.operators)
    looped = {e for e in graph.edges if e.source >= e.target}
    assert all(graph.operators[e.source].times > 1 for e in looped)
    for o in graph.operators:
        assert all(size > 1 for size in o.sizes.values())
        known = {name for x in (o.result, *o.operands) for name in x.names} - {None}
        assert o.sizes.keys() <= known
