"""Adapters of weights in host memory: the frozen weights are there, one layer at a time comes to the device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from test_adapters import CONFIG, X, layout_of, make_nnx, nnx_loss, trained

import jaxpar as jp
from jaxpar.models import llama
from jaxpar.models.losses import next_token_loss
from jaxpar.utils.jaxprs import equations

pytestmark = pytest.mark.filterwarnings("ignore:offload. simulated CPU devices use host memory:UserWarning")
LLAMA = llama.LlamaConfig(vocab=40, embed=16, layers=3, heads=4, kv_heads=2, head_dim=4, mlp=32, remat="full")
RULES = jp.Rules(
    batch="data", seq=None, residual_seq=None, embed=None, norm=None, heads="model", kv_heads="model", head_dim=None,
    mlp="model", vocab="model", layers=None, params={"embed": "data"}, optimizer={"embed": "data"},
)  # fmt: skip
TOKENS = {
    name: np.random.default_rng(i).integers(0, 32, (8, 12)).astype("int32")
    for i, name in enumerate(("tokens", "targets"))
}
MODELS: dict[str, tuple[Any, Any, Any, Any]] = {
    "nnx": (make_nnx, nnx_loss, {"x": X}, layout_of().rules),
    "llama": (llama.make_llama(LLAMA), next_token_loss, TOKENS, RULES),
}


def run(model: str, sizes: dict[str, int], tx: Any, rules: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """A step's adapters and metrics as NumPy arrays, and the state after it."""
    make, loss, batch, own = MODELS[model]
    layout = layout_of(**sizes, rules=rules or own)
    state = trained(jp.init(layout, jp.lora.adapt(make, CONFIG), tx))
    before = jax.tree.map(np.asarray, jp.lora.frozen_params(state))
    after, metrics = jp.train_step(layout, loss, return_grads=True, donate=False, **options)(state, batch)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, jp.lora.frozen_params(after)))
    return jax.tree.map(np.asarray, after.params), jax.tree.map(np.asarray, metrics), after


def check_equal(got: Any, want: Any) -> None:
    assert got[1]["loss"] == pytest.approx(want[1]["loss"], rel=1e-5)
    for mine, theirs in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(want[:2]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * max(1.0, np.abs(theirs).max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [("llama", {"grad_accum_steps": 2}), ("llama", {}), ("nnx", {}), ("nnx", jp.Zero(1).step)],
)
def test_adapters_of_weights_in_host_memory_are_trained_as_on_one_device(model: str, options: dict[str, Any]) -> None:
    tx = optax.sgd(0.1, momentum=0.9)
    hosted = jp.offload.to_host(tx, parameters=True, min_bytes=0)
    want = run(model, {}, tx, **{name: n for name, n in options.items() if name == "grad_accum_steps"})
    got = run(model, {"data": 2, "model": 2}, hosted, **options)
    check_equal(got, want)
    kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
    frozen = jp.lora.frozen_params(got[2])["blocks"]
    assert "pinned_host" in kinds(frozen)
    assert kinds(got[2].params) == {"device"}


@pytest.mark.slow
def test_merged_weights_are_those_of_weights_on_the_device() -> None:
    tx = optax.sgd(0.1)
    got = run("llama", {"data": 2, "model": 2}, jp.offload.to_host(tx, parameters=True, min_bytes=0))[2]
    want = run("llama", {"data": 2, "model": 2}, tx)[2]
    for mine, theirs in zip(*(jax.tree.leaves(jp.lora.merge(state)) for state in (got, want)), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=0, atol=1e-5)
    digests = [jp.lora.digest_of(jp.lora.frozen_params(state)) for state in (got, want)]
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_no_array_of_the_size_of_a_frozen_weight_is_a_gradient() -> None:
    layout = layout_of(rules=RULES)
    make = jp.lora.adapt(llama.make_llama(LLAMA), CONFIG)
    tx = jp.offload.to_host(optax.sgd(0.1), parameters=True, min_bytes=0)
    state = jp.abstract_state(layout, make, tx)
    jaxpr = jax.make_jaxpr(jp.train_step(layout, next_token_loss, donate=False))(state, TOKENS).jaxpr
    products = {tuple(e.outvars[0].aval.shape) for e in equations(jaxpr) if e.primitive.name == "dot_general"}
    assert not products & {(16, 32), (32, 16)}  # the shapes of `up` and `down`
    assert (8, 12, 32) in products
