"""The train steps of MaxText and jaxpar, compiled for the same TPUs: wire bytes, memory, FLOPs and compile time.

    uv run python benchmarks/maxtext/train_step.py

Needs no TPU, only the TPU compiler (extra ``tpu``, or ``JAXPAR_TPU_PYTHON``) and uv on the path. The first run installs
MaxText 0.2.5 as its users would, in a separate environment next to jaxpar's cache (3 GB). Each run of the table
compiles MaxText's train step and then jaxpar's, in separate processes, and audits both programs with ``jaxpar.audit``.
``wire`` is what one device sends per step, ``peak`` its memory, and ``compile`` the CPU seconds of the compiler,
without tracing on both sides. Compile times need an idle machine, and only their ratio is meaningful.

Shapes: weights in fp32 with AdamW, compute in bf16, full remat. ``1b`` has embed 2048, 16 layers, 16 heads of 128, a
gated MLP of 7168, a vocabulary of 32,000 and 2 × 2,048 tokens per device. ``8b`` is Llama 3.1 8B with 1 × 4,096 tokens
per device.

Goals: the limits of ``RUNS``, and no more matmul FLOPs than MaxText. Exit status 1 if one is missed.

``--growth`` instead compiles the 8B FSDP step for 16, 256 and 4,096 v5p chips; the goal is at most 1.3 × the compile
time of the first. ``--repeat 3`` compiles in turn and shows the fastest compile of each side, because the CPU seconds
of one compile vary by a tenth.

Measured for ``1b_fsdp16`` (2026-11, jax 0.12.0.1): MaxText 6.31 GB and 1,851 MiB with libtpu 0.0.52, which it installs,
and 2,185 MiB with 0.0.50.1, which this jax requires and jaxpar uses; jaxpar 6.01 GB and 1,779 MiB. Both have 3.157e13
matmul FLOPs. To use one libtpu on both sides, create the environment yourself and pass it with ``--maxtext-python``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.compile_maxtext import MAXTEXT, QUIET, compile_maxtext, maxtext_python
from benchmarks.shared.compiled_step import BF16, compile_step
from benchmarks.shared.paths import BENCH_CONFIGS
from jaxpar.app.config import load_run
from jaxpar.app.job import Job, make_job
from jaxpar.models.llama import LlamaConfig
from jaxpar.sharding.hardware.topology import Topology

GROWTH = ("v5p:2x2x4", "v5p:4x8x8", "v5p:16x16x16")  # one kind of chip: v5e ends at 256
GROWTH_GOAL = 1.3
"""Largest compile time for any topology of ``GROWTH``, relative to the first."""


@dataclass(frozen=True)
class Run:
    """One run of the table and its goals.

    Attributes:
      config: name of the configuration in ``configs/bench``.
      maxtext: MaxText's settings for the shape, or ``None`` to compile jaxpar only.
      settings: changes to ``config``.
      wire: most GB on the wire.
      by_hand: most bytes on the wire, as a multiple of the figure of :func:`by_hand`; replaces ``wire``.
      peak: most MiB of peak memory; if not given, less than MaxText's.
      compile: most CPU seconds to compile, as a multiple of MaxText's.
    """

    config: str
    maxtext: tuple[str, ...] | None
    settings: tuple[str, ...] = ()
    wire: float | None = None
    by_hand: float | None = None
    peak: float | None = None
    compile: float | None = None


LLAMA_8B = ("model_name=llama3.1-8b",)
RUNS = {
    "1b_fsdp16": Run("1b_fsdp16", (), wire=6.25, peak=1800, compile=48 / 60),
    "1b_fsdp4_tp4": Run("1b_fsdp4_tp4", (), wire=11.2, peak=2300, compile=60 / 79),
    "1b_save_outputs": Run("1b_fsdp4_tp4", None, ("model.remat=save_outputs",), wire=9.6, peak=2900),
    "8b_fsdp16": Run("8b_fsdp16", LLAMA_8B, by_hand=1.02, compile=1),
    "8b_fsdp4_tp4": Run("8b_fsdp4_tp4", LLAMA_8B, by_hand=1.05, compile=1),
}


def by_hand(model: LlamaConfig, data: int, tensor: int, tokens: int) -> dict[str, float]:
    """Return the bytes that one device must send per step, all in bf16, by term.

    FSDP is over ``data`` devices, tensor and sequence parallelism over ``tensor`` devices.

    To gather or to scatter X bytes over N devices, each sends X · (N - 1) / N.

    - ``layers``: weights are gathered for the forward pass and again for the backward pass, and their gradients are
      scattered once.
    - ``ends``: head and embedding are gathered once (the loss keeps the head for its backward pass), and their
      gradients are scattered once. A lookup that exchanges rows (:mod:`jaxpar.models.embedding`) can send less where
      there are fewer rows than words. Both programs do so under FSDP alone, which saves 0.2 GB at 1B and 1.9 GB at 8B.
    - ``stream``: the residual stream of a data shard's ``tokens`` is gathered before and scattered after each block: 4
      times in the forward pass and 4 in the backward pass. Full remat repeats the 2 gathers and the scatter after
      attention; nothing needs the scatter after the MLP again. ``save_outputs`` repeats only the gathers.
    - ``stream_ends``: the same out of the embedding and into the head, and back.

    For 1B this gives 5.97 GB (FSDP 16), 10.25 (FSDP 4 × TP 4) and 9.45 (block outputs kept). The goals were set with
    6.1, 10.9 and 9.2: the first gathers the head twice; the second repeats both scatters of a layer; the last two omit
    ``stream_ends``.
    """
    attention = model.embed * model.head_dim * 2 * (model.heads + model.kv_heads)
    kept = BF16 * (data - 1) / data / tensor
    hop = BF16 * tokens * model.embed * (tensor - 1) / tensor
    repeated = {"full": 3, "save_outputs": 2}[str(model.remat)]
    return {
        "layers": 3 * kept * model.layers * (attention + 3 * model.embed * model.mlp),
        "ends": (2 + 2) * kept * model.embed * model.vocab,
        "stream": (8 + repeated) * hop * model.layers,
        "stream_ends": 4 * hop,
    }


def job_of(run: Run, devices: int, layers: int | None) -> Job:
    """Return the run's job with its batch scaled to ``devices``; its configuration is for 16."""
    settings = [*run.settings, *([f"model.layers={layers}"] if layers else [])]
    batch = make_job(load_run(BENCH_CONFIGS / f"{run.config}.yaml", settings)).config.data.batch
    return make_job(load_run(BENCH_CONFIGS / f"{run.config}.yaml", [*settings, f"data.batch={batch * devices // 16}"]))


