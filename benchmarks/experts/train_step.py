"""Wire bytes, peak memory and FLOPs of train steps with experts, compiled for 16 v5e chips.

    uv run python benchmarks/experts/train_step.py [--maxtext] [NAME ...]

Needs no TPU, only its compiler (extra ``tpu``, or ``JAXPAR_TPU_PYTHON``). Each row compiles ``configs/bench/NAME.yaml``
for ``v5e:4x4``, or takes the program from jaxpar's cache, and counts the bytes of a balanced and of the worst routing.

``by hand`` is the least that a device can send: five transfers of rows a layer (two forward, two backward, one that the
recomputation repeats), the experts' weights gathered twice and their gradients scattered once over ``data``, and the
same for all other weights over all devices. Where rows are deduplicated, so are those by hand.

``--maxtext`` also compiles MaxText 0.2.5's train step of the same sizes, each in turn, and prints its figures. The
first run installs MaxText in an environment of its own (3 GB). Compile times are CPU seconds of the compiler alone; run
it on an idle machine.

Goals: ``GOALS``; with ``--maxtext`` at most MaxText's compile time. Exit status 1 if one is missed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from math import comb
from typing import Any

from benchmarks.shared.compile_maxtext import MAXTEXT, QUIET, compile_maxtext, maxtext_python
from benchmarks.shared.compiled_step import BF16, DEVICES, compile_step
from benchmarks.shared.paths import BENCH_CONFIGS
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.models.moe.config import MoEConfig
from jaxpar.sharding.hardware.topology import Topology


@dataclass(frozen=True)
class Goal:
    """The most that a step may need: GB on the wire, MiB at the peak, FLOPs of matmuls; and MaxText 0.2.5's."""

    wire: float
    peak: float
    flops: float
    maxtext: str


GOALS = {
    "mix_ep4": Goal(10.4, 7615, 5.30e13, "11.20 / 8,908 / 5.66e13"),
    "mix_ep8": Goal(6.45, 7400, 5.30e13, "7.39 / 8,916 / 5.66e13"),
    "mix_ep4_capacity": Goal(10.9, 7600, 6.4e13, "34.20 / 8,376 / 7.64e13"),
    "ds_ep4": Goal(15.9, 11900, 3.82e13, "17.00 / 12,849 / 4.03e13"),
    "ds_ep16": Goal(10.1, 11500, 3.82e13, "does not fit"),
}
DEDUPLICATED = ("ds_ep4", "ds_ep16")
TRANSFERS = 5


def by_hand(model: MoEConfig, tokens: int, shards: int, *, deduplicated: bool) -> float:
    """Return the least bytes that a device sends in a step.

    Args:
      model: sizes of the model.
      tokens: tokens of one device.
      shards: number of devices over which the experts are sharded.
      deduplicated: a token's row is sent once to each device that has any of its experts.
    """
    per_device = model.experts // shards
    copies: float = model.k
    if deduplicated:
        copies = shards * (1 - comb(model.experts - per_device, model.k) / comb(model.experts, model.k))
    rows = TRANSFERS * tokens * copies * model.embed * BF16 * (shards - 1) / shards
    groups = DEVICES // shards
    experts = 3 * 3 * per_device * model.embed * model.expert_mlp * BF16 * (groups - 1) / groups
    shared = 3 * model.embed * model.expert_mlp * model.shared_experts
    others = 3 * (model.attention_params + shared + model.embed * model.experts) * BF16 * (DEVICES - 1) / DEVICES
    head = 2 * model.vocab * model.embed * BF16 * (DEVICES - 1) / DEVICES
    lookup = 2 * tokens * model.embed * BF16 * (DEVICES - 1) / DEVICES
    return model.layers * (rows + experts + others) + head + lookup


