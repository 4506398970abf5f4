"""``init`` creates the state sharded: no tensor is ever complete on one device, and none passes through the host."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from profiles import few

import jaxpar as jp
from jaxpar.models.llama import make_llama, preset
from jaxpar.training.state import init_program

LAYOUTS = Path(__file__).parents[2] / "configs" / "layouts"
CONFIG = preset("tiny", layers=2, embed=128, mlp=1024, vocab=2048)


@pytest.mark.parametrize("name", few(["fsdp", "fsdp_tp"], 1))
def test_nothing_is_ever_whole_on_one_device(name: str) -> None:
    layout = jp.Layout.from_yaml(LAYOUTS / f"{name}.yaml")
    make_model, tx = make_llama(CONFIG), optax.adamw(1e-3)
    memory = init_program(layout, make_model, tx).lower(jax.random.key(0)).compile().memory_analysis()
    total = jp.explain(layout, make_model, tx).total("params", "opt_state")
    assert memory.output_size_in_bytes == pytest.approx(total.device_bytes, rel=1e-3)
    # Random bits and their conversions need memory of a few shards, never of a full tensor in addition to the state.
    embedding = CONFIG.vocab * CONFIG.embed * 4
    assert memory.temp_size_in_bytes < embedding, "some tensor is built whole"


@pytest.mark.slow
def test_init_moves_no_array_between_host_and_devices() -> None:
    layout = jp.Layout.from_yaml(LAYOUTS / "fsdp.yaml")
    program = init_program(layout, make_llama(CONFIG), optax.adamw(1e-3))
    key = jax.device_put(jax.random.key(0), layout.sharding(()))
    with jax.transfer_guard("disallow"):
        state = program(key)
    largest = max(np.prod(shard.data.shape) for x in jax.tree.leaves(state.params) for shard in x.addressable_shards)
    assert largest == max(np.prod(x.shape) for x in jax.tree.leaves(state.params)) / 8


@pytest.mark.slow
def test_the_seed_decides_the_parameters() -> None:
    layout = jp.Layout.from_yaml(LAYOUTS / "dp.yaml")
    states = [jp.init(layout, make_llama(preset("tiny", layers=1)), optax.sgd(0.1), seed=seed) for seed in (0, 0, 1)]
    heads = [np.asarray(state.params["head"]) for state in states]
    np.testing.assert_array_equal(heads[0], heads[1])
    assert not np.array_equal(heads[0], heads[2])


def test_the_key_of_the_model_is_what_init_says() -> None:
    """A model outside of jaxpar has the same initial values from the first half of the seed's key."""
    layout = jp.Layout(jp.MeshSpec(data=2).build(jax.devices()[:2]), jp.Rules(embed="data"))
    make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (8, 3)), "embed", None)}
    model_key, step_key = jax.random.split(jax.random.key(5))
    state = jp.init(layout, make_model, optax.sgd(0.1), seed=5)
    np.testing.assert_allclose(state.params["w"], make_model(model_key)["w"].value, rtol=1e-6)
    assert state.key == step_key


def test_no_array_of_a_state_has_a_weak_type() -> None:
    """An update returns none, so a step would compile twice, and the buffers of a pipeline would not fit its layers."""
    layout = jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), jp.Rules(embed=None))
    make = lambda key: {"w": jp.tag(jnp.full(8, 2.0), "embed")}
    assert jnp.full(8, 2.0).weak_type
    abstract = jp.abstract_state(layout, make, optax.sgd(0.1, momentum=0.9))
    assert not any(x.weak_type for x in jax.tree.leaves(abstract.params))
