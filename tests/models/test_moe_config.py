"""The errors of the sizes and options of a decoder with experts."""

from __future__ import annotations

from typing import Any

import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.models.moe.config import LatentAttentionConfig, preset

ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"dense_layers": 4}, "moe: dense_layers"),
    "remat": ({"dense_layers": 1, "remat": jp.RematPolicy("full", layers=(1,))}, "moe: remat.layers"),
    "copies": ({"copies": 2}, "moe: overlap.ways"),
    "latent": ({"latent_attention": LatentAttentionConfig()}, "kv_heads"),
    "dispatch": ({"dispatch": "raged"}, "raged"),
    "capacity": ({"dispatch": "all_to_all"}, "capacity_factor"),
    "router": ({"k": 9}, "Router: k"),
    "groups": ({"groups": 3}, "Router: groups"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_sizes_that_do_not_fit_are_rejected(name: str) -> None:
    changes, text = ERRORS[name]
    with raises(ConfigError, text):
        preset("mixtral", **changes)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("mixtrl",), "qwen3_moe"),
        (("mixtral", "tny"), "mixtral_8x7b"),
    ],
    ids=["family", "preset"],
)
def test_unknown_names_are_rejected(names: tuple[str, ...], text: str) -> None:
    with raises(ConfigError, text):
        preset(*names)


def test_flops_of_a_token_are_those_of_its_own_experts() -> None:
    config = preset("mixtral", vocab=64, embed=32, layers=3, heads=4, kv_heads=2, head_dim=8, expert_mlp=24)
    expert, attention = 3 * 32 * 24, 32 * 8 * (4 + 2 + 2 + 4)
    matmuls = 64 * 32 + 3 * (attention + config.k * expert + 32 * config.experts)
    scores = 3 * 4 * (8 + 8) * 16 / 2  # half of 16 keys, each for a score and a sum of values, in 4 heads
    assert config.flops_per_token(16) == 6 * (matmuls + scores)
    assert config.block_layers == 3 and config.supports_chunks is False
