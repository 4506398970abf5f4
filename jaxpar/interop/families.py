"""Configurations of Hugging Face models: ``config.json`` to a ``LlamaConfig`` or ``MoEConfig``, and back."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.interop.family_table import DEEPSEEK, FAMILIES, IGNORED, LATENT, NEUTRAL, HFFamily, Neutral
from jaxpar.interop.fields import CONFIG, ROPE_KINDS, Fields, is_one_of, number
from jaxpar.interop.rope_fields import LOCAL, read_rope, read_two_ropes, scaling_fields, write_rope
from jaxpar.interop.window_fields import read_windows, write_pattern, write_windows
from jaxpar.models.llama.config import LlamaConfig
from jaxpar.models.moe.config import LatentAttentionConfig, MoEConfig
from jaxpar.utils.yaml_config import build


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
    values: Fields = {ours: number(read, theirs) for theirs, ours in family.sizes.items()}
    values |= {**family.fixed, "tie_embeddings": bool(read.get("tie_word_embeddings", False))}
    with_null = {**read, **{key: None for key, value in fields.items() if value is None}}
    values |= read_windows(
        {**read, "sliding_window": with_null.get("sliding_window")}, family.windows, per_layer=family.per_layer
    )
    values |= _gemma(with_null, family) if family.gemma else read_rope(read, 10_000.0)
    if latent:
        values |= _latent(read, values["heads"])
    elif moe:
        values["balance_loss"] = read.get("router_aux_loss_coef", 0.001)
    _check_fields(fields, {**NEUTRAL, **family.neutral, **(_repeated(read) if latent else {})}, family.reads, ignore)
    try:
        return build(MoEConfig if moe else LlamaConfig, values, CONFIG)
    except ConfigError as error:
        raise ConfigError(_in_names_of(fields, family, str(error))) from None


def _in_names_of(fields: Fields, family: HFFamily, text: str) -> str:
    """Returns the error of a value, which names a key of our configuration, with the field of ``config.json``."""
    match = re.match(rf"{CONFIG}: (?:(?:latent_attention|gemma|rope_scaling): )?(\w+) must ", text)
    if match is None:
        return text
    others = {"router_aux_loss_coef": "balance_loss", "aux_loss_alpha": "balance_loss", LOCAL: "local_rope_theta"}
    others |= {"num_local_experts": "experts", "sliding_attention": "local_rope_theta"}
    names = [*family.sizes.items(), *family.gemma.items(), *LATENT.items(), *others.items()]
    names += [pair for kind in ROPE_KINDS.values() for pair in kind.items()]
    present = [theirs for theirs, ours in names if ours == match[1] and repr(theirs) in repr(fields)]
    return f"{CONFIG}: {(present or [match[1]])[0]} must {text[match.end() :]}"


def _latent(fields: Fields, heads: Any) -> Fields:
    """Returns our fields of latent attention, and of the losses that balance experts."""
    given = [key for key in LATENT if key != "q_lora_rank" or fields.get(key) is not None]
    sizes = {"q_latent": None, **{LATENT[key]: number(fields, key) for key in given}}
    loss = number({"aux_loss_alpha": 0.0001, **fields}, "aux_loss_alpha")
    per = "sequence" if fields.get("seq_aux", True) else "batch"
    return {"latent_attention": sizes, "kv_heads": heads, "balance_loss": loss, "balance_per": per}


def _repeated(fields: Fields) -> Neutral:
    """Returns the only values of fields of latent attention that repeat others."""
    rotated, heads = fields["qk_rope_head_dim"], fields["num_attention_heads"]
    return {
        "head_dim": (rotated,),
        "qk_head_dim": (fields["qk_nope_head_dim"] + rotated,),
        "num_key_value_heads": (heads, None),
    }


def _gemma(fields: Fields, family: HFFamily) -> Fields:
    """Returns our fields of a Gemma, and of its rotary positions."""
    # A soft cap may be null.
    own = {ours: None if fields.get(key) is None else number(fields, key) for key, ours in family.gemma.items()}
    present = {key: value for key, value in fields.items() if value is not None}
    if not family.two_ropes:
        return {"gemma": own, **read_rope(present, 10_000.0)}
    rope, local_theta = read_two_ropes(present, (1e6, 1e4))
    return {"gemma": {**own, "local_rope_theta": local_theta}, **rope}


def _check_fields(fields: Fields, neutral: Neutral, reads: Collection[str], ignore: Collection[str]) -> None:
    """Raises an error that lists all fields that no table knows, or not with their values."""
    problems = []
    for key, value in fields.items():
        if key in reads or key in IGNORED or key in ignore:
            continue
        if key not in neutral:
            problems.append(f"{key} is {value!r:.100}")
        elif not is_one_of(value, neutral[key]):
            problems.append(f"{key} must be {neutral[key][0]!r}, got {value!r:.100}")
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
        if fields is not None and same_model(to_config(fields), config):
            return fields
    raise ConfigError(
        f"export: {'no family can' if family is None else f'{family} cannot'} express this configuration: {config}. "
        f"Families: {', '.join(FAMILIES)}."
    )


_TRAINING_ONLY = {"dtype", "param_dtype", "remat", "reshard_after_forward", "context", "copies", "copies_dim"}
_TRAINING_ONLY |= {"balance_loss", "balance_per", "z_loss", "bias_rate", "dispatch", "capacity_factor", "pieces"}
_TRAINING_ONLY |= {"mtp_depth", "mtp_weight", "overlap_matmuls"}
"""Fields of our configurations that do not change the logits."""


def same_model(one: LlamaConfig, other: LlamaConfig) -> bool:
    """Whether two configurations compute the same."""

    def own(config: LlamaConfig) -> Fields:
        unused = {"mlp"} if isinstance(config, MoEConfig) and not config.dense_layers else set()
        values = {key: value for key, value in vars(config).items() if key not in unused | _TRAINING_ONLY}
        return values | {
            "rope_scaling": scaling_fields(config.rope_scaling),
            "sliding_window": config.sliding_window if any(config.local_layers) else None,
            "window_pattern": config.local_layers,
            "has_bias": getattr(config, "bias_rate", None) is not None,
        }

    return type(one) is type(other) and own(one) == own(other)


def _fields_of(config: LlamaConfig, name: str) -> Fields | None:
    family = FAMILIES[name]
    moe = "num_experts_per_tok" in family.sizes
    latent = config.latent_attention if isinstance(config, MoEConfig) else None
    if isinstance(config, MoEConfig) and config.mtp_depth and latent is None:
        return None  # only DeepSeek-V3's files have layers for further tokens
    if moe != isinstance(config, MoEConfig) or (latent is not None) != (family.sizes is DEEPSEEK):
        return None
    if (config.gemma is None) is bool(family.gemma):
        return None
    scaling = config.rope_scaling
    positions = 8192 if scaling is None else int(scaling.original_seq * scaling.factor)
    return {
        "architectures": [family.architecture],
        "model_type": name,
        "torch_dtype": config.param_dtype,
        "hidden_act": family.neutral["hidden_act"][0],
        "attention_dropout": 0.0,
        "max_position_embeddings": positions,
        "tie_word_embeddings": config.tie_embeddings,
        **{theirs: getattr(config, ours) for theirs, ours in family.sizes.items()},
        **(_latent_fields(config, latent) if isinstance(config, MoEConfig) and latent else {}),
        **({"router_aux_loss_coef": config.balance_loss} if isinstance(config, MoEConfig) and latent is None else {}),
        **write_rope(config),
        **{theirs: getattr(config.gemma, ours) for theirs, ours in family.gemma.items()},
        **({LOCAL: config.gemma.local_rope_theta} if config.gemma is not None and family.two_ropes else {}),
        **(write_pattern(config) if family.two_ropes else {}),
        **write_windows(config, family.windows, per_layer=family.per_layer),
        **family.extra,
    }


def _latent_fields(config: MoEConfig, latent: LatentAttentionConfig) -> Fields:
    sizes = {theirs: getattr(latent, ours) for theirs, ours in LATENT.items()}
    aux = {"aux_loss_alpha": config.balance_loss, "seq_aux": config.balance_per == "sequence"}
    further = {"num_nextn_predict_layers": config.mtp_depth} if config.mtp_depth else {}
    return {**sizes, **aux, **further, "num_key_value_heads": config.heads}
