"""Runs of a model with experts: its metrics, and held-out losses without those of the routers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxpar.app.cli import main
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.models.losses import next_token_loss, token_loss

CONFIGS = Path(__file__).parents[3] / "configs"
RECIPE = CONFIGS / "recipes" / "moe.yaml"
SMALL = {"embed": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "expert_mlp": 24, "layers": 2}
METRICS = {"aux_loss", "dropped_fraction", "expert_load_max", "router_entropy", "router_nonfinite"}


def run(tmp_path: Path, **keys: Any) -> Path:
    """A short run of a small model whose balance loss is far above that of the tokens."""
    file = tmp_path / "run.yaml"
    model = {"family": "mixtral", "preset": "tiny", **SMALL, "balance_loss": 30.0}
    train = {"steps": 2, "eval_every": 1, "eval_batches": 1}
    data = {"source": "synthetic", "batch": 16, "seq": 32}
    values = {"extends": str(RECIPE), "model": model, "train": train, "data": data, **keys}
    file.write_text(yaml.safe_dump({**values, "output": str(tmp_path / "out")}))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("pipelined", [False, True])
def test_a_run_reports_its_routers_and_the_loss_of_its_tokens(
    pipelined: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys: dict[str, Any] = {}
    if pipelined:
        rules = {"extends": str(CONFIGS / "layouts" / "ep.yaml"), "rules": {"layers": "pipeline"}}
        layout = tmp_path / "layout.yaml"
        layout.write_text(yaml.safe_dump({**rules, "mesh": {"pipeline": 2, "data": 2, "expert": 2}}))
        keys = {"layout": str(layout), "parallel": {"pipeline": {"schedule": "1f1b", "microbatches": 2}}}
    config = run(tmp_path, **keys)
    assert main(["train", str(config)]) == 0
    screen = capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    heldout = [line["heldout_loss"] for line in lines if "heldout_loss" in line]
    assert all(METRICS <= line.keys() for line in steps) and "aux_loss" in screen
    assert all(line["aux_loss"] > 30 and line["loss"] > line["aux_loss"] for line in steps)
    assert all(2 < loss < 8 for loss in heldout)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["verify", "explain", "generate"])  # a run itself checks
def test_every_command_takes_experts(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--prompt", "a", "--max-new-tokens", "2"] if command == "generate" else []
    assert main([command, str(run(tmp_path)), *more]) == 0
    if command != "generate":
        assert "expert" in capsys.readouterr().out


def test_the_held_out_loss_of_experts_is_that_of_the_tokens() -> None:
    job = make_job(load_run(RECIPE))
    assert (job.loss_fn, job.eval_loss_fn) == (next_token_loss, token_loss)
