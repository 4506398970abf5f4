"""Decoders with experts generate in every layout what the model without a cache computes on one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from generators import MOST, PROMPTS, SLOTS
from one_step import layout_of
from small_moe import FOLDED, FSDP, RULES, TP

import jaxpar as jp
from jaxpar.models.llama.decode import cached_llama
from jaxpar.models.moe.config import LatentAttentionConfig, preset
from jaxpar.models.moe.model import make_moe

INT8 = {"weights": "int8", "cache": "int8"}
SIZES: dict[str, Any] = {"vocab": 64, "embed": 32, "heads": 4, "head_dim": 8, "mlp": 48, "expert_mlp": 24}
LATENT = LatentAttentionConfig(kv_latent=16, q_latent=24, rope_dim=4, value_dim=10)
CONFIGS = {
    # A capacity that would drop half of the choices: decoding drops none.
    "mixtral": preset("mixtral", **SIZES, layers=2, kv_heads=2, capacity_factor=0.5),
    "qwen3_moe": preset("qwen3_moe", **SIZES, layers=2, kv_heads=2, tie_embeddings=True),
    "deepseek_v3": preset("deepseek_v3", **SIZES, layers=3, kv_heads=4, latent_attention=LATENT),
}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "ep": ({"expert": 4}, {}),
    "ep fsdp": ({"data": 2, "expert": 2}, FSDP),
    "ep tp": ({"expert": 2, "model": 2}, TP),
    "over model": ({"data": 2, "model": 2}, {"batch": "data", "experts": "model"}),
    "not sharded": ({"data": 2, "model": 2}, {"batch": "data", "experts": None, **TP}),
    "ring": ({"data": 2, "expert": 2, "context": 2}, FSDP),
    "folded": ({"data": 2, "context": 2}, FOLDED),
    "pipelined": ({"pipeline": 2, "expert": 2, "model": 2}, TP),
    "pipelined ring": ({"pipeline": 2, "data": 2, "context": 2}, {**FOLDED, **FSDP}),
}


def generator(family: str, mesh: dict[str, int], rules: dict[str, Any], kept: dict[str, str]) -> jp.Generator:
    layout = layout_of(jp.Rules(**{**RULES, "vocab": "model", **rules}), mesh)
    config = CONFIGS[family]
    return jp.Generator(layout, make_moe(config), cached_llama(config, **kept), batch=4, slots=SLOTS)


@functools.cache
def parameters(family: str) -> Any:
    """Parameters with enlarged layers: initial ones hardly change the embedding, and the head would repeat it."""
    model = generator(family, {"data": 1}, {}, {})
    params = jp.init(model.layout, make_moe(CONFIGS[family]), optax.identity()).params
    stacks = {"blocks", "dense_blocks"}
    return {name: jax.tree.map(lambda w: w * 3, part) if name in stacks else part for name, part in params.items()}


def generate(family: str, mesh: dict[str, int], rules: dict[str, Any], kept: dict[str, str]) -> list[list[int]]:
    model = generator(family, mesh, rules, kept)
    params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), parameters(family), model.params)
    return model.generate(model.prepare(params) if kept else params, PROMPTS, most=MOST)


@functools.cache
def without_cache(family: str) -> list[list[int]]:
    """The tokens that a plain forward pass without a capacity finds likeliest."""
    config = replace(CONFIGS[family], capacity_factor=None)
    layout, params = layout_of(jp.Rules(**RULES), {"data": 1}), parameters(family)
    state = jp.abstract_state(layout, make_moe(config), optax.identity())
    forward = jax.jit(lambda params, tokens: state.metadata.kind.merge(params, {})(tokens))
    found = []
    for prompt, most in zip(PROMPTS, MOST, strict=True):
        tokens = list(prompt)
        for _ in range(most):
            with layout:
                logits = forward(params, jnp.array([tokens + [0] * (SLOTS - len(tokens))]))
            tokens.append(int(logits[0, len(tokens) - 1].argmax()))
        found.append(tokens[len(prompt) :])
    assert len({token for made in found for token in made}) > 8, "tokens that say something"
    return found


def in_turn(first: int) -> list[tuple[str, str]]:
    """Every mesh once, and every family in each third mesh; two values of ``first`` give each mesh two families."""
    families = [*CONFIGS]
    return [(families[(first + number) % len(families)], name) for number, name in enumerate(MESHES)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), in_turn(0))
def test_tokens_are_those_without_a_cache_on_one_device(family: str, name: str) -> None:
    assert generate(family, *MESHES[name], {}) == without_cache(family)


@functools.cache
def in_int8(family: str) -> list[list[int]]:
    return generate(family, {"data": 1}, {}, INT8)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), in_turn(1))
def test_tokens_in_int8_are_those_of_one_device(family: str, name: str) -> None:
    """Experts are gathered and multiplied as integers; routers keep the compute dtype."""
    assert generate(family, *MESHES[name], INT8) == in_int8(family)


def test_what_is_stored_in_int8() -> None:
    model = generator("deepseek_v3", {"data": 1}, {}, INT8)
    dtypes = {
        "/".join(str(getattr(key, "key", key)) for key in keys): x.dtype.name
        for keys, x in jax.tree_util.tree_leaves_with_path(model.prepared["blocks"]["mixture"])
    }
    assert dtypes["router"] == dtypes["router_bias"] == "float32"
    assert dtypes["gate/.values"] == dtypes["down/.values"] == "int8"
