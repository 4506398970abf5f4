"""Tests two real processes: SIGTERM to one ends both after the same step, and the slow one is reported."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import yaml
from interpreters import outputs_of, two_processes, wait_for
from rich.console import Console

import jaxpar as jp
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.app.launch.process_group import free_port
from jaxpar.app.train import loop, run_data
from jaxpar.checkpoint.verify import check, steps_in
from jaxpar.data import Batches

RUN: dict[str, Any] = {
    "model": {"family": "llama", "preset": "tiny", "layers": 1, "embed": 16, "heads": 2, "head_dim": 8, "mlp": 24},
    "layout": str(Path(__file__).parents[2] / "configs/layouts/fsdp_tp.yaml"),
    "data": {"source": "synthetic", "batch": 8, "seq": 16},
    "train": {
        "steps": 100000,
        "eval_every": 100000,
        "eval_batches": 1,
        "straggler": {"every": 4},
        "max_consecutive_nonfinite": 1,
    },
    "checkpoint": {"save_interval_steps": 3},
}
BAD = 5
"""The batch with a non-finite loss, which makes both processes roll back first."""


@pytest.mark.slow
def test_sigterm_to_one_process_ends_both_after_the_same_step(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RUN, "output": str(tmp_path / "out")}))
    with two_processes(__file__, tmp_path, flags="--xla_force_host_platform_device_count=4") as workers:
        named = lambda: [one for one in records(tmp_path) if one.get("slow") == [1]]
        beyond = lambda: any(one["step"] > BAD + 1 for one in records(tmp_path))
        wait_for(lambda: (bool(named()) and beyond()) or any(worker.poll() is not None for worker in workers))
        workers[1].send_signal(signal.SIGTERM)
        outputs_of(workers, timeout=600)
    ended = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    last = ended[0]["steps"]
    assert last == ended[1]["steps"] == steps_in(tmp_path / "out/checkpoints")[-1] > 4
    for one in ended:
        assert one["signal"] == signal.SIGTERM and "stopped by SIGTERM" in one["screen"]
        # Both processes rolled back to step 3, and skip batches 4 and 5.
        assert one["passed"] == [[4, 5]] and "rolled back from step 5 to 3: step 5 was not finite" in one["screen"]
        assert "process 1 is slow: it spends " in one["screen"] and "process 1         " in one["screen"]
    slow = named()[0]
    assert slow["own_seconds"][1] > 0.5 and slow["own_seconds"][1] > 2 * slow["own_seconds"][0]
    assert len(slow["waited_seconds"]) == 2
    found = check(tmp_path / "out/checkpoints" / str(last))
    assert found.metadata["passed"] == [[4, 5]] and found.metadata["position"] == ended[0]["position"]


@pytest.mark.slow
def test_sigterm_to_one_process_before_its_first_step_ends_both_at_once(tmp_path: Path) -> None:
    """This test uses the command line, whose processes can leave a compile."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RUN, "cpu_devices": 4, "output": str(tmp_path / "out")}))
    place = ("--coordinator", f"127.0.0.1:{free_port()}", "--process-count", "2", "--process-id")
    command = [sys.executable, "-m", "jaxpar.app.cli", "train", str(tmp_path / "run.yaml"), *place]
    env = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    screens = [tmp_path / f"{rank}.txt" for rank in range(2)]
    with ExitStack() as opened:
        runs = [
            subprocess.Popen(
                [*command, str(rank)], env=env, stdout=opened.enter_context(screen.open("w")), stderr=subprocess.STDOUT
            )
            for rank, screen in enumerate(screens)
        ]
        try:
            wait_for(lambda: "\ntext  " in screens[1].read_text() or any(run.poll() is not None for run in runs))
            runs[1].send_signal(signal.SIGTERM)
            codes = [run.wait(300) for run in runs]
        finally:
            for run in runs:
                run.kill()
                run.wait()
    said = [screen.read_text() for screen in screens]
    assert codes == [85, 85], said
    for text in said:
        assert "stopped by SIGTERM during the compile: no step was run, so there is nothing to save" in text
        assert "compiled in" not in text and "Traceback" not in text
    assert steps_in(tmp_path / "out/checkpoints") == []


def records(folder: Path) -> list[dict[str, Any]]:
    file = folder / "out/metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Stream:
    """Batches of which one is marked; process 1 is slow, because it sleeps before each batch."""

    def __init__(self, *arguments: Any, **options: Any):
        self._inner = Batches(*arguments, **options)
        self._taken = 0

    def __next__(self) -> Any:
        self._taken += 1
        if jax.process_index() == 1:
            time.sleep(0.5)
        batch = next(self._inner)
        return {**batch, "tokens": -batch["tokens"] - 1} if self._taken == BAD else batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def work(address: str, rank: str, folder: str) -> None:
    screen = io.StringIO()
    jax.distributed.initialize(address, 2, int(rank), coordinator_bind_address=address)
    streams = list[Stream]()

    def made(*arguments: Any, **options: Any) -> Stream:
        streams.append(Stream(*arguments, **options))
        return streams[-1]

    run_data.Batches = made
    job = replace(
        make_job(load_run(Path(folder) / "run.yaml")),
        make_model=lambda key: {"w": jp.tag(jax.random.normal(key, (16, 8)), "embed", "mlp")},
        loss_fn=lambda model, batch: (
            jnp.mean((jnp.abs(batch["tokens"]).astype(jnp.float32) / 128 @ model["w"] - 1) ** 2)
            * jnp.where(jnp.any(batch["tokens"] < 0), jnp.nan, 1.0)
        ),
    )
    console = Console(file=screen, width=300, highlight=False)
    try:
        summary = loop.train(job, console)
    finally:
        print(screen.getvalue())
    about = check(Path(folder) / "out/checkpoints" / str(summary.steps)).metadata
    told = {"steps": summary.steps, "signal": summary.signal, "passed": summary.passed, "screen": screen.getvalue()}
    (Path(folder) / f"{rank}.json").write_text(json.dumps({**told, "position": about["position"]}))


if __name__ == "__main__":
    work(*sys.argv[1:])
