"""ZeRO stage 1 with one microbatch, where layers gather their own weights and gradients are reduced as they arise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_step import SGD, initial
from profiles import few

import jaxpar as jp
from jaxpar.analysis.compare import gradient_gaps
from jaxpar.training import layer_gathers
from jaxpar.training.layer_gathers import gathered_in_layers, overlaps
from jaxpar.training.microbatches import StepConfig
from jaxpar.utils.contexts import keep_gathered

RULES = jp.Rules(batch="data", embed=None, mlp=None, layers=None)
LAYERS, EMBED, MLP = 3, 16, 40
POLICIES = jax.checkpoint_policies


def make(key: jax.Array) -> dict[str, Any]:
    """A stack of layers with a scale each, and a head."""
    up, down, head = jax.random.split(key, 3)
    return {
        "down": jp.tag(jax.random.normal(down, (LAYERS, MLP, EMBED)) / 6, "layers", "mlp", "embed"),
        "head": jp.tag(jax.random.normal(head, (EMBED, MLP)) / 4, "embed", "mlp"),
        "scale": jp.tag(jnp.ones((LAYERS, EMBED)), "layers", "embed"),
        "up": jp.tag(jax.random.normal(up, (LAYERS, EMBED, MLP)) / 4, "layers", "embed", "mlp"),
    }


def layer(x: jax.Array, w: Any) -> jax.Array:
    hidden = jnp.tanh(x * w["scale"] @ jp.gather_weight(w["up"], "embed", "mlp"))
    return x + jp.sharded_dot(hidden, (w["down"], ("mlp", "embed")))[0]


def remat(policy: Any = None) -> Callable[[jax.Array, Any], jax.Array]:
    return jax.checkpoint(layer, policy=policy)


def by_jaxpar(x: jax.Array, w: Any) -> jax.Array:
    return remat(jp.RematPolicy("full").rule(()))(x, w)


def unkept(x: jax.Array, w: Any) -> jax.Array:
    return remat(POLICIES.dots_saveable)(x, w)


def kept_by_name(x: jax.Array, w: Any) -> jax.Array:
    return remat(POLICIES.save_only_these_names("gathered_weight"))(x, w)


def used_twice(x: jax.Array, w: Any) -> jax.Array:
    return layer(x, w) + w["up"].sum()


def loss_of(one: Callable[[jax.Array, Any], jax.Array]) -> Callable[..., jax.Array]:
    def loss(model: Any, x: jax.Array) -> jax.Array:
        stack = {name: w for name, w in model.items() if name != "head"}
        x, _ = jax.lax.scan(lambda x, w: (one(x, w), None), x, stack)
        return jnp.mean((x @ model["head"]) ** 2)

    return loss


def found(loss: Callable[..., jax.Array]) -> set[str]:
    """The weights that are left to the layers."""
    params = jax.eval_shape(lambda: jax.tree.map(lambda tag: tag.value, make(jax.random.key(0)), is_leaf=is_tag))
    layout = jp.Layout(jp.MeshSpec(data=8).abstract(), jp.Zero(1, min_bytes=0).rules(RULES))
    with layout:
        flags = gathered_in_layers(lambda p: loss(p, jnp.ones((8, EMBED))), params)
    return {name for name, flag in zip(sorted(params), flags, strict=True) if flag}


def is_tag(x: Any) -> bool:
    return hasattr(x, "value")


@pytest.mark.parametrize(
    ("one", "weights"),
    [(layer, {"up", "down"}), (kept_by_name, {"up", "down"}), (unkept, set()), (used_twice, {"down"})],
)
def test_layers_gather_what_they_keep_and_use_in_no_other_way(one: Any, weights: set[str]) -> None:
    assert found(loss_of(one)) == weights


def test_a_policy_of_jaxpar_keeps_gathered_weights_only_in_such_a_step() -> None:
    assert found(loss_of(by_jaxpar)) == set()
    with keep_gathered(True):
        assert found(loss_of(by_jaxpar)) == {"up", "down"}


def test_weights_outside_of_a_loop_or_the_same_in_all_iterations_are_not_left_to_it() -> None:
    def unrolled(model: Any, x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            x = layer(x, {name: model[name][i] for name in ("up", "down", "scale")})
        return x.sum()

    def shared(model: Any, x: jax.Array) -> jax.Array:
        one = {name: model[name][0] for name in ("up", "down", "scale")}
        return jax.lax.scan(lambda x, _: (layer(x, one), None), x, None, length=LAYERS)[0].sum()

    def carried(model: Any, x: jax.Array) -> jax.Array:
        one = {name: model[name][0] for name in ("up", "down", "scale")}
        return jax.lax.scan(lambda c, _: ((layer(*c), c[1]), None), (x, one), None, length=LAYERS)[0][0].sum()

    assert found(unrolled) == found(shared) == found(carried) == set()


STAGE_1 = {"weight_gather": "per_step", "grad_reduction": "per_step"}
NARROW = {"precision": jp.Precision(compute="bf16", reduce="bf16")}


@pytest.mark.parametrize(
    ("mesh", "topology", "options", "does"),
    [
        ({"data": 16}, "v5e:4x4", NARROW, True),
        ({"data": 8}, "v5p:2x2x2", {"precision": jp.Precision(compute="fp32")}, True),
        ({"data": 8}, "h100:8", NARROW, False),
        ({"data": 64}, "v5e:8x8", NARROW, False),
        ({"data": 4, "model": 4}, "v5e:4x4", NARROW, False),
        ({"replica": 4, "data": 4}, "v5e:4x4", NARROW, False),
        ({"data": 16}, "v5e:4x4", NARROW | {"grad_accum_steps": 2}, False),
        ({"data": 16}, "v5e:4x4", NARROW | {"weight_gather": "per_use"}, False),
        ({"data": 16}, "v5e:4x4", NARROW | {"per_device_grads": True}, False),
        ({"data": 16}, "v5e:4x4", {"precision": jp.Precision(compute="bf16")}, False),  # sums in fp32
        ({"data": 16}, "v5e:4x4", {"precision": jp.Precision(compute="bf16", gather="int8", reduce="bf16")}, False),
        ({"data": 16}, "v5e:4x4", NARROW | {"fusion": jp.overlap.CollectiveFusion(scatter=(1,))}, False),
    ],
)
def test_a_step_overlaps_where_the_compiler_does_and_sums_as_precisely(
    mesh: dict[str, int], topology: str, options: dict[str, Any], does: bool
) -> None:
    rules = jp.Rules(batch=("replica", "data"), embed=None, mlp="model")
    layout = jp.Layout(jp.MeshSpec(**mesh).on(topology), rules)
    assert overlaps(layout, StepConfig(**(STAGE_1 | options))) is does


@pytest.mark.parametrize("one", few([layer, by_jaxpar, unkept, used_twice], 1))
def test_gradients_equal_one_device_and_weights_cross_once(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sharded weight is gathered once, by a layer or before the first one, and nothing is gathered again."""
    monkeypatch.setattr(layer_gathers, "platform_of", lambda mesh: "tpu")
    x = np.random.default_rng(0).normal(size=(24, EMBED)).astype(np.float32)
    zero, metrics = jp.Zero(1, min_bytes=0), list[Any]()
    for devices, rules, options in ((1, RULES, {}), (8, zero.rules(RULES), zero.step)):
        layout = jp.Layout(jp.MeshSpec(data=-1).build(jax.devices()[:devices]), rules)
        shapes = jp.abstract_state(layout, make, SGD)
        precision = {"precision": {"compute": "fp32"}}
        step = jp.train_step(layout, loss_of(one), return_grads=True, donate=False, **precision, **options)
        with jax.default_matmul_precision("highest"):
            compiled = step.lower(shapes, x).compile()
        metrics.append(jax.device_get(compiled(initial(shapes, make, RULES, SGD), x)[1]))
    assert metrics[1]["loss"] == pytest.approx(metrics[0]["loss"], rel=1e-6)
    assert max(gradient_gaps(metrics[0]["grads"], metrics[1]["grads"]).values()) <= 1e-6
    stored = sum(w.size for w in jax.tree.leaves(shapes.params))
    gathered = jp.audit(compiled, mesh=layout.mesh).wire_bytes("all-gather")
    assert gathered == pytest.approx(4 * stored * 7 / 8, rel=0.05)
