"""Memory, FLOPs and wire bytes of each remat policy, for the 1B model fully sharded over 16 v5e chips.

    uv run python benchmarks/memory/remat_policies.py

Needs no TPU, only its compiler (extra ``tpu``, or ``JAXPAR_TPU_PYTHON``). Compiles one step per policy for ``v5e:4x4``.
Prints for one device: temporary and peak memory, host memory, matmul and attention-kernel FLOPs, the share of matmul
FLOPs beyond those needed without recomputation, and the bytes sent. There is no goal.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.shared.compiled_step import compile_step
from benchmarks.shared.paths import BENCH_CONFIGS
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.sharding.hardware.topology import Topology

RUNS = {
    "none": "none",
    "dots": "dots",
    "save_attention": "save_attention",
    "save_outputs": "save_outputs",
    "save qkv, mlp_hidden": "{policy: save_names, save_names: [qkv, mlp_hidden]}",
    "offload block_output": "{policy: save_names, offload_names: [block_output]}",
    "full, 10 of 16 layers": "{policy: full, layers: [10]}",
    "full": "full",
}
HEAD = (
    "policy                 temp MiB  peak MiB  host MiB  matmul FLOPs  kernel FLOPs  computed again  wire GB  "
    "compile CPU s"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=";".join(RUNS), help="names of runs, separated by semicolons (default: all)")
    parser.add_argument("--layers", type=int, help="layers of the model, for a trial")
    parser.add_argument("--keep-cache", action="store_true", help="do not compile a step that jaxpar's cache holds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures into this file")
    options = parser.parse_args()
    names = options.runs.split(";")
    if unknown := sorted(set(names) - RUNS.keys()):
        parser.error(f"no run {', '.join(unknown)}; runs are {'; '.join(RUNS)}")
    layers = [f"model.layers={options.layers}"] if options.layers else []
    figures = {}
    print(HEAD)
    for name in names:
        # The configuration's model recomputes everything; parallel.remat overrides that.
        job = make_job(load_run(BENCH_CONFIGS / "1b_fsdp16.yaml", [f"parallel.remat={RUNS[name]}", *layers]))
        found = compile_step(job, Topology.parse("v5e:4x4"), options.keep_cache)
        found["needed_flops"] = job.llama.matmul_params * 6 * job.config.data.batch * job.config.data.seq / 16
        figures[name] = found
        memory, matmul, kernel = found["memory"], found["matmul_flops"], found["kernel_flops"]
        print(
            f"{name:22} {memory['temp'] / 2**20:8.0f}  {memory['peak'] / 2**20:8.0f}  {memory['host'] / 2**20:8.0f}  "
            f"{matmul:12.4g}  {kernel:12.4g}  {matmul / found['needed_flops'] - 1:14.1%}  "
            f"{found['wire_bytes'] / 1e9:7.2f}  "
            f"{found['compile_cpu_seconds']:13.0f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
