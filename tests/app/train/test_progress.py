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
        line.update(1, 3.25, heldout, 0.1, 640.0, None, {})
    assert f"step 1/1  loss 3.2500{shown}  640 tok/s  100 ms/step" in cast(Any, console.file).getvalue()


def test_the_metrics_of_the_loss_are_shown() -> None:
    console = Console(file=io.StringIO(), width=200)
    with StepLine(console, 1) as line:
        line.update(1, 3.25, math.nan, 0.1, 640.0, 0.25, {"expert_load_max": 1.23456, "router_nonfinite": 0.0})
    shown = "100 ms/step  MFU 25.0%  expert_load_max 1.235  router_nonfinite 0  ETA"
    assert shown in cast(Any, console.file).getvalue()


def test_the_training_loss_begins_with_the_first_known_one(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    summary = Summary(losses=[math.nan, math.nan, 3.0, 2.0], goodput=Goodput().record())
    saver = SimpleNamespace(unsaved="", active=False)
    conclude(summary, tmp_path, console, cast(Any, saver))
    assert "training loss     3.0000 -> 2.0000 nats per token" in cast(Any, console.file).getvalue()
