"""Exposed communication of a step with one or two overlapped copies, in TPU programs.

    uv run python benchmarks/overlap/interleaved_copies.py [NAME ...]

Needs no TPU, only its compiler (extra ``tpu``, or ``JAXPAR_TPU_PYTHON``). Each line is a step of a configuration in
``configs/bench``, compiled for ``v5e:4x4``. It lists what one device sends and how much of that is exposed, that is,
scheduled without compute, over all axes and over the axis that the copies overlap; peak memory; FLOPs; and compile
time. ``--set`` changes every configuration, for example ``--set model.layers=2``. There is no goal.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import jaxpar as jp
from benchmarks.shared.paths import BENCH_CONFIGS
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job

TOPOLOGY, DEVICES = "v5e:4x4", 16


@dataclass(frozen=True)
class Run:
    """A configuration, changes to it, and the mesh axis over which its layers communicate."""

    config: str
    axis: str
    settings: tuple[str, ...] = ()


RUNS = {
    "tp": Run("1b_fsdp4_tp4", "model"),
    # Four sequences on four devices are one per device, which cannot be halved. So eight, of half the length.
    "ring": Run("1b_cp4_ring", "context", ("data.batch=8", "data.seq=16384")),
    "ulysses": Run("1b_cp4_ulysses", "ulysses", ("data.batch=8", "data.seq=16384")),
}


def line(run: Run, copies: int, settings: list[str]) -> str:
    """Compile one configuration; return its row of the table."""
    changes = [*run.settings, *settings, f"parallel.overlap.ways={copies}"]
    job = make_job(load_run(str(BENCH_CONFIGS / f"{run.config}.yaml"), changes))
    layout = job.layout(DEVICES)
    program = jp.analysis.compile_for(
        TOPOLOGY,
        layout,
        job.make_model,
        job.tx,
        job.loss_fn,
        job.batch_spec(),
        compiler_options=job.compiler_options("tpu"),
        **job.step_options(),
    )
    audit = jp.audit(program, mesh=layout.mesh)
    own = f"{audit.wire_bytes(axis=run.axis) / 1e9:.2f} | {audit.exposed(axis=run.axis) / 1e9:.2f}"
    return (
        f"| {run.config} | {copies} | {audit.wire_bytes() / 1e9:.2f} | {audit.exposed() / 1e9:.2f} | {own} | "
        f"{program.memory['peak'] / 2**20:,.0f} | {audit.matmul_flops + audit.kernel_flops:.4g} | "
        f"{program.compile_cpu_seconds:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(RUNS), help=f"runs of {', '.join(RUNS)} (default: all)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="change every configuration"
    )
    options = parser.parse_args()
    print(
        "| configuration | copies | wire GB | exposed GB | wire GB of the axis | exposed GB of the axis | peak MiB "
        "| FLOPs | compile CPU s |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name in options.names:
        for copies in (1, 2):
            print(line(RUNS[name], copies, options.settings), flush=True)


if __name__ == "__main__":
    main()
