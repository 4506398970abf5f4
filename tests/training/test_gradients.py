"""Tests microbatches, gradient reduction per step and per microbatch, and the dtypes of a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from one_step import SGD, initial, one_step
from profiles import few, few_pairs

import jaxpar as jp
from jaxpar.analysis.compare import gradient_gaps
from jaxpar.errors import ConfigError, LayoutError, ModelError
from jaxpar.models.llama import LlamaConfig, make_llama
from jaxpar.models.losses import next_token_loss

RULES = jp.Rules(batch=("replica", "data"), embed=None, mlp=None)
WAYS = {
    "once": {"grad_reduction": "per_step"},
    "each": {"grad_reduction": "per_microbatch"},
    "once, weights for a step": {"grad_reduction": "per_step", "weight_gather": "per_step"},
    "each, weights for a step": {"grad_reduction": "per_microbatch", "weight_gather": "per_step"},
}


def mean_and_weight(model: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean over the rows that the mask counts, whose share differs between microbatches."""
    rows = jnp.mean((jnp.tanh(batch["x"] @ model["up"]) @ model["down"]) ** 2, axis=1)
    weight = jnp.sum(batch["mask"])
    return jnp.sum(rows * batch["mask"]) / jnp.maximum(weight, 1), {"weight": weight, "largest": jnp.max(rows)}


def make(key: jax.Array) -> dict[str, Any]:
    up, down = jax.random.split(key)
    return {
        "up": jp.tag(jax.random.normal(up, (16, 24)) / 4, "embed", "mlp"),
        "down": jp.tag(jax.random.normal(down, (24, 16)) / 5, "mlp", "embed"),
    }


