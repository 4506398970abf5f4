"""Configurations of Hugging Face models: every published family is read, and what is not implemented is named."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples, few
from published_configs import PUBLISHED

from jaxpar.errors import CheckpointError, ConfigError, DamagedError
from jaxpar.interop import huggingface
from jaxpar.interop.families import to_config, to_fields
from jaxpar.interop.tensor_map import shared_copies, tensor_rules
from jaxpar.models import make_decoder
from jaxpar.models.llama import LlamaConfig
from jaxpar.models.moe.config import preset
from jaxpar.training.model import build_shapes, leaves_with_paths, show

GOLDEN = Path(__file__).parents[1] / "golden" / "huggingface"
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "answers.npz").is_file())


def fields_of(case: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((GOLDEN / case / "config.json").read_text())
    return fields


@pytest.mark.parametrize(
    ("case", "fields", "name"),
    [
        ("llama2", {"model_type": "lama"}, "'lama'"),
        ("llama2", {"model_type": "falcon"}, "model_type"),
        ("llama2", {"attention_bias": True}, "config.json"),
        ("llama2", {"hidden_act": "gelu"}, "silu"),
        ("llama2", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama2", {"hidden_size": "many"}, "hidden_size"),
        ("llama2", {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ("llama2", {"rope_parameters": {"rope_type": "linear"}}, "config.json: factor"),
        ("llama3", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (
            "qwen2_windows",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "short_factor": [1.0], "x": 3}},
            "short_factor",
        ),
        ("llama2", {"sliding_window": 8}, "sliding_window must"),
        ("llama2", {"layer_types": ["sliding_attention"] * 2}, "2 times"),
        ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "1 times"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types must"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma2", {"sliding_window_pattern": 6}, "6"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"attn_logit_softcapping": "50"}, "'50'"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "50.0"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e6}}, "have full_attention"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}},
            "rope_parameters.sliding_attention",
        ),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, ">= 1"),
        ("gemma3", {"model_type": "gemma3"}, "model_type"),
        ("gemma3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}, "config.json: truncate"),
        ("llama3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "10000"),
        ("llama2", {"rope_scaling": [8.0]}, "[8.0]"),
        ("llama2", {"is_causal": False}, "True, got False"),
        ("llama2", {"is_causal": None, "x": None}, "None; x"),
        ("llama2", {"attention_bias": 0}, "False, got 0"),
        ("deepseek_v3", {"rope_interleave": None}, "rope_interleave"),
        ("deepseek_v3", {"head_dim": 8}, "head_dim"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("llama2", {"num_key_value_heads": 3}, "kv_heads"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
    ],
)
def test_what_is_not_implemented_is_an_error(case: str, fields: dict[str, Any], name: str) -> None:
    before = json.loads((GOLDEN / case / "config.json").read_text())
    with raises(ConfigError, name):
        to_config({**before, **fields})


def test_windows_of_some_layers_are_read() -> None:
    old = {key: value for key, value in fields_of("qwen3").items() if key != "layer_types"}
    window = {"use_sliding_window": True, "sliding_window": 8}
    read = lambda **more: to_config({**old, **window, **more})
    assert read(max_window_layers=0).local_layers == (True, True)
    assert read(max_window_layers=0).window_pattern == (True,)
    assert read(max_window_layers=1).local_layers == (False, True)
    assert read(max_window_layers=2) == read(use_sliding_window=False) == to_config(old)
    types = ["sliding_attention", "full_attention"]
    assert read(max_window_layers=2, layer_types=types).local_layers == (True, False)
    assert read(use_sliding_window=False, layer_types=types) == to_config(old)
    absent = {key: value for key, value in old.items() if key != "sliding_window"}
    assert to_config({**absent, "use_sliding_window": True, "max_window_layers": 1}).sliding_window == 4096
    ministral = {**fields_of("mistral"), "model_type": "ministral", "layer_types": types}
    assert to_config(ministral).local_layers == (True, False)
    assert to_config({**ministral, "use_sliding_window": False}) == to_config(ministral)  # which it does not read
    assert to_config({**ministral, "layer_types": None}) == to_config(fields_of("mistral"))
    assert to_fields(to_config(ministral))["model_type"] == "ministral"


def test_windows_of_models_with_experts_are_read() -> None:
    read = lambda **more: to_config({**fields_of("qwen3_moe"), "sliding_window": 8, **more})
    used = read(use_sliding_window=True)
    assert used.sliding_window == 8 and set(used.local_layers) == {True}
    assert set(read(use_sliding_window=False).local_layers) == {False}


def test_a_number_of_layers_that_cannot_be_is_an_error_of_the_model() -> None:
    with raises(ConfigError, "config.json", "from 1"):
        to_config({**fields_of("mistral"), "num_hidden_layers": 0})


def test_a_config_json_that_is_none_is_an_error(tmp_path: Path) -> None:
    with raises(CheckpointError, "config.json"):
        huggingface.read_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("[1]")
    with raises(DamagedError, "config.json", "JSON"):
        huggingface.read_config(tmp_path)
    with file.open("wb") as opened:
        opened.truncate(10_000_001)
    with raises(DamagedError, "config.json", "bytes"):
        huggingface.read_config(tmp_path)


def test_what_cannot_be_exported_is_an_error(tmp_path: Path) -> None:
    config = LlamaConfig(vocab=64, embed=16, layers=1, heads=2, kv_heads=2, head_dim=8, mlp=16)
    params = build_shapes(make_decoder(config)).params
    with raises(ConfigError, "export: dtype"):
        huggingface.export(tmp_path / "out", params, config, dtype="int3")
    other = {**params, "norm": {"bias": params["norm"]["scale"]}}
    with raises(CheckpointError, "norm/bias"):
        huggingface.export(tmp_path / "out", other, config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "folder", "names"),
    [
        ("mixtral", "block_sparse_moe.", ("w1", "w3", "w2")),
        ("qwen3_moe", "mlp.", ("gate_proj", "up_proj", "down_proj")),
        ("deepseek_v3", "mlp.", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_experts_have_the_names_of_transformers(family: str, folder: str, names: tuple[str, ...]) -> None:
    """All of them compute ``down(silu(gate(x)) * up(x))``; in Mixtral, ``w2(silu(w1(x)) * w3(x))``."""
    rules = {rule.path: (rule.name, rule.pattern) for rule in tensor_rules(preset(family, "tiny"))}
    for ours, theirs, pattern in zip(
        ("gate", "up", "down"), names, ("f e -> e f", "f e -> e f", "e f -> f e"), strict=True
    ):
        name = f"model.layers.{{layer}}.{folder}experts.{{expert}}.{theirs}.weight"
        assert rules[f"blocks/mixture/{ours}"] == (name, pattern)
    assert rules["blocks/mixture/router"] == (f"model.layers.{{layer}}.{folder}gate.weight", "x e -> e x")


def test_layers_of_further_tokens_have_the_names_of_deepseek() -> None:
    """``model.layers.N`` after the model's own, with an embedding and a head of their own that are copies."""
    config = preset("deepseek_v3", "tiny", mtp_depth=1, tie_embeddings=False)
    config = replace(config, latent_attention=replace(config.latent_attention, q_latent=None))
    rules, copies = tensor_rules(config), shared_copies(config)
    shapes = {show(path): x.shape for path, x in leaves_with_paths(build_shapes(make_decoder(config)).params)}
    assert {rule.path for rule in rules} == set(shapes)
    at = f"model.layers.{config.layers}."
    names = {name for rule in rules for _, name in rule.names(shapes[rule.path])}
    own = {name.removeprefix(at) for name in names if name.startswith(at)}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= own
    assert {"self_attn.q_proj.weight", "self_attn.kv_b_proj.weight", "mlp.gate.weight"} <= own
    assert {f"mlp.experts.{k}.down_proj.weight" for k in range(config.experts)} <= own
    assert [(rule.path, rule.name) for rule in copies] == [
        ("embedding", f"{at}embed_tokens.weight"),
        ("head", f"{at}shared_head.head.weight"),
    ]
    tied = shared_copies(replace(config, tie_embeddings=True))
    assert [rule.path for rule in tied] == ["embedding", "embedding"]


