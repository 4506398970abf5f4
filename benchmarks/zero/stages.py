"""Memory and wire bytes of the ZeRO stages, for the 1B shape on 16 v5e chips.

    uv run python benchmarks/zero/stages.py

Needs no TPU, only its compiler (extra ``tpu``, or ``JAXPAR_TPU_PYTHON``). Each run compiles a step for ``v5e:4x4``.
Prints for one device: the bytes of the step's arguments (``state``) next to the figure by hand, peak memory, and wire
bytes next to what the device must send by hand.

ZeRO's formulas for P parameters on N devices with Adam, 16-bit weights and gradients and fp32 master weights: 16P; 4P +
12P/N; 2P + 14P/N; 16P/N. Of these the state is 12P or 12P/N; weights and gradients of 2P each exist only inside the
step. ``formula`` is the sum.

Goals: the state equals the figure by hand to the byte, the limits of ``RUNS``, and stage 0 does not fit. Exit status 1
otherwise.

MaxText 0.2.5 with the same compiler: ZeRO-1 6.6 GB and 11,767 MiB; FSDP 6.3 GB; plain data parallelism does not fit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.compiled_step import BF16, DEVICES, FP32, compile_step, matrices
from benchmarks.shared.paths import BENCH_CONFIGS
from jaxpar.app.config import load_run
from jaxpar.app.job import Job, make_job
from jaxpar.errors import CompileError
from jaxpar.models.llama import LlamaConfig
from jaxpar.sharding.hardware.topology import Topology

COUNTERS = 4 * 512  # step, key, Adam's count and the schedule's count; a TPU stores a scalar in 512 bytes


@dataclass(frozen=True)
class Run:
    """One run of the table.

    Attributes:
      config: name of the configuration in ``configs/bench``.
      settings: changes to ``config``.
      ways: number of devices over which the state is sharded.
      formula: maps the number of parameters to bytes of state, weights and gradients; ``None`` if there is no formula.
      wire: bytes that one device must send, computed by hand from the model.
      most_wire: most wire bytes in GB.
      most_peak: most peak memory in MiB.
      most_exposed: most wire bytes in GB that overlap with no compute.
      fits: whether the compiler should accept the program.
      norms: which of the layers' norms are sharded: all (``split``), only their ``moments``, or none (``whole``).
    """

    config: str
    settings: tuple[str, ...]
    ways: int
    formula: Callable[[float], float] | None
    wire: Callable[[LlamaConfig], float]
    most_wire: float | None = None
    most_peak: float | None = None
    most_exposed: float | None = None
    fits: bool = True
    norms: str = "split"


def ends(model: LlamaConfig) -> float:
    """Return the number of parameters of embedding and head."""
    return 2.0 * model.embed * model.vocab


def once(model: LlamaConfig, reduce: int = BF16, n: int = DEVICES) -> float:
    """Return the wire bytes for gathering each weight once and scattering each gradient once.

    All-reducing each gradient takes as many. A lookup that exchanges rows instead of gathering the embedding (stage 3)
    sends less.
    """
    return (BF16 + reduce) * (matrices(model) + ends(model)) * (n - 1) / n


def groups(model: LlamaConfig, size: int = 4) -> float:
    """Return the wire bytes of stage 3 within groups.

    The sharded gradients are summed across groups. The lookup exchanges rows, twice 16 MiB.
    """
    within = BF16 * (3 * matrices(model) + 2 * ends(model) / 2) * (size - 1) / size
    across = 2 * BF16 * (matrices(model) + ends(model)) / size * (DEVICES // size - 1) / (DEVICES // size)
    return within + across + 2 * (16 << 20) * (size - 1) / size


def fsdp_in_fp32(model: LlamaConfig) -> float:
    """Return the wire bytes of stage 3 with gradients summed in fp32.

    The layers' weights are gathered twice and the head once. The lookup exchanges rows, twice 16 MiB.
    """
    head = model.embed * model.vocab
    sent = BF16 * (2 * matrices(model) + head) + FP32 * (matrices(model) + head) + 2 * (16 << 20)
    return sent * (DEVICES - 1) / DEVICES


N = DEVICES
STAGE = "parallel.optimizer.stage={}"
RUNS = {
    "stage 0": Run("1b_dp16", (), 1, lambda p: 16 * p, once, fits=False),
    # One microbatch with bf16 sums: the layers gather their own weights, and gradients are scattered where they arise.
    "stage 1": Run("1b_dp16_zero1", (), N, lambda p: 2 * p + 14 * p / N, once, 4.6, 4000, 1.0),
    "stage 1, fp32 sums": Run("1b_dp16", (STAGE.format(1),), N, lambda p: 4 * p + 12 * p / N, lambda m: once(m, FP32)),
    "stage 1, 8 microbatches": Run(
        "1b_dp16_zero1", ("train.grad_accum_steps=8", "data.batch=256"), N, lambda p: 6 * p + 12 * p / N, once, 4.5
    ),
    "stage 2": Run("1b_dp16_zero1", (STAGE.format(2),), N, lambda p: 2 * p + 14 * p / N, once),
    "stage 3, kept": Run("1b_fsdp16_keep", (), N, lambda p: 2 * p + 14 * p / N, once, 4.3, norms="whole"),
    "stage 3": Run("1b_fsdp16", (), N, lambda p: 16 * p / N, lambda m: once(m) * 1.5, norms="whole"),
    "stage 3, fp32 sums": Run(
        "1b_fsdp16", ("precision={compute: bf16}",), N, lambda p: 16 * p / N, fsdp_in_fp32, norms="whole"
    ),
    "stage 3, groups of 4": Run("1b_hsdp4x4", (), 4, lambda p: 16 * p / 4, groups, norms="moments"),
}
HEAD = (
    "run                      state B  (by hand)    formula MiB  peak MiB  wire GB  (by hand)  exposed GB  "
    "compile CPU s"
)


def state_by_hand(job: Job, run: Run) -> int:
    """Return bytes of parameters, moments, counters and batch on one device.

    The last norm is replicated, because it is below 64 KiB.
    """
    model = job.llama
    norms = 2 * model.layers * model.embed
    whole = {"split": 0, "moments": FP32 * norms, "whole": 3 * FP32 * norms}[run.norms]
    split = 3 * FP32 * (model.params - model.embed) - whole
    batch = 2 * 4 * job.config.data.batch * job.config.data.seq // DEVICES
    return split // run.ways + whole + 3 * FP32 * model.embed + COUNTERS + batch


def measure(name: str, run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Compile a run, print its row, and return its figures and goals."""
    layers = [f"model.layers={options.layers}"] if options.layers else []
    job = make_job(load_run(BENCH_CONFIGS / f"{run.config}.yaml", [*run.settings, *layers]))
    hand, state = run.wire(job.llama) / 1e9, state_by_hand(job, run)
    formula = run.formula(job.model.params) / 2**20 if run.formula else 0
    try:
        found = compile_step(job, Topology.parse("v5e:4x4"), options.keep_cache)
    except CompileError as error:
        refused = "memory" in str(error)
        print(f"{name:23}           ({state})  {formula:11.0f}  does not fit: {refused}", flush=True)
        return {"goals": {"does not fit": refused and not run.fits}}
    wire, peak = found["wire_bytes"] / 1e9, found["memory"]["peak"] / 2**20
    given = found["memory"]["argument"]
    print(
        f"{name:23} {given}  ({state})  {formula:11.0f}  {peak:8.0f}  {wire:7.3f}  {hand:9.3f}  "
        f"{found['exposed_bytes'] / 1e9:10.3f}"
        f"  {found['compile_cpu_seconds']:13.0f}",
        flush=True,
    )
    goals = {"fits": run.fits, f"state {given - state:+} bytes": given == state}
    if run.most_wire is not None:
        goals[f"wire {wire:.2f} ≤ {run.most_wire} GB"] = wire <= run.most_wire
    if run.most_peak is not None:
        goals[f"peak {peak:.0f} ≤ {run.most_peak} MiB"] = peak <= run.most_peak
    if run.most_exposed is not None:
        exposed = found["exposed_bytes"] / 1e9
        goals[f"exposed {exposed:.2f} ≤ {run.most_exposed} GB"] = exposed <= run.most_exposed
    return {"jaxpar": found, "wire_by_hand": hand, "state_by_hand": state, "goals": goals}


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
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    print(HEAD)
    figures = {name: measure(name, RUNS[name], options) for name in names}
    for name, found in figures.items():
        for text, met in found["goals"].items():
            print(f"{'pass' if met else 'FAIL'}  {name}: {text}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0 if all(met for found in figures.values() for met in found["goals"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
