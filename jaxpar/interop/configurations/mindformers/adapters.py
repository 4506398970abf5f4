"""Low-rank adapters of a MindFormers configuration: ``pet_config`` of the model."""

from __future__ import annotations

import re
from typing import Any

from jaxpar.interop.configurations.keys import ConfigKeys, NeutralKeys

_TARGETS = {
    "wq": ("attention/q",),
    "wk": ("attention/k",),
    "wv": ("attention/v",),
    "wo": ("attention/o",),
    "w1": ("mlp/gate",),
    "w3": ("mlp/up",),
    "w2": ("mlp/down",),
    "w_qkv": ("attention/q", "attention/k", "attention/v"),
    "linear_qkv": ("attention/q", "attention/k", "attention/v"),
    "linear_proj": ("attention/o",),
    "w_gate_hidden": ("mlp/gate", "mlp/up"),
    "linear_fc1": ("mlp/gate", "mlp/up"),
    "linear_fc2": ("mlp/down",),
}
"""Modules of MindFormers and the weights of our models."""
_IGNORED = {
    "adapters start at zero": "lora_a_init lora_b_init",
    "dtypes are those of the model": "param_init_type compute_dtype",
}
_NEUTRAL: NeutralKeys = (
    ("exclude_layers freeze_include freeze_exclude", ("", []), "targets select the weights, and all others are frozen"),
    ("lora_dropout", (0, 0.0), "there is no dropout"),
)


def read_adapters(keys: ConfigKeys, prefix: str) -> dict[str, Any] | None:
    """Returns ``model.lora`` of a run; ``None`` without adapters.

    Args:
      keys: the configuration.
      prefix: of the model's keys.
    """
    at = f"{prefix}pet_config"
    if keys.get(at, "mapping") in (None, {}):
        keys.ignore(at, "off")
        return None
    if str(keys.raw(f"{at}.pet_type")).lower() != "lora":
        keys.refuse(at, "only the pet_type lora is translated")
        return None
    keys.translate(f"{at}.pet_type", "model.lora")
    keys.ignore_all(_IGNORED, f"{at}.")
    keys.neutral_all(_NEUTRAL, f"{at}.")
    return {
        "rank": keys.take(f"{at}.lora_rank", "count", 8, "model.lora.rank"),
        "alpha": float(keys.take(f"{at}.lora_alpha", "number", 16, "model.lora.alpha")),
        "targets": _targets(keys, f"{at}.target_modules"),
    }


def _targets(keys: ConfigKeys, path: str) -> list[str]:
    """The weights that get adapters, from patterns such as ``.*wq|.*wk``."""
    value = keys.take(path, "text", ".*wq|.*wk|.*wv|.*wo", "model.lora.targets")
    found: list[str] = []
    for pattern in value.split("|"):
        name = re.sub(r"^.*[.*\\]", "", pattern.strip("() "))
        if name not in _TARGETS:
            keys.refuse(path, f"no weight here corresponds to {pattern!r}")
        found += _TARGETS.get(name, ())
    return list(dict.fromkeys(found)) or ["*"]
