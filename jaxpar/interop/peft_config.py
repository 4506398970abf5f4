"""``adapter_config.json`` of PEFT: the fields that are read, ignored, refused and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxpar.errors import ConfigError
from jaxpar.interop.folder import read_object

CONFIG = "adapter_config.json"
_NEUTRAL: dict[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_bias": False,
    "use_dora": False,
    "use_qalora": False,
}
"""Fields that are not implemented, and the only values that they may have."""
_IGNORED = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode",
    "init_lora_weights", "lora_alpha", "lora_dropout", "loftq_config", "megatron_config", "megatron_core",
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
    problems = [
        f"{key} must be {_NEUTRAL[key]!r}, got {value!r:.100}"
        for key, value in fields.items()
        if key in _NEUTRAL and value is not None and value != _NEUTRAL[key]
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
