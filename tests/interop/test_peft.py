"""Adapters in PEFT's layout: files written by hand are read, and files that are written compute what they should."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from error_texts import raises
from one_step import drawn

import jaxpar as jp
from jaxpar.errors import CheckpointError, ConfigError
from jaxpar.interop import huggingface, peft
from jaxpar.interop.safetensors import DTYPES, read_tensors
from jaxpar.lora import LoraConfig, adapt
from jaxpar.models import make_decoder
from jaxpar.models.llama import LlamaConfig
from jaxpar.models.moe.config import preset
from jaxpar.training.model.lora_targets import Adapter

CONFIG = LlamaConfig(vocab=40, embed=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=24)
LORA = LoraConfig(rank=3, alpha=6, targets=("attention/[qo]", "mlp/gate", "embedding", "head"))
SIZES = {"q_proj": (16, 16), "o_proj": (16, 16), "gate_proj": (16, 24)}
"""Inputs and outputs of the modules of a layer."""
FIELDS = {
    "peft_type": "LORA",
    "r": 3,
    "lora_alpha": 6,
    "lora_dropout": 0.05,
    "bias": "none",
    "target_modules": ["gate_proj", "q_proj", "o_proj", "embed_tokens", "lm_head"],
    "base_model_name_or_path": "some/model",
    "task_type": "CAUSAL_LM",
    "use_rslora": False,
    "rank_pattern": {},
    "modules_to_save": None,
}


def layout_of(data: int = 1, model: int = 1) -> jp.Layout:
    dims = ("embed", "norm", "head_dim", "vocab", "layers", "seq", "residual_seq")
    rules = jp.Rules(
        batch="data", heads="model", kv_heads="model", mlp="model", **dict.fromkeys(dims), params={"embed": "data"}
    )
    return jp.Layout(jp.MeshSpec(data=data, model=model).build(jax.devices()[: data * model]), rules)


def state_of(layout: jp.Layout, lora: LoraConfig = LORA) -> Any:
    """A state with random weights and adapters, both matrices."""
    return drawn(jp.abstract_state(layout, adapt(make_decoder(CONFIG), lora), optax.identity()))


def expected_shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of the adapter, as PEFT names them."""
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(2):
        for module, (inputs, outputs) in SIZES.items():
            part = "mlp" if module == "gate_proj" else "self_attn"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}"
            found |= {f"{name}.lora_A.weight": (3, inputs), f"{name}.lora_B.weight": (outputs, 3)}
    name = "base_model.model.model.embed_tokens"
    found |= {f"{name}.lora_embedding_A": (3, 40), f"{name}.lora_embedding_B": (16, 3)}
    name = "base_model.model.lm_head"
    return found | {f"{name}.lora_A.weight": (3, 16), f"{name}.lora_B.weight": (40, 3)}


def write(folder: Path, tensors: dict[str, np.ndarray], **fields: Any) -> Path:
    """Writes an adapter by the published layout, without a line of jaxpar."""
    folder.mkdir(parents=True)
    header, at = {}, 0
    for name, value in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header).encode()
    data = b"".join(value.tobytes() for value in tensors.values())
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "adapter_config.json").write_text(json.dumps(FIELDS | fields))
    return folder


