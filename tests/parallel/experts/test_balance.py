"""Losses and metrics of a routing: against formulas, and equal in every layout."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covers import covering
from error_texts import raises
from jax.sharding import PartitionSpec as P
from one_step import SGD, check_grads, initial, layout_of, one_step

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.parallel.experts.balance import expert_counts, load_balance_loss, router_z_loss
from jaxpar.parallel.experts.bias import update_bias
from jaxpar.parallel.experts.metrics import routing_metrics
from jaxpar.parallel.experts.routing import Router, Routing

ROWS, SEQ, EMBED, EXPERTS, K, LAYERS = 16, 8, 8, 8, 2, 2
ROUTER = Router(experts=EXPERTS, k=K)
RULES = jp.Rules(batch="data", seq="context", embed=None, layers="pipeline")
FSDP = RULES.replace(params={"embed": "data"})


def make_model(key: jax.Array) -> dict[str, Any]:
    router, w = jax.random.split(key)
    blocks = {
        "router": jp.tag(jax.random.normal(router, (LAYERS, EMBED, EXPERTS)), "layers", "embed", None),
        "w": jp.tag(jax.random.normal(w, (LAYERS, EMBED, EMBED)), "layers", None, "embed"),
    }
    return {"blocks": blocks, "out": jp.tag(jnp.ones(EMBED), None)}


def batch_of() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, ROWS, SEQ, EMBED)).astype(np.float32)
    x += 1  # so that some experts are chosen more often
    mask = (rng.random((ROWS, SEQ)) < np.linspace(0.2, 1, ROWS)[:, None]).astype(np.float32)
    mask[3] = 0
    return {"x": x, "y": y, "mask": mask}


def layer(block: Any, x: jax.Array, mask: Any, *, per: Any = "batch") -> tuple[jax.Array, dict[str, jax.Array]]:
    x = jp.hint(x, "batch", "seq", "embed")
    routing = ROUTER(x @ block["router"])
    scalars = routing_metrics(routing, 0.25, mask=mask)
    loss = load_balance_loss(routing, per, mask=mask) / 4 + router_z_loss(routing, mask=mask) / 100
    return x + routing.weights[..., :1] * jnp.tanh(x @ block["w"]), {"loss": loss, **scalars}


def head(model: Any, x: jax.Array, batch: Any) -> Any:
    error = jnp.mean((x * model["out"] - batch["y"]) ** 2, -1)
    if "mask" not in batch:
        return jnp.mean(error)
    weight = jnp.sum(batch["mask"])
    return jnp.sum(error * batch["mask"]) / jnp.where(weight == 0, 1, weight), {"weight": weight}


LOSS = jp.pipeline.PipelineLoss(
    "blocks",
    lambda model, batch: batch["x"],
    layer,
    head,
    layer_inputs=lambda model, batch: batch.get("mask"),
    dims=("batch", "seq", "embed"),
)


def using(**options: Any) -> jp.pipeline.PipelineLoss:
    return dataclasses.replace(LOSS, layer=functools.partial(layer, **options))


def formulas(p: Any, logits: Any, chosen: Any, mask: Any, per: str) -> dict[str, Any]:
    """Every loss and metric of one layer, for probabilities ``[batch, seq, experts]`` and one-hot choices."""
    weight = mask / mask.sum()
    counts = (chosen * mask[..., None]).sum((0, 1))
    if per == "sequence":
        own = (chosen * mask[..., None]).sum(1)
        share = own.sum(-1, keepdims=True)
        balance = ((own / jnp.where(share == 0, 1, share))[:, None] * p).sum(-1)
    else:
        balance = (counts / counts.sum() * p).sum(-1)
    return {
        "balance": EXPERTS * (balance * weight).sum(),
        "z": (jnp.log(jnp.exp(logits).sum(-1)) ** 2 * weight).sum(),
        "expert_load_max": counts.max() / counts.mean(),
        "router_entropy": -((p * jnp.log(p)).sum(-1) * weight).sum(),
    }


def reference_of(model: Any, batch: Any, per: str) -> Any:
    """Loss, metrics and weight of one microbatch, with ``lax.top_k`` and one-hot choices."""
    x, found = batch["x"], []
    mask = batch.get("mask", np.ones(x.shape[:2], np.float32))
    for i in range(LAYERS):
        logits = x @ model["blocks"]["router"][i]
        p = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
        best, index = jax.lax.top_k(p, K)
        found.append(formulas(p, logits, jax.nn.one_hot(index, EXPERTS).sum(-2), mask, per))
        x = x + (best / best.sum(-1, keepdims=True))[..., :1] * jnp.tanh(x @ model["blocks"]["w"][i])
    sums = {name: sum(each[name] for each in found) for name in found[0]}
    error = ((x * model["out"] - batch["y"]) ** 2).mean(-1)
    loss = (error * mask / mask.sum()).sum() + sums["balance"] / 4 + sums["z"] / 100
    return loss, {name: sums[name] for name in ("expert_load_max", "router_entropy")}, mask.sum()


@functools.cache
def wanted(per: str, masked: bool, microbatches: int, shards: int) -> tuple[dict[str, float], Any]:
    """Metrics and gradients of a step: the mean over microbatches, each with rows of every device."""
    split = lambda x: x.reshape(shards, microbatches, -1, *x.shape[1:]).swapaxes(0, 1)
    batch = {name: split(x) for name, x in batch_of().items() if masked or name != "mask"}
    pieces = [{name: x[n].reshape(-1, *x.shape[3:]) for name, x in batch.items()} for n in range(microbatches)]

    def mean(model: Any) -> Any:
        found = [reference_of(model, piece, per) for piece in pieces]
        total = sum(weight for *_, weight in found)
        shares = [jax.tree.map(lambda x, w=w: x * w / total, (loss, metrics)) for loss, metrics, w in found]
        return jax.tree.map(lambda *x: sum(x), *shares)

    one = layout_of(RULES, {"data": 1})
    with one, jax.default_matmul_precision("highest"):
        params = initial(jp.abstract_state(one, make_model, SGD), make_model, RULES).params
        (loss, metrics), grads = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
    return {"loss": loss, **metrics}, jax.device_get(grads)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout with the options of its step, and how it splits rows into microbatches."""

    sizes: dict[str, int]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    per: str = "batch"
    masked: bool = False
    rules: jp.Rules = RULES
    microbatches: int = 1
    loss: Any = LOSS


