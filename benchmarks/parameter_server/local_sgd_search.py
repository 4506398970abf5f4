"""Settings of local SGD on the quickstart, in one process without servers: held-out loss every 40 steps.

    python benchmarks/parameter_server/local_sgd_search.py --stop 80 1:0:3e-3:20 1:0:3e-3:4 1:0.3:3e-3:20

A setting is OUTER_RATE:OUTER_MOMENTUM:RATE:EVERY. The workers take turns, on the batches that they have in
`diloco.py`, and the schedule of the learning rate is that of all `--steps`, also with `--stop`. Data parallelism, one
step on the batches of all workers, is run first. `own` is the loss of a worker just before it is averaged.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar as jp
from jaxpar.app.train.server_run import job_program
from jaxpar.parameter_server import ServerConfig, TrainingProgram

CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
REPORT = 40


class Search:
    """The batches, and functions that train on them."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        program = self.program(3e-3)
        read = [program.batches(worker, args.workers) for worker in range(args.workers)]
        self._batches = [[one(step) for one in read] for step in range(args.stop)]
        self._heldout = list(program.heldout() if program.heldout else ())
        self._evaluate = jp.eval_step(program.layout(), program.eval_loss_fn or program.loss_fn)

    def program(self, rate: float) -> TrainingProgram:
        """Returns the quickstart on one device."""
        args = self._args
        settings = (
            *("cpu_devices=1", "mesh.model=1", f"data.batch={args.batch}", f"data.seq={args.seq}"),
            *(f"train.steps={args.steps}", "train.eval_every=100000", f"optimizer.learning_rate={rate}"),
        )
        return job_program(CONFIG, settings, ServerConfig(workers=args.workers))

    def loss(self, state: Any) -> float:
        """Returns the mean loss on the held-out batches."""
        return float(np.mean([float(self._evaluate(state, batch)["loss"]) for batch in self._heldout]))

    def start(self, rate: float) -> tuple[Callable[..., Any], Any]:
        """Returns the train step, and the initial state."""
        program = self.program(rate)
        step = jp.train_step(program.layout(), program.loss_fn, donate=False, **program.step_options)
        return step, jp.init(program.layout(), program.make_model, program.tx, seed=program.seed)

    def data_parallel(self, rate: float) -> None:
        """Train on the batches of all workers together."""
        step, state = self.start(rate)
        for n, parts in enumerate(self._batches, 1):
            state, _ = step(state, jax.tree.map(lambda *x: jnp.concatenate(x), *parts))
            if n % REPORT == 0:
                print(f"data parallel {rate:g}: step {n}  loss {self.loss(state):.4f}", flush=True)

    def local(self, setting: str) -> None:
        """Train each worker on its batches, and exchange every few steps."""
        outer_rate, momentum, rate, every = (float(x) for x in setting.split(":"))
        step, state = self.start(rate)
        states = [state] * self._args.workers
        outer, velocity = state.params, jax.tree.map(jnp.zeros_like, state.params)
        for n, parts in enumerate(self._batches, 1):
            states = [step(one, part)[0] for one, part in zip(states, parts, strict=True)]
            if n % every:
                continue
            own = self.loss(states[0]) if n % REPORT == 0 else None
            ends = [one.params for one in states]
            change = jax.tree.map(lambda start, *end: start - sum(end) / len(end), outer, *ends)
            velocity = jax.tree.map(lambda v, c: momentum * v + c, velocity, change)
            outer = jax.tree.map(lambda x, c, v: x - outer_rate * (c + momentum * v), outer, change, velocity)
            states = [dataclasses.replace(one, params=outer) for one in states]
            if own is not None:
                print(f"{setting}: step {n}  loss {self.loss(states[0]):.4f}  own {own:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", nargs="+")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--stop", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data-parallel", type=float, nargs="*", default=[3e-3])
    args = parser.parse_args()
    search = Search(args)
    for rate in args.data_parallel:
        search.data_parallel(rate)
    for setting in args.settings:
        search.local(setting)


if __name__ == "__main__":
    main()
