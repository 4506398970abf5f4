"""A small Llama that generates on any mesh, shared by the tests of generation."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from one_step import LLAMA_RULES

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.models.llama import LlamaConfig, make_llama
from jaxpar.models.llama.decode import cached_llama

CONFIG = LlamaConfig(vocab=64, embed=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48)
TIED = replace(CONFIG, tie_embeddings=True)
RULES = jp.Rules(**{**LLAMA_RULES.to_dict(), "vocab": "model"})
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], list(range(20, 37))]
MOST, SLOTS = [8, 5, 8, 8], 32


def generator(
    mesh: Any, rules: jp.Rules = RULES, config: LlamaConfig = CONFIG, kept: dict[str, str] | None = None, **options: Any
) -> jp.Generator:
    """A generator with four rows of 32 slots; ``kept`` sets what is stored in int8."""
    how: dict[str, Any] = {"batch": 4, "slots": SLOTS, **options}
    return jp.Generator(jp.Layout(mesh, rules), make_llama(config), cached_llama(config, **(kept or {})), **how)


def one_device() -> Any:
    """The mesh of the first device."""
    return jp.MeshSpec().build(jax.devices()[:1])


def parameters(model: jp.Generator, config: LlamaConfig = CONFIG) -> Any:
    """Random parameters with large layers: initial ones hardly change the embedding, and the head would repeat it."""
    shapes = jp.abstract_state(model.layout, make_llama(config), optax.identity()).params
    rng = np.random.default_rng(0)

    def drawn(path: Any, like: Any) -> jax.Array:
        value = (rng.normal(size=like.shape) / 2 + ("scale" in str(path[-1]))).astype("f4")
        return jax.make_array_from_callback(like.shape, like.sharding, lambda at: value[at])

    return jax.tree_util.tree_map_with_path(drawn, shapes)


def work(address: str, rank: str, folder: str) -> None:
    """Run one of two processes that generate together, and write its results to a file in ``folder``."""
    jax.distributed.initialize(address, 2, int(rank), coordinator_bind_address=address)
    mesh = jp.MeshSpec(pipeline=2, data=2).build()
    model = generator(mesh)
    across = {d.process_index for d in mesh.devices[:, 0].flat} == {0, 1}
    params = parameters(model)
    told: dict[str, Any] = {"across": across, "made": model.generate(params, PROMPTS, most=MOST), "errors": []}
    long = [[1] * (40 if rank == "1" else 2)]
    for prompts, seeds in ((long, [0]), ([[1], [2, 3]], [0, 5 + int(rank)])):
        try:
            model.stream(params, prompts, most=1, seeds=seeds)
        except ConfigError as error:
            told["errors"].append(str(error))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    work(*sys.argv[1:])
