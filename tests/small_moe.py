"""Rules for decoders with experts over every axis, shared by tests."""

from __future__ import annotations

from typing import Any

from one_step import LLAMA_RULES

import jaxpar as jp

RULES: dict[str, Any] = {
    **LLAMA_RULES.to_dict(),
    "batch": ("data", "expert"),
    "experts": "expert",
    "expert_mlp": None,
    "latent": None,
    "dense_layers": None,
    "params": {},
}
FSDP: dict[str, Any] = {
    "params": {
        "embed": jp.first_of(("data", "expert"), "data", None),
        "latent": jp.first_of(("data", "expert"), None),
    }
}
TP: dict[str, Any] = {"expert_mlp": "model"}
FOLDED: dict[str, Any] = {"batch": "data", "experts": ("context", "data")}
