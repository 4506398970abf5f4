"""``jaxpar plan`` from the command line, with a compiler that has the same figures for every plan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxpar.app import plan as plan_command
from jaxpar.app.cli import main
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.app.plan import RunPlanner
from jaxpar.planning.search import scaling, topologies
from jaxpar.planning.search.compiled import CompiledPlan
from jaxpar.planning.search.plan import Plan
from jaxpar.sharding.hardware.topology import Topology

MODEL = """
import jax, jax.numpy as jnp, optax

def make_model(key):
    return {"table": jax.random.normal(key, (64, 16)), "head": jax.random.normal(key, (16, 64))}

def loss(model, batch):
    logits = model["table"][batch["tokens"]] @ model["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
"""
RUN = """
model: {factory: "plain_words:make_model", loss: "plain_words:loss"}
data: {source: synthetic, batch: 16, seq: 16}
optimizer: {learning_rate: 0.01, warmup: 0}
output: none
"""


@dataclass(frozen=True)
class Compiler:
    """Has the same figures for every plan that can be built, and knows no memory."""

    run_of: Any
    topology: Topology

    def traced_bytes(self, plan: Plan) -> int | None:
        return None

    def compiled(self, plan: Plan) -> CompiledPlan:
        assert self.run_of(plan).layout.sizes == dict(plan.mesh)
        return CompiledPlan(True, 0.25, 0.125, 0.0625, 0.0, (), 0.0, 0.0, 2.0**20)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a run of a model of the user's own."""
    for module in (plan_command, scaling, topologies):
        monkeypatch.setattr(module, "CompilerMeasures", Compiler)
    (tmp_path / "plain_words.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return file


def test_the_best_plan_is_written_as_a_run_that_can_be_built(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best, told = config.with_name("best.yaml"), config.with_name("plans.json")
    fixed = ("--set", "mesh.data=2", "--set", "mesh.model=2", "--set", "train.grad_accum_steps=2")
    assert main(["plan", str(config), "--topology", "v5e:2x2", *fixed, "--output", str(best), "--json", str(told)]) == 0
    screen, plans = capsys.readouterr().out, json.loads(told.read_text())
    assert screen.endswith(f"wrote {best}: jaxpar check {best} --topology v5e:2x2\n")
    first = plans["plans"][0]
    assert first["compiled"] and (first["step_seconds"], first["peak_bytes"]) == (0.25, 2**20)
    assert best.read_text().startswith(f"# {first['plan']} on v5e:2x2: 250 ms a step, ")
    assert yaml.safe_load(best.read_text()) == first["config"]
    job = make_job(load_run(best))
    assert job.layout(4).sizes["data"] == job.layout(4).sizes["model"] == 2
    assert (
        job.config.train.grad_accum_steps == 2 and job.config.optimizer == make_job(load_run(config)).config.optimizer
    )
    # A written plan is the run's own layout, which is compiled first and shown as given.
    assert main(["plan", str(best), "--topology", "v5e:2x2", "--programs", "1"]) == 0
    assert " as given\n" in capsys.readouterr().out


@pytest.mark.slow
def test_an_operator_search_is_given_the_rules_of_the_run(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(RUN + "mesh: {data: 2, model: 2}\nrules: {batch: data, vocab: model}\n")
    assert main(["plan", str(config), "--topology", "v5e:2x2", "--search", "sharding_propagation"]) == 0
    assert "sharding_propagation" in capsys.readouterr().out


@pytest.mark.slow
def test_topologies_are_compared(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = config.with_name("plans.json")
    words = ("--topology", "v5e:2x2,v5e:2x1", "--objective", "chips", "--max-batch", "32", "--programs", "1")
    assert main(["plan", str(config), *words, "--json", str(told)]) == 0
    report = json.loads(told.read_text())
    chips = {one["topology"]: (one["chips"], one["compiled"]) for one in report["topologies"]}
    assert report["goal"] == "chips" and chips == {"v5e:2x2": (4, False), "v5e:2x1": (2, True)}
    assert {one["choices"]["batch"] for one in report["plans"]} <= {16, 32}
    assert report["topology"] == "v5e:2x1" and "1  v5e:2x1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_range_of_sizes_is_planned(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = config.with_name("points.json")
    words = ("--topology", "v5e", "--scale", "2:4", "--compile-up-to", "2", "--programs", "1")
    assert main(["plan", str(config), *words, "--json", str(told)]) == 0
    points = json.loads(told.read_text())["points"]
    assert [(p["topology"], p["batch"], p["compiled"]) for p in points] == [
        ("v5e:2x1", 16, True),
        ("v5e:2x2", 32, False),
    ]
    assert points[0]["step_seconds"] == 0.25 and "weak scaling" in capsys.readouterr().out
    assert main(["plan", str(config), *words, "--output", "best.yaml"]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: plan: --output has no effect with --scale. Remedy: leave it or --scale out.\n"
    )


def test_a_layout_for_other_devices_or_without_a_mesh_is_not_the_runs_own(config: Path) -> None:
    assert RunPlanner(config).given(4) == {}
    config.write_text(RUN + "mesh: {data: 2, model: 2}\nrules: {batch: data, vocab: model}\n")
    planner = RunPlanner(config)
    assert planner.given(8) == {}
    data = planner.config_of(Plan(data=8, zero=1, offload=True, batch=32))
    assert data["parallel"]["offload"] == {"optimizer": "host"}
    assert (data["parallel"]["optimizer"]["stage"], data["data"]["batch"]) == (1, 32)
