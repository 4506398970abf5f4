"""Tests the searches of ``plan(..., search=...)``: the tables that they choose, that those train, and their errors."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.errors import PlanError
from jaxpar.planning.operators.choose import SEARCHES, ChosenSpace, SearchName, SearchRequest, chosen_space
from jaxpar.planning.operators.given import rules_given
from jaxpar.planning.operators.table import TableSearch
from jaxpar.planning.plan import ModelPlanner
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.report import PlanReport
from jaxpar.planning.search.search import Search
from jaxpar.planning.search.space import Space, plans, tensor_dims
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.training.model import Tagged
from tests.planning.names import models
from tests.profiles import few

GIVEN = {"mlp": "model"}


def mlp(batch: int, width: int = 1024) -> ModelPlanner:
    """Two matmuls and a residual connection."""

    def make_model(key: jax.Array) -> dict[str, jax.Array]:
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (width, 4 * width)) / 32,
            "down": jax.random.normal(down, (4 * width, width)) / 64,
        }

    def loss_fn(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((batch["x"] + jax.nn.relu(batch["x"] @ params["up"]) @ params["down"]) ** 2)

    return ModelPlanner.of(make_model, loss_fn, {"x": models.floats(batch, width)}, optax.sgd(0.1))


def model_of(planner: ModelPlanner, topology: str = "v5e:2x4") -> CostModel:
    return CostModel(planner.workload, Topology.parse(topology))


def space_of(planner: ModelPlanner, **fixed: Any) -> Space:
    return Space(tensor=tensor_dims(planner.workload), sequence_parallel=True, fixed=fixed)


def choose(planner: ModelPlanner, name: str, given: Any = None, topology: str = "v5e:2x4", **fixed: Any) -> ChosenSpace:
    request = SearchRequest(cast("SearchName", name), given or {})
    return chosen_space(request, planner.trace, model_of(planner, topology), space_of(planner, **fixed))


def best(planner: ModelPlanner, chosen: ChosenSpace, topology: str = "v5e:2x4") -> Plan:
    model = model_of(planner, topology)
    found = plans(planner.workload, model.topology.devices, chosen.space, Counter())
    return min(found, key=lambda plan: model.cost(plan).step)


@pytest.mark.parametrize("name", few(["recursive", "dynamic_programming"], 1))
def test_many_tokens_are_split_and_few_are_not(name: str) -> None:
    many, small = mlp(2**16), mlp(8)
    assert choose(many, name).space.fixed["data"] == 8
    chosen = choose(small, name)
    assert chosen.space.fixed["model"] == 8 and chosen.space.tensor == ("mlp",)
    assert best(small, chosen).describe() == "TP 8"


def test_the_notes_say_which_search_ran_what_it_saw_and_what_it_did_not() -> None:
    planner = mlp(8)
    head, table, unseen = choose(planner, "dynamic_programming").notes
    strategies = sum(len(o.strategies(m, allowed)) for m, o, allowed in _strategies(planner))
    options = len(list(plans(planner.workload, 8, choose(planner, "dynamic_programming").space, Counter())))
    assert head == (
        f"search: dynamic_programming: {strategies} strategies of 4 operators, then {options} options of the step"
    )
    assert table.startswith("data 1 × model 8, model shards 'mlp': operators and redistribution ")
    assert table.endswith(", 0.0% more than with the best strategy for each operator by itself")
    assert "pipelines" in unseen and "search='enumerate'" in unseen
    assert choose(planner, "enumerate").notes == (
        "search: enumerate: every mesh and every option of the space, estimated in closed form",
    )


def test_the_report_and_its_json_have_the_notes() -> None:
    planner = mlp(8)
    chosen, topology = choose(planner, "recursive"), Topology.parse("v5e:2x4")
    report = PlanReport(Search(topology, "time", [], 0, Counter(), notes=chosen.notes), planner)
    assert report.remarks()[: len(chosen.notes)] == list(chosen.notes)
    assert json.loads(report.to_json())["search"] == list(chosen.notes)


def _strategies(planner: ModelPlanner) -> list[Any]:
    graph = TableSearch(planner.trace(), model_of(planner), space_of(planner)).graph
    allowed = {"data": ("batch",), "model": ("mlp",)}
    return [({"data": d, "model": 8 // d}, o, allowed) for d in (1, 2, 4, 8) for o in graph.operators]


@pytest.mark.slow
def test_propagation_derives_the_other_dims_from_one() -> None:
    planner = ModelPlanner.of(*models.CASES["gpt"](), optax.sgd(0.1))
    chosen = choose(planner, "sharding_propagation", {"blocks/0/up/kernel": (None, "model")}, data=4, model=2)
    assert chosen.space.tensor == ("mlp", "vocab")
    by_name = choose(planner, "sharding_propagation", GIVEN, data=4, model=2)
    assert by_name.space.tensor == chosen.space.tensor
    without = choose(planner, "sharding_propagation", {**GIVEN, "vocab": None}, data=4, model=2)
    assert without.space.tensor == ("mlp",)


def test_two_dims_of_one_weight_are_not_both_sharded() -> None:
    planner = ModelPlanner.of(*models.CASES["experts"](), optax.sgd(0.1))
    assert {"experts", "mlp"} <= {*tensor_dims(planner.workload)}
    for name in ("recursive", "dynamic_programming"):
        assert len({"experts", "mlp"} & {*choose(planner, name, data=4, model=2).space.tensor}) == 1


def test_the_rules_of_a_configuration_are_what_a_propagation_is_given() -> None:
    program = ModelPlanner.of(*models.CASES["gpt"](), optax.sgd(0.1)).trace()
    rules = {"batch": ["replica", "data"], "embed": None, "mlp": ["model"], "norm": None, "params": {"embed": "data"}}
    assert rules_given(rules, program) == {"batch": "data", "embed": None, "mlp": "model"}


def test_a_parameter_over_data_is_fully_sharded() -> None:
    planner = mlp(64)
    chosen = choose(planner, "sharding_propagation", {"up": ("data", "model"), "batch/x": ("data", None)})
    assert chosen.space.fixed["zero"] == 3 and chosen.space.fixed["model"] > 1
    assert best(planner, chosen).rules(("batch", "embed", "mlp"))["params"] == {"embed": ["data"]}


@pytest.mark.parametrize("name", few([name for name in SEARCHES if name != "enumerate"], 1))
def test_what_a_search_chooses_trains_as_one_device(name: str) -> None:
    train(mlp(8, 64), name)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt scanned", "gpt tied", "experts", "vit"])
def test_models_of_others_train_as_searched_for(case: str) -> None:
    planner = ModelPlanner.of(*models.CASES[case](), optax.sgd(0.1))
    for name in ("dynamic_programming", "sharding_propagation"):
        train(planner, name)


def train(planner: ModelPlanner, name: str) -> None:
    """Hold the loss of a step of what a search chooses against one device."""
    chosen = choose(planner, name, GIVEN if name == "sharding_propagation" else None, data=4, model=2)
    plan = replace(best(planner, chosen), grad_accum_steps=1)
    layout, zero = plan.layout(planner.workload.names)
    random = np.random.default_rng(0)

    def numbers(x: Any) -> np.ndarray:
        if np.issubdtype(x.value.dtype, np.integer):
            return random.integers(0, 4, x.value.shape).astype(x.value.dtype)
        return random.normal(size=x.value.shape).astype(x.value.dtype)

    batch = jax.tree.map(numbers, planner.batch, is_leaf=lambda x: isinstance(x, Tagged))
    one = layout.on_one_device()
    _, right = jp.train_step(one, planner.loss_fn)(jp.init(one, planner.make_model, planner.tx), batch)
    state = jp.init(layout, planner.make_model, planner.tx)
    used = {axis for leaf in jax.tree.leaves(state.params) for axis in jax.tree.leaves(tuple(leaf.sharding.spec))}
    assert "model" in used
    _, own = jp.train_step(layout, planner.loss_fn, **zero.step)(state, batch)
    np.testing.assert_allclose(float(own["loss"]), float(right["loss"]), rtol=2e-6)


def test_a_fixed_mesh_and_slices_are_kept() -> None:
    planner = mlp(64)
    for name in ("recursive", "dynamic_programming"):
        assert choose(planner, name, model=4).space.fixed | {"zero": 0} == {"data": 2, "model": 4, "zero": 0}
    small = mlp(8)
    assert choose(small, "dynamic_programming", topology="v5e:2x2*2").space.fixed["model"] <= 4
    assert choose(small, "recursive", topology="v5e:2x2*2").space.fixed["model"] <= 4


def test_a_table_that_fits_is_chosen_before_a_faster_one_that_does_not() -> None:
    planner = mlp(2**18, 4096)
    fastest = choose(planner, "recursive")
    assert "no plan fits in memory" not in " ".join(fastest.notes)
    large = replace(
        planner.workload, params=tuple(replace(p, itemsize=p.itemsize * 50) for p in planner.workload.params)
    )
    model = CostModel(large, Topology.parse("v5e:2x4"))
    for name in ("recursive", "dynamic_programming"):
        request = SearchRequest(cast("SearchName", name))
        space = replace(space_of(planner), zero=(0,))
        found = chosen_space(request, planner.trace, model, space)
        assert found.space.fixed["model"] > fastest.space.fixed["model"]
        assert found.notes[1].endswith("no plan fits in memory")


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"name": "recursiv"}, "dynamic_programming"),
    "not a propagation": ({"name": "recursive", "given": GIVEN}, "search='recursive'"),
    "nothing given": ({"name": "sharding_propagation"}, "search='sharding_propagation' must"),
    "another axis": ({"name": "recursive", "context": 2}, "context"),
    "axis": ({"given": {"up": (None, "modle")}}, "modle"),
    "dim": ({"given": {"mpl": "model"}}, "mpl"),
    "path": ({"given": {"upp": (None, "model")}}, "upp"),
    "rank": ({"given": {"up": ("model",)}}, "params/up"),
    "two ways": ({"given": {"up": (None, "model"), "down": (None, None)}}, "shard 'mlp'"),
    "wrong axis": ({"given": {"batch": "model"}}, "shard 'batch'"),
    "no mesh": ({"given": GIVEN, "model": 1}, "8"),
}


@pytest.mark.parametrize("case", list(ERRORS))
def test_what_cannot_be_searched_for_is_named(case: str) -> None:
    arguments, text = ERRORS[case]
    with raises(PlanError, text):
        choose(mlp(64), **{"name": "sharding_propagation", **arguments})


def test_a_batch_that_does_not_divide_is_named() -> None:
    with raises(PlanError, "recursive", "data 8"):
        choose(mlp(63), "recursive", data=8)
