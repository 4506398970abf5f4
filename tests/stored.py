"""The auditor's stored programs as compiled steps, and a model's state as a step receives it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from jaxpar.analysis.checkup.footprint import HeldTensor
from jaxpar.analysis.compile.ahead_of_time import AheadOfTime

FIXTURES = Path(__file__).parent / "analysis" / "hlo" / "fixtures"


def facts(name: str) -> dict[str, Any]:
    """The facts recorded about a fixture."""
    return dict(json.loads((FIXTURES / "index.json").read_text(encoding="utf-8"))[name])


def text(name: str) -> str:
    """The HLO text of a fixture."""
    return gzip.decompress((FIXTURES / f"{name}.hlo.gz").read_bytes()).decode()


def step(name: str, topology: str = "v5e:4x4", **fields: Any) -> AheadOfTime:
    """A fixture as an ahead-of-time compiled step, with invented figures."""
    memory = {"argument": 4 * 2**20, "output": 0, "temp": 5 * 2**20, "alias": 0, "peak": 9 * 2**20, "host": 0}
    return AheadOfTime(
        **{
            "topology": topology,
            "text": text(name),
            "memory": memory,
            "compile_cpu_seconds": 3.0,
            "device_kind": "TPU v5 lite",
            "versions": {"jax": "0.12.0.1", "libtpu": "0.0.50.1"},
            "cached": True,
            **fields,
        }
    )


def held(path: str, shape: tuple[int, ...], spec: tuple[tuple[str, ...], ...], size: int, **fields: Any) -> HeldTensor:
    """An fp32 parameter, unless ``fields`` say otherwise; ``size`` is in bytes on one device."""
    plain = {"category": "parameters", "dims": ("embed", "mlp")[: len(shape)], "copies": 1}
    return HeldTensor(path=path, shape=shape, spec=spec, bytes=size, **{**plain, **fields})
