"""A run that comes back on other numbers of devices continues as if nothing had happened."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_processes import ROOT, TrainProcess

from jaxpar.app.launch.exit_codes import ExitCode
from jaxpar.checkpoint.verify import steps_in

STEPS = 160
RUN: dict[str, Any] = {
    "model": {"family": "llama", "preset": "tiny", "layers": 2, "embed": 48, "heads": 4, "head_dim": 8, "mlp": 96},
    "layout": str(ROOT / "configs" / "layouts" / "fsdp_tp.yaml"),  # its axis `data` has size -1
    "mesh": {"model": 2},
    "data": {"source": "synthetic", "batch": 24, "seq": 16},
    "optimizer": {"learning_rate": 1e-3, "warmup": 5},
    "train": {"steps": STEPS, "eval_every": STEPS, "eval_batches": 1},
    "checkpoint": {"save_interval_steps": 10, "keep": 100},
}


@pytest.mark.slow
def test_8_then_6_then_4_then_8_devices_train_as_one(tmp_path: Path) -> None:
    saved: list[int] = []
    # The number of devices, the signal that ends the run there after 25 more steps, and the exit status.
    for devices, number, status in (
        (8, signal.SIGTERM, int(ExitCode.STOPPED)),
        (6, signal.SIGKILL, -signal.SIGKILL),
        (4, signal.SIGTERM, int(ExitCode.STOPPED)),
        (8, None, 0),
    ):
        run = TrainProcess(tmp_path / "elastic", {**RUN, "cpu_devices": devices})
        if number is not None:
            run.wait_for(partial(run.reached, (saved or [0])[-1] + 25))
            run.process.send_signal(number)
        assert run.end() == status, run.screen()
        assert run.printed(rf"data {devices // 2}\b.*model 2 = {devices} devices \(cpu\)"), run.screen()
        resumed = run.printed(r"^resumed from step (\d+) ")
        assert [int(found[1]) for found in [resumed] if found] == saved[-1:], run.screen()
        saved = steps_in(tmp_path / "elastic/run/checkpoints")
    assert saved[-1] == STEPS and len(run.losses()) == STEPS
    alone = TrainProcess(tmp_path / "alone", {**RUN, "cpu_devices": 1, "mesh": {"model": 1}})
    assert alone.end() == 0, alone.screen()
    assert list(run.losses()) == list(alone.losses()) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(run.losses().values()), list(alone.losses().values()), rtol=1e-5)
    assert alone.losses()[STEPS] < alone.losses()[1] - 0.1  # the model learns, so equal losses mean equal training
