"""Rotary positions in ``config.json``, in its older and newer forms, alone and together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from error_texts import raises

from jaxpar.errors import ConfigError
from jaxpar.interop.families import to_config
from jaxpar.models.llama.config import GemmaConfig
from jaxpar.models.llama.rope import RopeScaling

GOLDEN = Path(__file__).parents[1] / "golden" / "huggingface"


def fields_of(case: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((GOLDEN / case / "config.json").read_text())
    return fields


def test_older_configurations_are_read() -> None:
    old = json.loads((GOLDEN / "llama3" / "config.json").read_text())
    rope = old.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    new = to_config(json.loads((GOLDEN / "llama3" / "config.json").read_text()))
    assert to_config({**old, "rope_theta": theta, "rope_scaling": rope}) == new
    rope["type"] = rope.pop("rope_type")
    assert to_config({**old, "rope_theta": theta, "rope_scaling": rope, "unsloth": "x"}, ignore=["unsloth"]) == new
    assert (new.rope_theta, new.rope_scaling) == (500.0, RopeScaling("llama3", 8.0, 32))


def test_a_rope_scaling_beside_rope_parameters_is_read() -> None:
    """transformers takes all of ``rope_scaling``, and of Gemma 3's full attention it adds it to what there is."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    wanted = RopeScaling("yarn", 4.0, 32, fast_turns=32.0)
    read = lambda case, **more: to_config({**fields_of(case), **more})
    assert read("llama2", rope_scaling=yarn).rope_scaling == wanted
    assert read("llama2", rope_scaling={}) == read("llama2", rope_scaling=None) == read("llama2")
    llama3 = read("llama3", rope_scaling={**yarn, "rope_theta": 500.0})
    assert (llama3.rope_scaling, llama3.rope_theta) == (wanted, 500.0)
    assert read("llama3", rope_scaling=yarn, rope_theta=500.0) == llama3
    gemma3 = read("gemma3", rope_scaling=yarn)
    assert (gemma3.rope_scaling, gemma3.rope_theta) == (wanted, 500.0)
    assert gemma3.gemma == read("gemma3").gemma


def test_bases_of_gemma_3_beside_rope_parameters_are_read() -> None:
    parts = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    read = lambda **more: to_config({**fields_of("gemma3"), "rope_parameters": parts, **more})
    config = read(rope_theta=300.0, rope_local_base_freq=200.0)
    assert (config.rope_theta, config.gemma) == (300.0, GemmaConfig(6, local_rope_theta=200.0))
    assert (read().rope_theta, read().gemma) == (1e6, GemmaConfig(6, local_rope_theta=1e4))


def test_older_gemmas_are_read() -> None:
    new = {key: value for key, value in fields_of("gemma3").items() if key not in ("rope_parameters", "layer_types")}
    rope = {"rope_theta": 500.0, "rope_local_base_freq": 100, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert to_config({**new, **rope, "sliding_window_pattern": 2}) == to_config(fields_of("gemma3"))
    assert to_config({**new, "sliding_window_pattern": 3}).local_layers == (True, True, False, True, True)
    assert to_config(new).gemma == GemmaConfig(query_scalar=6, local_rope_theta=1e4)
    assert to_config(new).rope_theta == 1e6
    old = {key: value for key, value in fields_of("gemma2").items() if key not in ("rope_parameters", "layer_types")}
    assert to_config(old) == to_config(fields_of("gemma2"))
    del old["attn_logit_softcapping"]
    assert to_config({**old, "final_logit_softcapping": None}).gemma == GemmaConfig(6, attention_softcap=50.0)


def test_yarn_is_read() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    read = lambda **more: to_config({**fields_of("llama2"), "rope_parameters": {**yarn, **more}}).rope_scaling
    assert read() == RopeScaling("yarn", 4.0, 32, fast_turns=32.0)
    assert read(truncate=False, attention_factor=1.5) == RopeScaling(
        "yarn", 4.0, 32, fast_turns=32.0, attention_factor=1.5, truncate=False
    )
    assert read(attention_factor=1.5).rotated_factor == 1.5
    assert read(factor=None) == RopeScaling("yarn", 256 / 32, 32, fast_turns=32.0)
    assert read(original_max_position_embeddings=None, mscale=0) == RopeScaling("yarn", 4.0, 256, fast_turns=32.0)


def test_a_base_that_a_rope_scaling_replaces_is_an_error() -> None:
    with raises(ConfigError, "config.json", "500.0"):
        to_config({**fields_of("llama3"), "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    with raises(ConfigError, "config.json", "of full_attention"):
        to_config({**fields_of("gemma3"), "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}})
