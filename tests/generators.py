"""The small Llama that generates, on any mesh: what tests of generation have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from one_step import LLAMA_RULES

import jaxpar as jp
from jaxpar.models.decoding import cached_llama
from jaxpar.models.llama import LlamaConfig, make_llama

CONFIG = LlamaConfig(vocab=64, embed=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48)
TIED = replace(CONFIG, tie_embeddings=True)
RULES = jp.Rules(**{**LLAMA_RULES.to_dict(), "vocab": "model"})
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], list(range(20, 37))]
MOST, SLOTS = [8, 5, 8, 8], 32


def generator(
    mesh: Any, rules: jp.Rules = RULES, config: LlamaConfig = CONFIG, kept: dict[str, str] | None = None, **options: Any
) -> jp.Generator:
    """Four rows of 32 slots; ``kept`` says what is in int8."""
    how: dict[str, Any] = {"batch": 4, "slots": SLOTS, **options}
    return jp.Generator(jp.Layout(mesh, rules), make_llama(config), cached_llama(config, **(kept or {})), **how)


def one_device() -> Any:
    """The mesh of the first device."""
    return jp.MeshSpec().build(jax.devices()[:1])