def masked(rows: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    mask = (random.random(rows) < 0.4).astype(np.float32)
    mask[:4] = 0  # No row of one device's microbatch counts.
    return {"x": random.normal(size=(rows, 16)).astype(np.float32), "mask": mask}


def found(loss_fn: Any, batch: Any, rules: jp.Rules = RULES, devices: int = 8, **options: Any) -> dict[str, Any]:
    layout = jp.Layout(jp.MeshSpec(data=-1).build(jax.devices()[:devices]), rules)
    with jax.default_matmul_precision("highest"):
        shapes = jp.abstract_state(layout, make, SGD)
        step = jp.train_step(layout, loss_fn, return_grads=True, donate=False, **options)
        compiled = step.lower(shapes, batch).compile()
        _, metrics = compiled(initial(shapes, make, RULES), batch)
    return jax.device_get(metrics)


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    """The step of one device with the large batch."""
    return found(mean_and_weight, masked(32), devices=1)


@pytest.mark.parametrize(("way", "grad_accum_steps"), few_pairs(WAYS, [1, 4], 2))
def test_microbatches_of_any_weight_sum_to_the_large_batch(
    way: str, grad_accum_steps: int, whole: dict[str, Any]
) -> None:
    batch = masked(32)
    sharded = RULES.replace(params={"embed": "data"})
    rules = sharded if "step" in way else RULES
    pieces = found(mean_and_weight, batch, rules, grad_accum_steps=grad_accum_steps, **WAYS[way])
    assert pieces["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert pieces["weight"] == whole["weight"]
    assert max(gradient_gaps(whole["grads"], pieces["grads"]).values()) < 1e-6


def test_a_single_device_has_microbatches_too() -> None:
    batch = masked(12)
    whole, pieces = (found(mean_and_weight, batch, devices=1, grad_accum_steps=n) for n in (1, 3))
    assert max(gradient_gaps(whole["grads"], pieces["grads"]).values()) < 1e-6


LLAMA = LlamaConfig(vocab=106, embed=24, layers=2, heads=4, kv_heads=2, head_dim=6, mlp=64, remat="full")
make_of_llama = make_llama(LLAMA)


def of_llama(layout: jp.Layout, **options: Any) -> dict[str, Any]:
    """Returns a step's metrics with grouped queries, 15 tokens per sequence and full rematerialization."""
    tokens = np.random.default_rng(0).integers(0, LLAMA.vocab, (2, 16, 15))
    batch = {"tokens": tokens[0], "targets": tokens[1]}
    metrics, grads, _ = one_step(layout, next_token_loss, make_of_llama, batch, **options)
    return {**metrics, "grads": grads}


@pytest.fixture(scope="session")
def llama_on_one_device(layout_of: Any) -> dict[str, Any]:
    return of_llama(layout_of("dp", jax.devices()[:1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "layout"), few([(1, "tp"), (2, "tp"), (3, "tp"), (1, "fsdp_tp"), (2, "fsdp_tp")], 1, names=2)
)
def test_stages_compose_with_tensor_parallelism(
    stage: int, layout: str, layout_of: Any, llama_on_one_device: dict[str, Any]
) -> None:
    """On a mesh of data 4 × model 2, in two microbatches."""
    zero = jp.Zero(stage, min_bytes=64)
    place = jp.Layout(jp.MeshSpec(data=4, model=2).build(), zero.rules(layout_of(layout, 8).rules))
    metrics = of_llama(place, grad_accum_steps=2, **zero.step)
    assert metrics["loss"] == pytest.approx(llama_on_one_device["loss"], rel=1e-6)
    assert max(gradient_gaps(llama_on_one_device["grads"], metrics["grads"]).values()) < 1e-5


@pytest.mark.parametrize(
    ("topology", "kernel"), few([("v5e:2x4", "pallas_call"), ("h100:8", "cudnn$fmhaSoftmax")], 1, names=2)
)
def test_kernels_take_the_shards_of_a_step_whose_axes_are_manual(topology: str, kernel: str, layout_of: Any) -> None:
    layout = jp.Layout(jp.MeshSpec(data=8).on(topology), jp.Zero(1).rules(layout_of("dp", 8).rules))
    config = LlamaConfig(vocab=256, embed=256, layers=1, heads=2, kv_heads=1, head_dim=128, mlp=256, dtype="bfloat16")
    state = jp.abstract_state(layout, make_llama(config), optax.adam(1e-3))
    tokens = jax.ShapeDtypeStruct((16, 256), jnp.int32)
    step = jp.train_step(layout, next_token_loss, grad_accum_steps=2, **jp.Zero(1).step)
    assert kernel in str(step.trace(state, {"tokens": tokens, "targets": tokens}).jaxpr)


@pytest.mark.slow
def test_sums_in_16_bits_beside_automatic_axes(layout_of: Any) -> None:
    """XLA:CPU aborts on 16-bit reductions here, so jaxpar widens them."""
    layout = jp.Layout(jp.MeshSpec(data=4, model=2).build(), jp.Zero(1, min_bytes=64).rules(layout_of("tp", 8).rules))
    metrics = of_llama(layout, precision={"reduce": "bf16"}, **jp.Zero(1).step)
    assert np.isfinite(metrics["loss"])


def test_every_microbatch_and_device_has_a_key_of_its_own() -> None:
    def noisy(model: Any, batch: jax.Array, key: jax.Array) -> Any:
        drawn = jax.random.uniform(key)
        return jnp.mean(batch @ model["up"]) + 0 * drawn, {"drawn": drawn, "squared": drawn**2}

    batch = np.ones((16, 16), np.float32)
    for way in ("per_step", "per_microbatch"):
        metrics = found(noisy, batch, grad_accum_steps=2, grad_reduction=way)
        assert metrics["squared"] - metrics["drawn"] ** 2 > 1e-4, "all drew the same"


@pytest.mark.parametrize("grad_reduction", ["per_step", "per_microbatch"])
def test_counters_are_carried_through_microbatches(grad_reduction: str) -> None:
    from flax import nnx

    class Counting(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((16, 4)), logical_dims=("embed", "mlp"))
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.calls[...] += 1
            return x @ self.w[...]

    layout = jp.Layout(jp.MeshSpec(data=-1).build(), RULES)
    state = jp.init(layout, lambda key: Counting(), optax.sgd(0.1))
    step = jp.train_step(layout, lambda model, x: jnp.mean(model(x)), grad_accum_steps=4, grad_reduction=grad_reduction)
    state, _ = step(state, np.ones((32, 16), np.float32))
    assert int(jax.tree.leaves(state.variables)[0]) == 4


def test_variables_that_depend_on_a_devices_rows_are_refused() -> None:
    from flax import nnx

    class Normed(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((16, 4)), logical_dims=("embed", "mlp"))
            self.mean = nnx.BatchStat(jnp.zeros((16,)))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(0)
            return x @ self.w[...]

    layout = jp.Layout(jp.MeshSpec(data=-1).build(), RULES)
    state = jp.init(layout, lambda key: Normed(), optax.sgd(0.1))
    with raises(ModelError, "loss_fn", "variables/mean"):
        jp.train_step(layout, lambda model, x: jnp.mean(model(x)), grad_accum_steps=2)(
            state, np.ones((16, 16), np.float32)
        )


def dtypes(text: str, primitive: str) -> set[str]:
    """Returns the result dtypes of a collective in a trace."""
    lines = [line for line in text.splitlines() if f" = {primitive}[" in line or f"= {primitive} " in line]
    return {line.split(":")[1].split("[")[0] for line in lines}


@pytest.mark.parametrize(
    ("precision", "gathered", "reduced"),
    few(
        [
            ({"compute": "bf16", "reduce": "bf16"}, "bf16", "bf16"),
            (None, "f32", "f32"),
            ("fp32", "f32", "f32"),
            ("bf16", "bf16", "f32"),
            ({"gather": "bf16"}, "bf16", "f32"),
            ({"compute": "bf16", "gather": "fp32"}, "f32", "f32"),
        ],
        2,
        names=3,
    ),
    ids=str,
)
def test_weights_and_gradients_cross_the_mesh_in_the_dtypes_asked_for(
    precision: Any, gathered: str, reduced: str
) -> None:
    zero = jp.Zero(1, min_bytes=0)
    layout = jp.Layout(jp.MeshSpec(data=8).build(), zero.rules(RULES))
    state = jp.init(layout, make, optax.adam(1e-3))
    loss = lambda model, x: jnp.mean((x.astype(model["up"].dtype) @ model["up"]).astype(jnp.float32) ** 2)
    step = jp.train_step(layout, loss, precision=precision, **zero.step)
    text = str(step.trace(state, np.ones((8, 16), np.float32)).jaxpr)
    assert dtypes(text, "all_gather") == {gathered}
    assert dtypes(text, "reduce_scatter") == {reduced}
    state, _ = step(state, np.ones((8, 16), np.float32))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}


def test_bf16_is_close_to_fp32() -> None:
    batch = masked(32)
    wide, narrow = (found(mean_and_weight, batch, precision=p, grad_reduction="per_step") for p in ("fp32", "bf16"))
    gaps = gradient_gaps(wide["grads"], narrow["grads"])
    assert 1e-5 < max(gaps.values()) < 2e-2


def step_of(rules: jp.Rules = RULES, **options: Any) -> Any:
    layout = jp.Layout(jp.MeshSpec(data=-1).build(), rules)
    loss = options.pop("loss", lambda model, x: jnp.mean(x @ model["up"]))
    return jp.train_step(layout, loss, **options), jp.init(layout, make, optax.sgd(0.1))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"grad_accum_steps": 0}, "grad_accum_steps"),
        ({"weight_gather": "per_stpe"}, "weight_gather"),
        ({"grad_reduction": "per_stpe"}, "grad_reduction"),
        ({"precision": "bf61"}, "bf61"),
        ({"precision": {"reduced": "fp32"}}, "reduced"),
        ({"precision": "fp64"}, "jax_enable_x64"),
    ],
)
def test_what_is_no_option(options: dict[str, Any], name: str) -> None:
    with raises(ConfigError, name):
        step_of(**options)


