"""The model that Megatron-LM arguments describe."""

from __future__ import annotations

import re
from typing import Any

from jaxpar.interop.configurations.families import further_tokens, with_family
from jaxpar.interop.configurations.keys import ConfigKeys
from jaxpar.interop.configurations.megatron.ignored import MODEL_NEUTRAL

_ARGUMENTS = (
    *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads"),
    *("--group-query-attention", "--num-query-groups", "--kv-channels", "--vocab-size", "--rotary-base"),
    *("--use-rope-scaling", "--rope-scaling-factor", "--norm-epsilon", "--qk-layernorm"),
    *("--add-qkv-bias", "--window-size", "--untie-embeddings-and-output-weights"),
    *("--multi-latent-attention", "--kv-lora-rank", "--q-lora-rank", "--qk-head-dim"),
    *("--qk-pos-emb-head-dim", "--v-head-dim", "--num-experts", "--moe-layer-freq", "--moe-router-topk"),
    *("--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size", "--moe-router-score-function"),
    *("--moe-router-pre-softmax", "--moe-router-topk-scaling-factor", "--moe-router-num-groups"),
    *("--moe-router-group-topk", "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"),
    *("--moe-z-loss-coeff", "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate"),
    *("--moe-expert-capacity-factor", "--rotary-scaling-factor"),
    *("--mtp-num-layers", "--mtp-loss-scaling-factor"),
)
"""Every argument that only the model has."""


def read_model(keys: ConfigKeys) -> dict[str, Any]:
    """Returns ``model`` of a run; empty if the import has a base, whose model is used.

    Raises:
      ConfigError: a size is missing or wrong.
    """
    if keys.options.base is not None:
        keys.ignore_each((*_ARGUMENTS, *(name for name, *_ in MODEL_NEUTRAL)), "--base has the model")
        return {}
    for name, values, default, reason in MODEL_NEUTRAL:
        if not keys.has(name) and default not in values:
            keys.refuse(name, f"{reason}; the default of Megatron is {default}", default=True)
        else:
            keys.neutral(name, values, reason)
    fields = _sizes(keys) | _numerics(keys)
    latent = _latent(keys)
    if latent:
        fields |= {"head_dim": latent.pop("head_dim"), "kv_heads": fields["heads"], "latent_attention": latent}
    experts = _experts(keys, fields)
    further = ("--mtp-num-layers", "--mtp-loss-scaling-factor")
    fields |= further_tokens(keys, *further, default=0.1, with_experts=bool(experts))
    return with_family(keys, fields, experts, "--multi-latent-attention")


def _needed(keys: ConfigKeys, name: str, target: str) -> int:
    if not keys.has(name):
        raise keys.error(name, "is missing, so the model is not known", f"{name} N, or --base RUN.yaml")
    return int(keys.take(name, "count", None, target))


def _sizes(keys: ConfigKeys) -> dict[str, Any]:
    layers, embed = _needed(keys, "--num-layers", "model.layers"), _needed(keys, "--hidden-size", "model.embed")
    heads, vocab = _needed(keys, "--num-attention-heads", "model.heads"), _needed(keys, "--vocab-size", "model.vocab")
    if embed % heads and not keys.has("--kv-channels"):
        raise keys.error("--hidden-size", f"must be a multiple of {heads} heads, got {embed}")
    grouped = keys.take("--group-query-attention", "bool", False, "model.kv_heads")
    groups = keys.take("--num-query-groups", "count", 1, "model.kv_heads")
    if not grouped:
        keys.ignore("--num-query-groups", "--group-query-attention is not given")
    width = int(4 * embed * 2 / 3 / 64) * 64 if keys.has("--swiglu") else 4 * embed
    return {
        "vocab": vocab,
        "embed": embed,
        "layers": layers,
        "heads": heads,
        "kv_heads": groups if grouped else heads,
        "head_dim": keys.take("--kv-channels", "count", embed // heads, "model.head_dim"),
        "mlp": keys.take("--ffn-hidden-size", "count", width, "model.mlp"),
    }


def _numerics(keys: ConfigKeys) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "rope_theta": float(keys.take("--rotary-base", "number", 10000, "model.rope_theta")),
        "norm_eps": float(keys.take("--norm-epsilon", "number", 1e-5, "model.norm_eps")),
        "qk_norm": keys.take("--qk-layernorm", "bool", False, "model.qk_norm"),
        "qkv_bias": keys.take("--add-qkv-bias", "bool", False, "model.qkv_bias"),
        "tie_embeddings": not keys.take("--untie-embeddings-and-output-weights", "bool", False, "model.tie_embeddings"),
    }
    if keys.take("--use-rope-scaling", "bool", False, "model.rope_scaling"):
        factor = float(keys.take("--rope-scaling-factor", "number", 8.0, "model.rope_scaling"))
        fields["rope_scaling"] = {"kind": "llama3", "factor": factor}
    else:
        keys.ignore("--rope-scaling-factor", "--use-rope-scaling is not given")
    window = keys.raw("--window-size")
    if window is not None:
        found = re.fullmatch(r"\(?(\d+),0\)?", str(window).replace(" ", ""))
        if found is None:
            raise keys.error("--window-size", f"must be tokens before and after, such as 4096,0, got {window!r}")
        keys.translate("--window-size", "model.sliding_window")
        fields["sliding_window"] = int(found[1]) + 1  # the token itself counts here
    return fields