def zero(stage: int, sizes: dict[str, int], steps: int = 1, **fields: Any) -> Case:
    stages = jp.Zero(stage, min_bytes=0)
    options = {**stages.step, "grad_accum_steps": steps}
    return Case(sizes, options, rules=stages.rules(RULES), microbatches=steps, **fields)


def piped(name: str, sizes: dict[str, int], **fields: Any) -> Case:
    schedule = jp.pipeline.schedule(name, stages=sizes["pipeline"], microbatches=2)
    return Case(sizes, {"pipeline": jp.Pipeline(schedule)}, microbatches=2, **fields)


def accumulated(sizes: dict[str, int], reduction: str, **fields: Any) -> Case:
    return Case(sizes, {"grad_accum_steps": 2, "grad_reduction": reduction}, microbatches=2, **fields)


REMAT = dataclasses.replace(LOSS, layer=jax.checkpoint(layer))
CASES = {
    "ZeRO 1": zero(1, {"data": 8}),
    "data 8": Case({"data": 8}, masked=True),
    "context": Case({"data": 2, "context": 4}, per="sequence"),
    "1f1b, context": piped("1f1b", {"pipeline": 2, "data": 2, "context": 2}, per="sequence", masked=True),
    "FSDP": Case({"data": 8}, per="global", rules=FSDP),
    "ZeRO 3, microbatches": zero(3, {"data": 4}, 2, masked=True),
    "ZeRO 1, masked": zero(1, {"data": 8}, masked=True),
    "ZeRO 1, context, microbatches, masked": zero(1, {"data": 2, "context": 4}, 2, per="sequence", masked=True),
    "ZeRO 1, context": zero(1, {"data": 2, "context": 4}),
    "ZeRO 2": zero(2, {"data": 8}, per="sequence"),
    "reduced once": accumulated({"data": 4}, "per_step"),
    "reduced in every microbatch": accumulated({"data": 4}, "per_microbatch", masked=True),
    "remat": Case({"data": 8}, loss=REMAT),
    "ZeRO 1, remat": zero(1, {"data": 8}, loss=REMAT),
    "1f1b, remat": piped("1f1b", {"pipeline": 2, "data": 4}, loss=REMAT),
    "gpipe, context": piped("gpipe", {"pipeline": 2, "data": 2, "context": 2}),
    "zb_h1": piped("zb_h1", {"pipeline": 2, "data": 2, "context": 2}, per="global", masked=True),
}

