"""Loads an export of ``jaxpar export`` in transformers, and compares its logits with those of a reference in NumPy.

    uv run --no-project --with transformers --with torch --with numpy python benchmarks/interop/check_export.py DIR

The reference (``tests/llama_numpy.py``) reads the files itself and shares no code with jaxpar. The default tests hold
it against the golden logits of transformers, and the exports of a fine-tuning against it, so they need neither torch
nor transformers. Exit status 1 if logits differ by more than 1e-4.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from llama_numpy import logits_of  # type: ignore[import-not-found]

os.environ["HF_HUB_OFFLINE"] = "1"
MOST = 1e-4


def main(folders: list[str]) -> int:
    worst = 0.0
    for folder in map(Path, folders):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 64))
        with torch.no_grad():
            found = model(torch.from_numpy(tokens)).logits.numpy()
        difference = float(np.abs(found - logits_of(folder, tokens)).max())
        print(f"{folder.name}: transformers {transformers.__version__}: logits within {difference:.1e}")
        worst = max(worst, difference)
    return 1 if worst > MOST else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