def _latent(keys: ConfigKeys) -> dict[str, Any]:
    names = ("--kv-lora-rank", "--q-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim")
    if not keys.take("--multi-latent-attention", "bool", False, "model.latent_attention"):
        keys.ignore_each(names, "--multi-latent-attention is not given")
        return {}
    keys.neutral("--rotary-scaling-factor", (1, 1.0), "rotary positions are not stretched by YaRN")
    target = "model.latent_attention"
    return {
        "kv_latent": keys.take(names[0], "count", 32, f"{target}.kv_latent"),
        "q_latent": keys.take(names[1], "count", None, f"{target}.q_latent"),
        "rope_dim": keys.take(names[3], "count", 64, f"{target}.rope_dim"),
        "value_dim": keys.take(names[4], "count", 128, f"{target}.value_dim"),
        "head_dim": keys.take(names[2], "count", 128, "model.head_dim"),
    }


def _experts(keys: ConfigKeys, dense: dict[str, Any]) -> dict[str, Any]:
    count = keys.take("--num-experts", "count", 1, "model.experts")
    if count == 1:
        keys.ignore_each((name for name in _ARGUMENTS if name.startswith("--moe-")), "the model has no experts")
        return {}
    k = keys.take("--moe-router-topk", "count", 2, "model.k")
    if k > count:
        raise keys.error("--moe-router-topk", f"must be at most --num-experts={count}, got {k}")
    width = keys.take("--moe-ffn-hidden-size", "count", dense["mlp"], "model.expert_mlp")
    shared = keys.take("--moe-shared-expert-intermediate-size", "natural", 0, "model.shared_experts")
    if shared % width:
        raise keys.error("--moe-shared-expert-intermediate-size", f"must be a multiple of {width}, got {shared}")
    score = keys.take("--moe-router-score-function", "text", "softmax", "model.score")
    if score not in ("softmax", "sigmoid"):
        raise keys.error("--moe-router-score-function", f"must be softmax or sigmoid, got {score!r}")
    early = keys.take("--moe-router-pre-softmax", "bool", False, "model.normalize")
    scale = keys.take("--moe-router-topk-scaling-factor", "number", 1.0, "model.scale")
    factor = keys.take("--moe-expert-capacity-factor", "number", None, "model.capacity_factor")
    return {
        "experts": count,
        "k": k,
        "expert_mlp": width,
        "shared_experts": shared // width,
        "dense_layers": _dense_layers(keys, dense["layers"]),
        "score": score,
        "normalize": score == "sigmoid" or not early,
        "scale": float(scale),
        "groups": keys.take("--moe-router-num-groups", "count", 1, "model.groups"),
        "groups_per_token": keys.take("--moe-router-group-topk", "count", 1, "model.groups_per_token"),
        **_balance(keys),
        "z_loss": float(keys.take("--moe-z-loss-coeff", "number", 0.0, "model.z_loss")),
        "capacity_factor": None if factor is None else float(factor),
    }


def _dense_layers(keys: ConfigKeys, layers: int) -> int:
    """The number of first layers without experts, from a period or a pattern such as ``([0]*3+[1]*58)``."""
    value = keys.raw("--moe-layer-freq")
    keys.translate("--moe-layer-freq", "model.dense_layers")
    if value in (None, 1):
        return 0
    found = re.fullmatch(r"\(?\[0\](?:\*(\d+))?\+\[1\](?:\*(\d+))?\)?", str(value).replace(" ", ""))
    dense, sparse = (int(number or 1) for number in found.groups()) if found else (0, 0)
    if found is None or dense + sparse != layers:
        keys.refuse("--moe-layer-freq", f"only the first layers may be dense, as in ([0]*1+[1]*{layers - 1})")
        return 0
    return dense


def _balance(keys: ConfigKeys) -> dict[str, Any]:
    kind = keys.take("--moe-router-load-balancing-type", "text", "aux_loss", "model.balance_per")
    factor = float(keys.take("--moe-aux-loss-coeff", "number", 0.0, "model.balance_loss"))
    if kind not in ("aux_loss", "seq_aux_loss", "none"):
        keys.refuse("--moe-router-load-balancing-type", "only aux_loss, seq_aux_loss and none are built")
    biased = keys.take("--moe-router-enable-expert-bias", "bool", False, "model.bias_rate")
    rate = float(keys.take("--moe-router-bias-update-rate", "number", 0.001, "model.bias_rate"))
    if not biased:
        keys.ignore("--moe-router-bias-update-rate", "--moe-router-enable-expert-bias is not given")
    return {
        "balance_loss": 0.0 if kind == "none" else factor,
        "balance_per": "sequence" if kind == "seq_aux_loss" else "batch",
        "bias_rate": rate if biased else None,
    }