DEFAULT = ("ZeRO 1", "1f1b, context")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.slow) for n in CASES])
def test_the_same_in_every_layout(name: str) -> None:
    """Loss, metrics and gradients are those of one device, computed by other code."""
    case = CASES[name]
    layout = layout_of(case.rules, case.sizes)
    batch = {name: x for name, x in batch_of().items() if case.masked or name != "mask"}
    loss = case.loss if case.per == "batch" else using(per=case.per)
    got, grads, _ = one_step(layout, loss, make_model, batch, **case.options)
    metrics, want = wanted(case.per, case.masked, case.microbatches, case.sizes.get("data", 1))
    for key, value in metrics.items():
        assert got[key] == pytest.approx(float(value), rel=1e-6), key
    assert got["router_nonfinite"] == 0
    assert got["dropped_fraction"] == LAYERS * 0.25
    check_grads(grads, want, 1e-6)


# Compiled as one program: compiling each of their operations takes longer.
route, counts_of, metrics_of = jax.jit(ROUTER), jax.jit(expert_counts), jax.jit(routing_metrics)
balance_of = jax.jit(load_balance_loss, static_argnames="per")


@functools.cache
def routed(seed: int) -> tuple[np.ndarray, Routing]:
    logits = np.random.default_rng(seed).normal(size=(ROWS, SEQ, EXPERTS)).astype(np.float32)
    logits[..., 0] += 1
    return logits, route(logits)