def by_hand(folder: Path, **fields: Any) -> tuple[Path, dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    tensors = {name: rng.normal(size=shape).astype("float32") for name, shape in expected_shapes().items()}
    return write(folder, tensors, **fields), tensors


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint or of an adapter."""
    one = folder / "adapter_model.safetensors"
    stored = peft.read_header(one) if one.is_file() else read_tensors(folder)
    read = lambda t: t.file.read_bytes()[t.start : t.start + t.size]
    return {name: np.frombuffer(read(t), DTYPES[t.dtype]).reshape(t.shape) for name, t in stored.items()}


def check_merged(state: Any, adapter: dict[str, np.ndarray], folder: Path) -> None:
    """Merged weights, exported, are W + alpha / r * B A of the adapter's tensors, as PEFT computes them."""
    huggingface.export(folder / "base", jp.lora.frozen_params(state), CONFIG)
    huggingface.export(folder / "merged", jp.lora.merge(state), CONFIG)
    base, merged, changed = arrays(folder / "base"), arrays(folder / "merged"), 0
    for name, w in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        added: Any = 0.0
        if f"{module}.lora_A.weight" in adapter:
            added = adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
        elif f"{module}.lora_embedding_A" in adapter:
            added = (adapter[f"{module}.lora_embedding_B"] @ adapter[f"{module}.lora_embedding_A"]).T
        np.testing.assert_allclose(merged[name], w + 6 / 3 * added, rtol=0, atol=1e-5)
        changed += np.ndim(added) == 2
    assert changed == 8


@pytest.mark.slow
def test_an_adapter_that_was_written_by_hand_is_loaded(tmp_path: Path) -> None:
    folder, tensors = by_hand(tmp_path / "adapter")
    lora = peft.read_lora(folder, CONFIG)
    assert (lora.rank, lora.alpha) == (3, 6.0)
    paths = ("embedding", "blocks/attention/q", "blocks/attention/o", "blocks/mlp/gate", "head")
    assert set(lora.targets) == set(paths)
    state = state_of(layout_of(2, 2), lora)
    loaded = peft.load(folder, state, CONFIG)
    shardings = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
    assert shardings(loaded.params) == shardings(state.params)
    check_merged(loaded, tensors, tmp_path)


def test_an_export_has_the_published_layout_and_is_loaded_bitwise(tmp_path: Path) -> None:
    state = state_of(layout_of(2, 2))
    peft.export(tmp_path / "adapter", jp.lora.without_frozen(state), CONFIG, base="some/model")
    tensors = arrays(tmp_path / "adapter")
    assert {name: value.shape for name, value in tensors.items()} == expected_shapes()
    fields = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    wanted = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none", "base_model_name_or_path": "some/model"}
    assert {key: fields[key] for key in wanted} == wanted
    assert fields["target_modules"] == ["embed_tokens", "gate_proj", "lm_head", "o_proj", "q_proj"]
    check_merged(state, tensors, tmp_path)
    fresh = state_of(layout_of())
    fresh = dataclasses.replace(fresh, params=jax.tree.map(lambda x: x * 0, fresh.params))
    again = peft.load(tmp_path / "adapter", fresh, CONFIG)
    same = lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    jax.tree.map(same, again.params, state.params)


def test_rank_stabilized_adapters_have_their_own_scale(tmp_path: Path) -> None:
    folder, _ = by_hand(tmp_path / "adapter", use_rslora=True)
    assert peft.read_lora(folder, CONFIG).scale == pytest.approx(6 / 3**0.5)


def test_modules_of_the_same_name_are_written_in_full() -> None:
    config = preset("deepseek_v3", "tiny")
    adapter = Adapter(("blocks", "attention", "o"), (1, 1, 1, 1), 1, 2)
    names = {"base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight": ()}
    assert config.dense_layers
    assert peft._target_modules((adapter,), config, names) == ["model.layers.1.self_attn.o_proj"]


def test_an_adapter_of_another_model_is_an_error_that_lists_all_tensors(tmp_path: Path) -> None:
    _, tensors = by_hand(tmp_path / "one")
    name = "base_model.model.model.layers.{}.{}.lora_{}.weight"
    del tensors[name.format(1, "self_attn.q_proj", "A")]
    tensors[name.format(0, "mlp.up_proj", "A")] = np.zeros((3, 16), "float32")
    tensors[name.format(0, "self_attn.o_proj", "B")] = np.zeros((20, 3), "float32")
    folder = write(tmp_path / "two", tensors)
    state = state_of(layout_of())
    with raises(CheckpointError, "/two", "adapters"):
        peft.load(folder, state, CONFIG)
    none = write(tmp_path / "three", {"base_model.model.h.0.c_attn.lora_A.weight": np.zeros((3, 8), "float32")})
    with raises(CheckpointError, "three/adapter_model.safetensors"):
        peft.read_lora(none, CONFIG)


@pytest.mark.slow
def test_another_rank_or_alpha_is_an_error(tmp_path: Path) -> None:
    folder, _ = by_hand(tmp_path / "adapter")
    for name, value, own in (
        ("rank", 3, LoraConfig(2, 4, LORA.targets)),
        ("alpha", 6, LoraConfig(3, 12, LORA.targets)),
    ):
        with raises(ConfigError, f"{name} {value}", f"have {getattr(own, name)}"):
            peft.load(folder, state_of(layout_of(), own), CONFIG)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all", "rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"r": 0}, "0"),
        ({"r": 2.5}, "2.5"),
        ({"lora_alpha": "x"}, "lora_alpha"),
    ],
)
def test_what_is_not_implemented_is_an_error(fields: dict[str, Any], name: str, tmp_path: Path) -> None:
    folder, _ = by_hand(tmp_path / "adapter", **fields)
    with raises(ConfigError, name):
        peft.read_lora(folder, CONFIG)


def test_missing_files_and_other_states_are_errors(tmp_path: Path) -> None:
    folder, _ = by_hand(tmp_path / "adapter")
    state = state_of(layout_of())
    with raises(CheckpointError, "export", "/adapter"):
        peft.export(folder, state, CONFIG)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with raises(CheckpointError, "/adapter", "pickle"):
        peft.load(folder, state, CONFIG)
    with raises(CheckpointError, "adapter_config.json"):
        peft.read_lora(tmp_path, CONFIG)
    plain = jp.abstract_state(layout_of(), make_decoder(CONFIG), optax.identity())
    with raises(ConfigError, "peft", "model"):
        peft.export(tmp_path / "none", plain, CONFIG)


def test_another_number_of_inputs_cannot_be_written(tmp_path: Path) -> None:
    lora = dataclasses.replace(LORA, inputs={"attention/o": 1})
    state = jp.abstract_state(layout_of(), adapt(make_decoder(CONFIG), lora), optax.identity())
    with raises(ConfigError, "blocks/attention/o", "peft"):
        peft.export(tmp_path / "adapter", state, CONFIG)
