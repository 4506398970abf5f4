"""The step of the busiest device under an imbalanced load: the figures, the reports, and the ``check`` command."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from error_texts import raises
from stored import facts, step

import jaxpar as jp
from jaxpar.analysis.checkup import checkup
from jaxpar.analysis.checkup.checkup import check_up, examine
from jaxpar.analysis.checkup.html import page
from jaxpar.analysis.checkup.imbalance import DeviceLoad, LoadImbalance, load_imbalance
from jaxpar.analysis.roofline import roofline
from jaxpar.app.cli import main
from jaxpar.errors import PlanError

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
MESH = facts("tpu_experts")["mesh"]


def test_the_loads_are_audits_and_rooflines_of_the_same_program() -> None:
    program = step("tpu_experts")
    found = load_imbalance(program, MESH, 2.0)
    assert list(found.loads) == ["balanced", "imbalanced", "worst"]
    for key, imbalance in (("balanced", 1.0), ("imbalanced", 2.0), ("worst", math.inf)):
        report = jp.audit(program.text, mesh=MESH, imbalance=imbalance)
        expected = (report.matmul_flops, report.wire_bytes(), roofline(report, "v5e:4x4").step)
        assert dataclasses.astuple(found.loads[key]) == expected
    flops = {key: load.matmul_flops for key, load in found.loads.items()}
    assert flops["imbalanced"] == 2 * flops["balanced"] and flops["worst"] * 192 == flops["balanced"] * 512
    steps = [load.step for load in found.loads.values()]
    assert steps == sorted(steps) and len(set(steps)) == 3


def test_the_roofline_of_an_imbalanced_audit_says_so() -> None:
    report = jp.audit(step("tpu_experts").text, mesh=MESH, imbalance=1.5)
    found = roofline(report, "v5e:4x4")
    assert found.imbalance == 1.5
    assert " on v5e:4x4 (16 × TPU v5e) at a load imbalance of 1.5, bound by " in found.headline()
    balanced = roofline(jp.audit(step("tpu_experts").text, mesh=MESH), "v5e:4x4")
    assert "imbalance" not in balanced.headline() and balanced.step < found.step


def test_a_factor_of_one_is_the_balanced_load() -> None:
    loads = load_imbalance(step("tpu_experts"), MESH, 1).loads
    assert loads["imbalanced"] == loads["balanced"]


def test_the_table_has_ratios_to_the_balanced_load() -> None:
    loads = {"balanced": DeviceLoad(1000, 2048, 0.5), "imbalanced": DeviceLoad(1500, 3072, 0.75)}
    found = LoadImbalance(1.5, {**loads, "worst": DeviceLoad(4000, 8192, 2.0)})
    assert str(found).splitlines() == [
        "load imbalance 1.5: the busiest device, by the roofline (a model, not a measurement)",
        "  load            matmul FLOPs  on the wire  step",
        "  balanced        1000          2.00 KiB     500 ms",
        "  1.5 × balanced  1500          3.00 KiB     750 ms (1.50 ×)",
        "  full buffers    4000          8.00 KiB     2 s (4.00 ×)",
    ]


def test_a_program_without_ragged_operations_has_no_loads() -> None:
    text = "HloModule m\n\nENTRY %main (x: f32[4]) -> f32[4] {\n  ROOT %x = f32[4]{0} parameter(0)\n}\n"
    found = load_imbalance(step("tpu_experts", text=text), {"data": 1}, 2.0)
    assert found == LoadImbalance(2.0, {}) and str(found) == (
        "load imbalance 2: the program has no ragged operations, so the routing of tokens does not change its work"
    )


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the compiler by a stored program: the last name in the list."""
    names = ["tpu_experts"]
    monkeypatch.setattr(checkup, "compile_for", lambda *_, **__: step(names[-1]))
    monkeypatch.setattr(checkup, "examine", lambda program, sizes, given, about: examine(program, MESH))
    return names


def run(*words: str) -> int:
    return main(["check", str(QUICKSTART), "--set", "model.layers=2", *words])


@pytest.mark.slow
def test_check_prints_and_writes_the_loads(
    compiled: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"r.{name}" for name in ("json", "html")}
    words = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    assert run("--topology", "v5e:4x4", "--imbalance", "2.0", *words) == 0
    loads = load_imbalance(step("tpu_experts"), MESH, 2.0)
    lines = str(loads).splitlines()
    assert lines[:2] == [
        "load imbalance 2: the busiest device, by the roofline (a model, not a measurement)",
        "  load          matmul FLOPs  on the wire  step",
    ]
    assert [line.split("  ")[1] for line in lines[2:]] == ["balanced", "2 × balanced", "full buffers"]
    assert str(loads) in capsys.readouterr().out
    told = json.loads(files["json"].read_text())["imbalance"]
    assert told == json.loads(json.dumps(dataclasses.asdict(loads))) and told["factor"] == 2.0
    html = files["html"].read_text()
    assert "<h2>If the load is imbalanced</h2>" in html and "<td>2 × balanced</td>" in html
    compiled.append("tpu_fsdp_tp")
    assert run("--topology", "v5e:4x4", "--imbalance", "2.0", *words) == 0
    assert (
        "load imbalance 2: the program has no ragged operations, so the routing of tokens does not change its work\n"
        in capsys.readouterr().out
    )
    assert json.loads(files["json"].read_text())["imbalance"] == {"factor": 2.0, "loads": {}}
    assert "has no ragged operations" in files["html"].read_text()


def test_without_the_option_there_is_no_section() -> None:
    found = examine(step("tpu_experts"), MESH)
    assert found.imbalance is None and json.loads(found.to_json())["imbalance"] is None
    assert "load imbalance" not in str(found) and "imbalanced" not in page(found, "run")


@pytest.mark.parametrize("factor", [0.5, 0.0, math.inf, math.nan])
def test_other_factors_are_refused(factor: float) -> None:
    arguments: Any = (None,) * 6
    for refuse in (
        lambda: load_imbalance(step("tpu_experts"), MESH, factor),
        lambda: check_up(*arguments, imbalance=factor),
    ):
        with raises(PlanError, "imbalance"):
            refuse()