@pytest.mark.parametrize("case", CASES)
def test_the_family_is_found(case: str) -> None:
    fields = json.loads((GOLDEN / case / "config.json").read_text())
    assert to_fields(to_config(fields))["model_type"] == fields["model_type"]


def test_what_no_family_can_express_is_an_error(tmp_path: Path) -> None:
    config = LlamaConfig(qk_norm=True, qkv_bias=True)
    with raises(ConfigError, "export", "qkv_bias=True"):
        to_fields(config)
    with raises(ConfigError, "export", "expert_mlp"):
        to_fields(preset("mixtral", mtp_depth=1))  # only files of DeepSeek-V3 have layers for further tokens
    with raises(ConfigError, "export: mistral"):
        to_fields(LlamaConfig(qk_norm=True), "mistral")
    with raises(ConfigError, "lama", "export"):
        to_fields(config, "lama")


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**20),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(
        st.sampled_from(["rope_type", "rope_theta", "factor"]), st.none() | st.text(max_size=2), max_size=2
    ),
)


@examples(30)
@given(st.data())
def test_no_field_raises_another_error(data: st.DataObject) -> None:
    fields = fields_of(data.draw(st.sampled_from(CASES)))
    for key in data.draw(st.lists(st.sampled_from(sorted({*fields, "layer_types", "rope_scaling"})), max_size=3)):
        fields[key] = data.draw(ODD)
    try:
        to_config(fields)
    except ConfigError as error:
        assert len(str(error)) < 1000


@pytest.mark.parametrize("name", few(PUBLISHED, 4))
def test_published_models_have_their_number_of_parameters(name: str, tmp_path: Path) -> None:
    fields, params = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = huggingface.read_config(tmp_path, dtype="bfloat16")
    traced = build_shapes(make_decoder(config)).params
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(traced)) == config.params == params
    exported = to_fields(config)
    assert to_config(exported) == huggingface.read_config(tmp_path, dtype="float32")
    assert exported["model_type"] in (fields["model_type"], "llama")
