"""Local SGD beside data parallelism on the quickstart: held-out loss, and all bytes that a worker sends and receives.

    python benchmarks/parameter_server/diloco.py

All runs train the model of configs/quickstart.yaml on one CPU device for each worker, on the same rows. The data
parallel run is the quickstart's, with AdamW, through synchronous servers. Workers of local SGD take 20 steps between
all exchanges, with Muon (``--optimizer``), and as a step costs them no exchange, each takes two steps on half of its
rows (``--split``). Data parallelism with Muon, which servers do not run, is trained in one process: with the batch of
the quickstart, and with the batches of local SGD, which exchanges twice as often. The exit status is 1 if no run of
local SGD that sends at most 1/20 of the bytes of the first run is within 0.03 nats of each of them. ``--reference
1.4148`` leaves out the first run, whose loss is then the given one, and whose bytes are those of a gradient and of the
parameters for each step; ``--same-optimizer`` gives the losses of the others.

    python benchmarks/parameter_server/diloco.py --optimizer adamw --rate 3.6e-3 --split 1 --runs
        local_int4 --every '{0: 1, 40: 2, 120: 3, 240: 5, 340: 20}'

is local SGD with the quickstart's optimizer, whose exchanges become rarer.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks.parameter_server.local_sgd_search import CONFIG, Search, Workload, muon_settings
from jaxpar.app.train.server_run import job_program
from jaxpar.parameter_server import ServerConfig, ServerRun, TrainingProgram
from jaxpar.utils.yaml_config import parse_yaml

RUNS = ("local", "local_int8", "local_int4")
NATS, FRACTION = 0.03, 1 / 20


@dataclasses.dataclass(frozen=True)
class Measured:
    """The held-out loss in nats per token, and the bytes that a worker pushed and pulled."""

    loss: float
    pushed: int
    pulled: int

    @property
    def sent(self) -> int:
        return self.pushed + self.pulled


def program_of(config: ServerConfig, args: argparse.Namespace) -> TrainingProgram:
    """Returns the quickstart on one device for each worker."""
    split = args.split if config.mode == "local_sgd" else 1
    settings = [
        *("cpu_devices=1", "mesh.model=1", f"data.batch={args.batch // split}", f"data.seq={args.seq}"),
        *(f"train.steps={args.steps * split}", f"train.eval_every={args.eval_every or 10**9}"),
        f"train.eval_batches={Workload.eval_batches * split}",
    ]
    if config.mode != "local_sgd":
        return job_program(CONFIG, settings, config)
    optimizer = muon_settings(args.rate) if args.optimizer == "muon" else [f"optimizer.learning_rate={args.rate}"]
    return job_program(CONFIG, [*settings, *optimizer], config)


def measure(config: ServerConfig, args: argparse.Namespace) -> Measured:
    """Returns what a run comes to; the bytes are those of the worker that sent and received most."""
    report = lambda worker, step, figures: (
        print(f"  step {step}  held-out loss {figures['heldout_loss']:.4f}", flush=True)
        if "heldout_loss" in figures
        else None
    )
    steps = args.steps * (args.split if config.mode == "local_sgd" else 1)
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerRun(
            program_of(config, args), config, steps=steps, folder=folder, cluster="threads", on_report=report
        ) as run,
    ):
        result = run.wait()
    most = max((report.traffic for report in result.reports.values()), key=lambda x: x.pushed + x.pulled)
    return Measured(result.finished["heldout_loss"], most.pushed, most.pulled)


def data_parallel(args: argparse.Namespace) -> Measured:
    """Returns the loss and bytes of data parallelism: those of a run, or with ``--reference`` of none."""
    config = ServerConfig(workers=args.workers)
    if args.reference is None:
        return measure(config, args)
    size = sum(spec.nbytes for spec in program_of(config, args).model_params.values())
    return Measured(args.reference, args.steps * size, args.steps * size)


def same_optimizer(args: argparse.Namespace) -> list[float]:
    """Returns the losses of data parallelism with the optimizer and the rate of local SGD, or the given ones.

    The first is with the whole batch, the second with the batches of local SGD.
    """
    if args.same_optimizer is not None:
        return args.same_optimizer
    found = []
    for split in sorted({1, args.split}):
        steps, eval_batches = args.steps * split, Workload.eval_batches * split
        workload = Workload(steps, steps, args.batch // split, args.seq, args.workers, report=steps)
        workload = dataclasses.replace(workload, muon=args.optimizer == "muon", eval_batches=eval_batches)
        found.append(Search(workload).data_parallel(args.rate))
    return found


def configs(args: argparse.Namespace) -> dict[str, ServerConfig]:
    """Returns the runs of local SGD."""
    rate, momentum = map(float, args.outer.split(":"))
    local = ServerConfig(
        "local_sgd",
        workers=args.workers,
        sync_every=parse_yaml(f"every: {args.every}")["every"],
        outer_learning_rate=rate,
        outer_momentum=momentum,
    )
    compressed = {f"local_{kind}": dataclasses.replace(local, compression=kind) for kind in ("int8", "int4")}
    return {"local": local} | compressed


def main() -> Sequence[str]:
    """Run everything; returns the goals that were missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--every", default="20", help="sync_every, in YAML")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon", help="of local SGD")
    parser.add_argument("--rate", type=float, default=2e-2, help="learning rate of local SGD")
    parser.add_argument("--split", type=int, default=2, help="steps of local SGD for each one of data parallelism")
    parser.add_argument("--outer", default="1.0:0.0", help="learning rate and momentum of the outer optimizer")
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=["local_int8"])
    parser.add_argument("--reference", type=float, help="the loss of data parallelism, instead of a run")
    parser.add_argument("--same-optimizer", type=float, nargs="+", metavar="LOSS", help="of data parallelism with Muon")
    parser.add_argument("--eval-every", type=int, default=0, help="also evaluate during runs; its bytes count too")
    args = parser.parse_args()
    base = data_parallel(args)
    print(f"data_parallel  held-out loss {base.loss:.4f}   {base.sent / 2**20:.2f} MiB", flush=True)
    same = same_optimizer(args)
    losses = ", ".join(f"{loss:.4f}" for loss in same)
    print(f"data_parallel with {args.optimizer} at {args.rate:g}, held-out loss {losses}", flush=True)
    missed, good = [], False
    for name in args.runs:
        began = time.perf_counter()
        found = measure(configs(args)[name], args)
        gaps, part = [found.loss - loss for loss in (base.loss, *same)], base.sent / found.sent
        good |= max(gaps) <= NATS and found.sent <= FRACTION * base.sent
        print(
            f"{name:14} held-out loss {found.loss:.4f}, {gaps[0]:+.4f}, from the same optimizer "
            f"{', '.join(f'{gap:+.4f}' for gap in gaps[1:])}   pushed {found.pushed / 2**20:.2f} MiB, pulled "
            f"{found.pulled / 2**20:.2f} MiB, 1/{part:.1f} of the bytes   {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    if not good:
        missed.append(
            f"no run is within {NATS} nats of all data parallel runs with at most 1/{1 / FRACTION:.0f} of the bytes"
        )
    return missed


if __name__ == "__main__":
    missed_goals = main()
    for goal in missed_goals:
        print(f"missed: {goal}")
    sys.exit(bool(missed_goals))
