"""Whether plans shard the experts of a model that nobody wrote for jaxpar, and that such plans train."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.planning.plan import ModelPlanner
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.space import Space, plans, tensor_dims
from jaxpar.training.model import leaves_with_paths, show
from tests.planning.names import models

EMBED, INNER, VOCAB, EXPERTS, LAYERS = 16, 24, 32, 4, 2
TEXT = {name: jax.ShapeDtypeStruct((8, 16), "int32") for name in ("tokens", "targets")}
IN, OUT = ("experts", "embed", "expert_mlp"), ("experts", "expert_mlp", "embed")
ROUTER = jp.moe.Router(EXPERTS, 2)


def make_model(key: jax.Array, layers: int = LAYERS) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 8 * layers + 2))
    draw = lambda *shape: 0.2 * jax.random.normal(next(keys), shape)
    mixture = lambda: {
        "router": draw(EMBED, EXPERTS),
        "gate": draw(EXPERTS, EMBED, INNER),
        "up": draw(EXPERTS, EMBED, INNER),
        "down": draw(EXPERTS, INNER, EMBED),
        "mix": draw(EMBED, EMBED),
    }
    blocks = {f"{i}": mixture() for i in range(layers)}
    return {"table": draw(VOCAB, EMBED), "blocks": blocks, "head": draw(EMBED, VOCAB)}


def make_named_model(key: jax.Array, layers: int = LAYERS) -> dict[str, Any]:
    names = {"router": ("embed", None), "gate": IN, "up": IN, "down": OUT, "mix": ("embed", None)}
    plain = make_model(key, layers)
    blocks = {i: {k: jp.tag(w, *names[k]) for k, w in block.items()} for i, block in plain["blocks"].items()}
    table, head = jp.tag(plain["table"], "vocab", "embed"), jp.tag(plain["head"], "embed", "vocab")
    return {"table": table, "blocks": blocks, "head": head}


def loss(model: Any, batch: Any) -> Any:
    x = model["table"][batch["tokens"]]
    extra = jnp.zeros(())
    for block in model["blocks"].values():
        x = x + jnp.tanh(x @ block["mix"])
        routing = ROUTER(x @ block["router"])
        y, _ = jp.experts(x, routing, (block["gate"], IN), (block["up"], IN), (block["down"], OUT))
        x, extra = x + y, extra + 0.01 * jp.moe.load_balance_loss(routing)
    return optax.softmax_cross_entropy_with_integer_labels(x @ model["head"], batch["targets"]).mean() + extra


@cache
def planner(named: bool = False) -> ModelPlanner:
    return ModelPlanner.of(make_named_model if named else make_model, loss, TEXT, optax.sgd(0.1))


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_calls_of_experts_are_found(named: bool) -> None:
    found = planner(named)
    assert found.axes == ("replica", "data", "expert", "model")
    (layers,) = found.workload.experts
    assert (layers.call.experts, layers.call.k, layers.call.row_bytes, layers.times) == (EXPERTS, 2, 4 * EMBED, LAYERS)
    stored = {p.path.rpartition("/")[2]: [name for name, _ in p.factors] for p in found.workload.params}
    assert stored["gate"][-3:] == [*IN] and stored["down"][-3:] == [*OUT] and "experts" not in stored["router"]
    assert {"expert_mlp"} <= {*tensor_dims(found.workload)} and "experts" not in tensor_dims(found.workload)
    every = list(plans(found.workload, 8, Space(axes=found.axes, own_model=True), Counter()))
    assert {plan.expert for plan in every} == {1, 2, 4}


def test_rows_of_very_many_tokens_are_known_as_their_choices() -> None:
    """Beyond 2³¹ pairs of a choice and a group, rows are ordered by an argsort."""
    many = {name: jax.ShapeDtypeStruct((2**18, 2**10), "int32") for name in TEXT}
    named = lambda key: make_named_model(key, layers=1)
    work = ModelPlanner.of(named, loss, many, optax.sgd(0.1)).workload
    rows = {m.rows for m in work.matmuls if m.groups}
    assert rows == {(("batch", 2**18), ("seq", 2**10), (None, 2))}


def test_experts_that_do_not_call_jp_experts_are_reported() -> None:
    make, loss_fn, batch = models.experts()
    found = ModelPlanner.of(make, loss_fn, batch, optax.sgd(0.1))
    assert "expert" not in found.axes
    (note,) = (note for note in found.notes if "expert," in note)
    assert note == (
        "left out: expert, because down and 2 others have a dim 'experts', but the model does not call jp.experts, so "
        "tokens would not travel to their experts; to plan it, call jp.experts"
    )


def test_weights_under_other_names_are_reported() -> None:
    def make(key: jax.Array) -> Any:
        plain = make_named_model(key, layers=1)
        own = {"gate": (None, "embed", "expert_mlp"), "up": (None, "embed", None), "down": (None, None, "embed")}
        for block in plain["blocks"].values():
            block |= {name: jp.tag(block[name].value, *dims) for name, dims in own.items()}
        return plain

    found = ModelPlanner.of(make, loss, TEXT, optax.sgd(0.1))
    assert "expert" not in found.axes
    assert found.notes[0] == (
        "left out: expert, because no parameter has a dim named 'experts', although the model calls jp.experts; to "
        "plan it, annotate the experts' weights as the call names them"
    )


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(data=2, expert=4, zero=3, remat="full"),
        Plan(data=4, expert=2, zero=1, remat="none"),
        Plan(expert=4, model=2, tensor=("expert_mlp",), zero=3, remat="dots"),
        Plan(replica=2, data=2, expert=2, zero=3, remat="none"),
    ],
    ids=Plan.describe,
)
def test_such_a_plan_computes_what_one_device_does(plan: Plan, named: bool) -> None:
    own, rng = planner(named), np.random.default_rng(0)
    batch: Any = {name: rng.integers(0, VOCAB, x.shape, dtype=np.int32) for name, x in TEXT.items()}
    run, (layout, _) = own.run_of(plan), plan.layout(own.workload.names)
    state = jp.init(layout, run.make_model, run.tx)
    step = jp.train_step(layout, run.loss_fn, return_grads=True, donate=False, **run.options)
    _, metrics = step(state, batch)
    with jp.unsharded():
        expected_loss, grads = jax.jit(jax.value_and_grad(loss))(state.model, batch)
    np.testing.assert_allclose(metrics["loss"], expected_loss, rtol=1e-5)
    largest = lambda x: np.abs(np.asarray(x)).max()
    most = max(map(largest, jax.tree.leaves(grads)))
    for (path, g), (_, expected) in zip(leaves_with_paths(metrics["grads"]), leaves_with_paths(grads), strict=True):
        assert largest(g - expected) <= 1e-5 * max(largest(expected), 1e-2 * most), show(path)
