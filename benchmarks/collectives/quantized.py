"""int8 and 1-bit communication: wire bytes in TPU programs, and the effect on the loss.

    uv run python benchmarks/collectives/quantized.py

Needs no TPU, only its compiler (extra ``tpu``, or ``JAXPAR_TPU_PYTHON``). The first table compiles steps of the 1B
shape for ``v5e:4x4``. It lists what one device sends, in total, in 8-bit elements (int8, or eight signs each), within
groups of four neighbours, and exposed, next to what it must send computed by hand. The second table trains the
quickstart on simulated devices with and without quantization on the same data, and lists the held-out losses.

Goals: at most the share ``most`` of the wire bytes of the run without quantization, and held-out losses within
``NEAR``. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.compiled_step import BF16, DEVICES, compile_step, matrices
from benchmarks.shared.paths import BENCH_CONFIGS, CONFIGS
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.models.llama import LlamaConfig
from jaxpar.parallel.collectives import one_bit
from jaxpar.parallel.collectives.quantized import BLOCK
from jaxpar.sharding.hardware.topology import Topology

INT8 = 1 + 4 / BLOCK  # one byte, and its share of a block's fp32 scale
PRECISION = "precision={compute: bf16, gather: int8, reduce: int8}"
SHARE = (DEVICES - 1) / DEVICES


@dataclass(frozen=True)
class Run:
    """One run of the first table.

    Attributes:
      config: name of the configuration in ``configs/bench``.
      settings: changes to ``config``.
      wire: bytes that one device must send, computed by hand from the model.
      against: name of the run to compare with.
      most: largest share of the wire bytes of ``against``.
      after: audit a step after the warm-up of 1-bit Adam, not during it.
    """

    config: str
    settings: tuple[str, ...]
    wire: Callable[[LlamaConfig], float]
    against: str | None = None
    most: float = 1.0
    after: bool = False


def sharded(model: LlamaConfig, size: float, group: int = DEVICES) -> float:
    """Return the wire bytes of stage 3 with ``size`` bytes per number.

    The layers' weights are gathered twice, the second time within groups, and their gradients are scattered. The head
    stays in 16 bits and is gathered once for both passes. The lookup exchanges rows, forward and backward.
    """
    layers = (2 * SHARE + (group - 1) / group) * size * matrices(model)
    return layers + SHARE * (2 * BF16 * model.embed * model.vocab + 2 * (16 << 20))


def whole(model: LlamaConfig, size: float) -> float:
    """Return the wire bytes of stage 1: all weights gathered once, all gradients scattered once."""
    return SHARE * 2 * size * (matrices(model) + 2 * model.embed * model.vocab)


SIGNS = 1 / 8 + 4 / one_bit.BLOCK  # one bit, and its share of a block's fp32 scale
ONE_BIT = (
    "optimizer={name: one_bit_adam, clip_norm: null, options: {warmup: 100}}",
    "precision={compute: bf16}",
    "model.layers=4",  # replicated state must fit on a device
)


def averaged(model: LlamaConfig, size: float) -> float:
    """Return the wire bytes of stage 0: all gradients scattered and gathered once."""
    return SHARE * 2 * size * (matrices(model) + 2 * model.embed * model.vocab)


RUNS = {
    "stage 3": Run("1b_fsdp16", (), lambda m: sharded(m, BF16)),
    "stage 3, int8": Run("1b_fsdp16_int8", (), lambda m: sharded(m, INT8), "stage 3", 0.55),
    "stage 3, int8, groups of 4": Run(
        "1b_fsdp16_int8", ("parallel.reshard_after_forward=4",), lambda m: sharded(m, INT8, 4), "stage 3", 0.55
    ),
    "stage 1": Run("1b_dp16_zero1", (), lambda m: whole(m, BF16)),
    "stage 1, int8": Run("1b_dp16_zero1", (PRECISION,), lambda m: whole(m, INT8), "stage 1", 0.55),
    "4 layers, 1-bit Adam warming up": Run("1b_dp16", ONE_BIT, lambda m: averaged(m, 4)),
    "4 layers, 1-bit Adam after it": Run(
        "1b_dp16", ONE_BIT, lambda m: averaged(m, SIGNS), "4 layers, 1-bit Adam warming up", 1 / 25, after=True
    ),
}
HEAD = (
    "run                              peak MiB  wire GB  (by hand)  8-bit GB  in groups of 4  exposed GB  compile CPU s"
)


def measure(name: str, run: Run, options: argparse.Namespace, before: dict[str, Any]) -> dict[str, Any]:
    """Compile a run, print its row, and return its figures and goals."""
    layers = [f"model.layers={options.layers}"] if options.layers else []
    job = make_job(load_run(BENCH_CONFIGS / f"{run.config}.yaml", [*run.settings, *layers]))
    found = compile_step(job, Topology.parse("v5e:4x4"), options.keep_cache, other_arms=run.after)
    wire, hand = found["wire_bytes"] / 1e9, run.wire(job.llama) / 1e9
    packed = sum(found["wire_by_dtype"].get(dtype, 0) for dtype in ("s8", "u8")) / 1e9
    near = found["wire_by_group"].get(4, 0) / 1e9
    print(
        f"{name:31} {found['memory']['peak'] / 2**20:9.0f}  {wire:7.3f}  {hand:9.3f}  {packed:8.3f}  {near:14.3f}  "
        f"{found['exposed_bytes'] / 1e9:10.3f}  {found['compile_cpu_seconds']:13.0f}",
        flush=True,
    )
    goals = {}
    if run.against in before:
        ratio = found["wire_bytes"] / before[run.against]["wire_bytes"]
        goals[f"{ratio:.3f} of the wire bytes of {run.against!r}, goal {run.most}"] = ratio <= run.most
    return found | {"goals": goals}


SIGNED = tuple(
    f"optimizer.{key}"
    for key in ("name=one_bit_adam", "clip_norm=null", "options.min_bytes=4KiB", "options.warmup={fifth}")
)
VARIANTS = {
    "not quantized": (),
    "int8 weights and gradients": ("precision={gather: int8, reduce: int8}",),
    "1-bit Adam": ("layout=layouts/dp.yaml", *SIGNED),
}
NEAR = {"int8 weights and gradients": 0.02, "1-bit Adam": 0.25}
"""Largest increase of the held-out loss, in nats per token."""


def trained(steps: int) -> dict[str, Any]:
    """Train the quickstart for ``steps`` steps with and without quantization; return the held-out losses and goals."""
    losses: dict[str, list[float]] = {}
    for name, settings in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            asked = [f"train.steps={steps}", f"train.eval_every={steps // 4}", f"output={folder}"]
            asked += [setting.replace("{fifth}", str(max(steps // 5, 1))) for setting in settings]
            command = [sys.executable, "-m", "jaxpar.app.cli", "train", str(CONFIGS / "quickstart.yaml")]
            subprocess.run(command + [w for s in asked for w in ("--set", s)], check=True, stdout=subprocess.DEVNULL)
            lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
            losses[name] = [line["heldout_loss"] for line in lines if "heldout_loss" in line]
        print(f"{name:27} {'  '.join(f'{loss:.4f}' for loss in losses[name])}", flush=True)
    full = losses["not quantized"][-1]
    gaps = {name: losses[name][-1] - full for name in NEAR}
    goals = {
        f"held-out loss with {name} {gap:+.4f}, goal + {NEAR[name]}": gap <= NEAR[name] for name, gap in gaps.items()
    }
    return {"losses": losses, "goals": goals}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=";".join(RUNS), help="names of runs, separated by semicolons (default: all)")
    parser.add_argument("--layers", type=int, help="layers of the model, for a trial")
    parser.add_argument(
        "--steps", type=int, default=200, help="steps of training; 0 omits the training (default: %(default)s)"
    )
    parser.add_argument("--keep-cache", action="store_true", help="do not compile a step that jaxpar's cache holds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures into this file")
    options = parser.parse_args()
    names = [name for name in options.runs.split(";") if name]
    if unknown := sorted(set(names) - RUNS.keys()):
        parser.error(f"no run {', '.join(unknown)}; runs are {'; '.join(RUNS)}")
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    figures: dict[str, Any] = {}
    if names:
        print(HEAD)
    for name in names:
        figures[name] = measure(name, RUNS[name], options, figures)
    if options.steps:
        print("held-out loss at the start and after each quarter of the steps")
        figures["training"] = trained(options.steps)
    for name, found in figures.items():
        for text, met in found["goals"].items():
            print(f"{'pass' if met else 'FAIL'}  {name}: {text}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0 if all(met for found in figures.values() for met in found["goals"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