@pytest.mark.parametrize(
    ("per", "masked"), covering(["batch", "sequence", "global"], [True, False], keep=1, strength=1)
)
def test_manual_axes_without_a_layout(per: Any, masked: bool) -> None:
    """In a ``shard_map``, the mean over devices, weighted by their tokens, has the value and gradient of all tokens."""
    mesh = jp.MeshSpec(data=2, context=4).build()
    logits, _ = routed(0)
    mask = batch_of()["mask"] if masked else np.ones((ROWS, SEQ), np.float32)

    def scalars(logits: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        routing, given = ROUTER(logits), mask if masked else None
        balance = load_balance_loss(routing, per, mask=given)
        return {"balance": balance, "z": router_z_loss(routing, mask=given), **routing_metrics(routing, mask=given)}

    def local(logits: jax.Array, mask: jax.Array) -> Any:
        weight = jnp.sum(mask)
        total = jax.lax.psum(weight, ("data", "context"))
        found, pull = jax.vjp(lambda logits: scalars(logits, mask), logits)
        (grad,) = pull({name: jnp.where(name in ("balance", "z"), weight / total, 0.0) for name in found})
        return jax.lax.psum({name: x * weight / total for name, x in found.items()}, ("data", "context")), grad

    def all_tokens(logits: jax.Array) -> Any:
        p = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
        chosen = jax.nn.one_hot(jax.lax.top_k(p, K)[1], EXPERTS).sum(-2)
        found = formulas(p, logits, chosen, mask, per)
        return found["balance"] + found["z"], found

    spec = P("data", "context")
    with jax.set_mesh(mesh):
        run = jax.shard_map(local, in_specs=spec, out_specs=(P(), spec), check_vma=False)
        got, grad = jax.jit(run)(logits, mask)
    want_grad, want = jax.jit(jax.grad(all_tokens, has_aux=True))(logits)
    for name, value in want.items():
        assert float(got[name]) == pytest.approx(float(value), rel=1e-6), name
    np.testing.assert_allclose(grad, want_grad, atol=1e-6 * np.abs(want_grad).max())


@pytest.mark.parametrize("per", ["batch", "sequence", "global"])
@pytest.mark.parametrize("k", [1, 3])
def test_a_balanced_routing_has_loss_1(per: Any, k: int) -> None:
    each = np.stack([np.roll(np.eye(4), i, 1) for i in range(k)]).sum(0)  # every expert is chosen by k tokens
    router = jax.jit(Router(experts=4, k=k))
    balanced = router(np.stack([9 * each, 5 * each]).astype(np.float32))
    assert float(balance_of(balanced, per)) == pytest.approx(1, rel=1e-6)
    assert float(metrics_of(balanced)["expert_load_max"]) == 1
    collapsed = router(np.broadcast_to(np.float32(40) * (np.arange(4, dtype=np.float32) < k), (2, 4, 4)))
    assert float(balance_of(collapsed, per)) == pytest.approx(4 / k, rel=1e-6)
    assert float(metrics_of(collapsed)["expert_load_max"]) == pytest.approx(4 / k)


def test_counts_of_a_batch_make_microbatches_exact() -> None:
    """With the batch's counts, the mean of the microbatches' losses is the loss of the batch, also its gradient."""
    logits, routing = routed(1)
    counts = sum(np.asarray(counts_of(route(piece))) for piece in np.split(logits, 4))
    np.testing.assert_array_equal(counts, counts_of(routing))

    def accumulated(logits: jax.Array) -> jax.Array:
        return sum(load_balance_loss(ROUTER(piece), "global", counts=counts) for piece in jnp.split(logits, 4)) / 4

    got, grad = jax.jit(jax.value_and_grad(accumulated))(logits)
    want, want_grad = jax.jit(jax.value_and_grad(lambda x: load_balance_loss(ROUTER(x))))(logits)
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    np.testing.assert_allclose(grad, want_grad, atol=1e-6 * np.abs(want_grad).max())


def test_tokens_that_are_not_finite() -> None:
    """They are counted, and neither a loss nor the gradient of another token is lost."""
    logits, clean = routed(2)
    bad = logits.copy()
    bad[0, 0], bad[1, 2, 3], bad[2, 1, 0] = np.nan, np.inf, np.nan

    def loss(logits: jax.Array) -> jax.Array:
        routing = ROUTER(logits)
        return load_balance_loss(routing, "sequence") + router_z_loss(routing)

    value, grad = jax.jit(jax.value_and_grad(loss))(bad)
    assert np.isfinite(value) and np.all(np.isfinite(grad))
    found = {name: float(x) for name, x in metrics_of(route(bad)).items()}
    assert found["router_nonfinite"] == 3 and all(map(math.isfinite, found.values()))
    assert float(metrics_of(clean)["router_nonfinite"]) == 0
    mask = np.ones((ROWS, SEQ), np.float32)
    mask[0] = 0
    assert float(metrics_of(route(bad), mask=mask)["router_nonfinite"]) == 2


def test_a_mask_leaves_tokens_out() -> None:
    logits, _ = routed(3)
    mask = np.zeros((ROWS, SEQ), np.float32)
    mask[4:9] = 1
    wild = np.where(mask[..., None] == 1, logits, 1e30).astype(np.float32)
    for per in ("batch", "sequence"):
        got, want = balance_of(route(wild), per, mask=mask), balance_of(route(logits[4:9]), per)
        assert float(got) == pytest.approx(float(want), rel=1e-6)

    def nothing(logits: jax.Array) -> Any:
        routing, none = ROUTER(logits), jnp.zeros((ROWS, SEQ))
        loss = load_balance_loss(routing, mask=none) + router_z_loss(routing, mask=none)
        return loss, routing_metrics(routing, mask=none)

    (value, metrics), grad = jax.jit(jax.value_and_grad(nothing, has_aux=True))(wild)
    assert float(value) == 0 and not np.any(grad) and not any(map(float, metrics.values()))


def test_dtypes() -> None:
    def dtypes(logits: jax.Array) -> Any:
        routing, mask = ROUTER(logits), jnp.ones((2, 4), bool)
        losses = load_balance_loss(routing, mask=mask), router_z_loss(routing, mask=mask)
        return losses, routing_metrics(routing, dropped=jnp.bfloat16(0.5))

    for logits, loss in (("bfloat16", "float32"), ("float64", "float64")):
        with jax.enable_x64(True):
            losses, metrics = jax.eval_shape(dtypes, jax.ShapeDtypeStruct((2, 4, EXPERTS), logits))
        assert {str(x.dtype) for x in losses} == {loss}
        assert {str(x.dtype) for x in metrics.values()} == {"float32"}
    assert update_bias(jnp.zeros(2, jnp.bfloat16), jnp.array([1, 2]), 0.1).dtype == jnp.bfloat16


def test_updates_of_the_bias_balance_the_choices() -> None:
    logits, _ = routed(4)
    router, bias = Router(experts=EXPERTS, k=K, score="sigmoid"), jnp.zeros(EXPERTS)
    step = jax.jit(lambda bias: update_bias(bias, expert_counts(router(logits, bias)), 0.01))
    before = metrics_of(jax.jit(router)(logits))["expert_load_max"]
    for _ in range(60):
        bias = step(bias)
    assert float(before) > 1.5 and float(metrics_of(jax.jit(router)(logits, bias))["expert_load_max"]) < 1.1


WRONG: dict[str, tuple[Any, str]] = {
    "per": (lambda r: load_balance_loss(r, "sequences"), "load_balance_loss: per"),
    "dims": (lambda r: router_z_loss(route(r.logits[0])), "8]"),
    "mask": (lambda r: expert_counts(r, jnp.ones(ROWS)), "routing: mask"),
    "counts that are not read": (lambda r: load_balance_loss(r, counts=jnp.ones(EXPERTS)), "per='batch'"),
    "counts": (lambda r: load_balance_loss(r, "global", counts=jnp.ones(3)), "[3]"),
    "bias": (lambda r: update_bias(jnp.ones(4), expert_counts(r), 0.1), "update_bias: counts"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    call, text = WRONG[name]
    with raises(ConfigError, text):
        call(routed(0)[1])
