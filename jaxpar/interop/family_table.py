"""The supported model types of transformers: names of their fields, and what a configuration may leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpar.interop.fields import Fields
from jaxpar.interop.rope_fields import LOCAL, ROPE_FIELDS
from jaxpar.interop.window_fields import (
    PATTERN,
    USED,
    WindowRule,
    after_first,
    all_but_every,
    all_if_used,
    all_layers,
)

IGNORED = frozenset((
    # of the file and the repository
    "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "_sliding_window_pattern", "architectures",
    "auto_map", "dtype", "model_type", "name_or_path", "torch_dtype", "transformers_version", "unsloth_fixed",
    "unsloth_version",
    # of tokens and generation
    "begin_suppress_tokens", "bos_token_id", "cache_implementation", "decoder_start_token_id", "do_sample",
    "eos_token_id", "max_length", "max_new_tokens", "min_length", "num_beams", "pad_token_id", "prefix",
    "repetition_penalty", "sep_token_id", "suppress_tokens", "temperature", "tokenizer_class", "top_k", "top_p",
    "use_cache",
    # of training and other heads
    "finetuning_task", "gradient_checkpointing", "id2label", "initializer_range", "label2id", "num_labels",
    "output_router_logits", "pretraining_tp", "problem_type", "task_specific_params",
    # that every family reads
    "max_position_embeddings", "tie_word_embeddings",
))  # fmt: skip
"""Fields of every family that may have any value: they change nothing that the layers compute, or are read."""

type Neutral = Mapping[str, tuple[Any, ...]]
"""Fields that are not implemented, and the only values that they may have; an export writes the first."""

NEUTRAL: Neutral = {
    "add_cross_attention": (False, None),
    "attention_bias": (False, None),
    "attention_dropout": (0.0, None),
    "chunk_size_feed_forward": (0, None),
    "cross_attention_hidden_size": (None,),
    "is_causal": (True,),
    "is_decoder": (False, True, None),
    "is_encoder_decoder": (False, None),
    "mlp_bias": (False, None),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
    "partial_rotary_factor": (1.0, None),
    "pruned_heads": ({}, None),
    "qk_layernorm": (False,),
    "quantization_config": (None,),
    "return_dict": (True,),
    "sliding_window": (None,),
    "tf_legacy_loss": (False,),
    "tie_encoder_decoder": (False, None),
    "torchscript": (False, None),
    "use_bfloat16": (False, None),
    "use_mrope": (False,),
    "use_sliding_window": (False, None),
}
"""Those of every family. A field in no table is an error, whatever its value: transformers gives every field to its
code, in which an absent one, ``is_causal`` for example, may count as true."""
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
_SILU: Neutral = {"hidden_act": ("silu",)}


@dataclass(frozen=True)
class HFFamily:
    """A model type of transformers.

    Attributes:
      architecture: the class that ``config.json`` names.
      sizes: field of ``config.json`` → field of our configuration.
      fixed: fields of our configuration that all models of the family share.
      defaults: values of fields that ``config.json`` may leave out.
      windows: which layers have a sliding window; ``None`` for a family without windows.
      per_layer: whether the family reads ``layer_types``.
      gemma: field of ``config.json`` → field of :class:`jaxpar.models.llama.config.GemmaConfig`; empty for a Llama.
      neutral: fields that are not implemented, and the only values that they may have, besides those of all families.
      extra: further fields of ``config.json`` that an export writes.
    """

    architecture: str
    sizes: Mapping[str, str]
    fixed: Fields = field(default_factory=dict)
    defaults: Fields = field(default_factory=dict)
    windows: WindowRule | None = None
    per_layer: bool = False
    gemma: Mapping[str, str] = field(default_factory=dict)
    neutral: Neutral = field(default_factory=lambda: _SILU)
    extra: Fields = field(default_factory=dict)

    @property
    def reads(self) -> frozenset[str]:
        """The fields that are read, besides those of every family."""
        names = {*self.sizes, *self.gemma, "layer_types", *ROPE_FIELDS}
        names |= {"sliding_window"} if self.windows else set()
        names |= {USED, "max_window_layers"} if self.reads_use else set()
        names |= {LOCAL, PATTERN} if self.two_ropes else set()
        names |= {"router_aux_loss_coef", "num_local_experts"} if "num_experts_per_tok" in self.sizes else set()
        names |= {*LATENT, "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers"} if self.sizes is DEEPSEEK else set()
        return frozenset(names)

    @property
    def reads_use(self) -> bool:
        """Whether ``use_sliding_window`` turns windows on."""
        return self.windows in (after_first, all_if_used)

    @property
    def two_ropes(self) -> bool:
        """Whether layers with a sliding window have rotary frequencies of their own."""
        return self.architecture == "Gemma3ForCausalLM"


_MIXTURE = {"num_experts_per_tok": "k"}
_QWEN_MOE = {"num_experts": "experts", "moe_intermediate_size": "expert_mlp", "norm_topk_prob": "normalize"}
DEEPSEEK = {
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
LATENT = {"kv_lora_rank": "kv_latent", "q_lora_rank": "q_latent", "qk_rope_head_dim": "rope_dim"}
LATENT |= {"v_head_dim": "value_dim"}
_NO_AUX: Fields = {"score": "sigmoid", "bias_rate": 0.001}
_COMMON: Fields = {"rms_norm_eps": 1e-6, "max_window_layers": 28}
_QWEN: Fields = {**_COMMON, "sliding_window": 4096}
_GELU = "gelu_pytorch_tanh"
_GEMMA_NEUTRAL: Neutral = {
    "hidden_act": (_GELU,),
    "hidden_activation": (_GELU,),
    "use_bidirectional_attention": (False, None),
}
_GEMMA_EXTRA: Fields = {"hidden_activation": _GELU, "attention_bias": False}
_GEMMA: Fields = {**_COMMON, "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096}

FAMILIES: dict[str, HFFamily] = {
    "llama": HFFamily("LlamaForCausalLM", _SIZES, defaults=_COMMON, extra={"attention_bias": False, "mlp_bias": False}),
    "mistral": HFFamily("MistralForCausalLM", _SIZES, defaults={**_COMMON, "sliding_window": 4096}, windows=all_layers),
    "ministral": HFFamily(
        "MinistralForCausalLM", _SIZES, defaults={**_COMMON, "sliding_window": 4096}, windows=all_layers, per_layer=True
    ),
    "qwen2": HFFamily("Qwen2ForCausalLM", _SIZES, {"qkv_bias": True}, _QWEN, after_first, per_layer=True),
    "qwen3": HFFamily("Qwen3ForCausalLM", _SIZES, {"qk_norm": True}, _QWEN, after_first, per_layer=True),
    "gemma2": HFFamily(
        "Gemma2ForCausalLM",
        _SIZES,
        defaults={**_GEMMA, PATTERN: 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        windows=all_but_every,
        per_layer=True,
        gemma={
            "query_pre_attn_scalar": "query_scalar",
            "attn_logit_softcapping": "attention_softcap",
            "final_logit_softcapping": "logit_softcap",
        },
        neutral={**_GEMMA_NEUTRAL, PATTERN: (2, None)},
        extra=_GEMMA_EXTRA,
    ),
    "gemma3_text": HFFamily(
        "Gemma3ForCausalLM",
        _SIZES,
        {"qk_norm": True},
        {**_GEMMA, PATTERN: 6},
        all_but_every,
        per_layer=True,
        gemma={"query_pre_attn_scalar": "query_scalar", "final_logit_softcapping": "logit_softcap"},
        neutral={**_GEMMA_NEUTRAL, "attn_logit_softcapping": (None,)},
        extra=_GEMMA_EXTRA,
    ),
    "mixtral": HFFamily(
        "MixtralForCausalLM",
        {**_SIZES, **_MIXTURE, "num_local_experts": "experts", "intermediate_size": "expert_mlp"},
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2, "num_local_experts": 8},
        windows=all_layers,
        neutral={**_SILU, "router_jitter_noise": (0.0,)},
    ),
    "qwen3_moe": HFFamily(
        "Qwen3MoeForCausalLM",
        {**_SIZES, **_MIXTURE, **_QWEN_MOE},
        {"qk_norm": True},
        {**_QWEN, "norm_topk_prob": False},
        all_if_used,
        neutral={**_SILU, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        extra={"decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "deepseek_v3": HFFamily(
        "DeepseekV3ForCausalLM",
        DEEPSEEK,
        _NO_AUX,
        _COMMON,
        neutral={
            **_SILU,
            "ep_size": (1,),
            "moe_layer_freq": (1,),
            "rope_interleave": (True,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
        },
        extra={"rope_interleave": True},
    ),
}
"""The supported values of ``model_type``."""
