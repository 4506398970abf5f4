"""Pipelines of a model that nobody wrote for jaxpar, whose loss is in parts."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.planning.plan import ModelPlanner
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.space import Space, plans, tensor_dims
from jaxpar.training.model import leaves_with_paths, show
from tests.app import own_models

TEXT = {name: jax.ShapeDtypeStruct((8, 16), "int32") for name in ("tokens", "targets")}
LAYERS = 4


@cache
def planner() -> ModelPlanner:
    make_model = lambda key: own_models.make_gpt(key, layers=LAYERS)
    return ModelPlanner.of(make_model, own_models.staged_next_byte, TEXT, optax.sgd(0.1))


@pytest.mark.slow
def test_layers_in_a_list_are_planned_over_stages() -> None:
    own, work = planner(), planner().workload
    assert own.axes == ("pipeline", "replica", "data", "context", "ulysses", "model") and own.notes == ()
    assert work.sizes["layers"] == LAYERS and sum("layers" in dict(p.factors) for p in work.params) == 16
    kept = {
        name: sum(k.bytes for k in back.kept if "layers" in dict(k.factors)) for name, back in work.backward.items()
    }
    assert kept["full"] == LAYERS * 8 * 16 * 16 * 4 < kept["dots"] < kept["none"] / 2
    space = Space(axes=own.axes, tensor=tensor_dims(work), remat=work.policies, own_model=True)
    staged = [plan for plan in plans(work, 8, space, Counter()) if plan.pipeline > 1]
    assert {(plan.pipeline, plan.virtual_stages) for plan in staged} >= {(2, 1), (2, 2), (4, 1)}
    assert all(plan.context == plan.ulysses == 1 for plan in staged)


@pytest.mark.slow
def test_a_loss_that_is_not_in_parts_is_reported() -> None:
    own = ModelPlanner.of(own_models.make_gpt, own_models.next_byte, TEXT, optax.sgd(0.1))
    assert "pipeline" not in own.axes
    (note,) = own.notes
    assert note == (
        "left out: pipelines, because the loss does not say what runs beside its 2 layers params/blocks/*; to plan "
        "them, give a jp.pipeline.PipelineLoss(layers=..., embed=..., layer=..., head=...)"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        Plan(pipeline=2, data=4, zero=3, remat="dots", microbatches=2),
        Plan(pipeline=4, data=2, remat="full", microbatches=4, checkpoint_stages=True),
        Plan(pipeline=2, data=2, model=2, tensor=("mlp",), remat="full", microbatches=4, virtual_stages=2),
    ],
    ids=Plan.describe,
)
def test_such_a_plan_computes_what_one_device_does(plan: Plan) -> None:
    own, rng = planner(), np.random.default_rng(0)
    batch: Any = {name: rng.integers(0, 256, x.shape, dtype=np.int32) for name, x in TEXT.items()}
    run, (layout, _) = own.run_of(plan), plan.layout(own.workload.names)
    state = jp.init(layout, run.make_model, run.tx)
    _, metrics = jp.train_step(layout, run.loss_fn, return_grads=True, donate=False, **run.options)(state, batch)
    loss, grads = jax.jit(jax.value_and_grad(own_models.next_byte))(state.model, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    found = {show(path): np.asarray(x) for path, x in leaves_with_paths(metrics["grads"])}
    largest = lambda x: np.abs(np.asarray(x)).max()
    most = max(map(largest, jax.tree.leaves(grads)))
    for path, expected in leaves_with_paths(grads):
        first, *rest = show(path).removesuffix("/value").split("/")
        g = found["/".join((first, *rest[1:]))][int(rest[0])] if first == "blocks" else found["/".join((first, *rest))]
        assert largest(g - expected) <= 1e-5 * max(largest(expected), 1e-2 * most), path
