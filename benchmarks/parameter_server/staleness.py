"""Throughput against the bound of staleness, with one worker four times slower than the others.

    python benchmarks/parameter_server/staleness.py [--picture FILE.png]

A worker's compute is a pause, so the figures show how workers wait for each other and not how fast a machine is. Each
run lasts until every worker has taken its steps; the rate is that of the fast workers until they have finished.
Goal: no pull sees more staleness than the bound. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp
from jaxpar.parameter_server import ServerConfig, ServerRun, TrainingProgram

WORKERS = 4
BOUNDS = (0, 1, 2, 4, 8, 16)


def slow_batches(pause: float) -> Callable[[int, int], Callable[[int], Any]]:
    """Returns batches that take a while; four times as long for the last worker."""

    def batches(worker: int, workers: int) -> Callable[[int], Any]:
        def batch(step: int) -> Any:
            # A third of the compute varies from step to step, as that of a real worker does.
            share = np.random.default_rng(1000 * worker + step).uniform(2 / 3, 4 / 3)
            time.sleep(pause * share * (4 if worker == workers - 1 else 1))
            return {"x": np.ones((2, 8), np.float32)}

        return batch

    return batches


def program(pause: float) -> TrainingProgram:
    """Returns a small model."""
    layout = lambda: jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), jp.Rules(batch=None, unannotated="replicate"))
    loss = lambda model, batch: ((batch["x"] @ model["w"] - 1) ** 2).mean()
    return TrainingProgram(layout, lambda key: {"w": jnp.zeros(8)}, loss, optax.sgd(0.01), slow_batches(pause))


def measure(config: ServerConfig, steps: int, pause: float) -> tuple[float, int, float]:
    """Returns steps per second of a fast worker, the largest staleness, and its mean."""
    times: dict[int, list[float]] = {}
    note = lambda worker, step, figures: times.setdefault(worker, []).append(time.perf_counter())
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerRun(program(pause), config, steps=steps, folder=folder, cluster="threads", on_report=note) as run,
    ):
        while run.poll(0.01):
            pass
        result = run.wait()
    fast = [(len(t) - 1) / (t[-1] - t[0]) for worker, t in times.items() if worker < WORKERS - 1]
    counts = result.staleness
    mean = sum(s * n for s, n in counts.items()) / sum(counts.values())
    return float(np.mean(fast)), max(counts), mean


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    runs = [(f"s = {s}", ServerConfig("stale_synchronous", 2, WORKERS, staleness=s)) for s in BOUNDS]
    runs += [("asynchronous", ServerConfig("asynchronous", 2, WORKERS))]
    found = []
    for name, config in runs:
        rate, most, mean = measure(config, args.steps, args.pause)
        found.append((name, rate, most, config.lead))
        print(f"{name:14} {rate:6.2f} steps/s of a fast worker   staleness mean {mean:5.2f}, most {most}", flush=True)
    if args.picture:
        draw(found, args.picture)
    return int(any(bound is not None and most > bound for _, _, most, bound in found))


def draw(found: list[tuple[str, float, int, int | None]], file: Path) -> None:
    """Draw the rate against the bound."""
    from jaxpar.utils.plotting import new_figure

    figure = new_figure("the picture", figsize=(6, 3.5))
    axes = figure.subplots()
    axes.plot(range(len(found)), [rate for _, rate, _, _ in found], marker="o")
    axes.set_xticks(range(len(found)), [name for name, *_ in found], rotation=20)
    axes.set_ylabel("steps/s of a fast worker")
    axes.set_ylim(bottom=0)
    axes.set_title("one of four workers takes four times as long")
    figure.savefig(file, bbox_inches="tight", dpi=100)


if __name__ == "__main__":
    sys.exit(main())
