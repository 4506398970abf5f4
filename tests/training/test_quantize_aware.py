"""A quantization-aware step is that of the model with rounded weights, in every layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from generators import CONFIG
from one_step import BOUND, LLAMA_RULES, check_grads, layout_of, one_step

import jaxpar as jp
from jaxpar.compression import QuantizeConfig, dequantize, quantize, quantize_aware
from jaxpar.errors import ConfigError, ModelError
from jaxpar.models.llama import make_llama
from jaxpar.models.llama.decode import quantized_weights
from jaxpar.models.llama.pipeline import staged_next_token_loss
from jaxpar.models.losses import next_token_loss
from jaxpar.training.model.quantized import RoundedKind
from jaxpar.training.rounded_weights import with_rounded_weights

RULES = jp.Rules(batch="data", embed=None, mlp="model", params={"embed": "data"})
X = np.random.default_rng(0).normal(size=(8, 24)).astype("float32")
HOW = QuantizeConfig(("up", "down"), bits=4, group=8)


def make_model(key: jax.Array) -> Any:
    up, down = jax.random.split(key)
    return {
        "up": jp.tag(jax.random.normal(up, (24, 32)), "embed", "mlp"),
        "down": jp.tag(jax.random.normal(down, (32, 24)), "mlp", "embed"),
        "bias": jp.tag(jnp.zeros(32), "mlp"),
    }


def loss_fn(model: Any, batch: Any) -> Any:
    return (((jnp.tanh(batch["x"] @ model["up"] + model["bias"]) @ model["down"]) - batch["x"]) ** 2).mean()


def layout(data: int, model: int) -> jp.Layout:
    return jp.Layout(jp.MeshSpec(data=data, model=model).build(jax.devices()[: data * model]), RULES)


AWARE = quantize_aware(make_model, HOW)
TX = optax.adam(1e-2)


def rounded(params: Any, how: QuantizeConfig) -> Any:
    return dequantize(quantize(params, how), "float32")


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_rounded_weights_in_every_layout() -> None:
    params = jax.tree.map(np.asarray, jp.init(layout(1, 1), make_model, TX).params)
    want, grads = jax.value_and_grad(loss_fn)(rounded(params, HOW), {"x": X})
    plain = loss_fn(params, {"x": X})
    assert abs(float(want - plain)) > 1e-3 * float(plain), "rounding changes the loss"
    cases: list[tuple[jp.Layout, dict[str, Any]]] = [
        (layout(1, 1), {}),
        (layout(2, 2), {}),  # 12 rows of a device: one group and a half
        (layout(4, 1), {"grad_accum_steps": 2, "grad_reduction": "per_step"}),
    ]
    for here, options in cases:
        step = jp.train_step(here, loss_fn, return_grads=True, **options)
        state = jp.init(here, AWARE, TX)
        new, metrics = step(state, {"x": X})
        np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
        check_grads(jax.device_get(metrics["grads"]), jax.device_get(grads), 1e-5)
        assert float(jp.eval_step(here, loss_fn)(new, {"x": X})["loss"]) < float(want)
        # The trained weights are not rounded: their updates are smaller than a step of the integers.
        assert len(np.unique(np.asarray(new.params["up"]))) > 24 * 32 // 2
        for name in ("up", "down"):
            assert new.params[name].sharding.is_equivalent_to(jp.init(here, make_model, TX).params[name].sharding, 2)


@pytest.mark.slow
def test_the_models_weights_are_what_quantize_gives(tmp_path: Path) -> None:
    here = layout(2, 2)
    state = jp.init(here, AWARE, TX)
    step = jp.train_step(here, loss_fn, donate=False)
    for _ in range(2):
        state, _ = step(state, {"x": X})
    want = rounded(state.params, HOW)
    for name, w in state.model.items():
        np.testing.assert_array_equal(np.asarray(w), np.asarray(want[name]))
    # A checkpoint has the paths of the model without rounding, and a run goes on from it bit by bit.
    jp.save(tmp_path / "one", state, layout=here)
    again = jp.restore(tmp_path / "one", jp.abstract_state(here, AWARE, TX))
    plain = jp.restore(tmp_path / "one", jp.abstract_state(here, make_model, TX))
    assert jax.tree.structure(plain.params) == jax.tree.structure(state.params)
    ends = [step(one, {"x": X})[0] for one in (state, again)]
    for a, b in zip(*(jax.tree.leaves(end.params) for end in ends), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_no_weight_is_gathered_to_round_it() -> None:
    here = layout(4, 2)
    shapes = jp.abstract_state(here, AWARE, TX)
    kinds = []
    for make in (make_model, AWARE):
        program = jp.train_step(here, loss_fn).lower(jp.abstract_state(here, make, TX), {"x": X}).compile()
        found = jp.audit(program, mesh=here.mesh).collectives
        kinds.append(sum(c.result_bytes * c.count for c in found if c.kind == "all-gather"))
    assert kinds[1] <= kinds[0] + 4 * 32 * 3, (kinds, shapes)


def test_each_device_rounds_its_own_shards() -> None:
    """12 rows of a device are one group and a half, so the largest magnitude is that of two devices."""
    here, rng = layout(2, 2), np.random.default_rng(1)
    state = jp.abstract_state(here, AWARE, TX)
    params = jax.tree.map(lambda x: jax.device_put(rng.normal(size=x.shape).astype("f4"), x.sharding), state.params)
    inner = lambda params: with_rounded_weights(here, dataclasses.replace(state, params=params))
    with here:
        found = jax.jit(lambda params: inner(params).params)(params)
        kind = jax.eval_shape(inner, params).metadata.kind
    assert isinstance(state.metadata.kind, RoundedKind) and not isinstance(kind, RoundedKind)
    for name, w in params.items():
        values = np.asarray(w)
        if name != "bias":  # groups of 8 neighbors along the inputs, each with a scale of max / 7
            groups = values.reshape(-1, 8, values.shape[1])
            scales = np.abs(groups).max(1, keepdims=True) / np.float32(7)
            values = (np.rint(groups / scales) * scales).reshape(values.shape)
        np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-7)
        assert found[name].sharding.is_equivalent_to(w.sharding, w.ndim)


def test_weights_in_host_memory_are_not_rounded() -> None:
    state = jp.abstract_state(layout(1, 1), AWARE, TX)
    host = jax.tree.map(lambda x: x.update(sharding=x.sharding.with_memory_kind("pinned_host")), state.params)
    with raises(ConfigError, "quantize: weights"):
        with_rounded_weights(layout(1, 1), dataclasses.replace(state, params=host))


LLAMA = quantized_weights(CONFIG, 4, 16)
TOKENS = np.random.default_rng(1).integers(0, CONFIG.vocab, (8, 17)).astype("int32")
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
MAKE, LOSS = make_llama(CONFIG), next_token_loss
AWARE_LLAMA = quantize_aware(MAKE, LLAMA)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"data": 2, "model": 2}, {}),
        ({"pipeline": 2, "data": 2}, {"pipeline": jp.pipeline.schedule("1f1b", 2, 2)}),
        ({"data": 4}, {"grad_accum_steps": 2, "weight_gather": "per_step", "grad_reduction": "per_step"}),
    ],
    ids=["fsdp tp", "pipeline", "zero 1"],
)
def test_a_llama_trains_as_on_one_device(sizes: dict[str, int], options: dict[str, Any]) -> None:
    metrics, grads, _ = one_step(layout_of(LLAMA_RULES, {"data": 1}), LOSS, AWARE_LLAMA, BATCH)
    loss = staged_next_token_loss(CONFIG) if "pipeline" in options else LOSS
    found, own, _ = one_step(layout_of(LLAMA_RULES, sizes), loss, AWARE_LLAMA, BATCH, **options)
    assert found["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    check_grads(own, grads, BOUND)
    plain, _, _ = one_step(layout_of(LLAMA_RULES, {"data": 1}), LOSS, MAKE, BATCH)
    assert abs(plain["loss"] - metrics["loss"]) > 1e-4


def test_what_does_not_fit_is_an_error() -> None:
    lora = jp.lora.LoraConfig(rank=2, targets=("up",))
    cases: list[tuple[Any, str]] = [
        (quantize_aware(jp.lora.adapt(make_model, lora), HOW), "quantize_aware"),
        (quantize_aware(AWARE, HOW), "quantize_aware"),
        (jp.lora.adapt(AWARE, lora), "adapt(make_model)"),
        (jp.pipeline.stack(AWARE, "blocks"), "blocks"),
    ]
    for make, name in cases:
        with raises(ModelError, name):
            jp.abstract_state(layout(1, 1), make, TX)
    with raises(ConfigError, "quantize: up"):
        jp.abstract_state(layout(1, 1), quantize_aware(make_model, QuantizeConfig(("up",), group=5)), TX)
