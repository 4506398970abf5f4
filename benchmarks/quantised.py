"""int8 and signs on the wire: their bytes in TPU programs, and what they do to a loss: ``uv run python benchmarks/quantised.py``.

Nothing here needs a TPU, but its compiler (extra ``tpu``, or ``JAXPAR_TPU_PYTHON``). The first table compiles steps of the 1B shape for
``v5e:4x4``: what one device sends, how much of it in 8 bits (or eight signs), within groups of four neighbours, exposed; beside what it must send by
hand. The second trains the quickstart on simulated devices with and without, on the same data: held-out losses, side by side.
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

from maxtext_aot import BF16, CONFIGS, compile_ours
from zero import DEVICES, matrices

from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.models.llama import LlamaConfig
from jaxpar.parallel.collectives import one_bit
from jaxpar.parallel.collectives.quantized import BLOCK
from jaxpar.sharding.hardware.topology import Topology

INT8 = 1 + 4 / BLOCK  # a byte, and its share of a block's scale
PRECISION = "precision={compute: bf16, gather: int8, reduce: int8}"
SHARE = (DEVICES - 1) / DEVICES


@dataclass(frozen=True)
class Run:
    """One line of the first table.

    Attributes:
      config: in ``configs/bench``; ``settings`` are changes to it.
      wire: bytes that one device must send.
      most: of what the run ``against`` sends, at most this share.
      after: count a step after the warm-up of 1-bit Adam, not in it.
    """

    config: str
    settings: tuple[str, ...]
    wire: Callable[[LlamaConfig], float]
    against: str | None = None
    most: float = 1.0
    after: bool = False


def sharded(model: LlamaConfig, size: float, group: int = DEVICES) -> float:
    """Stage 3: the layers' weights gathered twice, the second time within groups, their gradients scattered, in so many bytes a number.

    The head stays in 16 bits, gathered for both passes at once; the lookup exchanges rows, there and back.
    """
    layers = (2 * SHARE + (group - 1) / group) * size * matrices(model)
    return layers + SHARE * (2 * BF16 * model.embed * model.vocab + 2 * (16 << 20))


def whole(model: LlamaConfig, size: float) -> float:
    """Stage 1: all weights gathered once, all gradients scattered once."""
    return SHARE * 2 * size * (matrices(model) + 2 * model.embed * model.vocab)


SIGNS = 1 / 8 + 4 / one_bit.BLOCK  # a bit, and its share of a block's scale
ONE_BIT = (
    "optimizer={name: one_bit_adam, clip_norm: null, options: {warmup: 100}}",
    "precision={compute: bf16}",
    "model.layers=4",  # what is whole on every device has to fit
)


def averaged(model: LlamaConfig, size: float) -> float:
    """Stage 0: all gradients scattered and gathered once."""
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
    """Compile a run, print its row."""
    layers = [f"model.layers={options.layers}"] if options.layers else []
    job = make_job(load_run(CONFIGS / f"{run.config}.yaml", [*run.settings, *layers]))
    found = compile_ours(job, Topology.parse("v5e:4x4"), options.keep_cache, other_arms=run.after)
    wire, hand = found["wire_bytes"] / 1e9, run.wire(job.model) / 1e9
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
        goals[f"{ratio:.3f} of what {run.against!r} sends, goal {run.most}"] = ratio <= run.most
    return found | {"goals": goals}


SIGNED = tuple(
    f"optimizer.{key}"
    for key in ("name=one_bit_adam", "clip_norm=null", "options.min_bytes=4KiB", "options.warmup={fifth}")
)
VARIANTS = {
    "as it is": (),
    "int8 weights and gradients": ("precision={gather: int8, reduce: int8}",),
    "1-bit Adam": ("layout=layouts/dp.yaml", *SIGNED),
}
NEAR = {"int8 weights and gradients": 0.02, "1-bit Adam": 0.25}
"""Nats per token that the held-out loss may be higher."""


def trained(steps: int) -> dict[str, Any]:
    """Held-out losses of the quickstart with and without, after so many steps."""
    losses: dict[str, list[float]] = {}
    for name, settings in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            asked = [f"train.steps={steps}", f"train.eval_every={steps // 4}", f"output={folder}"]
            asked += [setting.replace("{fifth}", str(max(steps // 5, 1))) for setting in settings]
            command = [sys.executable, "-m", "jaxpar.app.cli", "train", str(CONFIGS.parent / "quickstart.yaml")]
            subprocess.run(command + [w for s in asked for w in ("--set", s)], check=True, stdout=subprocess.DEVNULL)
            lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
            losses[name] = [line["heldout_loss"] for line in lines if "heldout_loss" in line]
        print(f"{name:27} {'  '.join(f'{loss:.4f}' for loss in losses[name])}", flush=True)
    full = losses["as it is"][-1]
    gaps = {name: losses[name][-1] - full for name in NEAR}
    goals = {
        f"held-out loss with {name} {gap:+.4f}, goal + {NEAR[name]}": gap <= NEAR[name] for name, gap in gaps.items()
    }
    return {"losses": losses, "goals": goals}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", default=";".join(RUNS), help="which, by name, with ; between them")
    parser.add_argument("--layers", type=int, help="make the model this deep, to try things out")
    parser.add_argument("--steps", type=int, default=200, help="of training; 0 leaves it out")
    parser.add_argument("--keep-cache", action="store_true", help="take steps from jaxpar's cache where they are there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
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
