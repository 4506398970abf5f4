"""After SIGTERM to one process of a run, all processes save the same step and exit with 0.

    uv run python benchmarks/reliability/terminated_process.py [--processes 4 --trials 2]

Each process has two simulated devices.

Goal: at most ``GOAL`` seconds from the end of the save to the end of the last process. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.shared.paths import LAYOUTS
from jaxpar.app.launch.process_group import free_port
from jaxpar.checkpoint.manifest import NAME
from jaxpar.checkpoint.verify import check, steps_in

GOAL = 5.0
"""Most seconds from the end of the save to the end of the last process."""
RUN: dict[str, Any] = {
    "model": {"family": "llama", "preset": "tiny", "layers": 1, "embed": 16, "heads": 2, "head_dim": 8, "mlp": 24},
    "layout": str(LAYOUTS / "fsdp_tp.yaml"),
    "data": {"source": "synthetic", "batch": 16, "seq": 16},
    "train": {"steps": 1_000_000, "eval_every": 1_000_000, "eval_batches": 1},
    "checkpoint": {"save_interval_steps": 100},
}


def child(folder: Path, port: str, rank: int, count: int) -> None:
    """Run one process: two devices, a model of one matrix, the loop of ``jaxpar train``."""
    import jax
    import jax.numpy as jnp
    from rich.console import Console

    import jaxpar as jp
    from jaxpar.app.config import load_run
    from jaxpar.app.job import make_job
    from jaxpar.app.train.loop import train

    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, count, rank, coordinator_bind_address=address)
    job = replace(
        make_job(load_run(folder / "run.yaml")),
        make_model=lambda key: {"w": jp.tag(jax.random.normal(key, (16, 512)), "embed", "mlp")},
        loss_fn=lambda model, batch: jnp.mean((batch["tokens"].astype(jnp.float32) / 128 @ model["w"] - 1) ** 2),
    )
    train(job, Console())
    print(f"{time.process_time():.3f} CPU s", flush=True)


def terminate(count: int, trials: int, dice: random.Random, root: Path) -> bool:
    """Run ``count`` processes ``trials`` times, each ended by one SIGTERM; return whether the goal is met."""
    good, worst = True, 0.0
    for trial in range(trials):
        line, seconds = _one(count, dice.randrange(count), dice.uniform(0, 2), root / f"terminate{trial}")
        worst = max(worst, seconds)
        good &= "WRONG" not in line
        print(line, flush=True)
    good &= worst <= GOAL
    print(
        f"{'pass' if good else 'FAIL'}  SIGTERM to one of {count} processes, {trials} runs: at most {worst:.1f} s from "
        f"the end of the save to the end of the last process (goal: {GOAL:g} s)",
        flush=True,
    )
    return good


def _one(count: int, victim: int, pause: float, folder: Path) -> tuple[str, float]:
    """Run once; return a line about the run, and the seconds from its last save to its end."""
    folder.mkdir()
    (folder / "run.yaml").write_text(yaml.safe_dump({**RUN, "output": str(folder / "out")}))
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--child", str(folder), str(free_port())]
    screens = [(folder / f"{rank}.txt").open("w") for rank in range(count)]
    runs = [
        subprocess.Popen([*command, str(rank), str(count)], env=env, stdout=screen, stderr=subprocess.STDOUT)
        for rank, screen in enumerate(screens)
    ]
    try:
        checkpoints = folder / "out/checkpoints"
        while not steps_in(checkpoints) and all(run.poll() is None for run in runs):
            time.sleep(0.05)
        time.sleep(pause)
        asked = time.time()
        runs[victim].send_signal(signal.SIGTERM)
        cpu = [0.0] * count
        for rank, run in enumerate(runs):
            if run.returncode is not None:
                continue  # the process ended before the signal
            _, status, used = os.wait4(run.pid, 0)
            run.returncode = os.waitstatus_to_exitcode(status)
            cpu[rank] = used.ru_utime + used.ru_stime
        ended = time.time()
    finally:
        for run, screen in zip(runs, screens, strict=True):
            run.kill()
            screen.close()
    codes = [run.returncode for run in runs]
    if not steps_in(checkpoints):
        last = "\n".join((folder / f"{rank}.txt").read_text()[-2000:] for rank in range(count))
        return f"WRONG: exit statuses {codes} before the first checkpoint:\n{last}", 0.0
    step = steps_in(checkpoints)[-1]
    check(checkpoints / str(step), step)
    saved = (checkpoints / str(step) / NAME).stat().st_mtime
    same = all(f"steps             {step} in" in (folder / f"{rank}.txt").read_text() for rank in range(count))
    before = [re.findall(r"([\d.]+) CPU s", (folder / f"{rank}.txt").read_text()) for rank in range(count)]
    after = max((used - float(found[0]) for used, found in zip(cpu, before, strict=True) if found), default=0.0)
    verdict = "all processes stopped there with exit status 0"
    if not same or codes != [0] * count:
        verdict = f"WRONG: exit statuses {codes}"
    line = (
        f"SIGTERM to process {victim}: step {step} saved {saved - asked:.1f} s later, {verdict}; the last process "
        f"ended {ended - saved:.1f} s after the save, of which the end of a process takes {after:.1f} CPU s at most "
        f"(load {os.getloadavg()[0]:.0f})"
    )
    return line, ended - saved


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4, help="processes of a run (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=2, help="runs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of processes and moments (default: %(default)s)")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        folder, port, rank, count = options.child
        child(Path(folder), port, int(rank), int(count))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        good = terminate(options.processes, options.trials, random.Random(options.seed), Path(folder))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
