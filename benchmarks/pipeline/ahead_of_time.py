"""Pipelines compiled for TPUs that this machine does not have: wire bytes, memory, FLOPs and compile time.

    uv run python benchmarks/pipeline/ahead_of_time.py

Needs no TPU, only its compiler (extra ``tpu``, or ``JAXPAR_TPU_PYTHON``). Compiles the step of the 1B model for v5e 4x4
with pipeline 4 × FSDP 4 and 8 microbatches (``configs/bench/1b_pp4_fsdp4.yaml``), two CPU minutes each, and prints it
next to the figures of MaxText's circular pipeline. ``--maxtext`` compiles that pipeline too, in turn, as
``benchmarks/maxtext/train_step.py`` does.

Goals: the limits of ``GOAL`` for ``interleaved 4, none``. Exit status 1 if one is missed.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.shared.compile_maxtext import MAXTEXT, QUIET, compile_maxtext, maxtext_python
from benchmarks.shared.compiled_step import compile_step
from benchmarks.shared.paths import BENCH_CONFIGS
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.sharding.hardware.topology import Topology

CONFIG = BENCH_CONFIGS / "1b_pp4_fsdp4.yaml"
MIB = 2**20
RUNS = {
    f"{name}, {activation_checkpointing}": [
        f"parallel.pipeline.{key}" for key in (*keys, f"activation_checkpointing={activation_checkpointing}")
    ]
    for name, keys in {
        "1f1b": ["schedule=1f1b", "virtual_stages=1", "grad_reduction=per_step"],
        "interleaved 4, sums whole": ["schedule=interleaved", "virtual_stages=4", "grad_reduction=per_step"],
        "interleaved 4": ["schedule=interleaved", "virtual_stages=4", "grad_reduction=per_chunk"],
    }.items()
    for activation_checkpointing in ("full", "none")
}
"""Name of a run → its settings."""
CIRCULAR_FIGURES = {
    "MaxText, least sent": {"wire": 4.5, "peak": 3415, "flops": 3.438e13, "seconds": 120},
    "MaxText, least held": {"wire": 12.5, "peak": 2323, "flops": 3.719e13, "seconds": 113},
}
"""MaxText 0.2.5's circular pipeline of the same model, repeats and microbatches: GB, MiB, matmul FLOPs, compile CPU
seconds."""
CIRCULAR = [
    *("compile_topology=v5e-16", "compile_topology_num_slices=1", "per_device_batch_size=2", "max_target_length=2048"),
    *("ici_pipeline_parallelism=4", "ici_fsdp_parallelism=4", "num_pipeline_microbatches=8"),
    *("num_layers_per_pipeline_stage=1", "num_pipeline_repeats=4", "pipeline_fsdp_ag_per_repeat=true"),
]
"""The first entry of ``CIRCULAR_FIGURES`` as MaxText settings; MaxText's defaults are the 1B shape."""
GOAL = {"wire": 3.5, "peak": 2600, "flops": 3.44e13, "seconds": 60}
"""Largest figures for the interleaved schedule: GB, MiB, matmul FLOPs, compile CPU seconds."""


def compiled(settings: list[str], layers: int | None = None, config: Path = CONFIG) -> dict[str, float]:
    """Compile the configuration's step with these settings for v5e 4x4; return its figures."""
    job = make_job(load_run(config, [*settings, *([f"model.layers={layers}"] if layers else [])]))
    return figures_of(compile_step(job, Topology.parse("v5e:4x4"), False))


def figures_of(found: dict[str, Any]) -> dict[str, float]:
    figures = {"wire": found["wire_bytes"] / 1e9, "exposed": found["exposed_bytes"] / 1e9}
    figures |= {"peak": found["memory"]["peak"] / MIB, "temp": found["memory"]["temp"] / MIB}
    return figures | {"flops": found["matmul_flops"], "seconds": found["compile_cpu_seconds"]}


def quickest(compile_one: Callable[[], dict[str, float]], repeat: int) -> dict[str, float]:
    """Compile ``repeat`` times; return the figures with the fewest compile seconds, which vary by a quarter."""
    each = [compile_one() for _ in range(repeat)]
    return {**each[0], "seconds": min(one["seconds"] for one in each)}


def beside_maxtext(names: list[str], layers: int | None, python: str | None, repeat: int) -> dict[str, Any]:
    """Compile the runs and print them.

    The goals apply to the interleaved schedule of the configuration, which is also MaxText's.
    """
    print("1B, pipeline 4 × FSDP 4     wire GB  exposed GB  peak MiB  matmul FLOPs  compile CPU s  goals missed")
    for name, found in CIRCULAR_FIGURES.items():
        say(name, found, [])
    figures: dict[str, Any] = {}
    if python is not None:
        depth = [f"base_num_decoder_layers={layers}", f"num_pipeline_repeats={layers // 4}"] if layers else []
        theirs = quickest(lambda: figures_of(compile_maxtext(python, [*CIRCULAR, *QUIET, *depth])), repeat)
        figures["MaxText"] = {**theirs, "missed": []}
        say("MaxText, compiled now", theirs, [])
    for name in names:
        found = quickest(functools.partial(compiled, RUNS[name], layers), repeat)
        held = layers is None and name == "interleaved 4, none"
        missed = [key for key, most in GOAL.items() if held and found[key] > most]
        figures[name] = {**found, "missed": missed}
        say(name, found, missed)
    say("goal, interleaved", GOAL, [])
    return figures


def say(name: str, found: dict[str, float], missed: list[str]) -> None:
    exposed = f"{found['exposed']:10.2f}" if "exposed" in found else f"{'–':>10}"
    print(
        f"{name:26}  {found['wire']:7.2f}  {exposed}  {found['peak']:8.0f}  {found['flops']:12.4g}  "
        f"{found['seconds']:13.0f}  "
        f"{', '.join(missed)}".rstrip(),
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=";".join(RUNS), help="names, separated by semicolons (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="layers of the model, for a trial: no goal is checked")
    parser.add_argument(
        "--repeat", type=int, default=1, help="compiles of each run, of which the fastest counts (default: %(default)s)"
    )
    parser.add_argument("--maxtext", action="store_true", help="also compile MaxText's circular pipeline")
    parser.add_argument(
        "--maxtext-python",
        metavar="FILE",
        help=f"Python interpreter with MaxText {MAXTEXT} (default: one is installed)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures into this file")
    options = parser.parse_args()
    names = options.runs.split(";")
    if unknown := sorted(set(names) - RUNS.keys()):
        parser.error(f"no run {', '.join(unknown)}; runs are {'; '.join(RUNS)}")
    python = maxtext_python(options.maxtext_python) if options.maxtext or options.maxtext_python else None
    figures = beside_maxtext(names, options.layers, python, options.repeat)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    missed = sum(len(found["missed"]) for found in figures.values())
    print(f"{missed} goals missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
