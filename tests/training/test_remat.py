"""Tests rematerialization policies: equal gradients, FLOPs, memory, and errors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import few

import jaxpar as jp
from jaxpar.analysis.compare import gradient_gaps
from jaxpar.errors import ConfigError
from jaxpar.models.llama import make_llama
from jaxpar.models.llama.config import LlamaConfig
from jaxpar.models.losses import next_token_loss

POLICIES: dict[str, str | jp.RematPolicy] = {
    "none": "none",
    "full": "full",
    "dots": "dots",
    "save_attention": "save_attention",
    "save_outputs": "save_outputs",
    "names": jp.RematPolicy("save_names", save_names=("qkv", "mlp_hidden")),
    "some layers": jp.RematPolicy("full", layers=(2, 1)),
    "no layer": jp.RematPolicy("full", layers=(0,)),
}


TX = optax.sgd(0.1)


def model_of(remat: str | jp.RematPolicy) -> Callable[[jax.Array], Any]:
    return make_llama(LlamaConfig(layers=4, vocab=64, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=64, remat=remat))


def step_of(remat: str | jp.RematPolicy, layout: jp.Layout) -> tuple[Any, Any, Any]:
    """Returns the step, with its state and batch as shapes."""
    state = jp.abstract_state(layout, model_of(remat), TX)
    tokens = jax.ShapeDtypeStruct((16, 32), jnp.int32)
    step = jp.train_step(layout, next_token_loss, return_grads=True)
    return step, state, {"tokens": tokens, "targets": tokens}


@pytest.fixture(scope="session")
def compiled(layout_of: Any) -> Callable[[str], Any]:
    def build(name: str) -> Any:
        step, state, batch = step_of(POLICIES[name], layout_of("fsdp_tp"))
        with jax.default_matmul_precision("highest"):
            return step.lower(state, batch).compile(compiler_options={"xla_backend_optimization_level": 0})

    return functools.cache(build)


@pytest.fixture(scope="session")
def gradients(compiled: Callable[[str], Any], layout_of: Any) -> Callable[[str], Any]:
    def run(name: str) -> Any:
        state = jp.init(layout_of("fsdp_tp"), model_of(POLICIES[name]), TX)
        tokens = np.random.default_rng(0).integers(0, 64, (2, 16, 32)).astype(np.int32)
        return jax.device_get(compiled(name)(state, {"tokens": tokens[0], "targets": tokens[1]})[1]["grads"])

    return functools.cache(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", few([name for name in POLICIES if name != "none"], 1))
def test_gradients_do_not_depend_on_what_is_computed_again(name: str, gradients: Callable[[str], Any]) -> None:
    assert max(gradient_gaps(gradients("none"), gradients(name)).values()) < 1e-5


@pytest.mark.slow
def test_the_less_is_kept_the_more_is_computed(compiled: Callable[[str], Any]) -> None:
    flops = {name: jp.audit(compiled(name)).matmul_flops for name in POLICIES}
    assert flops["no layer"] == flops["none"] < flops["dots"] < flops["full"]
    assert flops["none"] < flops["names"] < flops["save_outputs"] < flops["full"]
    again = flops["full"] - flops["none"]
    assert flops["some layers"] == pytest.approx(flops["none"] + again * 3 / 4, rel=0.01)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_segments_cover_every_layer_once_in_order(layers: list[int]) -> None:
    total = 5 * len(layers)
    found = jp.RematPolicy("full", layers=tuple(layers)).segments(total)
    assert [a for a, _, _ in found] + [total] == [0] + [b for _, b, _ in found]
    assert sum(b - a for a, b, again in found if again) == sum(layers)
    assert all(one[2] is not other[2] for one, other in itertools.pairwise(found))


def kept_bytes(remat: str | jp.RematPolicy, layout: jp.Layout) -> int:
    """Returns the temporary bytes of a step over long sequences, where activations of layers dominate."""
    model = LlamaConfig(layers=12, vocab=64, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=64, remat=remat)
    state = jp.abstract_state(layout, make_llama(model), TX)
    tokens = jax.ShapeDtypeStruct((8, 512), jnp.int32)
    step = jp.train_step(layout, next_token_loss).lower(state, {"tokens": tokens, "targets": tokens})
    memory = step.compile(compiler_options={"xla_backend_optimization_level": 0}).memory_analysis()
    return int(memory.temp_size_in_bytes)


@pytest.mark.slow
def test_activations_kept_in_parts_take_less_and_change_no_gradient(
    layout_of: Any, gradients: Callable[[str], Any]
) -> None:
    plain = layout_of("tp")
    sliced = jp.Layout(plain.mesh, plain.rules.replace(saved_embed="model"))
    remat = jp.RematPolicy("full", slice_activation=True)
    state = jp.init(sliced, model_of(remat), TX)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 16, 32)).astype(np.int32)
    with jax.default_matmul_precision("highest"):
        step = jp.train_step(sliced, next_token_loss, return_grads=True)
        found = jax.device_get(step(state, {"tokens": tokens[0], "targets": tokens[1]})[1]["grads"])
    assert max(gradient_gaps(gradients("none"), found).values()) < 1e-5
    # Each of the twelve layers keeps [8, 512, 32] in fp32 per device, or a shard of it. One is gathered at a time.
    ways, layer = plain.sizes["model"], 8 // plain.sizes["data"] * 512 * 32 * 4
    saved = kept_bytes("full", plain) - kept_bytes(remat, sliced)
    assert saved > 12 * layer * (1 - 1 / ways) - 1.1 * layer


def test_offloaded_tensors_go_to_the_hosts_memory_and_back(layout_of: Any) -> None:
    rules = layout_of("fsdp", 8).rules
    layout = jp.Layout(jp.MeshSpec(data=8).on("v5e:2x4"), rules)
    step, state, batch = step_of(jp.RematPolicy("save_names", offload_names=("block_output",)), layout)
    text = str(step.trace(state, batch).jaxpr)
    assert "pinned_host" in text or "<host>" in text, text[:2000]


def test_simulated_devices_say_that_they_offload_nothing(layout_of: Any) -> None:
    step, state, batch = step_of(jp.RematPolicy("save_names", offload_names=("block_output",)), layout_of("fsdp"))
    with pytest.warns(UserWarning, match="offload_names"):
        step.trace(state, batch)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"policy": "ful"}, "save_attention"),
        ({"policy": "save_names"}, "'save_names'"),
        ({"policy": "full", "save_names": ("qkv",)}, "policy 'full'"),
        ({"policy": "save_names", "save_names": ("qkv",), "offload_names": ("qkv",)}, "remat: qkv"),
        ({"policy": "none", "slice_activation": True}, "remat: slice_activation"),
        ({"policy": "full", "layers": (1, -1)}, "remat: layers"),
    ],
)
def test_what_is_no_policy(arguments: dict[str, Any], name: str) -> None:
    with raises(ConfigError, name):
        jp.RematPolicy(**arguments)


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ((1, 1, 1), "has 3"),
        ((3, 1), "[3"),
    ],
)
def test_layers_that_do_not_fit(layers: tuple[int, ...], name: str) -> None:
    with raises(ConfigError, name):
        LlamaConfig(layers=4, remat=jp.RematPolicy("full", layers=layers))


def test_a_name_that_no_tensor_has(layout_of: Any) -> None:
    step, state, batch = step_of(jp.RematPolicy("save_names", save_names=("qvk",)), layout_of("dp", 8))
    with raises(ConfigError, "attention_keys"):
        step.trace(state, batch)