def maxtext_settings(run: Run, job: Job, topology: Topology, layers: int | None) -> list[str]:
    """Return the run as MaxText settings; MaxText's defaults are the 1B shape."""
    cores = 2 if topology.kind in ("v4", "v5p") else 1  # MaxText counts cores of these kinds, not chips
    tensor = job.layout(topology.devices).sizes["model"]
    data = job.config.data
    parallel = [f"ici_fsdp_parallelism={topology.devices // tensor}", f"ici_tensor_parallelism={tensor}"]
    shape = [f"per_device_batch_size={data.batch // topology.devices}", f"max_target_length={data.seq}"]
    depth = [f"base_num_decoder_layers={layers}", "override_model_config=true"] if layers else []
    slices = [f"compile_topology={topology.kind}-{topology.devices * cores}", "compile_topology_num_slices=1"]
    return [*slices, *shape, *(parallel if tensor > 1 else []), *QUIET, *(run.maxtext or ()), *depth]


def judge(run: Run, ours: dict[str, Any], theirs: dict[str, Any] | None, hand: float) -> list[tuple[str, bool]]:
    """Return the goals of a run as text, and whether each is met."""
    wire, peak = ours["wire_bytes"] / 1e9, ours["memory"]["peak"] / 2**20
    most = run.wire if run.by_hand is None else run.by_hand * hand / 1e9
    goals = [(f"wire {wire:.2f} ≤ {most:.2f} GB", wire <= most)] if most is not None else []
    if run.peak is not None:
        goals.append((f"peak {peak:.0f} ≤ {run.peak:.0f} MiB", peak <= run.peak))
    if theirs is not None:
        limit = theirs["memory"]["peak"] / 2**20
        if run.peak is None:
            goals.append((f"peak {peak:.0f} < {limit:.0f} MiB", peak < limit))
        if run.compile is not None:
            ratio = ours["compile_cpu_seconds"] / theirs["compile_cpu_seconds"]
            goals.append((f"compile {ratio:.2f} ≤ {run.compile:.2f} × MaxText's", ratio <= run.compile))
        goals.append(("matmul FLOPs not above MaxText's", ours["matmul_flops"] <= theirs["matmul_flops"]))
    return goals


HEAD = "run              side     wire GB  exposed GB  peak MiB  matmul FLOPs  compile CPU s"


def say(name: str, side: str, text: str) -> None:
    """Print a line of the table."""
    print(f"{name:15}  {side:7}  {text}", flush=True)


