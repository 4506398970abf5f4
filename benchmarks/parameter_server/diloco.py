"""Local SGD with an outer optimizer (DiLoCo) beside data parallelism: held-out loss, and bytes that workers push.

    python benchmarks/parameter_server/diloco.py --steps 400 --batch 32 --seq 128

All runs train the model of configs/quickstart.yaml on one CPU device for each worker, with the same batches. The data
parallel run is synchronous; the quickstart itself is data parallel too, and faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

from jaxpar.app.train.server_run import job_program
from jaxpar.parameter_server import ServerConfig, ServerRun

RUNS = ("data_parallel", "local", "local_int8")
CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


def measure(config: ServerConfig, args: argparse.Namespace) -> tuple[float, float]:
    """Returns the held-out loss in nats per token, and the MiB that a worker pushed."""
    settings = (
        *("cpu_devices=1", "mesh.model=1", f"data.batch={args.batch}", f"data.seq={args.seq}"),
        *(f"train.steps={args.steps}", "train.eval_every=100000", f"optimizer.learning_rate={args.rate}"),
    )
    program = job_program(CONFIG, settings, config)
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerRun(program, config, steps=args.steps, folder=folder, cluster="threads") as run,
    ):
        result = run.wait()
    pushed = max(report.traffic.pushed for report in result.reports.values())
    return result.finished["heldout_loss"], pushed / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--outer", default="0.7:0.9", help="learning rate and momentum of the outer optimizer")
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=RUNS)
    args = parser.parse_args()
    rate, momentum = map(float, args.outer.split(":"))
    local = ServerConfig(
        "local_sgd",
        workers=args.workers,
        sync_every=args.every,
        outer_learning_rate=rate,
        outer_momentum=momentum,
    )
    configs = {
        "data_parallel": ServerConfig(workers=args.workers),
        "local": local,
        "local_int8": dataclasses.replace(local, compression="int8"),
    }
    for name in args.runs:
        began = time.perf_counter()
        loss, pushed = measure(configs[name], args)
        seconds = time.perf_counter() - began
        print(f"{name:14} held-out loss {loss:.4f}   pushed {pushed:8.2f} MiB per worker   {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
