"""Which adapters of PEFT are read: by the value of every field, and of every weight that PEFT can adapt."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.interop import huggingface, peft
from jaxpar.interop.peft_config import read_rank_and_alpha
from jaxpar.interop.safetensors import DTYPES, read_tensors
from jaxpar.interop.tensor_map import tensor_rules
from jaxpar.lora import adapt
from jaxpar.models import make_decoder
from jaxpar.models.llama import LlamaConfig
from jaxpar.models.llama.config import GemmaConfig
from jaxpar.models.moe.config import LatentAttentionConfig, MoEConfig, preset
from jaxpar.training.model import build_shapes, leaves_with_paths, show

SAVED: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": {"base_model_class": "LlamaForCausalLM"},
    "base_model_name_or_path": "some/model",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 4,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 2,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj"],
    "target_parameters": None,
    "task_type": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}
"""What PEFT 0.21 writes."""


def write(folder: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    """Writes an adapter by the published layout, without a line of jaxpar."""
    folder.mkdir(parents=True, exist_ok=True)
    header, at = {}, 0
    for name, value in (tensors or {}).items():
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header).encode()
    data = b"".join(value.tobytes() for value in (tensors or {}).values())
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "adapter_config.json").write_text(json.dumps(SAVED | fields))
    return folder


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_adapters_that_leave_the_weights_as_they_are_are_read(init: Any, tmp_path: Path) -> None:
    """PEFT merges these as W + alpha / r * B A (``benchmarks/interop/check_adapters.py``)."""
    assert read_rank_and_alpha(write(tmp_path, {"init_lora_weights": init})) == (2, 4.0)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "PiSSA", "olora", "OLoRA", "corda", "lora_ga", "loftq"])
def test_adapters_of_weights_that_peft_changes_are_an_error(init: str, tmp_path: Path) -> None:
    """PEFT takes their initial product from the base when it loads them: W + alpha / r * B A is off by up to 1.06."""
    with raises(ConfigError, "adapter_config.json", "some/model"):
        read_rank_and_alpha(write(tmp_path, {"init_lora_weights": init}))


READ = {"r", "lora_alpha", "use_rslora"}
IGNORED = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "target_modules",
    "task_type",
}
"""Fields that do not change what an adapter with ``init_lora_weights: true`` computes: its tensors say where it is."""


@pytest.mark.parametrize("key", sorted(SAVED.keys() - READ - IGNORED))
def test_no_field_is_neutral_for_every_value(key: str, tmp_path: Path) -> None:
    for value in (True, "all", 3, ["lm_head"], {"q_proj": 4}):
        if value == SAVED[key]:
            continue
        with pytest.raises(ConfigError) as error:
            read_rank_and_alpha(write(tmp_path, {key: value}))
        assert re.search(rf"\b{key}\b", *error.value.args)


NARROW: dict[str, LlamaConfig] = {
    "llama": LlamaConfig(vocab=24, embed=4, layers=1, heads=4, kv_heads=2, head_dim=16, mlp=8),
    "gemma": LlamaConfig(vocab=24, embed=4, layers=1, heads=4, kv_heads=1, head_dim=16, mlp=8, gemma=GemmaConfig()),
    "qwen": LlamaConfig(vocab=24, embed=4, layers=1, heads=4, head_dim=16, mlp=8, qkv_bias=True, qk_norm=True),
    "mixtral": MoEConfig(vocab=24, embed=4, layers=1, heads=4, head_dim=16, expert_mlp=8, experts=2, k=1),
    "deepseek_v3": preset(
        "deepseek_v3",
        layers=2,
        embed=4,
        heads=4,
        head_dim=16,
        mlp=8,
        expert_mlp=8,
        vocab=24,
        latent_attention=LatentAttentionConfig(kv_latent=6, q_latent=6, rope_dim=4, value_dim=16),
    ),
}
"""Models with heads of more numbers than the model's width, so that sizes do not tell inputs from outputs."""


def linear_modules(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear modules of a model, by name."""
    shapes = {show(path): x.shape for path, x in leaves_with_paths(build_shapes(make_decoder(config)).params)}
    names = {
        name: rule.shape(shapes[rule.path])
        for rule in tensor_rules(config)
        for _, name in rule.names(shapes[rule.path])
    }
    return {
        name.removesuffix(".weight"): (shape[1], shape[0])
        for name, shape in names.items()
        if len(shape) == 2 and name != "model.embed_tokens.weight"
    }


def lora_tensors(modules: dict[str, tuple[int, int]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype("float32")
    tensors = {}
    for name, (inputs, outputs) in modules.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = draw(2, inputs)
        tensors[f"base_model.model.{name}.lora_B.weight"] = draw(outputs, 2)
    return tensors


@pytest.mark.parametrize("family", NARROW)
def test_adapters_of_every_linear_module_are_read(family: str, tmp_path: Path) -> None:
    """Each by itself: its two tensors have the shapes that the model's adapter needs."""
    config = NARROW[family]
    modules = linear_modules(config)
    folder = write(tmp_path / "all", {}, lora_tensors(modules))
    adapted = build_shapes(adapt(make_decoder(config), peft.read_lora(folder, config)))
    shapes = {show(path): tuple(x.shape) for path, x in leaves_with_paths(adapted.params)}
    expected = {name: value.shape for name, value in lora_tensors(modules).items()}
    rules = list(peft._rules(adapted.kind.adapters, config))
    assert {n: rule.shape(shapes[rule.path]) for rule in rules for _, n in rule.names(shapes[rule.path])} == expected
    assert any("kv_b_proj" in name for name in expected) is (family == "deepseek_v3")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_an_adapter_of_every_linear_module_adds_its_product(family: str, tmp_path: Path) -> None:
    config = NARROW[family]
    modules = linear_modules(config)
    tensors = lora_tensors(modules)
    folder = write(tmp_path / "adapter", {}, tensors)
    dims = ("embed", "norm", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layers")
    dims += ("experts", "expert_mlp", "latent", "dense_layers")
    layout = jp.Layout(jp.MeshSpec(data=1).build(jax.devices()[:1]), jp.Rules(batch="data", **dict.fromkeys(dims)))
    state = jp.init(layout, adapt(make_decoder(config), peft.read_lora(folder, config)), optax.identity())
    state = peft.load(folder, state, config)
    huggingface.export(tmp_path / "base", jp.lora.frozen_params(state), config)
    huggingface.export(tmp_path / "merged", jp.lora.merge(state), config)
    base, merged = arrays(tmp_path / "base"), arrays(tmp_path / "merged")
    for name in modules:
        a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        wanted = base[f"{name}.weight"] + 4 / 2 * b @ a
        np.testing.assert_allclose(merged[f"{name}.weight"], wanted, rtol=0, atol=1e-5, err_msg=name)


def arrays(folder: Path) -> dict[str, np.ndarray]:
    read = lambda t: t.file.read_bytes()[t.start : t.start + t.size]
    return {n: np.frombuffer(read(t), DTYPES[t.dtype]).reshape(t.shape) for n, t in read_tensors(folder).items()}