@pytest.mark.parametrize("grad_reduction", ["per_step", "per_microbatch"])
def test_a_batch_that_cannot_be_cut(grad_reduction: str) -> None:
    step, state = step_of(grad_accum_steps=3, grad_reduction=grad_reduction)
    with raises(LayoutError, "grad_accum_steps", "24"):
        step(state, np.ones((16, 16), np.float32))


def test_rules_that_do_not_know_the_batch() -> None:
    step, state = step_of(jp.Rules(embed=None, mlp=None), grad_accum_steps=2)
    with raises(LayoutError, "grad_reduction", "dim 'batch'"):
        step(state, np.ones((16, 16), np.float32))


@pytest.mark.parametrize("way", few(WAYS, 2))
def test_a_batch_in_which_nothing_counts_gives_zero(way: str) -> None:
    batch = masked(32)
    batch["mask"][:] = 0
    metrics = found(mean_and_weight, batch, grad_accum_steps=2, **WAYS[way])
    assert (metrics["loss"], metrics["weight"], metrics["skipped"]) == (0, 0, False)
    assert all(not leaf.any() for leaf in jax.tree.leaves(metrics["grads"]))


@pytest.mark.parametrize(
    ("precision", "options", "name"),
    [
        (
            {"compute": "fp32", "reduce": "bf16"},
            {"weight_gather": "per_step", "grad_reduction": "per_microbatch"},
            "(float32)",
        ),
        ({"compute": "bf16", "gather": "fp32"}, {}, "precision: gather"),
        (
            {"compute": "bf16", "reduce": "fp32"},
            {"weight_gather": "per_step", "grad_reduction": "per_microbatch"},
            "jaxpar.sharded_dot",
        ),
    ],
)
def test_a_dtype_that_the_compiler_would_not_keep_to(precision: Any, options: dict[str, Any], name: str) -> None:
    step, state = step_of(precision=precision, **options)
    with raises(ConfigError, name):
        step(state, np.ones((16, 16), np.float32))


def test_metrics_that_cannot_be_averaged() -> None:
    loss = lambda model, x: (jnp.mean(x @ model["up"]), {"rows": x.sum(1)})
    step, state = step_of(grad_accum_steps=2, loss=loss)
    with raises(ModelError, "loss_fn", "'rows'"):
        step(state, np.ones((16, 16), np.float32))
