"""The learning rates of a run's schedules."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from jaxpar.app.config import OptimizerConfig, PruneSettings
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


def test_an_optimizer_prunes_as_configured() -> None:
    settings = PruneSettings(pattern=(1, 2), targets=("w",), axis={"w": 1})
    state = make_optimizer(OptimizerConfig(prune=settings), 6).init({"w": np.ones((3, 4)), "v": np.ones((2, 2))})
    assert isinstance(state, PruneState) and state.masks["w"].shape == (3, 4)
    for config, text in (
        (OptimizerConfig(prune=PruneSettings()), "optimizer.prune: give either sparsity or pattern. Remedy: "),
        (
            OptimizerConfig("one_bit_adam", options={"warmup": 2}, prune=settings),
            "optimizer: one_bit_adam does not support prune. Remedy: another optimizer.",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            make_optimizer(config, 6)
        assert str(error.value).startswith(text)
