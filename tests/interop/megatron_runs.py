"""A small run of Megatron-LM as arguments, and its import with changes."""

from __future__ import annotations

from typing import Any

from jaxpar.interop.configurations import ImportedRun, ImportOptions, import_megatron, read_script
from jaxpar.interop.configurations.megatron.script import Conditions

LLAMA: dict[str, Any] = {
    "num-layers": 8,
    "hidden-size": 64,
    "ffn-hidden-size": 96,
    "num-attention-heads": 8,
    "group-query-attention": "",
    "num-query-groups": 4,
    "vocab-size": 256,
    "seq-length": 64,
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
    "attention-dropout": 0,
    "hidden-dropout": 0,
    "swiglu": "",
    "disable-bias-linear": "",
    "untie-embeddings-and-output-weights": "",
    "bf16": "",
    "micro-batch-size": 2,
    "global-batch-size": 16,
    "train-iters": 100,
    "lr": 1e-3,
    "min-lr": 1e-4,
    "lr-decay-style": "cosine",
    "lr-warmup-fraction": 0.1,
    "use-distributed-optimizer": "",
}
STAGES = {"pipeline-model-parallel-size": 2, "tensor-model-parallel-size": 2, "sequence-parallel": ""}


def run_of(
    *,
    devices: int = 8,
    steps: int | None = None,
    conditional: str = "",
    conditions: Conditions = "refuse",
    **changes: Any,
) -> ImportedRun:
    """The import of ``LLAMA`` with changed arguments, whose dashes are written ``_``; ``None`` removes one."""
    values = LLAMA | {name.replace("_", "-"): value for name, value in changes.items()}
    text = " ".join(f"--{name} {value}" for name, value in values.items() if value is not None)
    script = f"A=()\nif x; then\nA=({conditional})\nfi\ntorchrun --nproc_per_node {devices} train.py {text} ${{A[@]}}"
    options = ImportOptions("run.sh", steps=steps)
    return import_megatron(read_script(script, "run.sh", {}), options, conditions=conditions)


def row(found: ImportedRun, key: str) -> tuple[str, str]:
    (it,) = [row for row in found.report.rows if row.key == key]
    return it.status, it.note