def row(figures: dict[str, Any]) -> str:
    """Return the figures of one side as a row under ``HEAD``."""
    gigabytes = f"{figures['wire_bytes'] / 1e9:7.2f}  {figures['exposed_bytes'] / 1e9:10.2f}"
    compiled = f"{figures['memory']['peak'] / 2**20:8.0f}  {figures['matmul_flops']:12.4g}"
    notes = ("  (found in the cache)" if figures.get("cached") else "") + (
        "" if figures["certain"] else "  LOWER BOUNDS"
    )
    return f"{gigabytes}  {compiled}  {figures['compile_cpu_seconds']:13.0f}{notes}"


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return jaxpar's figures relative to MaxText's, and the versions of both."""
    peak = ours["memory"]["peak"] / theirs["memory"]["peak"]
    wire, seconds = (ours[name] / theirs[name] for name in ("wire_bytes", "compile_cpu_seconds"))
    versions = [f"{k} {v} and {ours['versions'][k]}" for k, v in theirs["versions"].items() if k in ours["versions"]]
    return f"{wire:7.3f}  {'':10}  {peak:8.3f}  {'':12}  {seconds:13.3f}  ({', '.join(versions)})"


def quicker(found: dict[str, Any], other: dict[str, Any] | None) -> dict[str, Any]:
    """Return the faster of two compiles of the same program."""
    return other if other and other["compile_cpu_seconds"] < found["compile_cpu_seconds"] else found


def compare(name: str, run: Run, options: argparse.Namespace, python: str | None) -> dict[str, Any]:
    """Compile both sides of a run; print its rows and goals."""
    topology = Topology.parse(options.topology)
    job = job_of(run, topology.devices, options.layers)
    theirs: dict[str, Any] | None = None
    ours: dict[str, Any] = {}
    for _ in range(options.repeat):  # in turn, so that the machine's load affects both sides
        if python is not None and run.maxtext is not None:
            theirs = quicker(compile_maxtext(python, maxtext_settings(run, job, topology, options.layers)), theirs)
        ours = quicker(compile_step(job, topology, options.keep_cache), ours)
    if theirs:
        say(name, "MaxText", row(theirs))
    say("" if theirs else name, "jaxpar", row(ours))
    if theirs:
        say("", "ratio", ratios(ours, theirs))
    sizes, tokens = job.layout(topology.devices).sizes, job.config.data.batch * job.config.data.seq
    terms = by_hand(job.llama, sizes["data"], sizes["model"], tokens // sizes["data"])
    hand = sum(terms.values())
    say("", "by hand", f"{hand / 1e9:7.2f}  ({', '.join(f'{k} {v / 1e9:.2f}' for k, v in terms.items() if v)})")
    as_set = options.topology == "v5e:4x4" and options.layers is None
    goals = judge(run, ours, theirs, hand) if as_set else []
    for text, met in goals:
        say("", "pass" if met else "FAIL", text)
    return {"maxtext": theirs, "jaxpar": ours, "by_hand": terms, "goals": dict(goals)}


def growth(options: argparse.Namespace) -> dict[str, Any]:
    """Compile the 8B FSDP step for more and more devices, one sequence each; return the figures by topology."""
    found: dict[str, Any] = {}
    for name in GROWTH:
        topology = Topology.parse(name)
        job = job_of(RUNS["8b_fsdp16"], topology.devices, options.layers)
        found[name] = compile_step(job, topology, options.keep_cache)
        ratio = found[name]["compile_cpu_seconds"] / found[GROWTH[0]]["compile_cpu_seconds"]
        found[name]["goals"] = {f"{ratio:.2f} ≤ {GROWTH_GOAL} × {GROWTH[0]}": ratio <= GROWTH_GOAL}
        say(name, f"{topology.devices}", row(found[name]))
        say("", "pass" if ratio <= GROWTH_GOAL else "FAIL", f"compile {ratio:.2f} ≤ {GROWTH_GOAL} × the first")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", default=",".join(RUNS), help="names of runs, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--topology", default="v5e:4x4", help="topology; only %(default)s, the default, has goals")
    parser.add_argument(
        "--growth", action="store_true", help="compile jaxpar's 8B step for more and more devices instead"
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=1,
        help="compiles of each side, of which the fastest counts (default: %(default)s)",
    )
    parser.add_argument("--layers", type=int, help="layers of the models, for a trial: no goal is checked")
    parser.add_argument(
        "--maxtext-python",
        metavar="FILE",
        help=f"Python interpreter with MaxText {MAXTEXT} (default: one is installed)",
    )
    parser.add_argument("--keep-cache", action="store_true", help="do not compile jaxpar's step if its cache holds it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures into this file")
    options = parser.parse_args()
    names = options.runs.split(",")
    if unknown := sorted(set(names) - RUNS.keys()):
        parser.error(f"no run {', '.join(unknown)}; runs are {', '.join(RUNS)}")
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # jax's own cache, which a user may have enabled
    print(f"load of this machine {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    both = not options.growth and any(RUNS[name].maxtext is not None for name in names)
    python = maxtext_python(options.maxtext_python) if both else None
    print(HEAD)
    figures = growth(options) if options.growth else {n: compare(n, RUNS[n], options, python) for n in names}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0 if all(met for found in figures.values() for met in found["goals"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
