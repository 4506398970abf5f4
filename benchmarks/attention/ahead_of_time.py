"""Attention over a sharded sequence, compiled for TPUs that this machine does not have: memory, bytes sent, overlap.

    uv run python benchmarks/attention/ahead_of_time.py

Needs no TPU, only its compiler (extra ``tpu``, or ``JAXPAR_TPU_PYTHON``). Compiles attention on its own for v5e 2x4,
forward and backward, in bfloat16, with 32 query and 8 key heads of 128. Prints the temporary memory, the bytes that a
device sends, and how many permutes in a ring's loop are exposed, that is, scheduled without compute. With ``--models``
also compiles the step of the 1B model with context 4 × FSDP 4 and 32,768 tokens per sequence, two CPU minutes per run
of ``MODELS``.

Goals: no exposed permute, and the limits of ``ALONE`` and ``MODELS``. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxpar as jp
from benchmarks.shared.compiled_step import compile_step
from benchmarks.shared.paths import BENCH_CONFIGS
from jaxpar.analysis.compile.ahead_of_time import aim, compile_program, placed
from jaxpar.analysis.hlo.audit import Audit
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.parallel.attention.options import Impl
from jaxpar.parallel.attention.split.token_order import Order
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.sharding.layout import tracing_under

RULES = jp.Rules(batch="data", seq=("context", "ulysses"), heads=None, kv_heads=None, head_dim=None)
GIB = 2**30
ALONE: dict[tuple[Impl, int], float] = {
    ("ring", 2**15): 0.35,
    ("ulysses", 2**15): 0.11,
    ("hybrid", 2**15): 0,
    ("gather", 2**15): 0,
    ("ring", 2**17): 1.6,
    ("ulysses", 2**17): 1.2,
}
"""(Implementation, tokens) → largest temporary memory in GiB; 0 for no goal."""
MESHES: dict[Impl, jp.MeshSpec] = {
    "ring": jp.MeshSpec(context=8),
    "gather": jp.MeshSpec(context=8),
    "ulysses": jp.MeshSpec(ulysses=8),
    "hybrid": jp.MeshSpec(context=4, ulysses=2),
}
MODELS = {  # Name → configuration, settings, largest wire GB and peak MiB; 0 for no goal.
    "gather": ("1b_cp4_gather", [], 16.5, 3392),
    "ring": ("1b_cp4_ring", [], 22.0, 4356),
    "ring, bf16 travels": ("1b_cp4_ring", ["parallel.context.grad_dtype=bfloat16"], 17.5, 4356),
    "gather, kept": ("1b_cp4_gather", ["parallel.context.keep_gathered_kv=true"], 13.5, 0),
    "ulysses": ("1b_cp4_ulysses", [], 10.5, 3208),
    "hybrid": ("1b_cp4_hybrid", [], 0, 0),
}


def alone(impl: Impl, seq: int) -> dict[str, Any]:
    """Compile attention on its own; return its figures."""
    topology = Topology.parse("v5e:2x4")
    layout = aim(jp.Layout(MESHES[impl].abstract(), RULES), topology)
    order: Order = "contiguous" if impl == "ulysses" else "zigzag"

    def run(q: Any, k: Any, v: Any, g: Any) -> Any:
        with tracing_under(layout):
            o, back = jax.vjp(lambda *x: jp.attention(*x, impl=impl, order=order), q, k, v)
            return o, *back(g)

    shape = lambda heads, name: jp.tag(
        jax.ShapeDtypeStruct((1, seq, heads, 128), jnp.bfloat16), "batch", "seq", name, "head_dim"
    )
    args = placed(layout, (shape(32, "heads"), shape(8, "kv_heads"), shape(8, "kv_heads"), shape(32, "heads")))
    program = compile_program(topology, layout, jax.jit(run), args, donated=0)
    report = jp.audit(program, mesh=layout.mesh)
    bare, looped = bare_permutes(report)
    sent = {"wire": report.wire_bytes() / 1e9, "exposed": report.exposed() / 1e9}
    return {"temp": program.memory["temp"] / GIB, **sent, "permutes": looped, "bare": bare}


def bare_permutes(report: Audit) -> tuple[int, int]:
    """Return the number of permutes in loops that are scheduled without compute, and of all permutes in loops."""
    looped = [c for c in report.select("collective-permute") if c.count > 1]
    return sum(not (c.overlapped and c.beside_flops) for c in looped), len(looped)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", action="store_true", help="also compile the steps of the 1B model")
    parser.add_argument(
        "--runs", metavar="NAMES", help="only these steps of the 1B model, by name, separated by semicolons"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures into this file")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    missed = 0
    if not options.runs:
        print("implementation  tokens  temp GiB   goal  wire GB  exposed GB  permutes in loops  exposed")
        for (impl, seq), goal in ALONE.items():
            found = figures[f"{impl} {seq}"] = alone(impl, seq)
            missed += (bool(goal) and found["temp"] > goal) + (found["bare"] > 0)
            print(
                f"{impl:14}  {seq:6}  {found['temp']:8.3f}  {goal or '':>5}  {found['wire']:7.2f}  "
                f"{found['exposed']:10.2f}  {found['permutes']:17}  {found['bare']:7}",
                flush=True,
            )
    if options.models or options.runs:
        print(
            "1B, context 4 × FSDP 4   wire GB  goal  exposed GB  peak MiB  goal  matmul FLOPs  kernel FLOPs  "
            "compile CPU s"
        )
        for name in options.runs.split(";") if options.runs else MODELS:
            config, sets, wire, peak = MODELS[name]
            job = make_job(load_run(BENCH_CONFIGS / f"{config}.yaml", sets))
            found = figures[name] = compile_step(job, Topology.parse("v5e:4x4"), False)
            sent, most = found["wire_bytes"] / 1e9, found["memory"]["peak"] / 2**20
            missed += bool(wire) and (sent > wire or (bool(peak) and most > peak))
            print(
                f"{name:23}  {sent:7.2f}  {wire or '':>4}  {found['exposed_bytes'] / 1e9:10.2f}  {most:8.0f}  "
                f"{peak or '':>4}  {found['matmul_flops']:12.4g}  {found['kernel_flops']:12.4g}  "
                f"{found['compile_cpu_seconds']:13.0f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    print(f"{missed} goals missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
