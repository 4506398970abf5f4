"""The errors of the sizes and options of a decoder with experts."""

from __future__ import annotations

from typing import Any

import pytest

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.models.moe.config import LatentAttentionConfig, preset

ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": (
        {"dense_layers": 4},
        "moe: dense_layers must be less than layers=4, got 4. Remedy: family: llama, which has no experts.",
    ),
    "remat": (
        {"dense_layers": 1, "remat": jp.RematPolicy("full", layers=(1,))},
        (
            "moe: remat.layers selects some of 4 layers, but dense_layers=1 of them are another stack. Remedy: leave "
            "remat.layers out."
        ),
    ),
    "copies": (
        {"copies": 2},
        "moe: overlap.ways is 2, but layers with experts run on whole batches. Remedy: overlap: {ways: 1}.",
    ),
    "latent": (
        {"latent_attention": LatentAttentionConfig()},
        "moe: latent attention gives every query head its own key, but heads=4 and kv_heads=2. Remedy: kv_heads: 4.",
    ),
    "dispatch": (
        {"dispatch": "raged"},
        (
            "experts: dispatch must be one of auto, ragged, deduplicated, gather, all_to_all, got 'raged'. Did you "
            "mean 'ragged'?"
        ),
    ),
    "capacity": (
        {"dispatch": "all_to_all"},
        (
            "experts: dispatch 'all_to_all' sends the same number of rows to every expert, so it requires a "
            "capacity_factor. Remedy: capacity_factor=1.25, or dispatch='ragged', which drops nothing."
        ),
    ),
    "router": (
        {"k": 9},
        (
            "Router: k must be at most the number of experts, 8, got 9. Remedy: choose fewer experts per token, or add "
            "experts."
        ),
    ),
    "groups": (
        {"groups": 3},
        (
            "Router: groups must be a divisor of the number of experts, 8, got 3. Remedy: use another number of "
            "groups, or groups=1."
        ),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_sizes_that_do_not_fit_are_rejected(name: str) -> None:
    changes, text = ERRORS[name]
    with pytest.raises(ConfigError) as error:
        preset("mixtral", **changes)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("mixtrl",), "moe: unknown family 'mixtrl'. Did you mean 'mixtral'? Known: mixtral, qwen3_moe, deepseek_v3."),
        (("mixtral", "tny"), "moe: unknown preset 'tny'. Did you mean 'tiny'? Known: tiny, mixtral_8x7b."),
    ],
    ids=["family", "preset"],
)
def test_unknown_names_are_rejected(names: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        preset(*names)
    assert str(error.value) == text


def test_flops_of_a_token_are_those_of_its_own_experts() -> None:
    config = preset("mixtral", vocab=64, embed=32, layers=3, heads=4, kv_heads=2, head_dim=8, expert_mlp=24)
    expert, attention = 3 * 32 * 24, 32 * 8 * (4 + 2 + 2 + 4)
    matmuls = 64 * 32 + 3 * (attention + config.k * expert + 32 * config.experts)
    scores = 3 * 4 * (8 + 8) * 16 / 2  # half of 16 keys, each for a score and a sum of values, in 4 heads
    assert config.flops_per_token(16) == 6 * (matmuls + scores)
    assert config.block_layers == 3 and config.supports_chunks is False
