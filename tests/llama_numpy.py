"""The forward pass of Llama in NumPy, from the files of a Hugging Face checkpoint; shares no code with jaxpar.

Written from Touvron et al. 2023 (arXiv:2307.09288), Su et al. 2021 (arXiv:2104.09864), the rotary scaling of Llama 3.1
(Grattafiori et al. 2024, arXiv:2407.21783, and its model card), and the layout of safetensors files: eight bytes with
the length of a JSON header, which has each tensor's dtype, shape and place in the bytes that follow.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

type Array = np.ndarray[Any, Any]
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def read_tensors(folder: Path) -> dict[str, Array]:
    """Returns the tensors of all safetensors files of a folder, by name."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                found[name] = np.frombuffer(data[start:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def logits_of(folder: Path, tokens: Array) -> Array:
    """Returns the logits [batch, seq, vocab] of a checkpoint for tokens [batch, seq], in fp64."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "llama", config["model_type"]
    w = {name: tensor.astype(np.float64) for name, tensor in read_tensors(folder).items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    norm = lambda x, name: x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]
    angles = np.arange(tokens.shape[1])[:, None] * _frequencies(config, size)
    x = w["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (h @ w[f"{layer}.self_attn.{name}_proj.weight"].T for name in "qkv")
        q, k, v = (y.reshape(*h.shape[:2], n, size) for y, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
        attended = _attention(_rotated(q, angles), _rotated(k, angles), v)
        x = x + attended @ w[f"{layer}.self_attn.o_proj.weight"].T
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate = h @ w[f"{layer}.mlp.gate_proj.weight"].T
        up = h @ w[f"{layer}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    result: Array = norm(x, "model.norm") @ w[head].T
    return result


def _frequencies(config: dict[str, Any], size: int) -> Array:
    """Returns the angle of each pair of a head's numbers from one token to the next, [size / 2]."""
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
    found: Array = rope["rope_theta"] ** (-np.arange(0, size, 2) / size)
    if rope.get("rope_type", "default") == "default":
        return found
    assert rope["rope_type"] == "llama3", rope["rope_type"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * found / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    mixed: Array = kept * found + (1 - kept) * found / rope["factor"]
    return mixed


def _rotated(x: Array, angles: Array) -> Array:
    """Returns x [batch, seq, heads, size] whose pair i, the numbers i and i + size / 2, is turned by [seq, i]."""
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attention(q: Array, k: Array, v: Array) -> Array:
    """Returns causal attention [batch, seq, heads * size]; each key and value head serves several heads of queries."""
    groups, seq = q.shape[2] // k.shape[2], q.shape[1]
    k, v = np.repeat(k, groups, axis=2), np.repeat(v, groups, axis=2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    scores = np.where(np.tri(seq, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*q.shape[:2], -1)
