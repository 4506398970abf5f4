"""What the backward pass keeps of layers outside of loops, against sums by hand."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpar as jp
from jaxpar.planning.search.best_estimate import best_estimate
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.space import Space, plans
from jaxpar.planning.search.traced import workload
from jaxpar.planning.search.workload import KeptArray, OutsideLoops, Workload
from jaxpar.sharding.hardware.topology import Topology

LAYERS, ROWS, EMBED, MLP = 3, 48, 64, 256
FSDP = Plan(data=4, zero=3, remat="none")
BATCH = {"x": jp.tag(jax.ShapeDtypeStruct((ROWS, EMBED), "float32"), "batch", "embed")}
RESIDUAL, HIDDEN = 4 * ROWS * EMBED, 4 * ROWS * MLP
WEIGHTS = 2 * EMBED * MLP
"""Of one layer."""


def loss(model: Any, batch: Any) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    x, blocks = batch["x"], model["blocks"]
    if isinstance(blocks, dict):
        x, _ = jax.lax.scan(layer, x, blocks)
    else:
        for w in blocks:
            x, _ = layer(x, w)
    return (x**2).mean()


@cache
def traced(scanned: bool) -> Workload:
    def matrix(key: jax.Array, *dims: str) -> Any:
        sizes = [{"layers": LAYERS, "embed": EMBED, "mlp": MLP}[dim] for dim in dims]
        return jp.tag(jax.random.normal(key, sizes), *dims)

    stack = ("layers",) if scanned else ()

    def make_model(key: jax.Array) -> Any:
        block = lambda: {"up": matrix(key, *stack, "embed", "mlp"), "down": matrix(key, *stack, "mlp", "embed")}
        return {"blocks": block() if scanned else [block() for _ in range(LAYERS)]}

    return workload(make_model, loss, BATCH, optax.adam(1e-3), remat=True)


def model(scanned: bool) -> CostModel:
    return CostModel(traced(scanned), Topology.parse("v5e:2x2"))


def in_layers(arrays: tuple[KeptArray, ...]) -> int:
    return sum(array.bytes for array in arrays if "layers" in dict(array.factors))


def outside(policy: str) -> OutsideLoops:
    found = traced(False).backward[policy].outside_loops
    assert found is not None
    return found


def test_elementwise_results_of_separate_layers_are_not_kept() -> None:
    """The first layer's input is the batch, which is outside of the layers."""
    found, as_a_loop = outside("none"), traced(False).backward["none"].kept
    assert in_layers(found.kept) == LAYERS * HIDDEN + (LAYERS - 1) * RESIDUAL
    # The derivative of GELU reads five arrays of the hidden size.
    assert in_layers(as_a_loop) == LAYERS * 5 * HIDDEN + (LAYERS - 1) * RESIDUAL
    (largest,) = found.again
    assert largest.bytes == HIDDEN


def test_a_loop_stores_them_all() -> None:
    for back in traced(True).backward.values():
        assert back.outside_loops is None and back.kept_by(FSDP) == back.kept
    assert in_layers(traced(True).backward["none"].kept) == LAYERS * (5 * HIDDEN + RESIDUAL)
    saved = {scanned: model(scanned).cost(FSDP).memory["saved activations"] for scanned in (False, True)}
    assert saved[True] == LAYERS * (5 * HIDDEN + RESIDUAL) / 4
    assert saved[False] == (LAYERS * HIDDEN + (LAYERS - 1) * RESIDUAL) / 4


def test_what_a_policy_names_is_kept_outside_of_loops_too() -> None:
    assert in_layers(outside("dots").kept) == LAYERS * HIDDEN + (LAYERS - 1) * RESIDUAL
    assert in_layers(outside("full").kept) == (LAYERS - 1) * RESIDUAL


def test_stages_of_a_pipeline_store_what_a_loop_does() -> None:
    back, plan = traced(False).backward["none"], Plan(pipeline=3, microbatches=6, remat="none")
    assert back.kept_by(plan) == back.kept and back.without_loops(plan) is None


@pytest.mark.parametrize("policy", ["none", "dots", "full"])
def test_both_passes_read_the_same_gathered_weights_unless_layers_are_recomputed(policy: str) -> None:
    plan = Plan(data=4, zero=3, remat=policy)
    costs = {scanned: model(scanned).cost(plan) for scanned in (False, True)}
    assert outside(policy).keeps_weights == (policy == "none")
    of_layers = lambda cost: sum(t.wire_bytes for t in cost.transfers if t.what == "gather in layer")
    gathered = {scanned: of_layers(cost) for scanned, cost in costs.items()}
    once = LAYERS * WEIGHTS * 4 * 3 / 4
    assert gathered == {False: once if policy == "none" else 2 * once, True: 2 * once}
    copies = {scanned: cost.memory["weight copies"] for scanned, cost in costs.items()}
    assert copies[False] - copies[True] == (pytest.approx((LAYERS - 1) * WEIGHTS * 4) if policy == "none" else 0)


def test_the_least_estimate_is_that_of_all_plans() -> None:
    """Its bounds know that weights may be gathered once."""
    costs, space = model(False), Space(remat=("none", "dots", "full"))
    found = best_estimate(costs, space)
    steps = [costs.cost(plan).step for plan in plans(costs.workload, 4, space, Counter(), offload=False)]
    assert found is not None and len(steps) > 10 and found.cost.step == min(steps)


def test_another_batch_keeps_as_much_for_each_row() -> None:
    double = traced(False).of_batch(2 * ROWS).backward["none"].outside_loops
    assert double is not None
    assert in_layers(double.kept) == 2 * in_layers(outside("none").kept)
    assert [array.bytes for array in double.again] == [2 * HIDDEN]


def test_a_model_without_layers_keeps_no_elementwise_results_either() -> None:
    def normed(model: Any, batch: Any) -> jax.Array:
        h = batch["x"] @ model["w"]
        return (jnp.tanh(jnp.tanh(h) + jnp.sin(h)) ** 2).mean()

    make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (EMBED, MLP)), "embed", "mlp")}
    back = workload(make_model, normed, BATCH, optax.sgd(1e-3)).backward[""]
    assert back.outside_loops is not None
    # The batch, which the weight's gradient reads, and the matmul's result.
    assert sum(array.bytes for array in back.outside_loops.kept) == RESIDUAL + HIDDEN
    assert sum(array.bytes for array in back.kept) > RESIDUAL + 2 * HIDDEN
