"""Servers and workers of a synchronous run on Ray are killed with SIGKILL at random times.

    uv run python benchmarks/parameter_server/kills.py [--kills 20]

Goal: the final parameters are those of a run without kills, bitwise, and a server answers again within 10 s (median).
Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp
from jaxpar.parameter_server import ServerConfig, ServerRun, TrainingProgram

CONFIG = ServerConfig(servers=2, workers=2, snapshot_every=10, patience=600, max_restarts=1000)


def make_program(pause: float) -> TrainingProgram:
    """Returns a small classifier under AdamW; each batch takes a while."""

    def batches(worker: int, workers: int) -> Callable[[int], Any]:
        def batch(step: int) -> Any:
            time.sleep(pause)
            x = np.random.default_rng(1000 * worker + step).standard_normal((16, 32)).astype(np.float32)
            return {"x": x, "y": np.tanh(x[:, :1])}

        return batch

    def make_model(key: jax.Array) -> Any:
        first, last = jax.random.split(key)
        return {"first": 0.2 * jax.random.normal(first, (32, 64)), "last": 0.1 * jax.random.normal(last, (64, 1))}

    def loss(model: Any, batch: Any) -> jax.Array:
        return ((jnp.tanh(batch["x"] @ model["first"]) @ model["last"] - batch["y"]) ** 2).mean()

    layout = lambda: jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), jp.Rules(batch=None, unannotated="replicate"))
    return TrainingProgram(layout, make_model, loss, optax.adamw(1e-3), batches)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    steps, draw = 10 * args.kills, random.Random(args.seed)
    seen, back = {0: 0, 1: 0}, []
    moments = sorted(draw.sample(range(2, steps - 5), args.kills))
    program, quick = make_program(0.05), make_program(0.0)
    note = lambda worker, step, figures: seen.update({worker: step})
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerRun(lambda: program, CONFIG, steps=steps, folder=folder, on_report=note) as run,
    ):
        actors: Any = run.cluster
        done = 0
        while run.poll(0.05):
            if done < args.kills and max(seen.values()) >= moments[done]:
                name = draw.choice(["server-0", "server-1", "worker-0", "worker-1"])
                time.sleep(draw.uniform(0, 0.1))
                began = time.perf_counter()
                os.kill(actors.pid(name), signal.SIGKILL)
                actors.pid(name)
                seconds = time.perf_counter() - began
                done += 1
                if name.startswith("server"):
                    back.append(seconds)
                print(f"kill {done}: {name} after step {max(seen.values())}, back after {seconds:.1f} s", flush=True)
        result = run.wait()
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerRun(quick, CONFIG, steps=steps, folder=folder, cluster="threads") as calm,
    ):
        expected = calm.wait()
    equal = all(np.array_equal(result.params[name], x) for name, x in expected.params.items())
    median = statistics.median(back) if back else 0.0
    print(f"{done} kills; bitwise equal to a run without kills: {equal}; servers back after {median:.1f} s (median)")
    return int(not equal or median > 10)


if __name__ == "__main__":
    sys.exit(main())
