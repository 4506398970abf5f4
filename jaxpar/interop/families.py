"""Configurations of Hugging Face models: ``config.json`` to a ``LlamaConfig`` or ``MoEConfig``, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.models.llama.config import LlamaConfig
from jaxpar.models.moe.config import MoEConfig
from jaxpar.utils.yaml_config import build

type Fields = dict[str, Any]

CONFIG = "config.json"

_IGNORED = frozenset(
    (
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "max_position_embeddings",
        "max_window_layers",
        "model_type",
        "num_nextn_predict_layers",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    )
)
"""Fields that do not change what the layers compute, or that every family reads."""
_NEUTRAL: Fields = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "ep_size": 1,
    "hidden_act": "silu",
    "mlp_bias": False,
    "mlp_only_layers": [],
    "moe_layer_freq": 1,
    "partial_rotary_factor": 1.0,
    "rope_interleave": True,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""Fields that are not implemented, and the only values that they may have."""
_SIZES = {
    "vocab_size": "vocab",
    "hidden_size": "embed",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp",
    "rms_norm_eps": "norm_eps",
}


@dataclass(frozen=True)
class HFFamily:
    """A model type of transformers.

    Attributes:
      architecture: the class that ``config.json`` names.
      sizes: field of ``config.json`` → field of our configuration.
      fixed: fields of our configuration that all models of the family share.
      defaults: values of fields that ``config.json`` may leave out.
      window: whether a model has a sliding window, from the fields of ``config.json``.
      extra: further fields of ``config.json`` that an export writes.
    """

    architecture: str
    sizes: Mapping[str, str]
    fixed: Fields = field(default_factory=dict)
    defaults: Fields = field(default_factory=dict)
    window: Callable[[Fields], bool] = lambda fields: False
    extra: Fields = field(default_factory=dict)


def _uses_window(fields: Fields) -> bool:
    """Whether all layers of a Qwen have a sliding window; some but not all is an error."""
    if not fields.get("use_sliding_window"):
        return False
    layers, first = (_number(fields, key) for key in ("num_hidden_layers", "max_window_layers"))
    kinds = {"sliding_attention": layers > first, "full_attention": first > 0}
    types = fields.get("layer_types") or [kind for kind, found in kinds.items() if found]
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ConfigError(f"{CONFIG}: layer_types must be a list of names, got {types!r:.100}.")
    if len(set(types)) > 1:
        raise ConfigError(
            f"{CONFIG}: layer_types has both {' and '.join(sorted(set(types)))}, but all layers "
            "share one mask here. Remedy: none; such models cannot be imported."
        )
    return bool(types[0] == "sliding_attention")


_MIXTURE = {"num_experts_per_tok": "k"}
_QWEN_MOE = {"num_experts": "experts", "moe_intermediate_size": "expert_mlp", "norm_topk_prob": "normalize"}
_DEEPSEEK = {
    **{theirs: ours for theirs, ours in _SIZES.items() if theirs not in ("head_dim", "num_key_value_heads")},
    **_MIXTURE,
    "qk_nope_head_dim": "head_dim",
    "n_routed_experts": "experts",
    "n_shared_experts": "shared_experts",
    "moe_intermediate_size": "expert_mlp",
    "first_k_dense_replace": "dense_layers",
    "n_group": "groups",
    "topk_group": "groups_per_token",
    "norm_topk_prob": "normalize",
    "routed_scaling_factor": "scale",
}
_LATENT = {"kv_lora_rank": "kv_latent", "q_lora_rank": "q_latent", "qk_rope_head_dim": "rope_dim"}
_LATENT |= {"v_head_dim": "value_dim"}
_NO_AUX: Fields = {"score": "sigmoid", "bias_rate": 0.001, "balance_loss": 0.0001, "balance_per": "sequence"}
_COMMON: Fields = {"rms_norm_eps": 1e-6, "max_window_layers": 28}