SIZES = [
    *("base_emb_dim=2048", "base_num_query_heads=16", "base_num_kv_heads=16", "base_num_decoder_layers=16"),
    *("vocab_size=32000", "override_model_config=true", "per_device_batch_size=2", "max_target_length=2048"),
]
MIXTRAL = ("model_name=mixtral-8x7b", "base_mlp_dim=7168", "base_moe_mlp_dim=7168")
DEEPSEEK = ("model_name=deepseek2-16b", "first_num_dense_layers=0", "shared_experts=1", "base_mlp_dim=1408")
SETTINGS = {
    "mix_ep4": (*MIXTRAL, "ici_expert_parallelism=4", "ici_fsdp_parallelism=4"),
    "mix_ep8": (*MIXTRAL, "ici_expert_parallelism=8", "ici_fsdp_parallelism=2", "allow_split_physical_axes=true"),
    "mix_ep4_capacity": (
        *MIXTRAL,
        "ici_expert_parallelism=4",
        "ici_fsdp_parallelism=4",
        "sparse_matmul=false",
        "capacity_factor=1.25",
    ),
    "ds_ep4": (*DEEPSEEK, "ici_expert_parallelism=4", "ici_fsdp_parallelism=4", "use_ring_of_experts=true"),
    "ds_ep16": (*DEEPSEEK, "ici_expert_parallelism=16"),
}
"""MaxText's settings of each configuration, beside ``SIZES``."""


def maxtext_step(python: str, name: str) -> dict[str, Any] | None:
    """Return the figures of MaxText's train step, or ``None`` after printing why it did not compile."""
    slices = ("compile_topology=v5e-16", "compile_topology_num_slices=1")
    try:
        return compile_maxtext(python, [*slices, *QUIET, *SIZES, *SETTINGS[name]])
    except SystemExit as error:
        print(f"{name}: {str(error).strip().splitlines()[-1]}")
        return None


def row(name: str, found: dict[str, Any], least: str) -> str:
    """Return the figures of a step as a row."""
    wire, worst = (f"{found[key] / 1e9:.2f}" if found.get(key) else "" for key in ("wire_bytes", "worst_wire_bytes"))
    peak = found["memory"]["peak"] / 2**20
    return (
        f"{name:20} {wire:>7}  {least:>7}  {worst:>8}  {peak:8,.0f}  {found['matmul_flops']:.3e}  "
        f"{found['compile_cpu_seconds']:13.0f}"
    )


def main() -> int:
    """Print a row for each configuration; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(GOALS), help="configurations of configs/bench; default: all")
    parser.add_argument("--maxtext", action="store_true", help=f"also compile MaxText {MAXTEXT}'s step")
    parser.add_argument("--maxtext-python", metavar="FILE", help="interpreter with MaxText (default: one is installed)")
    options, missed = parser.parse_args(), 0
    python = maxtext_python(options.maxtext_python) if options.maxtext else None
    print(
        "config               wire GB  by hand  worst GB  peak MiB  FLOPs      compile CPU s  MaxText GB / MiB / FLOPs"
    )
    for name in options.names:
        goal, job = GOALS[name], make_job(load_run(BENCH_CONFIGS / f"{name}.yaml"))
        theirs = maxtext_step(python, name) if python else None
        found: dict[str, Any] = compile_step(job, Topology.parse("v5e:4x4"), keep=python is None)
        wire, peak = found["wire_bytes"] / 1e9, found["memory"]["peak"] / 2**20
        model, shards = job.model, job.layout(DEVICES).sizes["expert"]
        assert isinstance(model, MoEConfig)
        least = by_hand(model, (job.tokens or 0) // DEVICES, shards, deduplicated=name in DEDUPLICATED) / 1e9
        print(f"{row(name, found, f'{least:.2f}')}  {goal.maxtext}", flush=True)
        checks = [(wire, goal.wire, "GB"), (peak, goal.peak, "MiB"), (found["matmul_flops"], goal.flops, "FLOPs")]
        if theirs:
            print(row("  MaxText", theirs, ""), flush=True)
            checks.append((found["compile_cpu_seconds"], theirs["compile_cpu_seconds"], "CPU seconds to compile"))
        for value, most, unit in checks:
            if value > most:
                print(f"{name}: {value:.4g} {unit}, more than the goal of {most:.4g}")
                missed = 1
    return missed


if __name__ == "__main__":
    sys.exit(main())
