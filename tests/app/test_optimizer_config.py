"""The learning rates of a run's schedules."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.app.config import MuonSettings, OptimizerConfig, PruneSettings
from jaxpar.app.optimizer_config import learning_rate, make_optimizer
from jaxpar.compression import PruneState
from jaxpar.errors import ConfigError


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("cosine", [0, 0.5, 1, 0.853553, 0.5, 0.146447, 0]),
        ("linear", [0, 0.5, 1, 0.75, 0.5, 0.25, 0]),
        ("constant", [0, 0.5, 1, 1, 1, 1, 1]),
    ],
)
def test_a_rate_grows_and_decays(schedule: Literal["cosine", "linear", "constant"], rates: list[float]) -> None:
    rate = learning_rate(OptimizerConfig(learning_rate=2.0, warmup=2, schedule=schedule, final_lr_ratio=0.0), 6)
    np.testing.assert_allclose([rate(step) for step in range(7)], 2 * np.array(rates), atol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_rate_ends_at_its_final_ratio(schedule: Literal["cosine", "linear"]) -> None:
    rate = learning_rate(OptimizerConfig(learning_rate=2.0, warmup=0, schedule=schedule, final_lr_ratio=0.25), 4)
    np.testing.assert_allclose([rate(0), rate(4), rate(9)], [2.0, 0.5, 0.5], rtol=1e-6)


def test_a_rate_may_end_its_decay_before_the_run() -> None:
    config = OptimizerConfig(learning_rate=2.0, warmup=2, schedule="linear", decay_steps=4, final_lr_ratio=0.5)
    np.testing.assert_allclose([learning_rate(config, 9)(step) for step in range(7)], [0, 1, 2, 1.5, 1, 1, 1])


def make_model(key: jax.Array) -> dict[str, Any]:
    del key
    return {
        "w": jp.tag(jnp.ones((2, 3, 4)), "layers", "embed", "mlp"),
        "b": jp.tag(jnp.ones((2, 4)), "layers", "mlp"),
        "head": jp.tag(jnp.ones((3, 8)), "embed", "vocab"),
    }


def test_muon_has_a_rate_for_matrices_and_one_for_all_other_parameters() -> None:
    rates = {"learning_rate": 0.5, "schedule": "constant", "warmup": 2}
    settings = MuonSettings(adam_learning_rate=0.25)
    config = OptimizerConfig("muon", **rates, options={"nesterov": False}, muon=settings)
    tx, params = make_optimizer(config, 6, make_model), make_model(jax.random.key(0))
    params = {name: leaf.value for name, leaf in params.items()}
    state, update, sizes = tx.init(params), jax.jit(tx.update), []
    for _ in range(2):
        updates, state = update(params, state, params)
        sizes.append({name: float(jnp.abs(x).max()) for name, x in updates.items()})
    assert sizes[0] == {"w": 0, "b": 0, "head": 0}
    # A matrix of ones has one singular value, which each iteration changes by this polynomial. Its entries are that
    # divided by sqrt(3 * 4), times Muon's factor sqrt(4 / 3) for the outputs and inputs.
    value = 1.0
    for _ in range(5):
        value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
    assert sizes[1]["w"] == pytest.approx(0.25 * value / 3, rel=1e-4)
    assert sizes[1]["b"] == sizes[1]["head"] == pytest.approx(0.125, rel=1e-4)
    assert jax.tree.leaves(state.inner_states["muon"].inner_state[0].mu)[0].shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (OptimizerConfig("adamw", muon=MuonSettings()), "optimizer.name"),
        (OptimizerConfig("muon", muon=MuonSettings(targets=("v",))), "head"),
        (OptimizerConfig("muon", options={"b2": 0.9}), "optimizer: muon"),
        (OptimizerConfig("muon", options={"preconditioning": "x"}), "frobenius"),
    ],
)
def test_wrong_keys_of_muon_are_named(config: OptimizerConfig, text: str) -> None:
    with raises(ConfigError, text):
        make_optimizer(config, 6, make_model)


def test_an_optimizer_prunes_as_configured() -> None:
    settings = PruneSettings(pattern=(1, 2), targets=("w",), axis={"w": 1})
    state = make_optimizer(OptimizerConfig(prune=settings), 6, make_model).init(
        {"w": np.ones((3, 4)), "v": np.ones((2, 2))}
    )
    assert isinstance(state, PruneState) and state.masks["w"].shape == (3, 4)
    for config, name in (
        (OptimizerConfig(prune=PruneSettings()), "optimizer.prune"),
        (OptimizerConfig("one_bit_adam", options={"warmup": 2}, prune=settings), "optimizer: one_bit_adam"),
    ):
        with raises(ConfigError, name):
            make_optimizer(config, 6, make_model)
