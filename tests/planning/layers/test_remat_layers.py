"""A loss whose layers are recomputed computes what the loss computes; what it keeps is what the policy says."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from jax.ad_checkpoint import checkpoint_name

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.planning.plan import ModelPlanner
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.space import Space, plans, tensor_dims
from jaxpar.training.model import leaves_with_paths, show
from jaxpar.utils.jaxprs import equations
from tests.app import own_models
from tests.planning.names import models

LAYERS = 3


@cache
def planner(scanned: bool) -> ModelPlanner:
    return ModelPlanner.of(*models.gpt(layers=LAYERS, scanned=scanned), optax.sgd(0.1))


def numbers(batch: Any) -> Any:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, models.VOCAB, x.shape, dtype=np.int32) for name, x in batch.items()}


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_plan_with_recomputed_layers_computes_what_one_device_does(scanned: bool) -> None:
    _, loss_fn, shapes = models.gpt(layers=LAYERS, scanned=scanned)
    batch, plan = numbers(shapes), Plan(data=4, model=2, tensor=("mlp",), zero=3, remat="full")
    own, run = planner(scanned), planner(scanned).run_of(plan)
    layout, _ = plan.layout(own.workload.names)
    state = jp.init(layout, run.make_model, run.tx)
    step = jp.train_step(layout, run.loss_fn, return_grads=True, donate=False, **run.options)
    assert _recomputed(step.trace(state, batch).jaxpr) == (1 if scanned else LAYERS)
    _, metrics = step(state, batch)
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(state.model, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    largest = lambda x: np.abs(np.asarray(x)).max()
    most = max(map(largest, jax.tree.leaves(grads)))
    for (path, g), (_, expected) in zip(leaves_with_paths(metrics["grads"]), leaves_with_paths(grads), strict=True):
        # The gradient of a bias of keys is 0: of what is rounding alone, no digit agrees.
        assert largest(g - expected) <= 1e-5 * max(largest(expected), 1e-2 * most), show(path)


def _recomputed(jaxpr: Any) -> int:
    """Functions of the backward pass that are recomputed."""
    found = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "remat2"]
    return sum(e.params["differentiated"] for e in found)


@pytest.mark.slow
def test_what_the_policies_keep_and_compute() -> None:
    for scanned in (False, True):
        work = planner(scanned).workload
        assert work.policies == ("none", "dots", "full") and work.own_policy == ("full" if scanned else "none")
        kept = {name: _in_layers(work, name) for name in work.policies}
        # The input of each layer; a list's first input is outside of the layers.
        assert kept["full"] == (LAYERS - (not scanned)) * 8 * models.SEQ * models.EMBED * 4
        assert kept["full"] < kept["dots"] < kept["none"] / 2
        assert [work.backward[name].weight_passes for name in ("none", "dots")] == [3.0, 3.0]
        # All but the last matmul of a layer, whose result nothing needs again.
        weights = [m.flops for m in work.matmuls if m.weight and m.layered]
        passes = 4.0 - work.matmuls[-2].flops / work.matmuls[-2].times / (sum(weights) / LAYERS)
        assert work.backward["full"].weight_passes == pytest.approx(passes)


def _in_layers(work: Any, policy: str) -> int:
    return sum(array.bytes for array in work.backward[policy].kept if "layers" in dict(array.factors))


@pytest.mark.slow
def test_the_estimate_of_flops_is_that_of_the_compiled_program() -> None:
    one = Plan(remat="none")
    measured = {}
    for policy in ("none", "full"):
        run = planner(False).run_of(Plan(remat=policy))
        layout, _ = one.layout(planner(False).workload.names, jax.devices()[:1])
        state = jp.abstract_state(layout, run.make_model, run.tx)
        compiled = jp.train_step(layout, run.loss_fn).lower(state, numbers(models.TEXT)).compile()
        costs: Any = compiled.cost_analysis()
        measured[policy] = costs["flops"]
    work = planner(False).workload
    again = sum(m.flops for m in work.matmuls if m.layered and m.weight) * (work.backward["full"].weight_passes - 3)
    again += sum(m.flops for m in work.matmuls if m.layered and not m.weight)
    assert measured["full"] - measured["none"] == pytest.approx(again, rel=0.5)


@pytest.mark.slow
def test_plans_have_the_policies() -> None:
    work = planner(False).workload
    space = Space(tensor=tensor_dims(work), remat=work.policies)
    every = {plan.remat for plan in plans(work, 8, space, Counter())}
    assert every == {"none", "dots", "full"}


def _blocks(count: int = 4) -> Any:
    return lambda key: {"blocks": [jp.tag(0.1 * jnp.eye(8), "embed", "mlp") for _ in range(count)]}


def _named_loss(model: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for w in model["blocks"]:
        x = x + jnp.tanh(checkpoint_name(x @ w, "hidden"))
    return (x**2).mean()


def _trace(loss: Any, make_model: Any = None) -> Any:
    layout = jp.Layout(jp.MeshSpec(data=8).abstract(), jp.Rules(batch="data", embed=None, mlp=None))
    state = jp.abstract_state(layout, make_model or _blocks(), optax.sgd(0.1))
    return jp.train_step(layout, loss).trace(state, {"x": jax.ShapeDtypeStruct((8, 8), "float32")}).jaxpr


def test_layers_are_selected_by_number_and_tensors_by_name() -> None:
    policy = jp.RematPolicy("save_names", save_names=("hidden",), layers=(1, 2))
    assert _recomputed(_trace(jp.models.remat_layers(_named_loss, policy))) == 3


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (jp.RematPolicy("save_names", save_names=("hiden",)), "hiden"),
        (jp.RematPolicy("full", slice_activation=True), "remat: slice_activation"),
    ],
)
def test_what_a_policy_cannot_do(policy: jp.RematPolicy, text: str) -> None:
    with raises(ConfigError, text):
        _trace(jp.models.remat_layers(_named_loss, policy))


def test_layers_of_a_scan_are_not_selected() -> None:
    def loss(model: Any, batch: Any) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"], model["blocks"])
        return (x**2).mean()

    make_model = lambda key: {"blocks": jp.tag(jnp.ones((4, 8, 8)), None, "embed", "mlp")}
    with raises(ConfigError, "remat: layers", "of 4"):
        _trace(jp.models.remat_layers(loss, jp.RematPolicy("full", layers=(2,))), make_model)


def test_a_loss_without_layers() -> None:
    with raises(ConfigError, "full", "repeated"):
        _trace(jp.models.remat_layers(_named_loss, "full"), _blocks(1))


@pytest.mark.slow
def test_dropout_and_keys() -> None:
    """A recomputed layer draws the numbers that it drew."""
    tokens = {"tokens": np.random.default_rng(0).integers(0, 32, (8, 8), dtype=np.int32)}
    layout = jp.Layout(jp.MeshSpec(data=8).build(), jp.Rules(batch="data", unannotated="replicate"))
    state = jp.init(layout, own_models.make_encoder, optax.sgd(0.1))
    losses = (own_models.copy_loss, jp.models.remat_layers(own_models.copy_loss, "full"))
    plain, again = (jp.train_step(layout, loss, donate=False)(state, tokens)[1] for loss in losses)
    np.testing.assert_allclose(again["loss"], plain["loss"], rtol=1e-6)
    np.testing.assert_allclose(again["grad_norm"], plain["grad_norm"], rtol=1e-5)
