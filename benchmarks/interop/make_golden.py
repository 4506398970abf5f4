"""Writes tiny random Hugging Face checkpoints of every supported family, and what transformers computes with them.

    uv run --no-project --with transformers --with torch --with numpy python benchmarks/interop/make_golden.py
    uv run ... python benchmarks/interop/make_golden.py --check EXPORTED/llama2 ...

Each family gets a folder with config.json, model.safetensors and answers.npz: ``tokens`` [1, 64], ``logits``
[1, 64, vocab] in fp32, and ``greedy`` [50], the tokens that greedy decoding appends to the first 8. The default tests
read these files, so that they need neither torch nor transformers.
"""

from __future__ import annotations

import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

os.environ["HF_HUB_OFFLINE"] = "1"
GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "huggingface"
PROMPT, NEW = 8, 50

BASE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
MIXTURE = {"num_experts_per_tok": 2, "num_hidden_layers": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 100.0}
"""Of few rotations, so that pairs are kept, blended and stretched."""
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 6, "sliding_window": 12, "tie_word_embeddings": True}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
CASES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "rms_norm_eps": 1e-5},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 12},
    "qwen2": {"model_type": "qwen2"},
    "qwen2_windows": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 1,
        "rope_parameters": {**YARN, "beta_fast": 4, "beta_slow": 1},
    },
    "qwen3": {"model_type": "qwen3"},
    "gemma2": {
        "model_type": "gemma2",
        **GEMMA,
        "num_hidden_layers": 4,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **GEMMA,
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        "rope_parameters": GEMMA3_ROPE,
    },
    "mixtral": {"model_type": "mixtral", **MIXTURE, "num_local_experts": 4},
    "qwen3_moe": {"model_type": "qwen3_moe", **MIXTURE, "num_experts": 4, "moe_intermediate_size": 12},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **MIXTURE,
        "head_dim": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "moe_intermediate_size": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "kv_lora_rank": 8,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {**YARN, "beta_fast": 4, "beta_slow": 1, "mscale": 0.5, "mscale_all_dim": 0.8},
    },
}
CASES["qwen3_moe"]["norm_topk_prob"] = True


def make(name: str) -> None:
    torch.manual_seed(zlib.crc32(name.encode()))
    values = {**BASE, **CASES[name]}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            # Norms near 1, weights large enough that logits of different tokens differ by much more than the bound.
            one = 0 if "gemma" in name else 1  # a Gemma's norms add 1 to their weights
            tensor.copy_(
                one + 0.1 * torch.randn_like(tensor)
                if tensor.ndim == 1 and "bias" not in key
                else torch.randn_like(tensor) * (0.5 if tensor.ndim == 1 else tensor.shape[-1] ** -0.5)
            )
        for key, tensor in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * torch.randn_like(tensor))
    tokens = torch.randint(0, config.vocab_size, (1, 64))
    with torch.no_grad():
        logits = model(tokens).logits
        row = tokens[:, :PROMPT]
        for _ in range(NEW):  # without a cache: the plainest form of greedy decoding
            row = torch.cat([row, model(row).logits[:, -1:].argmax(-1)], 1)
    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    answers = {"tokens": tokens.numpy().astype(np.int32), "logits": logits.numpy(), "greedy": row[0, PROMPT:].numpy()}
    np.savez_compressed(folder / "answers.npz", **answers)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: {size:,} bytes, transformers {transformers.__version__}, torch {torch.__version__}")


def check(folder: Path) -> float:
    """Returns how far the logits of an exported checkpoint are from those of the golden one of the same name."""
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), loading
    with np.load(GOLDEN / folder.name / "answers.npz") as found, torch.no_grad():
        logits = model.eval()(torch.from_numpy(found["tokens"].astype(np.int64))).logits.numpy()
        return float(np.abs(logits - found["logits"]).max())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        for argument in sys.argv[2:]:
            print(f"{argument}: logits differ by at most {check(Path(argument)):.1e}")
    else:
        for case in sys.argv[1:] or CASES:
            make(case)
