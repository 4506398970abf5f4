"""The model of a MindFormers configuration: ``model.model_config`` and ``moe_config``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpar.interop.configurations.families import further_tokens, with_family
from jaxpar.interop.configurations.keys import ConfigKeys
from jaxpar.interop.configurations.mindformers.adapters import read_adapters
from jaxpar.interop.configurations.mindformers.experts import read_experts
from jaxpar.interop.configurations.mindformers.ignored import MODEL_IGNORED, MODEL_NEUTRAL
from jaxpar.interop.configurations.mindformers.rope import read_rope_scaling

SECTIONS = ("model.model_config.", "model_config.")
LAYERS = ("num_layers", "num_hidden_layers")
HEADS = ("num_heads", "num_attention_heads")
KV_HEADS = ("n_kv_heads", "num_key_value_heads", "num_query_groups")
HEAD_DIM = ("head_dim", "kv_channels")
MLP = ("intermediate_size", "ffn_hidden_size")
THETA = ("theta", "rope_theta", "rotary_base")
MTP_DEPTH = ("mtp_depth", "mtp_num_layers", "num_nextn_predict_layers")
MTP_WEIGHT = ("mtp_loss_factor", "mtp_loss_scaling_factor")
DTYPES = {"float32": "float32", "fp32": "float32", "float16": "float16", "fp16": "float16"}
DTYPES |= {"bfloat16": "bfloat16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class ImportedModel:
    """The model that a configuration describes.

    Attributes:
      prefix: of its keys, such as ``model.model_config.``.
      fields: ``model`` of our configuration; empty if the file has no model.
      seq: tokens of a sequence; ``None`` if the file does not say it.
    """

    prefix: str
    fields: dict[str, Any] = field(default_factory=dict)
    seq: int | None = None

    @property
    def layers(self) -> int | None:
        """The number of layers, if the file has a model."""
        return self.fields.get("layers")

    @property
    def experts(self) -> int:
        """The number of experts; 1 for a dense model, or if the file has no model."""
        return int(self.fields.get("experts", 1))


def read_model(keys: ConfigKeys) -> ImportedModel:
    """Returns the model, with the defaults of MindFormers for sizes that the file leaves out.

    Raises:
      ConfigError: a size is missing or wrong, or the file has no model and the import no base.
    """
    prefix = next((prefix for prefix in SECTIONS if keys.has(prefix[:-1])), SECTIONS[0])
    seq = keys.take(f"{prefix}seq_length", "count", None, "data.seq")
    keys.neutral_all(MODEL_NEUTRAL, prefix)
    for name in keys.get(prefix[:-1], "mapping", {}):
        if "dropout" in str(name):  # every model of MindFormers has names of its own
            keys.neutral(f"{prefix}{name}", (0.0, False), "there is no dropout")
    keys.ignore_all(MODEL_IGNORED, prefix)
    keys.ignore("model.arch", "model.family follows from the sizes")
    if not keys.has(f"{prefix}hidden_size"):
        if keys.options.base is None:
            raise keys.error(f"{prefix}hidden_size", "is missing, so the model is not known", "--base RUN.yaml")
        return ImportedModel(prefix, seq=seq)
    adapters = read_adapters(keys, prefix)
    fields: dict[str, Any] = {} if adapters is None else {"lora": adapters}
    fields |= _sizes(keys, prefix)
    fields["rope_theta"] = float(keys.take(_named(keys, prefix, THETA), "number", 10000.0, "model.rope_theta"))
    fields |= read_rope_scaling(keys, prefix) | _numerics(keys, prefix)
    latent = _latent(keys, prefix)
    if latent:
        fields |= {"head_dim": latent.pop("head_dim"), "kv_heads": fields["heads"], "latent_attention": latent}
    experts = read_experts(keys, prefix, fields)
    depth, weight = _named(keys, prefix, MTP_DEPTH), _named(keys, prefix, MTP_WEIGHT)
    default = 0.1 if depth.endswith("mtp_num_layers") else 0.3  # as in MindFormers
    fields |= further_tokens(keys, depth, weight, default, with_experts=bool(experts))
    return ImportedModel(prefix, with_family(keys, fields, experts, f"{prefix}kv_lora_rank"), seq)


def _named(keys: ConfigKeys, prefix: str, names: Sequence[str]) -> str:
    return keys.first([f"{prefix}{name}" for name in names])


def _sizes(keys: ConfigKeys, prefix: str) -> dict[str, Any]:
    embed = keys.take(f"{prefix}hidden_size", "count", None, "model.embed")
    layers = keys.take(_named(keys, prefix, LAYERS), "count", 32, "model.layers")
    heads = keys.take(_named(keys, prefix, HEADS), "count", 32, "model.heads")
    kv_path, dim_path = _named(keys, prefix, KV_HEADS), _named(keys, prefix, HEAD_DIM)
    if embed % heads and not keys.has(dim_path):
        raise keys.error(f"{prefix}hidden_size", f"must be a multiple of {heads} heads, got {embed}")
    return {
        "vocab": keys.take(f"{prefix}vocab_size", "count", 32000, "model.vocab"),
        "embed": embed,
        "layers": layers,
        "heads": heads,
        "kv_heads": keys.take(kv_path, "count", heads, "model.kv_heads"),
        "head_dim": keys.take(dim_path, "count", embed // heads, "model.head_dim"),
        "mlp": _mlp(keys, prefix, embed),
    }


def _mlp(keys: ConfigKeys, prefix: str, embed: int) -> int:
    """The width of the MLP: given, or 8/3 of the residual stream, scaled and rounded up as MindFormers does."""
    path = _named(keys, prefix, MLP)
    rounding = {name: f"{prefix}{name}" for name in ("multiple_of", "ffn_dim_multiplier")}
    if keys.has(path):
        keys.ignore_each(rounding.values(), f"{path} sets the width")
        return int(keys.take(path, "count", None, "model.mlp"))
    multiple = keys.take(rounding["multiple_of"], "count", 256, "model.mlp")
    factor = keys.take(rounding["ffn_dim_multiplier"], "number", None, "model.mlp")
    width = 4 * embed if factor is None else int((factor + 0.01) * 4 * embed)
    return -(-int(2 * width / 3) // multiple) * int(multiple)


def _numerics(keys: ConfigKeys, prefix: str) -> dict[str, Any]:
    tied, untied = f"{prefix}tie_word_embeddings", f"{prefix}untie_embeddings_and_output_weights"
    tie = keys.take(tied, "bool", not keys.get(untied, "bool", True), "model.tie_embeddings")
    if keys.has(untied) and keys.take(untied, "bool", None, "model.tie_embeddings") is tie:
        raise keys.error(untied, f"is {str(tie).lower()}, but {tied} is too", "leave one of them out")
    bias = _named(keys, prefix, ("qkv_has_bias", "attention_bias", "add_qkv_bias"))
    eps = _named(keys, prefix, ("rms_norm_eps", "layernorm_epsilon"))
    legacy = keys.get("use_legacy", "bool", True)
    stored = _named(keys, prefix, ("param_init_type", "params_dtype"))
    fields: dict[str, Any] = {
        "norm_eps": float(keys.take(eps, "number", 1e-5, "model.norm_eps")),
        "qk_norm": keys.take(f"{prefix}qk_layernorm", "bool", False, "model.qk_norm"),
        "qkv_bias": keys.take(bias, "bool", False, "model.qkv_bias"),
        "tie_embeddings": tie,
        "dtype": _dtype(keys, f"{prefix}compute_dtype", "float16" if legacy else "bfloat16", "model.dtype"),
        "param_dtype": _dtype(keys, stored, "float16" if legacy else "float32", "model.param_dtype"),
    }
    window, used = f"{prefix}sliding_window", keys.get(f"{prefix}use_sliding_window", "bool", True)
    keys.translate(f"{prefix}use_sliding_window", "model.sliding_window")
    if used:
        fields["sliding_window"] = keys.take(window, "count", None, "model.sliding_window")
    else:
        keys.ignore(window, "use_sliding_window is false")
    return fields


def _dtype(keys: ConfigKeys, path: str, default: str, target: str) -> str:
    name = keys.take(path, "text", default, target)
    if name not in DTYPES:
        raise keys.error(path, f"must be float32, float16 or bfloat16, got {name!r}")
    return DTYPES[name]


def _latent(keys: ConfigKeys, prefix: str) -> dict[str, Any]:
    """The sizes of latent attention, with ``head_dim``; empty without ``kv_lora_rank``."""
    if not keys.get(f"{prefix}kv_lora_rank", "natural", 0):
        return {}
    target = "model.latent_attention"
    rope = _named(keys, prefix, ("qk_rope_head_dim", "qk_pos_emb_head_dim"))
    nope = _named(keys, prefix, ("qk_nope_head_dim", "qk_head_dim"))
    return {
        "kv_latent": keys.take(f"{prefix}kv_lora_rank", "count", None, f"{target}.kv_latent"),
        "q_latent": keys.take(f"{prefix}q_lora_rank", "natural", None, f"{target}.q_latent") or None,
        "rope_dim": keys.take(rope, "count", 64, f"{target}.rope_dim"),
        "value_dim": keys.take(f"{prefix}v_head_dim", "count", 128, f"{target}.value_dim"),
        "head_dim": keys.take(nope, "count", 128, "model.head_dim"),
    }
