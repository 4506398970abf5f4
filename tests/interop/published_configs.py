"""``config.json`` of published models, and their number of parameters: facts, written down by hand.

Each entry has all fields of the file except dates of versions, names of dtypes and ids of tokens, which
:data:`EVERYWHERE` stands for.
"""

from __future__ import annotations

from typing import Any

EVERYWHERE: dict[str, Any] = {
    "architectures": ["ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [1, 2],
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
}
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES += ("intermediate_size", "max_position_embeddings", "rms_norm_eps")


def fields(sizes: tuple[float, ...], **own: Any) -> dict[str, Any]:
    """The fields of a model: its sizes, in the order of :data:`SIZES`, and the others."""
    return {**EVERYWHERE, "hidden_act": "silu", **dict(zip(SIZES, sizes, strict=True)), **own}


def llama3(factor: float) -> dict[str, Any]:
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "factor": factor, **bands}


LLAMA = {"model_type": "llama", "attention_bias": False, "pretraining_tp": 1, "tie_word_embeddings": False}
QWEN2 = {"model_type": "qwen2", "rope_theta": 1e6, "use_sliding_window": False}
QWEN3 = {"rope_theta": 1e6, "rope_scaling": None, "use_sliding_window": False, "sliding_window": None}
QWEN3 |= {"attention_bias": False, "head_dim": 128}
YARN4 = {"factor": 4.0, "original_max_position_embeddings": 32768}
GELU = "gelu_pytorch_tanh"
GEMMA = {"attention_bias": False, "cache_implementation": "hybrid", "head_dim": 256, "hidden_activation": GELU}
GEMMA |= {"pad_token_id": 0, "query_pre_attn_scalar": 256}

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 2 7B": (
        fields((32_000, 4096, 32, 32, 32, 11_008, 4096, 1e-5), **LLAMA, rope_scaling=None),
        6_738_415_616,
    ),
    "Llama 3 8B": (
        fields((128_256, 4096, 32, 32, 8, 14_336, 8192, 1e-5), **LLAMA, rope_scaling=None, rope_theta=5e5),
        8_030_261_248,
    ),
    "Llama 3.1 70B": (
        fields(
            (128_256, 8192, 80, 64, 8, 28_672, 131_072, 1e-5),
            **LLAMA,
            rope_scaling=llama3(8.0),
            rope_theta=5e5,
            mlp_bias=False,
        ),
        70_553_706_496,
    ),
    "Llama 3.2 1B": (
        fields(
            (128_256, 2048, 16, 32, 8, 8192, 131_072, 1e-5),
            **{**LLAMA, "tie_word_embeddings": True},
            rope_scaling=llama3(32.0),
            rope_theta=5e5,
            mlp_bias=False,
            head_dim=64,
        ),
        1_235_814_400,
    ),
    "Llama 3.2 3B": (
        fields(
            (128_256, 3072, 28, 24, 8, 8192, 131_072, 1e-5),
            **{**LLAMA, "tie_word_embeddings": True},
            rope_scaling=llama3(32.0),
            rope_theta=5e5,
            mlp_bias=False,
            head_dim=128,
        ),
        3_212_749_824,
    ),
    "Mistral 7B v0.1": (
        fields(
            (32_000, 4096, 32, 32, 8, 14_336, 32_768, 1e-5),
            model_type="mistral",
            rope_theta=1e4,
            sliding_window=4096,
            tie_word_embeddings=False,
        ),
        7_241_732_096,
    ),
    "Mistral 7B v0.3": (
        fields(
            (32_768, 4096, 32, 32, 8, 14_336, 32_768, 1e-5),
            model_type="mistral",
            rope_theta=1e6,
            sliding_window=None,
            tie_word_embeddings=False,
        ),
        7_248_023_552,
    ),
    "Qwen2 0.5B": (
        fields(
            (151_936, 896, 24, 14, 2, 4864, 131_072, 1e-6),
            **QWEN2,
            sliding_window=131_072,
            max_window_layers=24,
            tie_word_embeddings=True,
        ),
        494_032_768,
    ),
    "Qwen2.5 7B": (
        fields(
            (152_064, 3584, 28, 28, 4, 18_944, 131_072, 1e-6),
            **QWEN2,
            sliding_window=131_072,
            max_window_layers=28,
            use_mrope=False,
            tie_word_embeddings=False,
        ),
        7_615_616_512,
    ),
    "Qwen2.5 72B with YaRN": (
        fields(
            (152_064, 8192, 80, 64, 8, 29_568, 32_768, 1e-6),
            **QWEN2,
            sliding_window=131_072,
            max_window_layers=70,
            rope_scaling={**YARN4, "type": "yarn"},
            tie_word_embeddings=False,
        ),
        72_706_203_648,
    ),
    "Qwen3 0.6B": (
        fields(
            (151_936, 1024, 28, 16, 8, 3072, 40_960, 1e-6),
            **QWEN3,
            model_type="qwen3",
            max_window_layers=28,
            tie_word_embeddings=True,
        ),
        596_049_920,
    ),
    "Qwen3 8B with YaRN": (
        fields(
            (151_936, 4096, 36, 32, 8, 12_288, 40_960, 1e-6),
            **{**QWEN3, "rope_scaling": {**YARN4, "rope_type": "yarn"}},
            model_type="qwen3",
            max_window_layers=36,
            tie_word_embeddings=False,
        ),
        8_190_735_360,
    ),
    "Mixtral 8x7B": (
        fields(
            (32_000, 4096, 32, 32, 8, 14_336, 32_768, 1e-5),
            model_type="mixtral",
            num_experts_per_tok=2,
            num_local_experts=8,
            output_router_logits=False,
            rope_theta=1e6,
            router_aux_loss_coef=0.02,
            sliding_window=None,
            tie_word_embeddings=False,
        ),
        46_702_792_704,
    ),
    "Qwen3 30B A3B": (
        fields(
            (151_936, 2048, 48, 32, 4, 6144, 40_960, 1e-6),
            **QWEN3,
            model_type="qwen3_moe",
            decoder_sparse_step=1,
            max_window_layers=48,
            mlp_only_layers=[],
            moe_intermediate_size=768,
            norm_topk_prob=True,
            num_experts=128,
            num_experts_per_tok=8,
            output_router_logits=False,
            router_aux_loss_coef=0.001,
            tie_word_embeddings=False,
        ),
        30_532_122_624,
    ),
    "DeepSeek-V3": (
        fields(
            (129_280, 7168, 61, 128, 128, 18_432, 163_840, 1e-6),
            model_type="deepseek_v3",
            attention_bias=False,
            auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
            aux_loss_alpha=0.001,
            ep_size=1,
            first_k_dense_replace=3,
            kv_lora_rank=512,
            moe_intermediate_size=2048,
            moe_layer_freq=1,
            n_group=8,
            n_routed_experts=256,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_experts_per_tok=8,
            num_nextn_predict_layers=1,
            pretraining_tp=1,
            q_lora_rank=1536,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
            rope_scaling={
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            rope_theta=10_000,
            routed_scaling_factor=2.5,
            scoring_func="sigmoid",
            seq_aux=True,
            tie_word_embeddings=False,
            topk_group=4,
            topk_method="noaux_tc",
            v_head_dim=128,
        ),
        671_026_419_200,
    ),
    "Gemma 2 2B": (
        fields(
            (256_000, 2304, 26, 8, 4, 9216, 8192, 1e-6),
            **{**GEMMA, "hidden_act": GELU},
            model_type="gemma2",
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            rope_theta=10_000.0,
            sliding_window=4096,
        ),
        2_614_341_888,
    ),
    "Gemma 3 1B": (
        {
            key: value
            for key, value in fields(
                (262_144, 1152, 26, 4, 1, 6912, 32_768, 1e-6),
                **GEMMA,
                model_type="gemma3_text",
                attn_logit_softcapping=None,
                final_logit_softcapping=None,
                rope_local_base_freq=10_000,
                rope_scaling=None,
                rope_theta=1_000_000,
                sliding_window=512,
                sliding_window_pattern=6,
            ).items()
            if key != "hidden_act"
        },
        999_885_952,
    ),
}
