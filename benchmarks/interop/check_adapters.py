"""What PEFT makes of an adapter by its ``init_lora_weights``: the sum of base and product, or something else.

    uv run --no-project --with peft --with transformers --with torch --with scipy python \
        benchmarks/interop/check_adapters.py

For each kind it trains nothing, but gives an adapter of a golden checkpoint random weights, saves it, loads it beside
the same checkpoint, and prints how far the merged weight is from W + alpha / r B A. A kind that is far off needs the
weights that PEFT made of the base, so jaxpar refuses it; LoRA-GA, too, which PEFT itself loads as an ordinary adapter
of the wrong base.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from transformers import AutoModelForCausalLM

os.environ["HF_HUB_OFFLINE"] = "1"
GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "huggingface" / "llama2"
KINDS: list[Any] = [True, False, "gaussian", "eva", "orthogonal", "mica"]
KINDS += ["pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga"]
MODULE = "model.layers.0.self_attn.q_proj"
RANK, ALPHA = 2, 4


def base() -> Any:
    return AutoModelForCausalLM.from_pretrained(GOLDEN, dtype=torch.float32)


def error_of(kind: Any, folder: Path) -> str:
    """How far a merged weight is from the sum, relative to it."""
    options: dict[str, Any] = {"loftq_config": {"loftq_bits": 4, "loftq_iter": 1}} if kind == "loftq" else {}
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj"], init_lora_weights=kind, **options)
    try:
        model = peft.get_peft_model(base(), config)
        torch.manual_seed(0)
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data = torch.randn_like(weight)
        model.save_pretrained(folder)
        fields = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**fields, "init_lora_weights": kind}))
        merged = peft.PeftModel.from_pretrained(base(), folder).merge_and_unload().get_submodule(MODULE).weight
    except ValueError as error:
        return f"PEFT does not load it by itself: {str(error)[:60]}..."
    tensors = peft.utils.load_peft_weights(str(folder), device="cpu")
    a, b = (tensors[f"base_model.model.{MODULE}.lora_{side}.weight"] for side in "AB")
    wanted = base().get_submodule(MODULE).weight + ALPHA / RANK * b @ a
    return f"{float((merged - wanted).norm() / wanted.norm()):.1e}"


def main() -> int:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"peft {peft.__version__}: relative error of W + alpha / r B A")
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{kind!s:>14}: {error_of(kind, Path(folder))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
