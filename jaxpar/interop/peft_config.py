"""``adapter_config.json`` of PEFT: the fields that are read, ignored, refused and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxpar.errors import ConfigError
from jaxpar.interop.fields import is_one_of
from jaxpar.interop.folder import read_object

CONFIG = "adapter_config.json"
INIT = "init_lora_weights"
_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Beginnings of ``init_lora_weights`` with which PEFT trains an adapter beside other weights than those of the base."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    INIT: (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
    "lora_bias": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
}
"""Fields that are not implemented, and the only values that they may have."""
_IGNORED = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode",
    "lora_alpha", "lora_dropout", "lora_ga_config", "loftq_config", "megatron_config", "megatron_core",
    "parent_library", "peft_type", "peft_version", "qalora_group_size", "r", "revision", "runtime_config",
    "target_modules", "task_type", "use_rslora",
))  # fmt: skip
"""Fields that do not change what a loaded adapter computes, or that are read."""


def read_rank_and_alpha(root: Path) -> tuple[int, float]:
    """Returns rank and alpha that an adapter's ``adapter_config.json`` sets.

    Raises:
      CheckpointError: there is no such file.
      ConfigError: it is no LoRA, or has fields that are not implemented.
      DamagedError: the file is malformed.
    """
    missing = f"{root} has no {CONFIG}. Remedy: the folder of an adapter, as PEFT writes it."
    fields = read_object(root / CONFIG, missing)
    if fields.get("peft_type") != "LORA":
        raise ConfigError(f"{CONFIG}: peft_type must be 'LORA', got {fields.get('peft_type')!r:.100}.")
    init = fields.get(INIT)
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise ConfigError(
            f"{CONFIG}: {INIT} is {init!r:.100}, so the adapter belongs to weights that PEFT made of those of "
            f"{fields.get('base_model_name_or_path')!r:.200}, which jaxpar does not make. Remedy: in PEFT, "
            "model.merge_and_unload().save_pretrained(DIR), and import DIR; or, but for loftq, model.save_pretrained("
            "DIR, path_initial_model_for_weight_conversion=INITIAL), which makes an adapter of the model itself."
        )
    problems = [
        f"{key} must be {_NEUTRAL[key][0]!r}, got {value!r:.100}"
        for key, value in fields.items()
        if key in _NEUTRAL and not is_one_of(value, _NEUTRAL[key])
    ]
    others = (key for key, value in fields.items() if value not in (None, False, "", [], {}))
    problems += [f"{key} is {fields[key]!r:.100}" for key in others if key not in {*_NEUTRAL, *_IGNORED}]
    if problems:
        raise ConfigError(
            f"{CONFIG}: these fields are not implemented: {'; '.join(problems)}. Remedy: another adapter."
        )
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    for key, value in (("r", rank), ("lora_alpha", alpha)):
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{CONFIG}: {key} must be a number above 0, got {value!r:.100}.")
    if not isinstance(rank, int):
        raise ConfigError(f"{CONFIG}: r must be an integer, got {rank!r:.100}.")
    # rank-stabilized LoRA (arXiv:2312.03732) scales by alpha / sqrt(r)
    return rank, float(alpha) * (rank**0.5 if fields.get("use_rslora") else 1.0)  # type: ignore[arg-type]


def config_fields(rank: int, alpha: float, modules: list[str], base: str | None) -> dict[str, Any]:
    """Returns the fields of an adapter that PEFT loads."""
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": modules,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