FAMILIES: dict[str, HFFamily] = {
    "llama": HFFamily("LlamaForCausalLM", _SIZES, defaults=_COMMON, extra={"attention_bias": False, "mlp_bias": False}),
    "mistral": HFFamily(
        "MistralForCausalLM", _SIZES, defaults={**_COMMON, "sliding_window": 4096}, window=lambda fields: True
    ),
    "qwen2": HFFamily("Qwen2ForCausalLM", _SIZES, {"qkv_bias": True}, _COMMON, _uses_window),
    "qwen3": HFFamily("Qwen3ForCausalLM", _SIZES, {"qk_norm": True}, _COMMON, _uses_window),
    "mixtral": HFFamily(
        "MixtralForCausalLM",
        {**_SIZES, **_MIXTURE, "num_local_experts": "experts", "intermediate_size": "expert_mlp"},
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2, "num_local_experts": 8},
        window=lambda fields: True,
    ),
    "qwen3_moe": HFFamily(
        "Qwen3MoeForCausalLM",
        {**_SIZES, **_MIXTURE, **_QWEN_MOE},
        {"qk_norm": True},
        {**_COMMON, "norm_topk_prob": False},
        _uses_window,
        {"decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "deepseek_v3": HFFamily("DeepseekV3ForCausalLM", _DEEPSEEK, _NO_AUX, _COMMON, extra={"rope_interleave": True}),
}
"""The supported values of ``model_type``."""


def family_of(fields: Fields) -> str:
    """Returns the family that ``config.json`` names.

    Raises:
      ConfigError: it is not supported.
    """
    name = fields.get("model_type")
    if name not in [*FAMILIES]:
        raise ConfigError(
            f"{CONFIG}: model_type must be one of {', '.join(FAMILIES)}, got {name!r}.{did_you_mean(name, FAMILIES)}"
            " Remedy: convert the weights of another family with a script of your own, and jp.save."
        )
    return str(name)


def to_config(fields: Fields, *, ignore: Collection[str] = ()) -> LlamaConfig:
    """Returns the configuration of the model that ``config.json`` describes, in fp32.

    Args:
      fields: of ``config.json``.
      ignore: names of fields that may have any value.

    Raises:
      ConfigError: the family is not supported, a field is missing, or a field is not implemented and has another value
        than the neutral one.
    """
    family = FAMILIES[family_of(fields)]
    moe, latent = "num_experts_per_tok" in family.sizes, "n_routed_experts" in family.sizes
    read = {**family.defaults, **{key: value for key, value in fields.items() if value is not None}}
    read.setdefault("num_key_value_heads", read.get("num_attention_heads"))
    read.setdefault("num_experts", read.get("num_local_experts"))  # transformers 5 writes the name of Mixtral
    if all(isinstance(read.get(key), int) for key in ("hidden_size", "num_attention_heads")):
        read.setdefault("head_dim", read["hidden_size"] // max(1, read["num_attention_heads"]))
    values: Fields = {ours: _number(read, theirs) for theirs, ours in family.sizes.items()}
    values |= {**family.fixed, **_rope(read), "tie_embeddings": bool(read.get("tie_word_embeddings", False))}
    if latent:
        without_q = read.get("q_lora_rank") is None
        sizes: Fields = {
            ours: _number(read, key) for key, ours in _LATENT.items() if ours != "q_latent" or not without_q
        }
        values["latent_attention"] = {"q_latent": None, **sizes}
        values["kv_heads"] = values["heads"]
    elif moe:
        values["balance_loss"] = read.get("router_aux_loss_coef", 0.001)
    window = fields.get("sliding_window", family.defaults.get("sliding_window"))
    if window is not None and family.window(read):
        values["sliding_window"] = window
    _check_fields(fields, family, ignore)
    made: LlamaConfig = build(MoEConfig if moe else LlamaConfig, values, CONFIG)
    return made


def _number(fields: Mapping[str, Any], key: str) -> Any:
    value, is_flag = fields.get(key), key == "norm_topk_prob"
    if not isinstance(value, int | float) or isinstance(value, bool) is not is_flag:
        raise ConfigError(f"{CONFIG}: {key} must be {'true or false' if is_flag else 'a number'}, got {value!r:.100}.")
    return value


def _rope(fields: Fields) -> Fields:
    """Returns our fields for rotary positions: of rope_theta and rope_scaling, or, in newer files, rope_parameters."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{CONFIG}: rope_scaling must be an object, got {given!r:.100}.")
    rope: Fields = dict(given)
    theta = _number({"rope_theta": 10_000.0, **fields, **rope}, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    ramp = {name: rope.get(name) for name in ("low_freq_factor", "high_freq_factor")}
    if kind != "llama3" or ramp != {"low_freq_factor": 1.0, "high_freq_factor": 4.0}:
        got = f"rope_type {kind!r}" if kind != "llama3" else f"{ramp}"
        raise ConfigError(
            f"{CONFIG}: rope_scaling must be of rope_type 'default', or 'llama3' with low_freq_factor 1 and "
            f"high_freq_factor 4, got {got}. Remedy: none; this scaling is not implemented."
        )
    original = _number(rope, "original_max_position_embeddings")
    return {"rope_theta": theta, "rope_factor": _number(rope, "factor"), "rope_original_seq": original}


def _check_fields(fields: Fields, family: HFFamily, ignore: Collection[str]) -> None:
    """Raises an error that lists all fields that are not implemented and not neutral."""
    own = {*family.sizes, *family.extra, "sliding_window", "use_sliding_window", "layer_types"}
    own |= {*_LATENT, "head_dim", "qk_head_dim", "num_key_value_heads"} if family.sizes is _DEEPSEEK else set()
    own |= {"router_aux_loss_coef", "num_local_experts"} if "num_experts_per_tok" in family.sizes else set()
    problems = []
    for key, value in fields.items():
        if key in _NEUTRAL:
            if value is not None and value != _NEUTRAL[key] and key not in ignore:
                problems.append(f"{key} must be {_NEUTRAL[key]!r}, got {value!r:.100}")
            continue
        known = key in own or key in _IGNORED or key in ignore or key.startswith("_")
        if not known and value not in (None, False, "", [], {}):
            problems.append(f"{key} is {value!r:.100}")
    if problems:
        raise ConfigError(
            f"{CONFIG}: these fields are not implemented: {'; '.join(problems)}. Remedy: another model; or "
            f"ignore={[p.split(' ')[0] for p in problems]}, if they do not change what the model computes."
        )


def to_fields(config: LlamaConfig, family: str | None = None) -> Fields:
    """Returns the fields of ``config.json`` for a model.

    Args:
      config: of the model.
      family: a supported ``model_type``; by default the one that fits.

    Raises:
      ConfigError: no family, or not this one, can express the configuration.
    """
    if family is not None and family not in FAMILIES:
        raise ConfigError(
            f"export: family must be one of {', '.join(FAMILIES)}, got {family!r}.{did_you_mean(family, FAMILIES)}"
        )
    for name in FAMILIES if family is None else [family]:
        fields = _fields_of(config, name)
        if fields is not None and _same_model(to_config(fields), config):
            return fields
    raise ConfigError(
        f"export: {'no family can' if family is None else f'{family} cannot'} express this configuration: {config}. "
        f"Families: {', '.join(FAMILIES)}."
    )


_TRAINING_ONLY = {"dtype", "param_dtype", "remat", "reshard_after_forward", "context", "copies", "copies_dim"}
_TRAINING_ONLY |= {"balance_loss", "balance_per", "z_loss", "bias_rate", "dispatch", "capacity_factor", "pieces"}
"""Fields of our configurations that do not change the logits."""


def _same_model(one: LlamaConfig, other: LlamaConfig) -> bool:
    """Whether two configurations compute the same."""
    own = lambda config: {name: value for name, value in vars(config).items() if name not in _TRAINING_ONLY}
    bias = lambda config: getattr(config, "bias_rate", None) is None
    unused = {"mlp"} if isinstance(one, MoEConfig) and not one.dense_layers else set()
    unused |= {"rope_original_seq"} if one.rope_factor == 1 else set()
    a, b = ({k: v for k, v in own(config).items() if k not in unused} for config in (one, other))
    return type(one) is type(other) and a == b and bias(one) == bias(other)


def _fields_of(config: LlamaConfig, name: str) -> Fields | None:
    family = FAMILIES[name]
    moe = "num_experts_per_tok" in family.sizes
    latent = config.latent_attention if isinstance(config, MoEConfig) else None
    if moe != isinstance(config, MoEConfig) or (latent is not None) != (family.sizes is _DEEPSEEK):
        return None
    rope: Fields = {"rope_theta": config.rope_theta, "rope_scaling": None}
    if config.rope_factor != 1:
        rope["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": config.rope_original_seq,
        }
    window: Fields = {} if name in ("llama", "deepseek_v3") else {"sliding_window": config.sliding_window}
    if name.startswith("qwen"):
        window["use_sliding_window"] = config.sliding_window is not None
        window["max_window_layers"] = 0 if config.sliding_window else config.layers
    return {
        "architectures": [family.architecture],
        "model_type": name,
        "torch_dtype": config.param_dtype,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "max_position_embeddings": int(config.rope_original_seq * config.rope_factor),
        "tie_word_embeddings": config.tie_embeddings,
        **{theirs: getattr(config, ours) for theirs, ours in family.sizes.items()},
        **({} if latent is None else {theirs: getattr(latent, ours) for theirs, ours in _LATENT.items()}),
        **({} if latent is None else {"num_key_value_heads": config.heads}),
        **({"router_aux_loss_coef": config.balance_loss} if isinstance(config, MoEConfig) and latent is None else {}),
        **rope,
        **window,
        **family.extra,
    }
