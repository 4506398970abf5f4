"""How the best plan grows with the chips: shapes of topologies, weak and strong scaling, estimates marked as such."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from error_texts import raises

from jaxpar.analysis.checkup.findings import About
from jaxpar.errors import MeshError, PlanError
from jaxpar.planning.search import scaling
from jaxpar.planning.search.compiled import CompiledPlan, PlannedRun
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.scaling import ScaleOptions, ScalePoint, ScalingReport, scale, scale_sizes, topology_of
from jaxpar.planning.search.space import Space, tensor_dims
from jaxpar.planning.search.workload import Workload
from tests.planning.llama_workload import llama_workload

WORK = llama_workload(batch=16)
AXES = ("pipeline", "replica", "data", "context", "ulysses", "model")
SPACE = Space(AXES, tensor_dims(WORK), True, remat=("none", "full"))


@dataclass(frozen=True)
class Planned:
    """A planner that compiles nothing."""

    workload: Workload

    def run_of(self, plan: Plan) -> PlannedRun:
        tokens = (plan.batch or self.workload.sizes["batch"]) * self.workload.sizes["seq"]
        about = About(tokens, tokens * 6.0 * self.workload.param_count)
        nothing: Any = None
        return PlannedRun(nothing, nothing, nothing, nothing, nothing, about=about)

    def config_of(self, plan: Plan) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Instant:
    """A compiler that has the same figures for every plan."""

    figures: CompiledPlan

    def traced_bytes(self, plan: Plan) -> int | None:
        return None

    def compiled(self, plan: Plan) -> CompiledPlan:
        return self.figures


def scaled(*chips: int, how: Any = "weak", work: Workload = WORK) -> ScalingReport:
    return scale(Planned(work), SPACE, "v5e", ScaleOptions(chips, how))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("v5e", {4: "v5e:2x2", 8: "v5e:2x4", 128: "v5e:8x16", 256: "v5e:16x16", 512: "v5e:16x16*2"}),
        ("v5p", {4: "v5p:2x2x1", 16: "v5p:2x2x4", 128: "v5p:4x4x8", 8192: "v5p:16x16x32", 16384: "v5p:16x16x32*2"}),
        ("tpu7x", {64: "tpu7x:4x4x4"}),
        ("h100", {4: "h100:4", 8: "h100:8", 64: "h100:8x8"}),
    ],
)
def test_a_size_has_the_usual_shape_of_its_kind(kind: str, names: dict[int, str]) -> None:
    found = {chips: topology_of(kind, chips) for chips in names}
    assert {chips: str(topology) for chips, topology in found.items()} == names
    for chips, topology in found.items():
        assert topology.devices == chips * topology.accelerator.chip_devices


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(MeshError, match="unknown accelerator 'v5x'"):
        topology_of("v5x", 8)


@pytest.mark.parametrize("text", ["16", "16:", "24:96", "64:16", "0:8"])
def test_sizes_are_powers_of_two(text: str) -> None:
    with raises(PlanError, "--scale"):
        scale_sizes(text)


@pytest.mark.slow
def test_weak_scaling_keeps_the_sequences_of_a_chip() -> None:
    small, large = scaled(16, 512).points
    assert (small.batch, large.batch) == (16, 512)
    # A little more than 32 times: dims of 16 chips close to rings, which have twice the bandwidth.
    assert large.tokens_per_second == pytest.approx(32 * small.tokens_per_second, rel=0.2)


def test_strong_scaling_keeps_the_batch_and_its_mfu_falls() -> None:
    points = scaled(4, 16, 64, how="strong").points
    assert {point.batch for point in points} == {16}
    assert points[0].mfu > points[1].mfu > points[2].mfu
    assert points[0].step_seconds > points[1].step_seconds > points[2].step_seconds


def test_each_program_that_a_size_compiles_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of other processes may keep the compiler for minutes."""
    figures = CompiledPlan(True, 0.4, 0.3, 0.1, 0.0, (), 0.0, 0.0, 2.0**30)
    monkeypatch.setattr(scaling, "CompilerMeasures", lambda run_of, topology: Instant(figures))
    lines: list[str] = []
    options = ScaleOptions((4, 8), compile_up_to=4, programs=2)
    first, second = scale(Planned(WORK), SPACE, "v5e", options, progress=lines.append).points
    assert first.compiled == figures and second.compiled is None
    *programs, one, other = lines
    assert 1 <= len(programs) <= 2
    assert all(line.startswith("4 chips, compiled: ") and line.endswith(": 400.0 ms, 1.00 GiB") for line in programs)
    assert one.startswith("4 chips: ") and other.startswith("8 chips: ")


def test_the_table_marks_estimates_and_what_crosses_slices() -> None:
    one, several = scaled(256, 512).rows()
    assert (one[-1], several[-1]) == ("estimate", "estimate")
    assert (one[1], several[1]) == ("v5e:16x16", "v5e:16x16*2")
    assert one[-2] == "" and "2: " in several[-2]


def test_a_size_that_no_plan_fits_stays_in_the_table() -> None:
    report = scaled(1, 64, work=llama_workload(batch=1, seq=2**20))
    assert report.points[0].plan is None and report.points[1].plan is not None
    assert report.rows()[0][3] == "no plan fits"
    told = json.loads(report.to_json())
    assert (told["scaling"], told["points"][0]["plan"], told["points"][1]["compiled"]) == ("weak", None, False)


def test_no_size_that_fits_is_an_error() -> None:
    with raises(PlanError, "v5e:2x1"):
        scaled(1, 2, how="strong", work=llama_workload(batch=1, seq=2**22))


def test_the_picture_draws_estimates_hollow_and_dashed() -> None:
    pytest.importorskip("matplotlib")
    points = list(scaled(16, 32, 64).points)
    for i in (0, 1):
        compiled = CompiledPlan(True, points[i].step_seconds, 0.0, 0.0, 0.0, (), 0.0, 0.0, 0.0)
        points[i] = ScalePoint(**{**vars(points[i]), "compiled": compiled})
    report = ScalingReport(tuple(points), "weak")
    panel = report.draw().axes[0]
    markers = {line.get_label(): line for line in panel.lines if line.get_marker() == "o"}
    assert list(markers["compiled"].get_xdata()) == [16, 32]
    assert list(markers["estimate"].get_xdata()) == [64]
    assert markers["estimate"].get_markerfacecolor() == "white"
    assert [line.get_linestyle() for line in panel.lines if line.get_marker() != "o"] == ["-", "--"]
    assert [row[-1] for row in report.rows()] == ["compiled", "compiled", "estimate"]
