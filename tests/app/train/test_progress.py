"""Tests the line of a step and the closing figures, where a process knows nothing of the steps before a resume."""

from __future__ import annotations

import io
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from jaxpar.app.train.goodput import Goodput
from jaxpar.app.train.progress import StepLine
from jaxpar.app.train.summary import Summary, conclude


@pytest.mark.parametrize(("heldout", "shown"), [(2.5, "  held-out 2.5000"), (math.nan, "")])
def test_a_heldout_loss_that_is_not_known_is_left_out(heldout: float, shown: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    with StepLine(console, 1) as line:
        line.update(1, 3.25, heldout, 0.1, (640.0, None), {})
    assert f"step 1/1  loss 3.2500{shown}  640 tok/s  100 ms/step" in cast(Any, console.file).getvalue()


def test_the_metrics_of_the_loss_are_shown() -> None:
    console = Console(file=io.StringIO(), width=200)
    with StepLine(console, 1) as line:
        line.update(1, 3.25, math.nan, 0.1, (640.0, 0.25), {"expert_load_max": 1.23456, "router_nonfinite": 0.0})
    shown = "100 ms/step  MFU 25.0%  expert_load_max 1.235  router_nonfinite 0  ETA"
    assert shown in cast(Any, console.file).getvalue()


def test_the_remaining_time_after_a_resume_is_that_of_the_steps_since(monkeypatch: pytest.MonkeyPatch) -> None:
    console, clock = Console(file=io.StringIO(), width=200), [100.0]
    monkeypatch.setattr("jaxpar.app.train.progress.time.perf_counter", lambda: clock[0])
    with StepLine(console, 1000) as line:
        for step in range(900, 951):
            line.update(step, 1.0, math.nan, 2.0, (10.0, None), {})
            clock[0] += 2.0
    text = cast(Any, console.file).getvalue()
    assert "step 900/1000" in text and "ETA 200 s" in text and "ETA 100 s" in text  # from the first, and since


def test_a_narrow_terminal_shows_the_counter_and_whole_words() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, legacy_windows=False, color_system=None)
    with StepLine(console, 4000) as line:
        line.update(2400, 3.25, 2.5, 0.1, (64000.0, None), {})
        line._bar.refresh()
    assert "2400/4000 loss 3.2500  held-out 2.5000  64,000 tok/s" in cast(Any, console.file).getvalue()


def test_a_broken_matplotlib_does_not_end_a_run_that_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **options: object) -> None:
        raise ImportError("numpy.core.multiarray failed to import")

    monkeypatch.setattr("jaxpar.app.train.summary.draw_loss", broken)
    console = Console(file=io.StringIO(), width=400)
    summary = Summary(losses=[3.0, 2.0], goodput=Goodput().record())
    conclude(summary, tmp_path, console, cast(Any, SimpleNamespace(unsaved="", active=False)))
    text = cast(Any, console.file).getvalue()
    assert f"{tmp_path}/loss.png cannot be written: numpy.core.multiarray failed to import\n" in text
    assert "done" in text and f"tensorboard, {tmp_path}/loss.png" not in text


def test_the_training_loss_begins_with_the_first_known_one(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    summary = Summary(losses=[math.nan, math.nan, 3.0, 2.0], goodput=Goodput().record())
    saver = SimpleNamespace(unsaved="", active=False)
    conclude(summary, tmp_path, console, cast(Any, saver))
    assert "training loss     3.0000 -> 2.0000 nats per token" in cast(Any, console.file).getvalue()
