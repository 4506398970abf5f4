"""Pipeline bubbles by formula, simulated and measured.

    uv run python benchmarks/pipeline/bubbles.py

Measures the step of ``jaxpar.train_step(pipeline=)`` on simulated CPU devices. Its layers sleep (``sleep.cc``, which
needs a C++ compiler: ``$CXX``, or ``c++``), equally long for a forward pass and for each half of a backward pass
(F = B = W). Four devices on two cores therefore take the time of four devices. This measures the executor, its order
and its overhead, not any hardware. A bubble is the share of time in which a stage idles. Run the
benchmark on an idle machine.

Goals: the simulated bubble equals the formula, and the measured time is within ``GOAL`` of the simulated one. Exit
status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpar as jp
from jaxpar.parallel.pipeline.schedules.async_window import ASYNCHRONOUS
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.parallel.pipeline.schedules.simulate import simulate

SOURCE = Path(__file__).with_name("sleep.cc")
ROWS, WIDTH = 2, 8
HOW: dict[str, Any] = {"lockstep": "ticks", "independent": "neighbours"}
"""Executor → how its stages wait for each other in the simulation."""
GOAL = 0.05
"""Largest relative difference of a measured time from the simulated one."""


@dataclass(frozen=True)
class Row:
    """A schedule of the table.

    Attributes:
      name: as for :func:`jaxpar.pipeline.schedule`.
      formula: the bubble of S stages, M microbatches and V chunks, from the papers.
      chunks: chunks of the model on each stage.
      sequence_chunks: chunks of a sequence. The executor of this benchmark takes full sequences, so a schedule with
        more than one is not measured.
      least: fewest microbatches per stage for which the formula holds.
    """

    name: str
    formula: Callable[[int, int, int], float]
    chunks: int = 1
    sequence_chunks: int = 1
    least: float = 1

    def schedule(self, stages: int, microbatches: int) -> Schedule:
        chunks = None if self.chunks == 1 else self.chunks
        return jp.pipeline.schedule(
            self.name, stages, microbatches, chunks=chunks, sequence_chunks=self.sequence_chunks
        )


def plain(s: int, m: int, v: int) -> float:
    return (s - 1) / (v * m + s - 1)


ROWS_OF_TABLE = (
    Row("gpipe", plain),
    Row("1f1b", plain),
    Row("seq1f1b", lambda s, m, v: plain(s, 4 * m, 1), sequence_chunks=4),
    Row("interleaved", plain, chunks=2),
    Row("interleaved", plain, chunks=4),
    Row("breadth_first", plain, chunks=2),
    Row("zb_uniform", lambda s, m, v: plain(s, 3 * m, 1)),
    Row("zb_h1", lambda s, m, v: plain(s, 3 * m, 1)),
    Row("zb_h2", lambda s, m, v: plain(s, 3 * m, 1)),
    Row("zb_v", lambda s, m, v: plain(s, 6 * m, 1), chunks=2, least=2),
    Row("dualpipe_v", lambda s, m, v: plain(s, 6 * m, 1), chunks=2, least=2),
)


def load_kernel(folder: Path) -> None:
    """Compile ``sleep.cc`` and register it with jax as ``sleep``."""
    library = folder / "sleep.so"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-shared", "-fPIC", "-isystem", jax.ffi.include_dir()]
    subprocess.run([*command, str(SOURCE), "-o", str(library)], check=True)
    handler = ctypes.cdll.LoadLibrary(str(library)).SleepHandler
    jax.ffi.register_ffi_target("sleep", jax.ffi.pycapsule(handler), platform="cpu")


def sleep(x: jax.Array, awaited: jax.Array, milliseconds: float) -> jax.Array:
    """Return ``x``, ``milliseconds`` after both ``x`` and ``awaited`` are ready."""
    call = jax.ffi.ffi_call("sleep", jax.ShapeDtypeStruct(x.shape, x.dtype))
    y: jax.Array = call(x, awaited, milliseconds=float(milliseconds))
    return y


def sleeping_layer(milliseconds: float) -> Callable[[Any, jax.Array, Any], jax.Array]:
    """Return a layer ``x * w`` whose forward, backward of ``x`` and backward of ``w`` sleep ``milliseconds`` each."""

    @jax.custom_vjp
    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return sleep(x * w, x, milliseconds)

    def forward(w: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        return layer(w, x), (w, x)

    def backward(kept: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        w, x = kept
        of_x = sleep(cotangent * w, cotangent, milliseconds)
        # One device runs them one after the other, so the second sleep depends on the first.
        return jnp.sum(sleep(cotangent * x, of_x, milliseconds), 0), of_x

    layer.defvjp(forward, backward)
    return lambda block, x, side: layer(block["w"], x)


def measured(schedule: Schedule, unit: float, repeats: int, executor: Any) -> float:
    """Return the fastest of several steps in seconds, with layers that take ``unit`` ms for F, B and W each."""
    layout, loss, make, batch = problem(schedule.stages, schedule.pieces.chunks, schedule.microbatches, unit)
    with layout:
        state = jp.init(layout, make, optax.sgd(0.0))
        step = jp.train_step(
            layout,
            loss,
            pipeline=jp.Pipeline(schedule, activation_checkpointing="none", executor=executor),
            donate=False,
        )
        compiled = step.lower(state, batch).compile()
    return least(lambda: compiled(state, batch), repeats)


def measured_asynchronous(name: str, stages: int, microbatches: int, unit: float, repeats: int) -> float:
    """Return the fastest of several calls of an asynchronous pipeline in seconds, in steady state."""
    layout, loss, make, batch = problem(stages, 1, microbatches, unit)
    step = jp.pipeline.pipedream_train_step(
        layout,
        loss,
        jp.pipeline.Asynchronous(name, stages, microbatches, activation_checkpointing="none"),
        donate=False,
    )
    state = step.start(jp.init(layout, make, optax.sgd(0.0)), batch)
    compiled = step.lower(state, batch).compile()
    state, _ = compiled(state, batch)
    return least(lambda: compiled(state, batch), repeats)


def problem(
    stages: int, chunks: int, microbatches: int, unit: float
) -> tuple[jp.Layout, jp.pipeline.PipelineLoss, Any, Any]:
    """Return layout, loss, model and batch with sleeping layers, one for each chunk of a stage."""
    layout = jp.Layout(
        jp.MeshSpec(pipeline=stages).build(jax.devices()[:stages]), jp.Rules(batch=None, embed=None, layers="pipeline")
    )
    loss = jp.pipeline.PipelineLoss(
        layers="blocks",
        embed=lambda model, batch: batch["x"],
        layer=sleeping_layer(unit / chunks),
        head=lambda model, x, batch: jnp.mean(x),
    )
    make = lambda key: {"blocks": {"w": jp.tag(jnp.ones((stages * chunks, WIDTH)), "layers", "embed")}}
    return layout, loss, make, {"x": jnp.ones((ROWS * microbatches, WIDTH))}


def least(call: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of the fastest of several calls."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def judged(row: Row, schedule: Schedule, unit: float, repeats: int, executor: Any) -> dict[str, Any]:
    """Return the figures of a schedule, and the goals that it misses."""
    microbatches = schedule.microbatches // row.sequence_chunks
    found = {
        "formula": row.formula(schedule.stages, microbatches, row.chunks),
        "ticks": simulate(schedule, timing="ticks").bubble,
        "stages": simulate(schedule, timing="stages").bubble,
    }
    missed = ["formula"] if abs(found["formula"] - found["stages"]) > 1e-9 else []
    if unit and row.sequence_chunks == 1:
        ideal = simulate(schedule, timing=HOW[executor])
        seconds = measured(schedule, unit, repeats, executor)
        found |= {"seconds": seconds, "measured": 1 - ideal.work * unit / 1e3 / seconds}
        found["ratio"] = seconds / (ideal.time * unit / 1e3)
        missed += ["measured"] if abs(found["ratio"] - 1) > GOAL else []
    return {**found, "missed": missed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", default="4x8,4x16,2x8", help="stages x microbatches, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--names", help="schedules, separated by commas (default: all)")
    parser.add_argument("--executor", choices=sorted(HOW), default="lockstep", help="executor (default: %(default)s)")
    parser.add_argument(
        "--unit",
        type=float,
        default=160,
        help=(
            "milliseconds of F, of B and of W on a stage; two cores add 1 to 3 ms to a tick; 0 measures "
            "nothing (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed steps, of which the fastest counts (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures into this file")
    options = parser.parse_args()
    sizes = [tuple(map(int, size.split("x"))) for size in options.sizes.split(",")]
    jp.simulate_devices(max(stages for stages, _ in sizes))
    names = options.names.split(",") if options.names else [row.name for row in ROWS_OF_TABLE]
    figures: dict[str, Any] = {}
    part = functools.partial("{:7.1%}".format)
    print(
        f"load of this machine {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores; F, B and W last {options.unit:g} ms "
        f"each"
    )
    print("                 stages  micro-   ---------------- bubble ----------------   measured ÷ simulated")
    print(
        f"                         batches  formula  by stages  by ticks  measured     time, by {HOW[options.executor]}"
    )
    with tempfile.TemporaryDirectory() as folder:
        if options.unit:
            load_kernel(Path(folder))
        for stages, microbatches in sizes:
            for row in ROWS_OF_TABLE:
                if row.name not in names or microbatches < row.least * stages:
                    continue
                name = f"{row.name} {row.chunks}" if row.name in ("interleaved", "breadth_first") else row.name
                found = judged(row, row.schedule(stages, microbatches), options.unit, options.repeats, options.executor)
                figures[f"{name} {stages}x{microbatches}"] = found
                last = (
                    f"{part(found['measured'])}  {found['ratio']:13.3f}" if "ratio" in found else f"{'–':>7}  {'–':>13}"
                )
                print(
                    f"{name:15}  {stages:6}  {microbatches:7}  {part(found['formula'])}  {part(found['stages']):>9}  "
                    f"{part(found['ticks']):>8}  {last}  "
                    f"{'FAIL: ' + ', '.join(found['missed']) if found['missed'] else ''}".rstrip(),
                    flush=True,
                )
        for stages, microbatches in sizes if options.unit else ():
            for name in ASYNCHRONOUS:
                if options.names and name not in names:
                    continue
                seconds = measured_asynchronous(name, stages, microbatches, options.unit, options.repeats)
                work = microbatches * 3 * options.unit / 1e3
                found = {"seconds": seconds, "measured": 1 - work / seconds, "ratio": seconds / work, "missed": []}
                found["missed"] = ["measured"] if found["ratio"] - 1 > GOAL else []
                figures[f"{name} {stages}x{microbatches}"] = found
                print(
                    f"{name:15}  {stages:6}  {microbatches:7}  {part(0)}  {part(0):>9}  {part(0):>8}  "
                    f"{part(found['measured'])}  {found['ratio']:13.3f}  "
                    f"{'FAIL: measured' if found['missed'] else ''}".rstrip(),
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    missed = sum(len(found["missed"]) for found in figures.values())
    print(f"{missed} goals missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
