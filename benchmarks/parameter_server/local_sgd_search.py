"""Settings of local SGD on the quickstart, in one process without servers: held-out loss every 40 steps.

    python benchmarks/parameter_server/local_sgd_search.py --stop 80 1:0:3e-3:20 1:0:3e-3:4 1:0.3:3e-3:20

A setting is OUTER_RATE:OUTER_MOMENTUM:RATE:EVERY. EVERY may grow: `1,5@60,20@200` exchanges after each step, from
step 60 on every 5 steps, and from step 200 on every 20. With `--bits 8` or 4 changes travel in so many bits, to the
servers and back, and each side adds its rounding error to its next change. The workers take turns, on the batches that
they have in `diloco.py`, and the schedule of the learning rate is that of all `--steps`, also with `--stop`. Data
parallelism, one step on the batches of all workers, is run first. `own` is the loss of a worker just before it is
averaged. With `--muon` RATE is that of Muon, which updates the matrices of layers; everything else is then updated
by Adam at the quickstart's rate.
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
from jaxpar.app.config import load_run
from jaxpar.app.train.server_run import job_program
from jaxpar.parameter_server import ServerConfig, TrainingProgram
from jaxpar.parameter_server.config import DeltaBits
from jaxpar.parameter_server.quantized_deltas import dequantize, quantize

CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


def muon_settings(rate: float) -> list[str]:
    """Returns settings of the quickstart with Muon at this rate, and its own Adam for what Muon does not update."""
    adam = load_run(CONFIG).config.optimizer
    decay, b2 = adam.options["weight_decay"], adam.options["b2"]
    return [
        *("optimizer.name=muon", f"optimizer.learning_rate={rate}"),
        f"optimizer.muon.adam_learning_rate={adam.learning_rate}",
        f"optimizer.options={{weight_decay: {decay}, adam_weight_decay: {decay}, adam_b2: {b2}}}",
    ]


def every_at(text: str) -> Callable[[int], int]:
    """Returns the steps between exchanges from a step on, as EVERY of a setting says."""
    first, *later = text.split(",")
    starts = {0: int(first)} | {int(at): int(every) for every, at in (part.split("@") for part in later)}
    return lambda step: starts[max(start for start in starts if start <= step)]


class Rounded:
    """Sends trees in few bits, and adds the rounding errors to the next tree."""

    def __init__(self, bits: DeltaBits) -> None:
        self._bits: DeltaBits = bits
        self._errors: list[np.ndarray] | None = None

    def __call__(self, tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        errors = self._errors or [np.zeros((), np.float32)] * len(leaves)
        exact = [np.asarray(x) + error for x, error in zip(leaves, errors, strict=True)]
        sent = [dequantize(quantize(x, self._bits)) for x in exact]
        self._errors = [x - y for x, y in zip(exact, sent, strict=True)]
        return jax.tree.unflatten(structure, sent)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained: as the options of the command line."""

    steps: int = 400
    stop: int = 400
    batch: int = 32
    seq: int = 128
    workers: int = 2
    report: int = 40
    bits: DeltaBits | None = None
    muon: bool = False
    eval_batches: int = 8  # of the quickstart, for its batch


class Search:
    """The batches, and functions that train on them."""

    def __init__(self, args: Workload):
        self._args = args
        program = self.program(3e-3)
        read = [program.batches(worker, args.workers) for worker in range(args.workers)]
        self._batches = [[one(step) for one in read] for step in range(args.stop)]
        self._heldout = list(program.heldout() if program.heldout else ())
        self._evaluate = jp.eval_step(program.layout(), program.eval_loss_fn or program.loss_fn)

    def program(self, rate: float) -> TrainingProgram:
        """Returns the quickstart on one device."""
        args = self._args
        settings = [
            *("cpu_devices=1", "mesh.model=1", f"data.batch={args.batch}", f"data.seq={args.seq}"),
            *(f"train.steps={args.steps}", "train.eval_every=100000"),
            f"train.eval_batches={args.eval_batches}",
        ]
        servers = ServerConfig(workers=args.workers)
        optimizer = muon_settings(rate) if args.muon else [f"optimizer.learning_rate={rate}"]
        return job_program(CONFIG, [*settings, *optimizer], servers)

    def loss(self, state: Any) -> float:
        """Returns the mean loss on the held-out batches."""
        return float(np.mean([float(self._evaluate(state, batch)["loss"]) for batch in self._heldout]))

    def start(self, rate: float) -> tuple[Callable[..., Any], Any]:
        """Returns the train step, and the initial state."""
        program = self.program(rate)
        step = jp.train_step(program.layout(), program.loss_fn, donate=False, **program.step_options)
        return step, jp.init(program.layout(), program.make_model, program.tx, seed=program.seed)

    def data_parallel(self, rate: float) -> float:
        """Returns the held-out loss of training on the batches of all workers together."""
        step, state = self.start(rate)
        for n, parts in enumerate(self._batches, 1):
            state, _ = step(state, jax.tree.map(lambda *x: jnp.concatenate(x), *parts))
            if n % self._args.report == 0:
                print(f"data parallel {rate:g}: step {n}  loss {self.loss(state):.4f}", flush=True)
        return self.loss(state)

    def local(self, setting: str) -> None:
        """Train each worker on its batches, and exchange every few steps."""
        *numbers, text = setting.split(":")
        outer_rate, momentum, rate = map(float, numbers)
        every, report, began = every_at(text), self._args.report, 0
        step, state = self.start(rate)
        states = [state] * self._args.workers
        outer, velocity = state.params, jax.tree.map(jnp.zeros_like, state.params)
        channel = lambda: Rounded(self._args.bits) if self._args.bits else lambda tree: tree
        send, answer = [channel() for _ in states], channel()
        exchanges = 0
        for n, parts in enumerate(self._batches, 1):
            states = [step(one, part)[0] for one, part in zip(states, parts, strict=True)]
            if n - began < every(began):
                continue
            began, exchanges = n, exchanges + 1
            own = self.loss(states[0]) if n % report == 0 else None
            changes = [
                send_one(jax.tree.map(lambda x, end: x - end, outer, one.params))
                for send_one, one in zip(send, states, strict=True)
            ]
            change = jax.tree.map(lambda *x: sum(x) / len(x), *changes)
            velocity = jax.tree.map(lambda v, c: momentum * v + c, velocity, change)
            moved = answer(jax.tree.map(lambda c, v: -outer_rate * (c + momentum * v), change, velocity))
            outer = jax.tree.map(lambda x, u: x + u, outer, moved)
            states = [dataclasses.replace(one, params=outer) for one in states]
            if own is not None:
                line = f"{setting}: step {n}  loss {self.loss(states[0]):.4f}  own {own:.4f}"
                print(f"{line}  exchanges {exchanges}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", nargs="+")
    for name in ("steps", "stop", "batch", "seq", "workers", "eval_batches"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Workload, name))
    parser.add_argument("--report", type=int, default=Workload.report, help="steps between two lines of a run")
    parser.add_argument("--bits", type=int, choices=(8, 4), help="of each number of a change")
    parser.add_argument("--muon", action="store_true", help="Muon instead of AdamW")
    parser.add_argument("--data-parallel", type=float, nargs="*", default=[3e-3])
    args = parser.parse_args()
    search = Search(Workload(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Workload)}))
    for rate in args.data_parallel:
        search.data_parallel(rate)
    for setting in args.settings:
        search.local(setting)


if __name__ == "__main__":
    main()
