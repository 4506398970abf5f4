"""The bias that balances experts is a parameter that one step moves by its rate, the same in every layout."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.models.losses import next_token_loss
from jaxpar.models.moe.config import preset
from jaxpar.models.moe.model import make_moe

CONFIG = preset("deepseek_v3", layers=2, embed=32, vocab=64, heads=4, kv_heads=4, head_dim=16, mlp=48, expert_mlp=24)
RATE = 0.001


@pytest.mark.slow
def test_a_step_moves_the_bias_against_the_load(layout_of: Callable[..., jp.Layout]) -> None:
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, CONFIG.vocab)
    batch = {"tokens": tokens[:, :16], "targets": tokens[:, 1:]}
    found, norms = [], []
    for layout in (layout_of("ep_latent"), layout_of("ep_latent").on_one_device()):
        for tx in (jp.moe.balanced_bias(optax.adamw(1e-3), RATE), optax.set_to_zero()):
            state = jp.init(layout, make_moe(CONFIG), tx)
            state, metrics = jp.train_step(layout, next_token_loss, clip_norm=0.1)(state, batch)
            found.append(np.asarray(state.params["blocks"]["mixture"]["router_bias"]))
            norms.append(float(metrics["grad_norm"]))
    moved, still, alone, _ = found
    assert (moved == alone).all() and not still.any()
    assert set(np.unique(moved).tolist()) <= {np.float32(-RATE), 0.0, np.float32(RATE)} and moved.any()
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-5)
