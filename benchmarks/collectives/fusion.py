"""The number of collectives follows ``parallel.fusion``.

    uv run python benchmarks/collectives/fusion.py

Compiles a small Llama of eight layers for TPU and GPU, once for each value of ``parallel.fusion``. Needs neither
device, only their compilers (extras ``tpu`` and ``gpu``, or ``JAXPAR_TPU_PYTHON`` and ``JAXPAR_GPU_PYTHON``). Prints
how many collectives of each kind a device runs per step, and how many of their bytes are exposed.

Goal: boundaries between layers give one collective per group. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Any

import jax
import optax

import jaxpar as jp
from jaxpar.models.llama import LlamaConfig, make_llama
from jaxpar.models.losses import next_token_loss

MODEL = LlamaConfig(vocab=512, embed=512, layers=8, heads=4, kv_heads=4, head_dim=128, mlp=1024, dtype="bfloat16")
KINDS = ("all-reduce", "reduce-scatter", "all-gather")
RULES = ("seq", "residual_seq", "embed", "norm", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layers")
HALF = MODEL.layers // 2
CASES: dict[tuple[str, int], list[dict[str, Any]]] = {
    # Not v5e 4x4: there a scatter over all chips takes two rounds.
    ("v5e:2x4", 0): [
        {},
        {"reduce": 0},
        {"reduce": "4MiB"},
        {"reduce": "1GiB"},
        {"reduce": (HALF,)},
        {"reduce": (2, 4, 6)},
    ],
    ("v5e:2x4", 1): [{}, {"gather": 0}, {"gather": "1GiB"}, {"gather": (HALF,), "scatter": (HALF,)}],
    ("h100:8", 0): [
        {},
        {"reduce": 0},
        {"reduce": "4MiB"},
        {"reduce": "1GiB"},
        {"reduce": (HALF,)},
        {"reduce": (2, 4, 6)},
    ],
    ("h100:8", 1): [
        {},
        {"gather": 0, "scatter": 0},
        {"gather": "1GiB", "scatter": "1GiB"},
        {"gather": (HALF,), "scatter": (HALF,)},
    ],
}
FOLLOWS = {"all-reduce": "reduce", "reduce-scatter": "scatter", "all-gather": "gather"}


def counted(topology: str, stage: int, asked: dict[str, Any]) -> tuple[dict[str, int], float]:
    """Compile the step; return the number of collectives of each kind, and their exposed bytes."""
    zero = jp.Zero(stage=stage, min_bytes=0)
    rules = zero.rules(jp.Rules(batch="data", **dict.fromkeys(RULES)))
    layout = jp.Layout(jp.MeshSpec(data=8).on(topology), rules)
    batch = {k: jp.tag(jax.ShapeDtypeStruct((16, 256), "int32"), "batch", "seq") for k in ("tokens", "targets")}
    options = zero.step or {"grad_reduction": "per_step"}
    make = make_llama(MODEL)
    step = jp.analysis.compile_for(
        topology,
        layout,
        make,
        optax.adamw(1e-3),
        next_token_loss,
        batch,
        fusion=jp.overlap.CollectiveFusion(**asked),
        precision="bf16",
        **options,
    )
    report = jp.audit(step, mesh=layout.mesh)
    return {kind: report.count(kind) for kind in KINDS}, report.exposed()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--topologies", default="v5e:2x4,h100:8", help="topologies, separated by commas (default: %(default)s)"
    )
    options = parser.parse_args()
    wrong = []
    print(f"topology  stage  fusion                              {'  '.join(KINDS)}  exposed MB")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAXPAR_CACHE"] = folder
        for (topology, stage), rows in CASES.items():
            if topology not in options.topologies.split(","):
                continue
            for asked in rows:
                counts, exposed = counted(topology, stage, asked)
                told = ", ".join(f"{name} {value}" for name, value in asked.items()) or "auto"
                numbers = "  ".join(f"{counts[kind]:{len(kind)}}" for kind in KINDS)
                print(f"{topology:8}  {stage:5}  {told:34}  {numbers}  {exposed / 1e6:10.2f}", flush=True)
                for kind, name in FOLLOWS.items():
                    value = asked.get(name)
                    # A metric's sum is a separate all-reduce, or is combined with another.
                    if isinstance(value, tuple) and counts[kind] not in (len(value) + 1, len(value) + 2):
                        wrong.append(
                            f"{topology}, stage {stage}: {counts[kind]} {kind}s instead of {len(value) + 1} for {told}"
                        )
    for text in wrong:
        print("FAIL ", text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
