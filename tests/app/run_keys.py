"""Parts of runs that several tests of their keys share."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"
BOTH = {"parameters": "host", "optimizer": "host"}
LLAMA_16 = {"family": "llama", "layers": 16}
STAGES = {"layout": str(CONFIGS / "layouts" / "pp.yaml"), "model": LLAMA_16}
