"""Device memory that offloading the optimizer state, and the layers' weights, to host memory frees in TPU programs.

    uv run python benchmarks/offload/host_memory.py

Needs no TPU, only its compiler (extra ``tpu``, or ``JAXPAR_TPU_PYTHON``). Compiles the 1B and the 8B shape, fully
sharded over 16 v5e chips: with Adam's moments on the device, with the moments in host memory, and with moments and the
layers' weights in host memory, where the weights are copied to the device layer by layer. Prints for one device: the
step's arguments in each memory, temporary memory, the peak, the number of asynchronous copies from and to the host, and
computations that run on the host.

Goals: host memory equals the size of moments and weights computed by hand, the host computes nothing, and at least 0.85
of the offloaded bytes are gone from the device's peak. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.shared.compiled_step import DEVICES, FP32
from benchmarks.shared.paths import BENCH_CONFIGS
from jaxpar.analysis.compile.ahead_of_time import compile_for
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.sharding.hardware.topology import Topology

HOST = "parallel={offload: {optimizer: host}}"
BOTH = "parallel={offload: {optimizer: host, parameters: host}}"
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "1B, on the device": ("1b_fsdp16", ()),
    "1B, on the host": ("1b_fsdp16_offload", ()),
    "1B, parameters too": ("1b_fsdp16", (BOTH,)),
    "8B, on the device": ("8b_fsdp16", ()),
    "8B, on the host": ("8b_fsdp16", (HOST,)),
    "8B, parameters too": ("8b_fsdp16", (BOTH,)),
}
MOST = 0.85
"""Smallest share of the offloaded bytes that must be gone from the device's peak."""
HEAD = (
    "moments                  given MiB  on the host  temp MiB  peak MiB  copies from host  to host  run by the host  "
    "compile CPU s"
)


def measure(name: str, config: str, settings: tuple[str, ...], layers: int | None) -> dict[str, Any]:
    """Compile a run and print its row; return its figures."""
    deep = [f"model.layers={layers}"] if layers else []
    job = make_job(load_run(BENCH_CONFIGS / f"{config}.yaml", [*settings, *deep]))
    topology = Topology.parse("v5e:4x4")
    step = compile_for(
        topology, job.layout(DEVICES), job.make_model, job.tx, job.loss_fn, job.batch_spec(), **job.step_options()
    )
    memory = step.memory
    starts = re.findall(r"= \([^\n]*?S\(5\)[^\n]*? (dynamic-slice|dynamic-update-slice|copy)-start\(", step.text)
    reads = sum(kind == "dynamic-slice" for kind in starts)
    writes = sum(kind == "dynamic-update-slice" for kind in starts)
    by_host = step.text.count('custom_call_target="HostExecute"')
    print(
        f"{name:23} {memory['argument'] / 2**20:10.0f}  {memory['host'] / 2**20:11.0f}  {memory['temp'] / 2**20:8.0f}  "
        f"{memory['peak'] / 2**20:8.0f}  {reads:16}  {writes:7}  {by_host:15}  {step.compile_cpu_seconds:13.0f}",
        flush=True,
    )
    # The last norm is small and stays on the device. The layers' norms are replicated; all else is sharded.
    norms = 2 * job.llama.layers * job.llama.embed
    moments = 2 * FP32 * ((job.llama.params - norms - job.llama.embed) // DEVICES + norms)
    model = job.llama
    kernels = model.embed * (2 * model.head_dim * (model.heads + model.kv_heads) + 3 * model.mlp)
    waits = moments + (FP32 * model.layers * kernels // DEVICES if BOTH in settings else 0)
    return {"memory": memory, "reads": reads, "writes": writes, "by_host": by_host, "waits": waits}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=";".join(RUNS), help="names of runs, separated by semicolons (default: all)")
    parser.add_argument("--layers", type=int, help="layers of the model, for a trial")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures into this file")
    options = parser.parse_args()
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    print(HEAD)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAXPAR_CACHE"] = folder
        for name in options.runs.split(";"):
            figures[name] = measure(name, *RUNS[name], options.layers)
    goals = {}
    for name, away in figures.items():
        shape, _, where = name.partition(", ")
        there = figures.get(f"{shape}, on the device")
        if where == "on the device":
            continue
        host = away["memory"]["host"]
        goals[f"{name}: {host} bytes on the host, {away['waits']} by hand"] = host == away["waits"]
        goals[f"{name}: the host computes nothing"] = away["by_host"] == 0
        if there:
            saved = (there["memory"]["peak"] - away["memory"]["peak"]) / away["waits"]
            goals[f"{name}: {saved:.0%} of these bytes gone from the device's peak, goal {MOST:.0%}"] = saved >= MOST
    for text, met in goals.items():
        print(f"{'pass' if met else 'FAIL'}  {text}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
