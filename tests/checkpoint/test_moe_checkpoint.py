"""A checkpoint of experts fits every number of devices that divides them, and no other number of experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
from error_texts import raises
from one_step import layout_of
from profiles import few
from small_moe import FOLDED, FSDP, RULES, TP

import jaxpar as jp
from jaxpar.errors import CheckpointError
from jaxpar.models.moe.config import preset
from jaxpar.models.moe.model import make_moe

CONFIG = preset("deepseek_v3", vocab=64, embed=32, heads=4, head_dim=8, mlp=48, expert_mlp=24, layers=2)
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "ep 2 fsdp 4": ({"data": 4, "expert": 2}, FSDP),
    "ep 8": ({"expert": 8}, {}),
    "one device": ({"data": 1}, {}),
    "ep 2 tp 2": ({"data": 2, "expert": 2, "model": 2}, {**FSDP, **TP}),
    "folded": ({"data": 2, "context": 4}, FOLDED),
}


def layout(name: str) -> jp.Layout:
    mesh, rules = {**MESHES, "ep 4 fsdp 2": ({"data": 2, "expert": 4}, FSDP)}[name]
    return layout_of(jp.Rules(**{**RULES, **rules}), mesh)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("experts") / "one"
    like, rng = jp.abstract_state(layout("ep 4 fsdp 2"), make_moe(CONFIG), optax.adam(0.1)), np.random.default_rng(0)

    def leaf(x: Any) -> jax.Array:
        key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.device_put(jax.random.key(0) if key else rng.normal(size=x.shape).astype(x.dtype), x.sharding)

    state = jax.tree.map(leaf, like)
    jp.save(folder, state)
    return folder, jax.device_get((state.params, state.opt_state))


@pytest.mark.parametrize("name", few(MESHES, 1))
def test_experts_move_to_any_number_of_devices(name: str, saved: tuple[Path, Any]) -> None:
    folder, arrays = saved
    like = jp.abstract_state(layout(name), make_moe(CONFIG), optax.adam(0.1))
    found = jp.restore(folder, like)
    assert found.params["blocks"]["mixture"]["gate"].sharding == like.params["blocks"]["mixture"]["gate"].sharding
    chex.assert_trees_all_equal(jax.device_get((found.params, found.opt_state)), arrays)


def test_another_number_of_experts_is_rejected_with_both_sizes(saved: tuple[Path, Any]) -> None:
    config = replace(CONFIG, experts=16)
    like = jp.abstract_state(layout("ep 8"), make_moe(config), optax.adam(0.1))
    names = (f"params/blocks/mixture/{name}" for name in ("down", "gate", "router", "router_bias", "up"))
    with raises(CheckpointError, *names):
        jp.restore(saved[0], like)
