"""Tests runs of a model that the configuration names: an unannotated one, from the working directory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpar.app.cli import main

PARTS = """
import jax

def mlp(p, x):
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]
"""
MODEL = """
import jax, optax
import language_parts

def make_model(key, width=16):
    make = lambda *shape: jax.random.normal(key, shape) * shape[0] ** -0.5
    up, down = make(width, 2 * width), make(2 * width, width)
    return {"table": make(256, width), "head": make(width, 256), "up": up, "down": down}

def loss(p, batch):
    logits = language_parts.mlp(p, p["table"][batch["tokens"]]) @ p["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

def endless(p, batch):
    return jax.lax.while_loop(lambda x: x < 0, lambda x: x + 1, loss(p, batch))

def broken(key):
    raise KeyError("no such weight")
"""
RUN = """
model: {factory: "language_model:make_model", loss: "language_model:loss", args: {width: 32}}
layout: LAYOUT
cpu_devices: 8
data: {batch: 16, seq: 16}
optimizer: {learning_rate: 0.01, warmup: 0}
train: {steps: 4, eval_batches: 1}
checkpoint: {save_interval_steps: 4}
output: out
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder with a model, the working directory, and the run's file in it."""
    layout = Path("configs/layouts/fsdp_tp.yaml").absolute()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "language_model.py").write_text(MODEL, encoding="utf-8")
    (tmp_path / "language_parts.py").write_text(PARTS, encoding="utf-8")
    (tmp_path / "queue.py").write_text("raise SystemExit('a file of the working directory was imported')")
    (tmp_path / "run.yaml").write_text(RUN.replace("LAYOUT", str(layout)), encoding="utf-8")
    yield "run.yaml"
    for name in ("language_model", "language_parts"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_a_model_without_names_trains_sharded(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", run]) == 0
    assert (
        "model   language_model:make_model, 20,480 parameters in 4 tensors, float32 compute" in capsys.readouterr().out
    )
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert (tmp_path / "out" / "checkpoints").is_dir()


def test_its_names_are_found_and_explained(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", run, "--full"]) == 0
    screen = capsys.readouterr().out
    rows = {line.split()[0]: line for line in screen.splitlines() if line.startswith("params/")}
    assert "embed, mlp" in rows["params/up"] and "data, model" in rows["params/up"]
    assert "vocab, embed" in rows["params/table"]


@pytest.mark.parametrize("command", ["explain", "check"])
def test_a_step_that_cannot_be_traced_is_a_problem(command: str, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, run, "--set", "model.loss=language_model:endless"]) == 2
    shown = capsys.readouterr()
    assert "the step cannot be traced: Reverse-mode differentiation does not work for lax.while_loop" in shown.err
    assert ("table" in shown.out) == (command == "explain"), "the report is printed all the same"


@pytest.mark.slow
def test_it_is_verified_against_one_device(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", run]) == 0
    assert "verified            within 1e-05" in capsys.readouterr().out


@pytest.mark.slow
def test_muon_trains_it_as_on_one_device(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    muon = [run, "--set", "optimizer.name=muon", "--set", "optimizer.muon.adam_learning_rate=0.001"]
    assert main(["explain", *muon, "--full"]) == 0
    screen = capsys.readouterr().out
    momenta = [line.split()[0] for line in screen.splitlines() if line.startswith("opt_state/inner_states/muon/")]
    assert [path.rpartition("/")[2] for path in momenta if "/mu/" in path] == ["down", "up"]
    assert main(["verify", *muon]) == 0
    assert "verified            within 1e-05" in capsys.readouterr().out
    assert main(["train", *muon]) == 0
    assert main(["train", *muon, "--set", "train.steps=6", "--set", "checkpoint.resume=required"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 6 and losses[-1] < losses[0]


WRONG = {
    "model.factory=language_model": (
        "model.factory must be module:function, got 'language_model'. Remedy: such as my_module:make_model."
    ),
    "model.factory=language_model:make_modle": (
        "model.factory: language_model ({folder}/language_model.py) has no function 'make_modle'. Did you mean "
        "'make_model'?"
    ),
    "model.loss=language:loss": (
        "model.loss: there is no module 'language' in {folder} or on Python's path. Remedy: run in the folder of "
        "language.py, or install it."
    ),
    "model.args.depth=3": (
        "model: language_model:make_model fails with args {{'width': 32, 'depth': 3}}: TypeError: make_model() got an "
        "unexpected keyword argument 'depth' (called by jaxpar). Remedy: it is called as function(key, **args)."
    ),
    "model.factory=language_model:broken": (
        "model: language_model:broken fails with args {{}}: KeyError: 'no such weight' "
        "({folder}/language_model.py:18). "
        "Remedy: it is called as function(key, **args)."
    ),
    "parallel.offload.optimizer=host": (
        "parallel.offload is for built-in models, but model.factory names one of your own. Remedy: leave it out; the "
        "model itself can do this, with the functions of jaxpar."
    ),
    "parallel.pipeline.microbatches=2": (
        "parallel.pipeline runs the layers that a jaxpar.pipeline.PipelineLoss names, but model.loss: "
        "language_model:loss is none. Remedy: a PipelineLoss(layers=..., embed=..., layer=..., head=...), or leave "
        "parallel.pipeline out."
    ),
    "parallel.remat=full": (
        "remat: the loss has no repeated layers that 'full' could recompute: no scan over stacked weights, and no "
        "equal modules with numbers in their paths. Remedy: leave remat out, or call jax.checkpoint in the model."
    ),
    "data.packing=true": (
        "data.packing is for built-in models, but model.factory names one of your own. Remedy: packing: false."
    ),
}


@pytest.mark.parametrize("change", WRONG)
def test_what_does_not_fit_is_named(change: str, run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--set", "model.args={}"] if "broken" in change else []
    assert main(["explain", run, "--set", change, *more]) == 2
    assert capsys.readouterr().err == f"ConfigError: {WRONG[change].format(folder=tmp_path)}\n"


def test_generate_says_that_the_cache_is_not_known(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", run, "--prompt", "a", "--set", "output=none"]) == 2
    assert "generate: language_model:make_model is a model of your own" in capsys.readouterr().err
