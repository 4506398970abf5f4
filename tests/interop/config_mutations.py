"""What transformers computes with changed ``config.json`` files: the rows of ``mutations.json.gz``.

``benchmarks/interop/make_mutations.py`` writes them with transformers.
"""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden" / "huggingface"
FILE = GOLDEN / "mutations.json.gz"
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("llama2", "llama3", "mistral", "qwen2", "qwen2_windows", "qwen3", "gemma2")},
    **{name: (name, {}) for name in ("gemma3", "mixtral", "qwen3_moe", "deepseek_v3")},
    "ministral": (
        "mistral",
        {
            "model_type": "ministral",
            "architectures": ["MinistralForCausalLM"],
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
"""By case: the golden checkpoint whose weights it has, and the fields that differ from it."""
FOREIGN = (
    "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "_sliding_window_pattern",
    "add_cross_attention", "alibi", "architectures", "attention_bias", "attention_dropout", "attention_multiplier",
    "attn_temperature_tuning", "auto_map", "aux_loss_alpha", "begin_suppress_tokens", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "clip_qkv", "cross_attention_hidden_size",
    "decoder_sparse_step", "decoder_start_token_id", "do_sample", "dtype", "embedding_multiplier", "eos_token_id",
    "ep_size", "finetuning_task", "gradient_checkpointing", "id2label", "initializer_range", "is_causal",
    "is_decoder", "is_encoder_decoder", "label2id", "layer_types", "logit_scale", "logits_scaling", "max_length",
    "max_new_tokens", "max_position_embeddings", "max_window_layers", "min_length", "mlp_bias", "mlp_only_layers",
    "moe_layer_freq", "name_or_path", "no_rope_layers", "norm_topk_prob", "num_beams", "num_experts",
    "num_key_value_heads", "num_labels", "num_local_experts", "original_max_position_embeddings",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "partial_rotary_factor",
    "prefix", "pretraining_tp", "problem_type", "pruned_heads", "qk_head_dim", "qk_layernorm", "qkv_bias",
    "repetition_penalty", "residual_multiplier", "return_dict", "rope_interleave", "rope_local_base_freq",
    "rope_theta", "rotary_pct", "router_jitter_noise", "scoring_func", "sep_token_id", "seq_aux", "sliding_window",
    "sliding_window_pattern", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class", "top_k", "top_p", "topk_method", "torch_dtype",
    "torchscript", "transformers_version", "unsloth_fixed", "unsloth_version", "use_bfloat16",
    "use_bidirectional_attention", "use_cache", "use_mrope", "use_qk_norm", "use_sliding_window",
)  # fmt: skip
"""Fields that other families or older files have."""


class Mutation(NamedTuple):
    """A change of a configuration with which transformers computes.

    Attributes:
      case: a key of ``BASES``.
      changes: fields with new values.
      removed: fields that are removed.
      answer: ``sample`` of the logits; ``None`` if they are those without the change.
    """

    case: str
    changes: dict[str, Any]
    removed: list[str]
    answer: list[float] | None

    @property
    def fields(self) -> dict[str, Any]:
        """The changed configuration."""
        return {key: value for key, value in (base_fields(self.case) | self.changes).items() if key not in self.removed}


@functools.cache
def base_fields(case: str) -> dict[str, Any]:
    golden, changes = BASES[case]
    fields: dict[str, Any] = json.loads((GOLDEN / golden / "config.json").read_text())
    return fields | changes


def sample(logits: np.ndarray) -> list[float]:
    """Returns some of logits [1, seq, vocab]: those of 3 positions, rounded."""
    return [round(float(x), 5) for x in logits[0, [5, 31, 63], ::3].reshape(-1)]


def read() -> list[Mutation]:
    with gzip.open(FILE, "rt", encoding="utf-8") as file:
        return [Mutation(*json.loads(line)) for line in file]
