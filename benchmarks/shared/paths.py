"""Folders of the repository that the benchmarks read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
LAYOUTS = CONFIGS / "layouts"
BENCH_CONFIGS = CONFIGS / "bench"
